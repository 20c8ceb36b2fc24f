"""Collectives: timed as the runner performs them, and what they take of the host.

What is timed is the moves of a tensor between two layouts. On a mesh of the processes, every set of
axes is a group size; all groups of that size communicate at once, as they do in a step. A time is
that of the slowest process. More bytes take no less: what a small collective took longer than a
larger one is the scheduler's, and is cut off.

The host takes time to gather a parameter's parts, and to reduce its gradient. That is measured on
the runner's own path, in a group whose collectives do nothing: what is sent, and how long that
takes, is measured elsewhere. A chain of linear layers is run by rows on several devices: alone,
with whole parameters, with parts that are gathered once, and with parts that are gathered again for
backward. What one layer more takes beyond one of those alone is the collective's own; a wide layer
fills a bucket, narrow ones share it. What lies in parts of two dims is two collectives in a plan,
and one where it is run: what the second of them takes is little, and known by itself.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.calibrate.timers import Times, middle, per_link, rounded, times_of
from shardfold.capture import Program, capture_program
from shardfold.cluster import Mesh
from shardfold.cluster.mesh import Axis
from shardfold.costs.decision_graph import shared_tensors
from shardfold.costs.measured import MORE, REDUCED, SHARED
from shardfold.costs.profile import CollectiveEntry, HostEntry
from shardfold.costs.steps import BUCKET_BYTES
from shardfold.graph import TensorType
from shardfold.operators import rules_of
from shardfold.plans.read import Decisions
from shardfold.runtime.lower import Lowered, alone, lower
from shardfold.runtime.module import Parallel
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.reshard import Lie, Moves, perform
from shardfold.runtime.shards import Place, Row
from shardfold.sharding import Space, Subdims, find_subdims
from shardfold.sharding.configs import NONE
from shardfold.sharding.layouts import PENDING, REPLICATED
from shardfold.strategies.baselines import batch_factors

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


FEW, MANY, OVERHEAD_ROUNDS = 4, 20, 15
DEVICES = 8
NARROW = 64
GATHER, SCATTER = "all_gather", "reduce_scatter"
SHARING = (
    *(GATHER, *REDUCED),
    *(f"{kind}{SHARED}" for kind in (GATHER, *REDUCED)),
    *(f"{kind}{MORE}" for kind in (GATHER, SCATTER)),
)


class Rows(nn.Module):
    """So many square layers without a bias, and the mean of what they make of a batch."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """The mean."""
        for layer in self.layers:
            x = layer(x)
        return x.float().mean()


@dataclass(frozen=True, slots=True)
class Way:
    """How the parameters lie: on one device, or by rows on several, in parts, gathered again."""

    is_shared: bool = True
    parts: int = 0  # dims of a parameter that are in parts
    again: bool = False


def sharing_entries(device: str, dtype: torch.dtype) -> tuple[HostEntry, ...]:
    """The host's seconds for a gather (ahead, and again for backward), a scatter and a sum."""
    wide = 8 * math.ceil(math.sqrt(BUCKET_BYTES / dtype.itemsize) / 8)
    with some_devices():
        own = _collectives(wide, device, dtype)
        shared = _collectives(NARROW, device, dtype)
        more = _more(wide, device, dtype) if dist.get_world_size() % 4 == 0 else own
    found = {
        GATHER: (own["gather"], own["again"]),
        **{kind: (own[kind], own[kind]) for kind in REDUCED},
        f"{GATHER}{SHARED}": (shared["gather"], shared["again"]),
        **{f"{kind}{SHARED}": (shared[kind], shared[kind]) for kind in REDUCED},
        f"{GATHER}{MORE}": (more["gather"], more["again"]),
        f"{SCATTER}{MORE}": (more[SCATTER], more[SCATTER]),
    }
    return tuple(HostEntry(kind, *map(rounded, times)) for kind, times in found.items())


def _collectives(width: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    """What each collective adds to a layer of that width."""
    ways = (Way(is_shared=False), Way(), Way(parts=1), Way(parts=1, again=True))
    plain, whole, parts, twice = _layers(ways, width, device, dtype)
    return {
        "all_reduce": whole[1] - plain[1],
        "gather": parts[0] - plain[0],
        SCATTER: parts[1] - plain[1],
        "again": (twice[0] - parts[0]) + (twice[1] - parts[1]),
    }


def _more(width: int, device: str, dtype: torch.dtype) -> dict[str, float]:
    """What a second collective adds, where a parameter is in parts of two dims."""
    ways = [Way(parts=n, again=again) for again in (False, True) for n in (1, 2)]
    one, two, once, twice = _layers(ways, width, device, dtype)
    return {
        "gather": two[0] - one[0],
        SCATTER: two[1] - one[1],
        "again": (twice[1] - two[1]) - (once[1] - one[1]),
    }


def _layers(ways: Sequence[Way], width: int, device: str, dtype: torch.dtype) -> list[Times]:
    """Seconds of one layer more, forward and backward, in each of these ways.

    They take turns, so that a host that is slow for a while is slow for all of them.
    """
    chains = [_chain(way, width, count, device, dtype) for way in ways for count in (FEW, MANY)]
    rounds = [[times_of(*chain) for chain in chains] for _ in range(OVERHEAD_ROUNDS)]
    seconds = [middle(taken) for taken in zip(*rounds, strict=True)]
    pairs = zip(seconds[::2], seconds[1::2], strict=True)
    return [per_link(few, many, MANY - FEW) for few, many in pairs]


def _chain(way: Way, width: int, count: int, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """A chain to be timed once at a time."""
    devices = dist.get_world_size()
    with torch.device(device):
        model = Rows(width, count).to(dtype)
        x = torch.randn(8 * devices, width, dtype=dtype)
    module = _module(way, model, x)
    return (lambda: module(x)), device, 1, partial(module.zero_grad, set_to_none=True)


def _module(way: Way, model: nn.Module, x: Tensor) -> Parallel:
    program = capture_program(model, (x,), {}, fold=False)
    subdims = find_subdims(program.graph, rules_of(program.graph))
    lowered = _by_rows(way, program, subdims) if way.is_shared else alone(program, subdims)
    return assemble(model, program, lowered, Settings())


def _by_rows(way: Way, program: Program, subdims: Subdims) -> Lowered:
    """Every operator by rows; parameters whole, or their first dims in parts."""
    graph, devices = program.graph, dist.get_world_size()
    shape = (2, devices // 2) if way.parts == 2 else (devices,)
    spaces = tuple(
        Space(rule, np.full((1, len(shape)), NONE if at is None else at, dtype=np.int8))
        for rule, at in zip(subdims.rules, batch_factors(graph, subdims), strict=True)
    )
    whole = (REPLICATED,) * len(shape)
    decisions = Decisions(
        Mesh(tuple(Axis(f"axis {k}", size, 0) for k, size in enumerate(shape))),
        spaces,
        dict.fromkeys(shared_tensors(graph), whole),
        dict.fromkeys(graph.parameters(), tuple(range(way.parts)) or whole),
        frozenset(graph.parameters() if way.again else ()),
    )
    return lower(program, subdims, decisions, Place.of_rank(dist.get_rank(), shape))


@contextmanager
def some_devices() -> Iterator[None]:
    """The process group that is there, or one of eight whose collectives do nothing."""
    if dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEVICES)
    try:
        yield
    finally:
        dist.destroy_process_group()
