"""Collectives timed as the runner performs them: the moves of a tensor between two layouts.

On a mesh of the processes, every set of axes is a group size; all groups of that size communicate
at once, as they do in a step. A time is that of the slowest process. More bytes take no less: what
a small collective took longer than a larger one is the scheduler's, and is cut off.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from shardfold.costs.profile import CollectiveEntry
from shardfold.graph import TensorType
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.reshard import Lie, Moves, perform
from shardfold.runtime.shards import Place, Row
from shardfold.sharding.layouts import PENDING, REPLICATED

SIZES = tuple(float(1 << e) for e in range(10, 27, 2))  # bytes of the larger side
ROUNDS = 9
ITEM_BYTES = 4
# from one state to another on the axes of the group: values of a tensor of two sub-dims
STATES: dict[str, tuple[int, int]] = {
    "all_reduce": (PENDING, REPLICATED),
    "all_gather": (0, REPLICATED),
    "reduce_scatter": (PENDING, 0),
    "all_to_all": (0, 1),
}


def collective_entries(
    device: str, watch: Callable[[str, int, int], None]
) -> tuple[CollectiveEntry, ...]:
    """Every kind of collective on every group size of the processes that run."""
    world = dist.get_world_size()
    cases = list(_cases(world))
    found = []
    for number, (kind, shape, axes) in enumerate(cases):
        watch(f"{kind} of {math.prod(shape[a] for a in axes)}", number, len(cases))
        place = Place.of_rank(dist.get_rank(), shape)
        groups = Groups(place)
        groups.make([axes])
        times = rising([_seconds(kind, place, axes, size, groups, device) for size in SIZES])
        size = math.prod(shape[a] for a in axes)
        found.append(CollectiveEntry(kind, size, world // size, SIZES, times))
    return tuple(found)


def rising(times: Sequence[float]) -> tuple[float, ...]:
    """The times with none longer than a later one.

    >>> rising([0.4, 3.6, 0.5, 0.8, 2.0])
    (0.4, 0.5, 0.5, 0.8, 2.0)
    """
    return tuple(accumulate(reversed(times), min))[::-1]


def _cases(world: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Groups of every size that divides the processes: neighbours, then the whole."""
    for size in range(2, world + 1):
        if world % size == 0:
            shape = (world // size, size) if size < world else (world,)
            for kind in STATES:
                yield kind, shape, (len(shape) - 1,)


def _seconds(
    kind: str, place: Place, axes: tuple[int, ...], size: float, groups: Groups, device: str
) -> float:
    moves = _moves(kind, place, axes, size)
    local = torch.ones(moves.source, device=device)
    for _ in range(2):
        perform(moves, local, groups)
    times = []
    for _ in range(ROUNDS):
        _wait(device)
        dist.barrier()
        began = time.perf_counter()
        perform(moves, local, groups)
        _wait(device)
        times.append(time.perf_counter() - began)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(f"{slowest.item():.4g}")


def _moves(kind: str, place: Place, axes: tuple[int, ...], size: float) -> Moves:
    """The steps of a tensor whose larger side on one device has `size` bytes."""
    members = math.prod(place.shape[a] for a in axes)
    # An all-to-all has parts on both sides: the whole is as many times larger.
    items = int(size / ITEM_BYTES) * (members if kind == "all_to_all" else 1)
    side = 1 << (int(math.log2(items)) // 2)
    dims = (max(items // side, members), max(side, members))
    lie = Lie(TensorType(dims, "float32"), dims, (0, 1), place)
    before, after = (_row(state, place, axes) for state in STATES[kind])
    return lie.moves(before, after, "forward")


def _row(state: int, place: Place, axes: tuple[int, ...]) -> Row:
    return tuple(state if a in axes else REPLICATED for a in range(len(place.shape)))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
