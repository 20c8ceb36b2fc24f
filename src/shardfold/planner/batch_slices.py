"""Slices of a batch: the micro-batches of a step, and whether a model can be run on them.

A plan names the inputs that are cut and the dim of each, by their places in the batch: `0` is the
first argument, `input_ids` an argument by name, `batch.image` what lies within one. All else is
whole in every part.

A step may take its batch in k equal parts, one after the other, and add their gradients up, if
its loss is the mean of the parts' losses. That holds if every sample is on its own until a mean
over all of them, and if only sums and fixed factors follow. So every operator is looked at, in
order, with one of these words for each of its tensors:

    fixed      depends on no sample: parameters, buffers, what is made of them
    own        has the samples' dim, each sample on its own
    mean       a mean over samples, or a sum of such means and of what is fixed

Anything else (statistics of a batch, a product of two means, a sample that is compared with
another) makes the loss another one, and the batch is not cut. Work: one look at each operator for
each dim of the inputs, until one will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from shardfold.errors import InputError, ModelError, PlanError
from shardfold.graph import Graph, Op, TensorType
from shardfold.operators import Operator
from shardfold.sharding import Subdims
from shardfold.sharding.subdims import WHOLE

Batch = tuple[tuple[Any, ...], dict[str, Any]]
SAME_VALUES = ("aten.contiguous", "aten.expand")
Cuts = Mapping[str, int]  # the place of each input that is cut, and the dim


def items_in(dtype: str, shape: Sequence[int]) -> tuple[int, str]:
    """What a batch counts, by its first tensor: whole numbers in rows are tokens, else samples.

    >>> items_in("int64", (8, 512)), items_in("float32", (8, 3, 32, 32))
    ((4096, 'tokens'), (8, 'samples'))
    """
    if len(shape) > 1 and dtype.startswith(("int", "uint")):
        return math.prod(shape), "tokens"
    return shape[0], "samples"


def first_input(graph: Graph) -> TensorType | None:
    """The first input that has dims: what a batch is counted by."""
    inputs = (t.type for t in graph.tensors if t.role == "input" and t.type.shape)
    return next(inputs, None)


def items_of(graph: Graph) -> tuple[int, str]:
    """What the batch of a graph counts, and which items; without an input it is a step."""
    first = first_input(graph)
    return (1, "steps") if first is None else items_in(first.dtype, first.shape)


def cut(args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Cuts, parts: int) -> list[Batch]:
    """The parts of a batch, in the order in which the passes take them."""
    return [_part(args, kwargs, cuts, parts, number) for number in range(parts)]


def first_part(args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Cuts, parts: int) -> Batch:
    """The first of the parts: an example of all."""
    return _part(args, kwargs, cuts, parts, 0)


def _part(
    args: Sequence[Any], kwargs: Mapping[str, Any], cuts: Cuts, parts: int, number: int
) -> Batch:
    def piece(place: str, value: Any) -> Any:
        return _slice(place, value, cuts[place], parts, number) if place in cuts else value

    if parts == 1:
        return tuple(args), dict(kwargs)
    positional = tuple(mapped(value, piece, str(k)) for k, value in enumerate(args))
    return positional, {name: mapped(value, piece, name) for name, value in kwargs.items()}


def mapped(value: Any, change: Callable[[str, Any], Any], place: str = "") -> Any:
    """The same structure with every leaf changed, given its place."""
    before = f"{place}." if place else ""
    if isinstance(value, Mapping):
        return {key: mapped(item, change, f"{before}{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [mapped(item, change, f"{before}{k}") for k, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(place, value)


def scaled(batch: Any, factor: float) -> Any:
    """An example batch with the leading dim of its first tensor scaled, in all that have it."""
    sizes = list[int]()
    mapped(batch, lambda _, leaf: sizes.extend(_shape(leaf)[:1]))
    if factor == 1.0 or not sizes:
        return batch
    size, wanted = sizes[0], round(sizes[0] * factor)
    if not math.isclose(wanted, sizes[0] * factor, rel_tol=1e-9):
        raise PlanError(f"A batch of {size} cannot be scaled by {factor:g}.")

    def resized(_: str, leaf: Any) -> Any:
        shape = _shape(leaf)
        return leaf.new_empty((wanted, *shape[1:])) if shape[:1] == (size,) else leaf

    return mapped(batch, resized)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if hasattr(leaf, "new_empty") else ()


def _slice(place: str, value: Any, dim: int, parts: int, number: int) -> Any:
    shape = tuple(getattr(value, "shape", ()))
    if dim >= len(shape):
        raise InputError(f"The input {place} has shape {shape}: it has no dim {dim} to cut.")
    if shape[dim] % parts:
        raise InputError(
            f"The input {place} has {shape[dim]} samples (dim {dim} of {shape}), which cannot be "
            f"cut into {parts} equal micro-batches. Try a number that divides {shape[dim]}."
        )
    size = shape[dim] // parts
    return value[(slice(None),) * dim + (slice(number * size, (number + 1) * size),)]


class _MixedError(Exception):
    """An operator that does not leave every sample on its own."""


@dataclass(frozen=True, slots=True)
class Samples:
    """How many samples a batch has, and along which dim of each input; or why it is not cut."""

    count: int = 1
    dims: tuple[tuple[int, int], ...] = ()  # the input's number in the graph, and the dim
    reason: str = ""  # empty: it may be cut

    def divisors(self) -> list[int]:
        """The powers of two, from 2 on, into which the batch can be cut."""
        if self.reason:
            return []
        return [2**n for n in range(1, self.count.bit_length()) if self.count % 2**n == 0]


def samples_in(graph: Graph, subdims: Subdims) -> Samples:
    """The first dim of the inputs along which the batch may be cut, leading dims first."""
    reasons = []
    for identity in _candidates(graph, subdims):
        try:
            dims = tuple(_carriers(graph, subdims, identity))
            _Look(graph, subdims, identity).run()
        except _MixedError as error:
            reasons.append(str(error))
            continue
        sizes = (
            graph.tensors[t].type.shape[d]
            for t, d, found in _dims(graph, subdims)
            if found == identity
        )
        return Samples(min(sizes), dims)
    return Samples(reason=(reasons or ["No dim is that of most of the input."])[0])


def check_alike(whole: Graph, part: Graph, passes: int) -> None:
    """Refuse a model that computes something else of a part than it does of the whole batch.

    Operators that change no value may come and go: of one sample, some have nothing to do.
    """
    own, others = ([op for op in g.ops if op.kind not in SAME_VALUES] for g in (whole, part))
    for op, other in zip_longest(own, others):
        if op is None or other is None or op.kind != other.kind:
            at = op or other
            raise ModelError(
                f"With {passes} micro-batches the model computes something else from operator "
                f"{at.name} ({at.kind}, {at.origin}) on: its batch cannot be cut."
            )


def _candidates(graph: Graph, subdims: Subdims) -> list[int]:
    """The identities of whole dims of most of the input: leading ones first, then by bytes."""
    weights: dict[int, tuple[int, float]] = {}
    for tensor, dim, identity in _dims(graph, subdims):
        depth, size = weights.get(identity, (dim, 0.0))
        weights[identity] = (min(depth, dim), size - graph.tensors[tensor].type.bytes)
    most = sum(tensor.type.bytes for tensor in graph.tensors if tensor.role == "input") / 2
    found = [identity for identity, (_, size) in weights.items() if -size > most]
    return sorted(found, key=lambda identity: weights[identity])


def _dims(graph: Graph, subdims: Subdims) -> Iterator[tuple[int, int, int]]:
    """Every dim of an input that is one piece and can be divided: input, dim, identity."""
    for index, tensor in enumerate(graph.tensors):
        if tensor.role == "input":
            dims = subdims.dims[index]
            for dim, identity in zip(dims, subdims.classes[index], strict=True):
                if dims.count(dim) == 1 and tensor.type.shape[dim] > 1:
                    yield index, dim, identity


def _carriers(graph: Graph, subdims: Subdims, identity: int) -> Iterator[tuple[int, int]]:
    """Every input with samples, and the dim: theirs alone, or one that runs over them first."""
    for index, tensor in enumerate(graph.tensors):
        classes, dims = subdims.classes[index], subdims.dims[index]
        if tensor.role == "input" and identity in classes:
            at = classes.index(identity)
            if classes.count(identity) > 1 or dims.index(dims[at]) != at:
                raise _MixedError(
                    f"The input {tensor.name} has its samples in no dim of their own."
                )
            yield index, dims[at]


class _Look:
    """A look at every operator, for one dim that may be the samples'."""

    def __init__(self, graph: Graph, subdims: Subdims, identity: int) -> None:
        self.graph, self.subdims, self.identity = graph, subdims, identity
        self.words: dict[int, str] = {}
        for index, tensor in enumerate(graph.tensors):
            if tensor.role != "activation":
                self.words[index] = (
                    "own" if tensor.role == "input" and self._has(index) else "fixed"
                )

    def run(self) -> None:
        for index, op in enumerate(self.graph.ops):
            word = self._word(index, op)
            for tensor in op.results:
                self.words[tensor] = word
        if self.words[self.graph.loss] != "mean":
            raise _MixedError("The loss is no mean over samples.")

    def _has(self, tensor: int) -> bool:
        return self.identity in self.subdims.classes[tensor]

    def _word(self, index: int, op: Op) -> str:
        read = [self.words[t] for t in op.inputs]
        if any(self.words[t] == "fixed" and self._has(t) for t in op.inputs):
            raise _mixed(op, "reads something for each sample that the batch does not have")
        operator = self.subdims.rules[index].rule.operator
        if operator.fills and set(read) <= {"fixed"}:
            return "own" if any(map(self._has, op.results)) else "fixed"
        factor = self._factor(index, op)
        if factor is None:
            if "own" in read:
                raise _mixed(op, "does not keep samples apart")
            return "fixed" if "mean" not in read else _of_means(operator, op, read)
        if "mean" in read:
            raise _mixed(op, "lets samples read a mean over all of them")
        if "own" not in read:
            raise _mixed(op, "makes something for each sample that the batch does not have")
        carried = [factor in side for side in self.subdims.rules[index].results]
        if all(carried):
            self._check_apart(index, op, factor)
            return "own"
        if any(carried) or not operator.is_mean(op):
            raise _mixed(op, "takes samples together, and not as a mean")
        return "mean"

    def _factor(self, index: int, op: Op) -> int | None:
        """The operator's factor that runs over the samples, the only one."""
        rule, factors = self.subdims.rules[index], self.subdims.factors[index]
        found = {f for f, identity in enumerate(factors) if identity == self.identity}
        if len(found) > 1:
            raise _mixed(op, "compares samples with one another")
        for tensor, side in zip(
            (*op.inputs, *op.results), (*rule.operands, *rule.results), strict=True
        ):
            classes = self.subdims.classes[tensor]
            carriers = [f for f, c in zip(side, classes, strict=True) if c == self.identity]
            if len(carriers) > 1 or WHOLE in carriers:
                raise _mixed(op, "does not keep samples apart")
        return next(iter(found), None)

    def _check_apart(self, index: int, op: Op, factor: int) -> None:
        rule = self.subdims.rules[index]
        base = rule.base(factor)
        sums = any(e.factor == base and e.phase == "forward" for e in rule.rule.exchanges)
        if sums:
            raise _mixed(op, "has statistics over the batch")
        if base in rule.rule.whole or rule.even[factor]:
            raise _mixed(op, "does not keep samples apart")


def _of_means(operator: Operator, op: Op, read: Sequence[str]) -> str:
    if not operator.keeps_means(op, [word == "mean" for word in read]):
        raise _mixed(op, "is no sum of means over the samples")
    return "mean"


def _mixed(op: Op, what: str) -> _MixedError:
    return _MixedError(f"Operator {op.name} ({op.kind}, {op.origin}) {what}.")
