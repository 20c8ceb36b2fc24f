"""Baselines that split the batch: data parallel, ZeRO-2, FSDP and HSDP.

A baseline fixes every operator's configuration; given those, the layouts of shared tensors and
the storage of parameters are independent, so each takes its cheapest allowed one. The others, and
the list of all, are in `named`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardfold.costs import Tables, Vertex
from shardfold.graph import Graph
from shardfold.sharding import Space, Subdims
from shardfold.sharding.configs import NONE
from shardfold.sharding.layouts import Layouts
from shardfold.sharding.names import batch_classes

Choice = tuple[int, ...]
Allowed = Callable[[Vertex], NDArray[np.bool_] | None]
BatchFactors = Sequence[int | None]  # per operator: the factor that is the batch


def batch_factors(graph: Graph, subdims: Subdims) -> BatchFactors:
    """Which factor of each operator is the batch and can be split, if any."""
    batch = batch_classes(graph, subdims)
    return [
        next((f for f, c in enumerate(factors) if c in batch and rule.splittable[f]), None)
        for rule, factors in zip(subdims.rules, subdims.factors, strict=True)
    ]


def data_parallel(tables: Tables, batch: BatchFactors) -> Choice:
    """Every operator by batch, over as many devices as the batch allows; gradients all-reduced."""
    return _by_batch(tables, batch, _as_used)


def fully_sharded(tables: Tables, batch: BatchFactors) -> Choice:
    """As data parallel, but parameters and their state are sharded over all devices (FSDP)."""
    return _by_batch(tables, batch, _most_sharded)


def sharded_state(tables: Tables, batch: BatchFactors) -> Choice:
    """As data parallel, but gradients and optimizer state are sharded over all devices (ZeRO-2).

    Parameters are gathered once in each step, and kept.
    """
    return _by_batch(tables, batch, _sharded_and_kept)


def hybrid_sharded(tables: Tables, batch: BatchFactors) -> Choice:
    """As FSDP, but within the innermost level only: every node has a replica (HSDP)."""
    inner = tables.mesh.axes[-1].level
    outer = [a for a, axis in enumerate(tables.mesh.axes) if axis.level != inner]
    return _by_batch(tables, batch, lambda vertex: _most_sharded(vertex, outer))


def stored_in_parts(tables: Tables, choice: Choice) -> Choice:
    """The same splits, with parameters split over all devices and gathered where they are used."""
    return _stored(tables, choice, _most_sharded)


def stored_whole(tables: Tables, choice: Choice) -> Choice:
    """The same splits, with parameters replicated where their use is."""
    return _stored(tables, choice, _as_used)


def _stored(tables: Tables, choice: Choice, allowed: Allowed) -> Choice:
    vertices = enumerate(tables.vertices)
    fixed = {v: choice[v] for v, vertex in vertices if vertex.storage is None}
    return complete(tables, fixed, allowed)


def _by_batch(tables: Tables, batch: BatchFactors, allowed: Allowed) -> Choice:
    """The set of axes that the batch can be split over with the most devices, then the cheapest."""
    axes = range(len(tables.mesh.axes))
    best: tuple[float, float, Choice] | None = None
    for count in reversed(range(len(axes) + 1)):
        for used in combinations(axes, count):
            devices = float(np.prod([tables.mesh.axes[a].size for a in used]))
            if best is not None and devices < -best[0]:
                continue
            fixed, legal = _batch_configs(tables, batch, used)
            if not legal:
                continue
            choice = complete(tables, fixed, allowed)
            candidate = (-devices, tables.problem.total(choice), choice)
            best = candidate if best is None else min(best, candidate)
    assert best is not None  # the empty set of axes is always legal
    return best[2]


def _batch_configs(
    tables: Tables, batch: BatchFactors, used: tuple[int, ...]
) -> tuple[dict[int, int], bool]:
    """Per operator vertex, the configuration that splits the batch over `used`.

    Operators without a batch factor are left unsplit; legal when all that have one can split it.
    """
    fixed: dict[int, int] = {}
    known: dict[tuple[int, int | None], int | None] = {}
    for v, vertex in enumerate(tables.vertices):
        if vertex.space is None:
            continue
        factor = batch[vertex.index] if len(vertex.space.configs) > 1 else None
        key = (id(vertex.space.configs), factor)
        if key not in known:
            known[key] = _row(vertex.space, factor, used)
        row = known[key]
        if row is None:
            return fixed, False
        fixed[v] = row
    return fixed, True


def _row(space: Space, factor: int | None, used: tuple[int, ...]) -> int | None:
    """The configuration that splits `factor` over the axes `used` and nothing else."""
    row = np.full(space.configs.shape[1], NONE)
    row[list(used)] = NONE if factor is None else factor
    found = np.flatnonzero((space.configs == row).all(axis=1))
    return int(found[0]) if len(found) else None


def complete(tables: Tables, fixed: dict[int, int], allowed: Allowed) -> Choice:
    """Choose for every vertex that is not fixed, given its fixed neighbours."""
    problem = tables.problem
    costs: dict[int, Any] = {
        v: problem.costs[v].copy() for v in range(len(problem.costs)) if v not in fixed
    }
    for (u, v), table in zip(problem.edges, problem.edge_costs, strict=True):
        if u in fixed and v not in fixed:
            costs[v] += table[fixed[u]]
        elif v in fixed and u not in fixed:
            costs[u] += table[:, fixed[v]]
    choice = dict(fixed)
    for v, total in costs.items():
        mask = allowed(tables.vertices[v])
        choice[v] = int(np.argmin(total if mask is None else np.where(mask, total, np.inf)))
    return tuple(choice[v] for v in range(len(problem.costs)))


def _as_used(vertex: Vertex) -> NDArray[np.bool_] | None:
    """Parameters replicated: data parallelism keeps a full copy on every device."""
    if vertex.storage is None:
        return None
    mask = np.asarray((vertex.storage.layouts < 0).all(axis=1))
    return mask if mask.any() else None


def _most_sharded(vertex: Vertex, whole: Sequence[int] = ()) -> NDArray[np.bool_] | None:
    """Parameters split over as many axes as possible, and gathered again in backward.

    Over the axes `whole` they are not split.
    """
    if vertex.storage is None:
        return None
    mask = _fullest(vertex.storage.layouts, whole)
    again = vertex.storage.regathers
    return mask & again if (mask & again).any() else mask


def _sharded_and_kept(vertex: Vertex) -> NDArray[np.bool_] | None:
    """Parameters split over as many axes as possible, and gathered once."""
    if vertex.storage is None:
        return None
    return _fullest(vertex.storage.layouts, ()) & ~vertex.storage.regathers


def _fullest(layouts: Layouts, whole: Sequence[int]) -> NDArray[np.bool_]:
    """The layouts that are split over the most axes, and not over the axes `whole`."""
    split = layouts >= 0
    axes = np.where(split[:, list(whole)].any(axis=1), -1, split.sum(axis=1))
    mask: NDArray[np.bool_] = np.equal(axes, axes.max())
    return mask
