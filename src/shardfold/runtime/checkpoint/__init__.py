"""Checkpoints: every rank writes its shards, any plan reads them; they contain no code."""

from shardfold.runtime.checkpoint.save_load import Checkpoint, load, restore_random, save

__all__ = ["Checkpoint", "load", "restore_random", "save"]
