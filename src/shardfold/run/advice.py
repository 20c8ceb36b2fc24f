"""What a compiler is told while it records a step: what to make again, and what to keep.

`torch.compile` decides what backward keeps by cutting the recorded graph where that is cheapest.
Nodes that carry a checkpointing policy are not for it to decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy


def made_again(number: int) -> AbstractContextManager[None]:
    """What is recorded here is made again for backward; stretches have ascending numbers."""
    return _advised(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=number)


def kept() -> AbstractContextManager[None]:
    """What is recorded here is kept for backward."""
    return _advised(recompute=CheckpointPolicy.MUST_SAVE, ac_graph_id=0)


@contextmanager
def _advised(**advice: object) -> Iterator[None]:
    noted = traceback.get_current_meta()
    before = {key: noted[key] for key in advice if key in noted}
    noted |= advice
    try:
        yield
    finally:
        for key in advice:
            del noted[key]
        noted |= before
