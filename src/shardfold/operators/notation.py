"""The notation of splits, and the call that a rule is made for.

A rule names the factor that each dim of each operand and result runs over, in the notation of
einops: `b s m, n m -> b s n` is a linear layer, `b s (h d) -> b s h d` a view. From that alone
follows how the operator can be split and what the split costs: an axis that splits a factor
splits every dim that carries it; a result without the factor is left as a partial sum; the
gradient of an operand without the factor is a partial sum.

A `joint` factor stands for several that one axis splits at once: with rows and experts over the
same axis, a device has a part of either, and rows travel to their experts; with queries and keys,
keys go round. A factor that is `whole` may still be split as a member of a joint one.

A call is an operator as a rule maker sees it: types by operand name, attributes, nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardfold.graph import Graph, Op, TensorType
from shardfold.operators.operator import UNKNOWN, Operator

Dim = tuple[str, ...]  # the factors of one tensor dim, major first; () if no factor describes it
Engine = Literal["matrix", "vector", "none"]
Phase = Literal["forward", "backward"]
Sent = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "halo", "ring"]
TOKEN = re.compile(r"\(([^()]*)\)|(\S+)")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective inside an operator, needed only where `factor` is split.

    Each of `repeats` collectives takes from every device `words` items for each point of the
    local part of `over`. A `halo` sends such a slab to each neighbour; `longer` says by how many
    points the part of another factor has grown by then, where that one is split too. With
    `together` it takes what all devices have of `over`. A backward exchange that serves the
    gradient of one operand names it in `of`.

    A `ring` sends to the next device. With `beside` it makes as many hops as there are devices less
    so many, each beside a piece of the operator's work; without, one that is waited for.
    """

    kind: Sent
    factor: str
    over: tuple[str, ...]
    words: float = 1.0
    item_bytes: int = 4
    repeats: int = 1
    phase: Phase = "forward"
    longer: tuple[tuple[str, float], ...] = ()
    of: int | None = None
    together: bool = False
    beside: int | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operator's tensors share factors.

    >>> rule = Rule.parse("b s m, n m -> b s n", {"b": 8, "s": 128, "m": 64, "n": 32})
    >>> sorted(rule.reduced)            # splitting these leaves a partial sum
    ['m']
    >>> rule.points
    2097152
    """

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    engine: Engine = "vector"
    flops: float = 1.0  # per point of the iteration space, forward
    over: tuple[str, ...] | None = None  # the factors whose points count as work; None: all
    sparse: tuple[int, ...] = ()  # operands of which only the rows that are looked up are read
    whole: frozenset[str] = frozenset()  # factors that must not be split
    resolved: frozenset[str] = frozenset()  # absent from a result, but left complete there
    skewed: frozenset[str] = frozenset()  # causal: the last part holds most of the work
    least: Mapping[str, int] = field(default_factory=dict)  # no part may have fewer points
    linear: tuple[int, ...] = ()  # operands that may be partial, together
    exchanges: tuple[Exchange, ...] = ()
    saves: tuple[int, ...] = ()  # operands kept for backward
    crossed: tuple[int, ...] = ()  # of those, the ones that only the others' gradients need
    copied: tuple[int, ...] = ()  # of those, the ones kept as a copy, or as what was made of them
    entering: tuple[
        int, ...
    ] = ()  # of those, the ones that only the first operand's gradient needs
    saves_results: bool = False
    backward: float | None = None  # backward work in forwards; None: one per operand with gradient
    known: bool = True  # False: no rule was found, the operator stays unsplit
    found: bool = False  # by experiment, not written
    means: frozenset[str] = frozenset()  # reduced, and a part's result counts by its share
    ranges: frozenset[str] = frozenset()  # factors that are split into ranges of the whole only
    joint: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # split together, by name
    imbalance: float = 1.0  # of what is routed: the fullest device's share, in even ones
    operator: Operator = UNKNOWN  # what else is known of the operator's kind

    @classmethod
    def parse(cls, notation: str, sizes: Mapping[str, int], **properties: object) -> Rule:
        """Read `operands -> results`; each is a comma-separated list of dims."""
        left, arrow, right = notation.partition("->")
        if not arrow:
            raise ValueError(f"A rule needs '->' between operands and results: {notation!r}.")
        return cls(_side(left), _side(right), sizes, **properties)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        used = {f for side in (*self.operands, *self.results) for dim in side for f in dim}
        named = used | self.whole | self.resolved | self.skewed | set(self.over or ())
        missing = named - set(self.sizes)
        if missing:
            raise ValueError(f"Factors without a size: {', '.join(sorted(missing))} in {self}.")

    def backward_passes(self, gradients: Sequence[bool]) -> float:
        """Backward work in forwards, given which operands have gradients."""
        return float(sum(gradients)) if self.backward is None else self.backward

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of first appearance; then those that stand for several."""
        sides = (*self.operands, *self.results)
        carried = dict.fromkeys(f for side in sides for dim in side for f in dim)
        joint = (name for name, members in self.joint.items() if carried.keys() >= set(members))
        return (*carried, *joint)

    @property
    def reduced(self) -> frozenset[str]:
        """Factors that no result carries."""
        carried = {f for side in self.results for dim in side for f in dim}
        return frozenset(self.factors) - carried - set(self.joint)

    @property
    def work_factors(self) -> tuple[str, ...]:
        """The factors whose points count as work."""
        return self.factors if self.over is None else self.over

    @property
    def points(self) -> int:
        """Points of the iteration space that count as work."""
        return math.prod(self.sizes[f] for f in self.work_factors)

    def needs_again(self, operand: int, gradients: Sequence[bool]) -> bool:
        """Whether backward reads an operand itself, given which operands have gradients.

        A layer that reads the batch itself needs no gradient of it, and so not its weight.
        """
        if operand in self.copied:
            return False
        if operand in self.entering:
            return gradients[0]
        if operand not in self.crossed:
            return operand in self.saves
        return any(gradients[k] for k in self.saves if k != operand)

    def __str__(self) -> str:
        return f"{_show(self.operands)} -> {_show(self.results)}"


def _side(text: str) -> tuple[tuple[Dim, ...], ...]:
    if not text.strip():
        return ()
    return tuple(_dims(tensor) for tensor in text.split(","))


def _dims(text: str) -> tuple[Dim, ...]:
    """`b (h d) .` is a dim of factor b, one of h and d merged, and one that no factor describes."""
    return tuple(
        () if single in (".", "1") else (single,) if single else tuple(merged.split())
        for merged, single in TOKEN.findall(text)
    )


def _show(side: Sequence[Sequence[Dim]]) -> str:
    return ", ".join(
        " ".join(
            "." if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in tensor
        )
        for tensor in side
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator: what a rule may depend on."""

    op: Op
    inputs: tuple[TensorType, ...]
    results: tuple[TensorType, ...]

    @classmethod
    def of(cls, graph: Graph, op: Op) -> Call:
        """The call that `op` makes in `graph`."""
        return cls(
            op,
            tuple(graph.tensors[i].type for i in op.inputs),
            tuple(graph.tensors[i].type for i in op.results),
        )

    def attribute(self, name: str, default: Any = None) -> Any:
        """An argument that is not a tensor."""
        value = self.op.attributes.get(name, default)
        return default if value is None else value

    def has(self, name: str) -> bool:
        """Whether the tensor argument `name` was given."""
        return any(operand.name == name for operand in self.op.operands)

    def position(self, name: str) -> int:
        """The position of the tensor argument `name` among the operands."""
        return [operand.name for operand in self.op.operands].index(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor argument `name`."""
        return self.inputs[self.position(name)].shape

    def rule(
        self,
        operands: Mapping[str, str],
        *results: str | None,
        sizes: Mapping[str, int] | None = None,
        saves: tuple[str, ...] = (),
        crossed: tuple[str, ...] = (),
        copied: tuple[str, ...] = (),
        entering: tuple[str, ...] = (),
        **properties: Any,
    ) -> Rule:
        """A rule from a notation per operand name; `...` stands for any further dims.

        Operands that were not given are left out; an operand that the notation does not name
        keeps all its dims undescribed. Sizes of single-factor dims are read off the shapes.
        """
        known = dict(sizes or {})
        given = frozenset(known)
        left = tuple(
            self._expand(operands.get(operand.name), kind.shape, known, given)
            for operand, kind in zip(self.op.operands, self.inputs, strict=True)
        )
        notations = results if len(results) > 1 else results * len(self.results)
        right = tuple(
            self._expand(notation, kind.shape, known, given)
            for notation, kind in zip(notations, self.results, strict=True)
        )
        kept, others, copies, met = (
            tuple(self.position(name) for name in names if self.has(name))
            for names in (saves, crossed, copied, entering)
        )
        more = {"saves": kept, "crossed": others, "copied": copies, "entering": met, **properties}
        return Rule(left, right, known, **more)

    def undescribed(self, **properties: Any) -> Rule:
        """A rule in which no factor can be split: every device does the whole operator."""
        operands = tuple(tuple(() for _ in kind.shape) for kind in self.inputs)
        results = tuple(tuple(() for _ in kind.shape) for kind in self.results)
        return Rule(operands, results, {}, **properties)

    @staticmethod
    def _expand(
        notation: str | None,
        shape: tuple[int, ...],
        sizes: dict[str, int],
        given: frozenset[str],
    ) -> tuple[Dim, ...]:
        if notation is None:
            return tuple(() for _ in shape)
        before, dots, after = notation.partition("...")
        head, tail = _dims(before), _dims(after)
        middle = len(shape) - len(head) - len(tail)
        if middle < 0 or (middle and not dots):
            raise ValueError(f"The notation {notation!r} does not fit the shape {shape}.")
        dims = (*head, *((f"i{k}",) for k in range(middle)), *tail)
        for dim, size in zip(dims, shape, strict=True):
            # A dim of size 1 may be broadcast: the factor's size is that of another operand.
            if len(dim) == 1 and dim[0] not in given and sizes.get(dim[0], 1) == 1:
                sizes[dim[0]] = size
        return tuple(() if size == 1 else dim for dim, size in zip(dims, shape, strict=True))
