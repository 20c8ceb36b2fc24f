"""Checkpoints: every rank writes its own parts, any plan reads them; nothing in them can run."""

from shardfold.runtime.checkpoint.load import Checkpoint, load
from shardfold.runtime.checkpoint.save import save

__all__ = ["Checkpoint", "load", "save"]
