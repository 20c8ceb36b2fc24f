"""Checkpoints: every rank writes its shards, any plan reads them; they contain no code."""

from shardfold.runtime.checkpoint.load import Checkpoint, load
from shardfold.runtime.checkpoint.save import save

__all__ = ["Checkpoint", "load", "save"]
