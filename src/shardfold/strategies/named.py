"""Baselines: strategies that people know by name, each from a model's tables to a choice.

A baseline fixes the splits of the operators that it names. What it leaves open (layouts of shared
tensors, which of several axes a factor takes) is solved for, so that no baseline is priced worse
than it could be. One that does not apply says why. A new one is a function here, and its line in
`STRATEGIES`; `plan` and `compare` then try it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardfold.costs import Tables
from shardfold.costs.unroll import UnrolledProblem
from shardfold.errors import InputError, nearest
from shardfold.graph import Graph
from shardfold.sharding import Subdims
from shardfold.strategies import baselines
from shardfold.strategies.roles import Roles
from shardfold.strategies.split_preferences import Way, choose_ways, parts_over

Choice = tuple[int, ...]
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
    known: dict[tuple[Axes, bool], Choice | None] = field(default_factory=dict)  # by degree

    @cached_property
    def roles(self) -> Roles:
        """Which sub-dims are heads, vocabulary, experts."""
        return Roles.of(self.graph, self.subdims)

    @cached_property
    def batch(self) -> baselines.BatchFactors:
        """Per operator, the factor that is the batch."""
        return baselines.batch_factors(self.graph, self.subdims)

    @cached_property
    def axes(self) -> Axes:
        """Every axis of the mesh."""
        return tuple(range(len(self.tables.mesh.axes)))

    @cached_property
    def inner(self) -> Axes:
        """The axes on the innermost level of links."""
        axes = self.tables.mesh.axes
        return tuple(a for a in self.axes if axes[a].level == axes[-1].level)

    def rank(self, choice: Choice) -> tuple[bool, float]:
        """What is better comes first: what fits in memory, then the shorter step."""
        problem, whole = self.tables.problem, tuple(choice)
        if self.unrolled is not None:
            problem, whole = self.unrolled.problem, tuple(self.unrolled.extended(choice).tolist())
        return (problem.total_bytes(whole) > self.limit_bytes, problem.total(whole))


Strategy = Callable[[Setting], Choice | Unfit]


def data_parallel(setting: Setting) -> Choice:
    """Every operator by batch; gradients all-reduced."""
    return baselines.data_parallel(setting.tables, setting.batch)


def zero_2(setting: Setting) -> Choice:
    """Data parallel with gradients and optimizer state split over all devices."""
    return baselines.sharded_state(setting.tables, setting.batch)


def fsdp(setting: Setting) -> Choice:
    """Data parallel with parameters split over all devices, gathered where they are used."""
    return baselines.fully_sharded(setting.tables, setting.batch)


def hsdp(setting: Setting) -> Choice | Unfit:
    """Parameters split within a node, copied between nodes."""
    if setting.inner == setting.axes:
        return Unfit("the cluster has one level of links, so it is the same as fsdp")
    return baselines.hybrid_sharded(setting.tables, setting.batch)


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
    return baselines.stored_in_parts(setting.tables, found)


def parts_over_all(setting: Setting, choice: Choice) -> bool:
    """Whether attention is split over every axis of a node."""
    return _is_split(setting, choice, setting.inner)


def mesh_tensorflow(setting: Setting) -> Choice | Unfit:
    """Mesh-TensorFlow's Transformer: as Megatron-LM, over any inner part of the whole mesh."""
    if setting.inner == setting.axes:
        return Unfit("the cluster has one level of links, so it is the same as megatron")
    return _tensor_parallel(setting, setting.axes, sequence=False)


def expert_parallel(setting: Setting) -> Choice | Unfit:
    """Experts over the devices of a node, all else by batch over all devices."""
    roles = setting.roles
    if not roles.experts:
        return Unfit("the model has no experts")
    outer = tuple(a for a in setting.axes if a not in setting.inner)
    by_expert = (Way(setting.inner, (roles.experts,)), Way(outer, (roles.batch,)))
    by_batch = (Way(setting.axes, (roles.batch,)),)
    return choose_ways(
        setting.tables,
        setting.subdims,
        lambda op: by_expert if op in roles.routed else by_batch,
    )


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
    for start in range(len(within)) if setting.roles.heads else ():
        key = (within[start:], sequence)
        if key not in setting.known:
            choice, tensor = _of_degree(setting, within[start:], sequence)
            setting.known[key] = choice if _is_split(setting, choice, tensor) else None
        found = setting.known[key]
        if found is not None:
            yield found


def _sharded(setting: Setting) -> Iterator[Choice]:
    """Every degree with sequence parallelism that leaves devices to split parameters over."""
    for choice in _degrees(setting, setting.inner, sequence=True):
        yield baselines.stored_in_parts(setting.tables, choice)


def _of_degree(setting: Setting, tensor: Axes, sequence: bool) -> tuple[Choice, Axes]:
    roles = setting.roles
    data = tuple(a for a in setting.axes if a not in tensor)
    tried = (roles.tensor_parallel, roles.seq) if sequence else (roles.tensor_parallel,)
    ways = (Way(data, (roles.batch,)), Way(tensor, tried))
    return choose_ways(setting.tables, setting.subdims, lambda op: ways), tensor


def _is_split(setting: Setting, choice: Choice, tensor: Axes) -> bool:
    """Whether attention and the products that return to the hidden features use every axis."""
    named = set(setting.roles.attention)
    inner = setting.roles.heads | setting.roles.inner
    named |= {product.op for product in setting.roles.products if product.reduced & inner}
    return all(
        parts_over(vertex.space, choice[v], tensor)
        for v, vertex in enumerate(setting.tables.vertices)
        if vertex.space is not None and vertex.index in named
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
    if name == "fsdp+tp+sp":
        return list(_sharded(setting))
    if name not in TENSOR_PARALLEL:
        return [first]
    within = setting.axes if name == "mesh-tensorflow" else setting.inner
    found = list(_degrees(setting, within, sequence=name == "megatron+sp"))
    if name == "mesh-tensorflow":  # within a node it is Megatron-LM's
        known = set(_degrees(setting, setting.inner, sequence=False))
        found = [choice for choice in found if choice not in known]
    return found


TENSOR_PARALLEL = ("megatron", "megatron+sp", "mesh-tensorflow")


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
