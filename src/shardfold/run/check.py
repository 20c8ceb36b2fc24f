"""One step under a plan beside the same step on one device, compared number by number.

Both run the captured program in float64 with the same dropout masks. Every operator's result is
put together from the parts and compared, in execution order; then the gradients of the results,
from the loss back; then the loss and the parameters' gradients. What differs first is where the
error is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.capture import Program
from shardfold.plans import Plan
from shardfold.run.alone import alone
from shardfold.run.lower import Instruction
from shardfold.run.module import Parallel
from shardfold.run.moves import perform
from shardfold.run.parallelize import LOSS_PREFIX, Settings, assemble, lowered_here, prepared
from shardfold.run.parts import Row
from shardfold.run.steps import Lie, gradients, values
from shardfold.spaces import Atoms, Maker
from shardfold.spaces.layout import REPLICATED

TOLERANCE = 1e-9
SMALL = 1e-4  # of the largest gradient: below it, differences are measured against it


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not what it is on one device, and by how much of its largest number."""

    what: str
    amount: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Loss on both sides, and what differs: the first operator, and parameters' gradients."""

    loss: float
    expected_loss: float
    operator: Difference | None
    gradients: tuple[Difference, ...]
    largest: float  # difference of any gradient

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.operator is None and not self.gradients and self._same_loss

    @property
    def _same_loss(self) -> bool:
        return abs(self.loss - self.expected_loss) <= TOLERANCE * abs(self.expected_loss)

    def __str__(self) -> str:
        if self.is_equal:
            return (
                f"Same loss {self.loss:.12g} and gradients as on one device "
                f"(largest difference {self.largest:.1e})."
            )
        lines = [f"Loss {self.loss:.12g}, on one device {self.expected_loss:.12g}."]
        if self.operator is not None:
            lines.append(f"First to differ: {self.operator.what} (by {self.operator.amount:.1e}).")
        lines += [f"Gradient of {d.what} differs by {d.amount:.1e}." for d in self.gradients[:5]]
        if len(self.gradients) > 5:
            lines.append(f"{len(self.gradients) - 5} more gradients differ.")
        return "\n".join(lines)


@dataclass
class _Watch:
    """Remembers every operator's local results and the gradients that come back to them."""

    results: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, instruction: Instruction, results: list[Tensor]) -> list[Tensor]:
        # An operator may return its operand itself: the gradients of the two are not the same.
        own = [result.view_as(result) for result in results]
        for tensor, result in zip(instruction.results, own, strict=True):
            self.results[tensor] = result.detach()
            if result.requires_grad:
                result.register_hook(self._hook(tensor))
        return own

    def _hook(self, tensor: int) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            self.gradients[tensor] = gradient.detach()

        return keep


def compare(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Any] | None = None,
    rules: Mapping[str, Maker] | None = None,
    seed: int = 0,
) -> Comparison:
    """Run one step both ways; on every rank of the plan's process group."""
    captured = prepared(model, plan, args, kwargs, loss, rules)
    settings = Settings(seed=seed, double=True, prefix="" if loss is None else LOSS_PREFIX)
    return compare_captured(model, plan, captured, args, kwargs, rules, settings)


def compare_captured(
    model: nn.Module,
    plan: Plan,
    captured: tuple[Program, Atoms],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    rules: Mapping[str, Maker] | None,
    settings: Settings,
) -> Comparison:
    """As `compare`, for a model that was captured already."""
    program, atoms = captured
    given = dict(kwargs or {})
    single = assemble(model, program, alone(program, atoms), settings)
    expected, expected_loss = _step(single, args, given)
    split = assemble(model, program, lowered_here(plan, program, atoms, rules), settings)
    found, found_loss = _step(split, args, given)
    operator = _first_operator(split, atoms, found, expected)
    differing, largest = _parameters(split, single)
    return Comparison(found_loss, expected_loss, operator, differing, largest)


def _step(module: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Watch, float]:
    watch = _Watch()
    loss = module.observed(watch, *args, **kwargs)
    loss.backward()
    return watch, float(loss.detach())


def _first_operator(
    module: Parallel, atoms: Atoms, found: _Watch, expected: _Watch
) -> Difference | None:
    """The first operator with another result; failing that, the last with another gradient."""
    wholes = _Wholes(module, atoms)
    instructions = module._run.lowered.instructions
    for instruction in instructions:
        for tensor, left in zip(instruction.results, instruction.left, strict=True):
            whole = wholes.of(tensor, values(left), found.results[tensor])
            amount = _agreed(_amount(whole, expected.results[tensor]))
            if amount > TOLERANCE:
                return Difference(_name(instruction), amount)
    scale = max((float(g.abs().max()) for g in expected.gradients.values() if g.numel()), default=0)
    for instruction in reversed(instructions):
        for tensor, left in zip(instruction.results, instruction.left, strict=True):
            if tensor not in expected.gradients:
                continue
            whole = wholes.of(tensor, gradients(left), found.gradients[tensor])
            amount = _agreed(_amount(whole, expected.gradients[tensor], scale * SMALL))
            if amount > TOLERANCE:
                readers = [_name(i) for i in instructions if tensor in i.site.op.inputs]
                what = f"backward of {' or '.join(readers) or _name(instruction)}"
                return Difference(what, amount)
    return None


class _Wholes:
    """Puts tensors together from their parts, on every rank."""

    def __init__(self, module: Parallel, atoms: Atoms) -> None:
        self.run, self.atoms = module._run, atoms

    def of(self, tensor: int, row: Row, local: Tensor) -> Tensor:
        place, groups = self.run.lowered.place, self.run.context.groups
        kind = self.run.program.graph.tensors[tensor].type
        lie = Lie(kind, self.atoms.tensors[tensor], self.atoms.dims[tensor], place)
        moves = lie.moves(row, (REPLICATED,) * len(row), "forward")
        groups.make(step.axes for step in moves.steps)
        if local.dtype != torch.bool:
            return perform(moves, local, groups)
        return perform(moves, local.to(torch.uint8), groups).to(torch.bool)


def _parameters(split: Parallel, single: Parallel) -> tuple[tuple[Difference, ...], float]:
    expected = dict(single.named_parameters())
    grads = [p.grad for p in expected.values() if p.grad is not None]
    scale = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
    run = split._run
    keepings = {run.name(name): keeping for name, keeping in run.keepings.items()}
    found, largest = [], 0.0
    for name, parameter in split.named_parameters():
        other = expected[name].grad
        if other is None or parameter.grad is None:
            if (other is None) != (parameter.grad is None):
                found.append(Difference(f"{name} (missing on one side)", float("inf")))
            continue
        whole = keepings[name].whole(parameter.grad)
        amount = _agreed(_amount(whole, other, scale * SMALL))
        largest = max(largest, amount)
        if amount > TOLERANCE:
            found.append(Difference(name, amount))
    return tuple(found), largest


def _amount(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The largest difference, as a share of the largest number (or of `floor`)."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    if not expected.numel():
        return 0.0
    same = (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    finite = expected[expected.isfinite()]
    size = max(float(finite.abs().max()) if finite.numel() else 0.0, floor, 1e-30)
    amount = float((found - expected)[~same].abs().max()) / size
    return amount if amount == amount else float("inf")


def _agreed(amount: float) -> float:
    """The largest amount on any rank, so that all ranks decide alike."""
    if not dist.is_initialized():
        return amount
    shared = torch.tensor(amount, dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)


def _name(instruction: Instruction) -> str:
    op = instruction.site.op
    config = [
        instruction.site.rule.factors[f] if f >= 0 else {-1: "-", -2: "+"}[f]
        for f in instruction.site.config
    ]
    return f"operator {op.name} ({op.kind}, {op.origin}), split as {' '.join(config) or '-'}"
