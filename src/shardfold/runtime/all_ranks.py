"""What every rank does for itself before all go on together: an error of one is everyone's.

A rank that gave up alone would leave the others waiting for it in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from shardfold.errors import RunError, ShardfoldError

T = TypeVar("T")


def agreed(function: Callable[[], T]) -> T:
    """The result of `function`, if it has one on every rank; else an error on every rank."""
    shared = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not shared:
        return function()
    failed: ShardfoldError | None = None
    try:
        found = function()
    except ShardfoldError as error:
        failed = error
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if failed is None else str(failed))
    if failed is not None:
        raise failed
    for rank, said in enumerate(told):
        if said is not None:
            raise RunError(f"Rank {rank} cannot run the plan, so no rank does: {said}")
    return found
