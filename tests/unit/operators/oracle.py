"""Runs an operator in parts, as a rule says it can be split, and compares with one whole run.

Along a factor, operands that carry it are sliced and the others are given to every part; results
that carry it are joined, and the others summed. Gradients go the same way with roles swapped: an
operand without the factor gets the sum of the parts' gradients. A rule that promises a split that
is not there gives other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from shardfold.capture import Invocation
from shardfold.capture.experiment import find_splits, is_open
from shardfold.capture.fx_nodes import Ref, invocation_of, kind_of, operands_and_attributes
from shardfold.graph import Op, TensorType
from shardfold.operators.notation import Call, Rule

Arguments = dict[str, Any]
Finish = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True, eq=False)
class Case:
    """One call of an operator with real tensors, and what its parts need to know."""

    overload: Any
    arguments: Arguments
    once: tuple[str, ...] = ()  # operands that are added to a partial sum by one part only
    is_mean: bool = False  # a part's mean is weighted by its share of the points
    fixed: tuple[str, ...] = ()  # operands that torch gives no gradient
    counts: tuple[int, ...] = (2, 3, 4)  # numbers of parts to try
    same_values: bool = True  # False: random or uninitialised, only shapes are compared
    localise: Callable[[Part, Arguments], tuple[Arguments, Finish] | Arguments] | None = None
    label: str = ""

    @property
    def kind(self) -> str:
        return str(self.overload._schema.name).replace("::", ".")

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.label)))


@dataclass(frozen=True)
class Part:
    """The points `low` to `high` of a factor."""

    call: Call
    rule: Rule
    factor: str
    number: int
    low: int
    high: int

    @property
    def size(self) -> int:
        return self.rule.sizes[self.factor]

    def shape(self, position: int = 0) -> list[int]:
        """The shape of this part's result."""
        kind, dims = self.call.results[position], self.rule.results[position]
        return [self.length(n, dim) for n, dim in zip(kind.shape, dims, strict=True)]

    def length(self, n: int, dim: tuple[str, ...]) -> int:
        return n * (self.high - self.low) // self.size if self.factor in dim else n

    def cut(self, tensor: Tensor, dims: tuple[tuple[str, ...], ...]) -> Tensor:
        """This part of a tensor: all of it, where no dim carries the factor."""
        for d, dim in enumerate(dims):
            if self.factor in dim:
                sizes, at, step = _unmerged(self.rule, dim, self.factor, tensor.shape[d])
                wide = tensor.unflatten(d, sizes)
                low, high = self.low * step, self.high * step
                tensor = wide.narrow(d + at, low, high - low).flatten(d, d + len(sizes) - 1)
        return tensor


def _unmerged(
    rule: Rule, dim: tuple[str, ...], factor: str, length: int
) -> tuple[list[int], int, int]:
    """The sizes of a dim's factors, where the factor stands, and rows for each of its points."""
    step = length // math.prod(rule.sizes[f] for f in dim)
    assert length == step * math.prod(rule.sizes[f] for f in dim), (dim, length, rule.sizes)
    assert step == 1 or len(dim) == 1, "A strided factor stands alone."
    return [rule.sizes[f] * step for f in dim], dim.index(factor), step


@cache
def call_of(case: Case) -> Call:
    """The call as capture would see it."""
    return captured(case)[0]


def captured(case: Case) -> tuple[Call, Invocation]:
    """The call as capture would see it, and as it would be run."""
    graph = fx.Graph()
    tensors: list[Tensor] = []

    def placeholder(value: Any) -> Any:
        if isinstance(value, Tensor):
            node = graph.placeholder(f"t{len(tensors)}")
            node.meta["val"] = value
            tensors.append(value)
            return node
        return [placeholder(v) for v in value] if isinstance(value, list) else value

    given = {name: placeholder(value) for name, value in case.arguments.items()}
    node = graph.call_function(case.overload, (), given)
    numbers = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    kwargs = fx.map_arg(given, lambda n: Ref(numbers[n], n))
    operands, attributes = operands_and_attributes(node, (), kwargs)
    results = run(case.overload, case.arguments)
    op = Op("call", kind_of(node), operands, tuple(range(len(results))), attributes)
    inputs, outputs = tuple(_type(tensors[o.tensor]) for o in operands), tuple(map(_type, results))
    invocation = invocation_of(node, (), kwargs)
    if is_open(op, invocation):
        op = replace(op, splits=find_splits(invocation, inputs, outputs))
    return Call(op, inputs, outputs), invocation


def _type(tensor: Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def run(overload: Any, arguments: Arguments) -> list[Tensor]:
    """The operator's results; its arguments are never written to."""
    copied = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    results = overload(**copied)
    return [results] if isinstance(results, Tensor) else list(results)


def operand_of(arguments: Arguments, name: str) -> Tensor:
    base, bracket, rest = name.partition("[")
    return arguments[base][int(rest[:-1])] if bracket else arguments[base]


def with_operands(arguments: Arguments, operands: dict[str, Tensor]) -> Arguments:
    """The arguments with some tensors replaced."""
    changed = {k: list(v) if isinstance(v, list) else v for k, v in arguments.items()}
    for name, tensor in operands.items():
        base, bracket, rest = name.partition("[")
        if bracket:
            changed[base][int(rest[:-1])] = tensor
        else:
            changed[base] = tensor
    return changed


@dataclass
class Outcome:
    """Results, and gradients by operand name, of a whole run or of the parts joined."""

    results: list[Tensor]
    gradients: dict[str, Tensor] = field(default_factory=dict)


def splits(case: Case, rule: Rule) -> Iterator[tuple[str, int]]:
    """Every factor that needs no exchange, in every number of parts that leaves none empty."""
    exchanged = {exchange.factor for exchange in rule.exchanges}
    for factor in splittable(rule):
        if factor not in exchanged:
            size = rule.sizes[factor]
            yield from ((factor, n) for n in case.counts if -(-size // n) * (n - 1) < size)


def splittable(rule: Rule) -> list[str]:
    """The factors that the rule allows to be split."""
    return [f for f in rule.factors if f not in rule.whole and rule.sizes[f] > 1]


@cache
def whole_run(case: Case) -> tuple[Outcome, list[Tensor]]:
    """One run of everything, and the gradients that are sent into its results."""
    call = call_of(case)
    leaves = _leaves(case, {o.name: operand_of(case.arguments, o.name) for o in call.op.operands})
    results = run(case.overload, with_operands(case.arguments, leaves))
    generator = torch.Generator().manual_seed(7)
    sent = [torch.randn(r.shape, generator=generator, dtype=torch.float64) for r in results]
    return Outcome([r.detach() for r in results], _gradients(results, sent, leaves)), sent


def in_parts(case: Case, call: Call, rule: Rule, factor: str, count: int) -> Outcome:
    """Run the parts one by one, and join what they give."""
    _, sent = whole_run(case)
    outcomes, parts = [], []
    size = rule.sizes[factor]
    chunk = -(-size // count)
    for number in range(count):
        low, high = number * chunk, min(size, (number + 1) * chunk)
        parts.append(Part(call, rule, factor, number, low, high))
        outcomes.append(_one_part(case, parts[-1], sent))
    results = [
        _join_results([o.results[k] for o in outcomes], dims, parts)
        for k, dims in enumerate(rule.results)
    ]
    gradients = {
        operand.name: _join([o.gradients[operand.name] for o in outcomes], dims, parts)
        for operand, dims in zip(call.op.operands, rule.operands, strict=True)
        if operand.name in outcomes[0].gradients
    }
    return Outcome(results, gradients)


def _one_part(case: Case, part: Part, sent: list[Tensor]) -> Outcome:
    rule, call = part.rule, part.call
    cut = {
        operand.name: part.cut(operand_of(case.arguments, operand.name), dims)
        for operand, dims in zip(call.op.operands, rule.operands, strict=True)
    }
    leaves = _leaves(case, cut)
    given = dict(leaves)
    if part.factor in rule.reduced and part.number:
        given |= {name: leaves[name] * 0 for name in case.once if name in leaves}
    arguments: Any = with_operands(case.arguments, given)
    finish: Finish = lambda results: results  # noqa: E731
    if case.localise is not None:
        localised = case.localise(part, arguments)
        arguments, finish = localised if isinstance(localised, tuple) else (localised, finish)
    results = finish(run(case.overload, arguments))
    if part.factor in rule.means or (case.is_mean and part.factor in rule.reduced):
        results = [r * ((part.high - part.low) / part.size) for r in results]
    mine = [part.cut(s, dims) for s, dims in zip(sent, rule.results, strict=True)]
    return Outcome([r.detach() for r in results], _gradients(results, mine, leaves))


def _leaves(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: t.detach().clone().requires_grad_(t.is_floating_point() and name not in case.fixed)
        for name, t in tensors.items()
    }


def _gradients(
    results: list[Tensor], sent: list[Tensor], leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    pairs = [(r, s) for r, s in zip(results, sent, strict=True) if r.requires_grad]
    for result, gradient in pairs:
        assert result.shape == gradient.shape, (result.shape, gradient.shape)
    names = [name for name, leaf in leaves.items() if leaf.requires_grad]
    if not pairs or not names:
        return {}
    found = torch.autograd.grad(
        [r for r, _ in pairs],
        [leaves[n] for n in names],
        [s.to(r.dtype) for r, s in pairs],
        allow_unused=True,
    )
    return {n: g for n, g in zip(names, found, strict=True) if g is not None}


def _join_results(
    pieces: list[Tensor], dims: tuple[tuple[str, ...], ...], parts: list[Part]
) -> Tensor:
    factor, rule = parts[0].factor, parts[0].rule
    if factor in rule.resolved and not any(factor in dim for dim in dims):
        assert all(_close(piece, pieces[0]) for piece in pieces), f"{factor} is not resolved"
        return pieces[0]
    return _join(pieces, dims, parts)


def _join(pieces: list[Tensor], dims: tuple[tuple[str, ...], ...], parts: list[Part]) -> Tensor:
    """Pieces side by side along the dim that carries the factor, or their sum."""
    factor, rule = parts[0].factor, parts[0].rule
    for d, dim in enumerate(dims):
        if factor in dim:
            at = dim.index(factor)
            wide = []
            for piece, part in zip(pieces, parts, strict=True):
                sizes = [rule.sizes[f] if f != factor else part.high - part.low for f in dim]
                if len(dim) == 1:
                    sizes = [piece.shape[d]]
                wide.append(piece.unflatten(d, sizes))
            return torch.cat(wide, d + at).flatten(d, d + len(dim) - 1)
    if pieces[0].dtype == torch.bool:
        return torch.stack(pieces).any(0)
    return torch.stack(pieces).sum(0)


def difference(case: Case, rule: Rule, factor: str, count: int) -> str:
    """What differs between the parts joined and the whole: empty if nothing does."""
    call = call_of(case)
    expected, _ = whole_run(case)
    found = in_parts(case, call, rule, factor, count)
    where = f"{case}: {rule}, {factor} in {count}"
    for k, (a, b) in enumerate(zip(found.results, expected.results, strict=True)):
        if a.shape != b.shape:
            return f"{where}: result {k} has shape {tuple(a.shape)}, not {tuple(b.shape)}"
        if case.same_values and not _close(a, b):
            return f"{where}: result {k} differs"
    if not case.same_values:
        return ""
    if set(found.gradients) != set(expected.gradients):
        return f"{where}: gradients of {set(found.gradients)}, not {set(expected.gradients)}"
    for name, gradient in found.gradients.items():
        if not _close(gradient, expected.gradients[name]):
            return f"{where}: the gradient of {name} differs"
    return ""


def _close(a: Tensor, b: Tensor) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return torch.equal(a.to(b.dtype), b)
    step = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    tolerance = min(1e5 * step, 2e-2) + 1e-10
    return torch.allclose(a.double(), b.double(), tolerance, tolerance, equal_nan=True)


def passes_sums(case: Case, rule: Rule) -> bool:
    """Whether the operator of a sum is the sum of the operators, on the operands it says."""
    call = call_of(case)
    names = [call.op.operands[k].name for k in rule.linear]
    generator = torch.Generator().manual_seed(11)
    first = {
        name: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
        for name in names
        for t in [operand_of(case.arguments, name)]
    }
    second = {name: operand_of(case.arguments, name) - first[name] for name in names}
    parts = [run(case.overload, with_operands(case.arguments, x)) for x in (first, second)]
    together = run(case.overload, case.arguments)
    return all(_close(a + b, c) for a, b, c in zip(*parts, together, strict=True))
