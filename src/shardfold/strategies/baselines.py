"""Baselines: strategies that people know by name, each from a model's tables to a choice.

Data parallel, ZeRO-2, FSDP and HSDP split the batch. Such a baseline fixes every operator's
configuration; given those, the layouts of shared tensors and the storage of parameters are
independent, so each takes its cheapest allowed one.

The others fix the splits of the operators that they name. What a baseline leaves open (layouts of
shared tensors, which of several axes a factor takes) is solved for, so that no baseline is priced
worse than it could be. One that does not apply says why. A new one is a function here, and its line
in `STRATEGIES`; `plan` and `compare` then try it. One that comes in several degrees has a line in
`DEGREES`, too: then `plan` simulates each, and not only the one of least additive cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardfold.costs import Tables, Vertex
from shardfold.costs.unroll import UnrolledProblem
from shardfold.errors import InputError, nearest
from shardfold.graph import Graph
from shardfold.sharding import Space, Subdims
from shardfold.sharding.configs import NONE
from shardfold.sharding.layouts import Layouts
from shardfold.sharding.names import batch_classes
from shardfold.strategies.split_preferences import (
    CONTEXTS,
    Roles,
    Way,
    Ways,
    choose_ways,
    parts_over,
)

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


def replicated(tables: Tables, batch: BatchFactors) -> Choice:
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


Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unfit:
    """A strategy does not apply to this model or mesh, and why."""

    reason: str


@dataclass(frozen=True)
class Setting:
    """A model, its tables on one mesh, and the memory of a device."""

    graph: Graph
    subdims: Subdims
    tables: Tables
    limit_bytes: float = math.inf
    unrolled: UnrolledProblem | None = None  # where the graph holds only a few periods of a run
    known: dict[tuple[object, Axes], Choice | None] = field(default_factory=dict)  # by degree

    @cached_property
    def roles(self) -> Roles:
        """Which sub-dims are heads, vocabulary, experts."""
        return Roles.of(self.graph, self.subdims)

    @cached_property
    def batch(self) -> BatchFactors:
        """Per operator, the factor that is the batch."""
        return batch_factors(self.graph, self.subdims)

    @cached_property
    def axes(self) -> Axes:
        """Every axis of the mesh."""
        return tuple(range(len(self.tables.mesh.axes)))

    @cached_property
    def inner(self) -> Axes:
        """The axes on the innermost level of links."""
        axes = self.tables.mesh.axes
        return tuple(a for a in self.axes if axes[a].level == axes[-1].level)

    def degrees(
        self, what: object, within: Axes, choose: Callable[[Axes], Choice | None]
    ) -> Iterator[Choice]:
        """What is chosen over all of some axes, all but the first, ... if it can be; found once."""
        for start in range(len(within)):
            key = (what, within[start:])
            if key not in self.known:
                self.known[key] = choose(within[start:])
            found = self.known[key]
            if found is not None:
                yield found

    def rank(self, choice: Choice) -> tuple[bool, float]:
        """What is better comes first: what fits in memory, then the shorter step."""
        problem, whole = self.tables.problem, tuple(choice)
        if self.unrolled is not None:
            problem, whole = self.unrolled.problem, tuple(self.unrolled.extended(choice).tolist())
        return (problem.total_bytes(whole) > self.limit_bytes, problem.total(whole))


Strategy = Callable[[Setting], Choice | Unfit]


def data_parallel(setting: Setting) -> Choice:
    """Every operator by batch; gradients all-reduced."""
    return replicated(setting.tables, setting.batch)


def zero_2(setting: Setting) -> Choice:
    """Data parallel with gradients and optimizer state split over all devices."""
    return sharded_state(setting.tables, setting.batch)


def fsdp(setting: Setting) -> Choice:
    """Data parallel with parameters split over all devices, gathered where they are used."""
    return fully_sharded(setting.tables, setting.batch)


def hsdp(setting: Setting) -> Choice | Unfit:
    """Parameters split within a node, copied between nodes."""
    if setting.inner == setting.axes:
        return Unfit("the cluster has one level of links, so it is the same as fsdp")
    return hybrid_sharded(setting.tables, setting.batch)


def krizhevsky_2014(setting: Setting) -> Choice | Unfit:
    """Krizhevsky 2014: convolutions by batch, linear layers by out features.

    What stands between two linear layers is split by the features of the first.
    """
    roles = setting.roles
    if not roles.has_convolutions or roles.attention:
        return Unfit("it is for convolutional networks")
    if not roles.products:
        return Unfit("the model has no linear layer")
    outs = {product.op: product.out for product in roles.products}
    between = (Way(setting.axes, (frozenset[int]().union(*outs.values()), roles.batch)),)
    own = {op: (Way(setting.axes, (out,)),) for op, out in outs.items()}
    return choose_ways(setting.tables, setting.subdims, lambda op: own.get(op, between))


def megatron(setting: Setting) -> Choice | Unfit:
    """Megatron-LM: heads, feed-forward features and vocabulary within a node, batch between.

    Of the degrees that a node allows, the fastest that fits in memory.
    """
    return _tensor_parallel(setting, setting.inner, sequence=False)


def megatron_sp(setting: Setting) -> Choice | Unfit:
    """Megatron-LM with sequence parallelism: what is between the products is split by sequence."""
    if not setting.roles.seq:
        return Unfit("the model has no sequence of tokens")
    return _tensor_parallel(setting, setting.inner, sequence=True)


def fsdp_tp_sp(setting: Setting) -> Choice | Unfit:
    """Megatron-LM with sequence parallelism, and parameters split over the other devices too."""
    if not setting.roles.seq:
        return Unfit("the model has no sequence of tokens")
    if len(setting.axes) == 1:
        return Unfit("the mesh has one axis, so it is the same as megatron+sp")
    return _best(setting, list(_sharded(setting)))


def sharded_by_node(setting: Setting) -> Choice | Unfit:
    """As `fsdp_tp_sp` with tensors split over a whole node, the way of torchtitan."""
    found = next(iter(_degrees(setting, setting.inner, sequence=True)), None)
    if found is None or not parts_over_all(setting, found):
        return Unfit("its heads or feed-forward features do not divide over a node")
    return stored_in_parts(setting.tables, found)


def parts_over_all(setting: Setting, choice: Choice) -> bool:
    """Whether attention is split over every axis of a node."""
    return is_split(setting, choice, setting.inner)


def mesh_tensorflow(setting: Setting) -> Choice | Unfit:
    """Mesh-TensorFlow's Transformer: as Megatron-LM, over any inner part of the whole mesh."""
    if setting.inner == setting.axes:
        return Unfit("the cluster has one level of links, so it is the same as megatron")
    return _tensor_parallel(setting, setting.axes, sequence=False)


def expert_parallel(setting: Setting) -> Choice | Unfit:
    """Megatron-LM's expert parallelism: rows go to their experts, all else is split by batch.

    Of the degrees that the experts allow, over any inner part of the mesh, the fastest that fits.
    """
    return _by_expert(setting, list(_expert_degrees(setting)))


def fsdp_ep(setting: Setting) -> Choice | Unfit:
    """As `expert_parallel`, and parameters split over the other devices too."""
    return _by_expert(setting, list(_sharded_experts(setting)))


def _by_expert(setting: Setting, choices: Sequence[Choice]) -> Choice | Unfit:
    reason = "the model has no experts that divide over devices"
    return min(choices, key=setting.rank) if choices else Unfit(reason)


def _expert_degrees(setting: Setting) -> Iterator[Choice]:
    """Rows and experts together over any inner part of the mesh."""
    if setting.roles.experts:
        yield from setting.degrees("experts", setting.axes, partial(_of_experts, setting))


def _of_experts(setting: Setting, inner: Axes) -> Choice | None:
    roles, outer = setting.roles, tuple(a for a in setting.axes if a not in inner)
    by_expert = (Way(inner, (roles.dispatch, roles.experts)), Way(outer, (roles.batch,)))
    by_batch = (Way(setting.axes, (roles.batch,)),)
    choice = _chosen(setting, dict.fromkeys(roles.routed, by_expert), by_batch)
    return choice if all_split(setting, choice, inner, roles.routed) else None


def _sharded_experts(setting: Setting) -> Iterator[Choice]:
    """Every degree of experts, with parameters split over the other devices."""
    for choice in _expert_degrees(setting):
        yield stored_in_parts(setting.tables, choice)


def context_parallel(setting: Setting, attention: str) -> Choice | Unfit:
    """The sequence over the inner part of the mesh, the batch over the rest, as people run it.

    Parameters are split over all devices, as torchtitan does it. Of the degrees that lengths and
    heads allow, the fastest that fits in memory.
    """
    found = list(_context_degrees(setting, attention))
    what = "heads" if attention == "ulysses" else "positions"
    reason = f"it has no attention whose {what} divide over the devices of a sequence"
    return min(found, key=setting.rank) if found else Unfit(reason)


def _context_degrees(setting: Setting, attention: str) -> Iterator[Choice]:
    """The sequence over any inner part of the mesh, or of the nodes, which then split tensors."""
    roles = setting.roles
    if not (roles.seq and roles.attention and roles.attended(attention)):
        return
    for tensor in dict.fromkeys(((), setting.inner)):
        within = tuple(a for a in setting.axes if a not in tensor)
        choose = partial(_of_context, setting, attention, tensor)
        yield from setting.degrees((attention, tensor), within, choose)


def _of_context(setting: Setting, attention: str, tensor: Axes, context: Axes) -> Choice | None:
    """Attention splits one thing over the axes where all else has its sequence, if it can."""
    roles = setting.roles
    batch = Way(tuple(a for a in setting.axes if a not in (*context, *tensor)), (roles.batch,))
    attended = (batch, Way(context, (roles.attended(attention),)), Way(tensor, (roles.heads,)))
    rest = Way(context, (roles.seq,)), Way(tensor, (roles.tensor_parallel, roles.seq))
    choice = _chosen(setting, dict.fromkeys(roles.attention, attended), (batch, *rest))
    is_legal = all_split(setting, choice, context, roles.attention)
    is_legal = is_legal and is_split(setting, choice, tensor)
    return stored_in_parts(setting.tables, choice) if is_legal else None


def _chosen(setting: Setting, ways: Mapping[int, Ways], otherwise: Ways) -> Choice:
    """The cheapest choice in which some operators are split in ways of their own."""
    return choose_ways(setting.tables, setting.subdims, lambda op: ways.get(op, otherwise))


def _tensor_parallel(setting: Setting, within: Axes, *, sequence: bool) -> Choice | Unfit:
    """The best degree: the last one, two, ... of the axes `within` for tensors."""
    if not setting.roles.heads:
        return Unfit("the model has no attention")
    return _best(setting, list(_degrees(setting, within, sequence=sequence)))


def _best(setting: Setting, choices: Sequence[Choice]) -> Choice | Unfit:
    if not choices:
        return Unfit("its heads or feed-forward features do not divide over the devices")
    return min(choices, key=setting.rank)


def _degrees(setting: Setting, within: Axes, *, sequence: bool) -> Iterator[Choice]:
    """Every degree that heads and features allow."""
    if setting.roles.heads:
        yield from setting.degrees(sequence, within, partial(_of_degree, setting, sequence))


def _sharded(setting: Setting) -> Iterator[Choice]:
    """Every degree with sequence parallelism that leaves devices to split parameters over."""
    for choice in _degrees(setting, setting.inner, sequence=True):
        yield stored_in_parts(setting.tables, choice)


def _of_degree(setting: Setting, sequence: bool, tensor: Axes) -> Choice | None:
    roles = setting.roles
    data = tuple(a for a in setting.axes if a not in tensor)
    tried = (roles.tensor_parallel, roles.seq) if sequence else (roles.tensor_parallel,)
    choice = _chosen(setting, {}, (Way(data, (roles.batch,)), Way(tensor, tried)))
    return choice if is_split(setting, choice, tensor) else None


def is_split(setting: Setting, choice: Choice, tensor: Axes, roles: Roles | None = None) -> bool:
    """Whether attention and the products that return to the hidden features use every axis."""
    roles = roles or setting.roles
    named = set(roles.attention)
    inner = roles.heads | roles.inner
    named |= {product.op for product in roles.products if product.reduced & inner}
    return all_split(setting, choice, tensor, named)


def all_split(setting: Setting, choice: Choice, axes: Axes, ops: Container[int]) -> bool:
    """Whether some operators split something over all of these axes."""
    return all(
        parts_over(vertex.space, choice[v], axes)
        for v, vertex in enumerate(setting.tables.vertices)
        if vertex.space is not None and vertex.index in ops
    )


STRATEGIES: Mapping[str, Strategy] = {
    "data-parallel": data_parallel,
    "zero-2": zero_2,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "krizhevsky-2014": krizhevsky_2014,
    "megatron": megatron,
    "megatron+sp": megatron_sp,
    "fsdp+tp+sp": fsdp_tp_sp,
    "mesh-tensorflow": mesh_tensorflow,
    "expert-parallel": expert_parallel,
    "fsdp+ep": fsdp_ep,
    **{f"cp-{way}": partial(context_parallel, attention=way) for way in CONTEXTS},
}


RENAMED = {
    "zero-3": "fsdp",
    "hybrid-sharded": "hsdp",
    "one-weird-trick": "krizhevsky-2014",
    "megatron-sequence": "megatron+sp",
    "sharded-megatron": "fsdp+tp+sp",
}


def every(name: str, setting: Setting) -> list[Choice]:
    """A strategy in every degree that it has on a mesh; none where it does not apply."""
    first = STRATEGIES[name](setting)
    if isinstance(first, Unfit):
        return []
    return list(DEGREES[name](setting)) if name in DEGREES else [first]


def _beyond_nodes(setting: Setting) -> Iterator[Choice]:
    """Features over more devices than a node has: within one it is Megatron-LM's."""
    known = set(_degrees(setting, setting.inner, sequence=False))
    found = _degrees(setting, setting.axes, sequence=False)
    return (choice for choice in found if choice not in known)


DEGREES: Mapping[str, Callable[[Setting], Iterator[Choice]]] = {
    "megatron": lambda setting: _degrees(setting, setting.inner, sequence=False),
    "megatron+sp": lambda setting: _degrees(setting, setting.inner, sequence=True),
    "fsdp+tp+sp": _sharded,
    "mesh-tensorflow": _beyond_nodes,
    "expert-parallel": _expert_degrees,
    "fsdp+ep": _sharded_experts,
    **{f"cp-{way}": partial(_context_degrees, attention=way) for way in CONTEXTS},
}


def check_renamed(name: str) -> None:
    """Refuse an old name of a strategy, and say the new one."""
    if name in RENAMED:
        raise InputError(f"{name!r} is now called {RENAMED[name]!r}.")


def strategy_named(name: str) -> Strategy:
    """The strategy of that name."""
    check_renamed(name)
    if name not in STRATEGIES:
        raise InputError(f"Unknown strategy {name!r}. {nearest(name, STRATEGIES)}")
    return STRATEGIES[name]
