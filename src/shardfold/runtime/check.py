"""Two steps under a plan beside the model itself on one device, compared number by number.

Three run the same two batches in float64, with the same dropout: the user's module in plain
PyTorch (`reference`), the captured program on one device, and the plan's splits. The program is
compared with the module: loss, gradients, buffers, and the parameters that forward changes. The
splits are compared with the program: every operator's result is put together from the parts and
compared, in execution order; then the gradients of the results, from the loss back; then the
loss, the parameters' gradients and the buffers. What differs first is where the error is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.capture import Program
from shardfold.operators import Rules
from shardfold.planner.batch_slices import cut
from shardfold.plans import Plan
from shardfold.runtime.inputs_outputs import put_together
from shardfold.runtime.lower import Instruction, alone
from shardfold.runtime.module import Parallel
from shardfold.runtime.parallelize import (
    LOSS_PREFIX,
    Settings,
    assemble,
    assemble_stages,
    lowered_here,
    lowered_parts,
    prepared,
)
from shardfold.runtime.ranks import agreed
from shardfold.runtime.reference import Batch, Outcome, Reference, UnlikeError, other_batch
from shardfold.runtime.reshard import Lie, gradients, values
from shardfold.runtime.shards import Row
from shardfold.sharding import Subdims
from shardfold.sharding.layouts import PENDING

TOLERANCE = 1e-9
SHOWN = 5
AS_MODEL = 1e-6  # of the program and the model: where forward insists on float32, they differ
STEPS = 2
ROUNDING = 1e-6  # of the largest operand: a smaller result is what is left of a difference
SMALL = 1e-4  # of the largest gradient: below it, differences are measured against it


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not what it is on one device, and by how much of its largest number."""

    what: str
    amount: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Loss on both sides, and what differs: the first operator, gradients, buffers."""

    loss: float
    expected_loss: float
    operator: Difference | None
    state: tuple[Difference, ...]  # parameters' gradients, and buffers
    largest: float  # difference of any of them
    model: tuple[Difference, ...] = ()  # of the captured program from the model itself
    unlike: str = "it was not asked for"  # why the model itself was not run; empty: it was
    split: int = 0  # operators of which no device computes all
    stages: int = 1

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.operator is None and not self.state and not self.model and self._same_loss

    @property
    def _same_loss(self) -> bool:
        return abs(self.loss - self.expected_loss) <= TOLERANCE * abs(self.expected_loss)

    def __str__(self) -> str:
        lines = self._equal() if self.is_equal else self._different()
        if self.unlike:
            lines.append(
                f"The model itself was not run ({self.unlike}): both sides are its captured "
                "program, and what capture may have lost is not seen."
            )
        if not self.split and self.stages == 1:
            lines.append(
                "The plan splits no operator: every process runs the whole model, and nothing was "
                "said about splits. Check a plan with splits: a larger cluster or batch, or pins."
            )
        return "\n".join(lines)

    def _equal(self) -> list[str]:
        whom = "its captured program" if self.unlike else "the model itself"
        return [
            f"Same loss {self.loss:.12g}, gradients and buffers as {whom} on one device "
            f"(largest difference {self.largest:.1e}; {self.split} operators are split"
            f"{f', in {self.stages} stages' if self.stages > 1 else ''})."
        ]

    def _different(self) -> list[str]:
        lines = [f"Loss {self.loss:.12g}, on one device {self.expected_loss:.12g}."]
        if self.operator is not None:
            lines.append(f"First to differ: {self.operator.what} (by {self.operator.amount:.1e}).")
        if self.model:
            lines.append("The captured program is not the model:")
        differences = (*self.model, *self.state)
        lines += [f"{_capital(d.what)} differs by {d.amount:.1e}." for d in differences[:SHOWN]]
        if len(differences) > SHOWN:
            lines.append(f"{len(differences) - SHOWN} more differ.")
        if self.model:
            lines.append(
                "Something that forward does is lost when it is captured: please report it, with "
                "the model."
            )
        return lines


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


@dataclass
class _Watch:
    """Remembers every operator's local results and the gradients that come back to them."""

    results: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, instruction: Instruction, results: list[Tensor]) -> list[Tensor]:
        # An operator may return its operand itself: the gradients of the two are not the same.
        own = [result.view_as(result) for result in results]
        if "empty" in instruction.site.op.kind:  # memory that nobody has written yet
            own = [result.zero_() for result in own]
        for tensor, result in zip(instruction.results, own, strict=True):
            # What may be a view of a buffer must outlast the step's writes.
            self.results[tensor] = result.detach().clone()
            if result.requires_grad:
                result.register_hook(self._hook(tensor))
        return own

    def _hook(self, tensor: int) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor | None) -> None:
            if gradient is not None:  # a backward function may give none
                self.gradients[tensor] = gradient.detach()

        return keep


def compare(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Any] | None = None,
    rules: Rules | None = None,
    seed: int = 0,
) -> Comparison:
    """Run two steps all three ways; on every rank of the plan's process group."""
    captured = agreed(lambda: prepared(model, plan, args, kwargs, loss, rules))
    settings = Settings(
        seed=seed,
        float64=True,
        prefix="" if loss is None else LOSS_PREFIX,
        passes=plan.micro_batches,
        cuts=plan.micro_batch_dims,
    )
    first: Batch = (args, dict(kwargs or {}))
    try:
        reference = Reference(model, loss)
    except UnlikeError as error:
        return compare_captured(model, plan, captured, args, kwargs, rules, settings, str(error))
    second = other_batch(first)
    batches = [first, second if reference.takes(second) else first]
    return _compared(model, plan, captured, batches, rules, settings, reference, "")


def compare_captured(
    model: nn.Module,
    plan: Plan,
    captured: tuple[Program, Subdims],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    rules: Rules | None,
    settings: Settings,
    unlike: str = "it was not asked for",
) -> Comparison:
    """One step of a model that was captured already: its splits beside its program."""
    batches: list[Batch] = [(args, dict(kwargs or {}))]
    return _compared(model, plan, captured, batches, rules, settings, None, unlike)


def _compared(
    model: nn.Module,
    plan: Plan,
    captured: tuple[Program, Subdims],
    batches: list[Batch],
    rules: Rules | None,
    settings: Settings,
    reference: Reference | None,
    unlike: str,
) -> Comparison:
    """Step by step, until something differs."""
    program, subdims = captured
    single = assemble(model, program, alone(program, subdims), settings)
    if plan.pipeline is None:
        split = assemble(model, program, lowered_here(plan, program, subdims, rules), settings)
    else:
        lower = partial(lowered_parts, plan, subdims=subdims, rules=rules)
        split = assemble_stages(model, program, lower, settings, plan)
        every = range(len(split._run.lowered.mesh.axes))
        split._run.context.groups.make(
            axes for count in every for axes in combinations(every, count + 1)
        )
    many = sum(i.site.is_split for i in split._run.lowered.instructions)
    largest = 0.0
    for batch in batches:
        expected, wanted, drawn = _step(single, batch)
        found, reached, _ = _step(split, batch)
        operator = _first_operator(split, subdims, found, expected)
        state, most = _parameters(split, single)
        lost: tuple[Difference, ...] = ()
        if reference is not None:
            try:
                outcome = reference.step(_parts(single, batch), drawn)
                lost = _lost(single, wanted, outcome)
                if lost and reference.drew:
                    raise UnlikeError("it draws other random numbers than its captured program")
                wanted = outcome.loss
            except UnlikeError as error:
                reference, unlike, lost = None, str(error), ()
        largest = max(largest, most)
        stages = 1 if plan.pipeline is None else len(plan.pipeline.layers)
        result = Comparison(reached, wanted, operator, state, largest, lost, unlike, many, stages)
        if not result.is_equal:
            break
        split.zero_grad()
        single.zero_grad()
    return result


def _parts(module: Parallel, batch: Batch) -> list[Batch]:
    """The micro-batches of a step."""
    return cut(*batch, module._run.cuts, module._run.passes)


def _step(module: Parallel, batch: Batch) -> tuple[_Watch, float, list[Tensor]]:
    """What the last pass leaves, the loss of all, and the random numbers that were drawn."""
    run, total = module._run, 0.0
    drawn: list[Tensor] = []
    if run.stages is not None:
        watch = _Watch()
        return watch, float(module._run_stages(batch, watch)), drawn
    run.context.drawn = drawn
    for number, (part, named) in enumerate(_parts(module, batch)):
        watch = _Watch()
        with run.in_pass(number):
            loss = module.observed(watch, *part, **named) / run.passes
            run.context.drawn = None  # what runs again for backward draws nothing new
            loss.backward()
            run.context.drawn = drawn
        total += float(loss.detach())
    run.context.drawn = None
    return watch, total, drawn


def _lost(single: Parallel, loss: float, outcome: Outcome) -> tuple[Difference, ...]:
    """In what the captured program differs from the model."""
    found = [("the loss", abs(loss - outcome.loss) / max(abs(outcome.loss), 1e-30))]
    sizes = (float(g.abs().max()) for g in outcome.gradients.values() if g.numel())
    floor = SMALL * max(sizes, default=0.0)
    readers = _readers_of(single)
    for name, parameter in single.named_parameters():
        ours, theirs = parameter.grad, outcome.gradients.get(name)
        zero = torch.zeros_like(parameter)
        amount = 0.0
        if ours is not None or theirs is not None:
            here, there = (zero if each is None else each.to_dense() for each in (ours, theirs))
            amount = difference(here, there, floor)
        found.append((f"the gradient of {name}{readers.get(name, '')}", amount))
    for kind, tensors in (("parameter", "named_parameters"), ("buffer", "named_buffers")):
        for name, tensor in getattr(single, tensors)():
            least = beside(name, outcome.state) if kind == "buffer" else 0.0
            amount = difference(tensor.detach(), outcome.state[name], least)
            found.append((f"the {kind} {name}, which forward changes,", amount))
    amounts = _agreed([amount for _, amount in found])
    pairs = zip(found, amounts, strict=True)
    return tuple(Difference(name, amount) for (name, _), amount in pairs if amount > AS_MODEL)


def _readers_of(module: Parallel) -> dict[str, str]:
    """Where the parameters are read first, in words."""
    run, found = module._run, dict[str, str]()
    for op in run.program.graph.ops:
        for tensor in op.inputs:
            name = run.name(run.program.graph.tensors[tensor].name)
            found.setdefault(name, f" (read by {op.name}, {op.origin})")
    return found


def _first_operator(
    module: Parallel, subdims: Subdims, found: _Watch, expected: _Watch
) -> Difference | None:
    """The first operator with another result; failing that, the last with another gradient."""
    instructions = module._run.lowered.instructions
    parts = _Parts(module, subdims)
    results, rounding = [], dict[int, float]()
    for i in instructions:
        floor = _rounding(i, expected, rounding)
        for t, left in zip(i.results, i.left, strict=True):
            amount = 0.0
            if t in found.results:  # not of another stage
                known = expected.results[t]
                amount = parts.difference(t, values(left), found.results[t], known, floor)
                if _size(known) <= floor:
                    rounding[t] = floor
            results.append((_name(i), amount))
    sizes = (float(g.abs().max()) for g in expected.gradients.values() if g.numel())
    floor = SMALL * max(sizes, default=0.0)
    backward = [
        (
            _readers(instructions, t) or _name(i),
            parts.difference(t, gradients(left), found.gradients[t], expected.gradients[t], floor)
            if t in found.results
            else 0.0,
        )
        for i in reversed(instructions)
        for t, left in zip(i.results, i.left, strict=True)
        if t in expected.gradients and (t in found.gradients or t not in found.results)
    ]
    return _first([*results, *backward])


def _rounding(instruction: Instruction, expected: _Watch, rounding: Mapping[int, float]) -> float:
    """What results are measured against that are nothing but rounding.

    That is what is left where numbers cancel out, and what is made of it.
    """
    given = [t for t in instruction.site.op.inputs if t in expected.results]
    largest = max((_size(expected.results[t]) for t in given), default=0.0)
    return max(ROUNDING * largest, *(rounding.get(t, 0.0) for t in given), 0.0)


def _size(tensor: Tensor) -> float:
    """The largest number of a tensor."""
    if not (tensor.numel() and _is_float(tensor)):
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _is_float(tensor: Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _first(named: list[tuple[str, float]]) -> Difference | None:
    """The first that differs on any rank."""
    amounts = _agreed([amount for _, amount in named])
    for (name, _), amount in zip(named, amounts, strict=True):
        if amount > TOLERANCE:
            return Difference(name, amount)
    return None


def _readers(instructions: tuple[Instruction, ...], tensor: int) -> str:
    """Who gave a result its gradient."""
    names = [_name(i) for i in instructions if tensor in i.site.op.inputs]
    return f"backward of {' or '.join(names)}" if names else ""


class _Parts:
    """Holds a rank's part of a tensor against that part of the whole; parts of a sum are added."""

    def __init__(self, module: Parallel, subdims: Subdims) -> None:
        self.run, self.subdims = module._run, subdims

    def difference(
        self, tensor: int, row: Row, local: Tensor, whole: Tensor, floor: float
    ) -> float:
        kind = self.run.program.graph.tensors[tensor].type
        subdims, dims = self.subdims.tensors[tensor], self.subdims.dims[tensor]
        lie = Lie(kind, subdims, dims, self.run.lowered.place)
        if PENDING in row:
            found = put_together(lie, row, local, self.run.context.groups)
            return difference(found, whole, floor)
        own, part = lie.extent(row), whole.reshape(subdims)
        for subdim, (low, high) in enumerate(own.bounds):
            part = part.narrow(subdim, low, high - low)
        return difference(local, part.reshape(own.shape), floor, of=whole)


def _parameters(split: Parallel, single: Parallel) -> tuple[tuple[Difference, ...], float]:
    """The parameters whose gradients differ, and the largest difference of any."""
    expected = dict(single.named_parameters())
    sizes = (float(p.grad.abs().max()) for p in expected.values() if _has_gradient(p))
    floor = SMALL * max(sizes, default=0.0)
    keepings = split._run.named()
    named, own = [], dict(split.named_parameters())
    for name in expected:
        if name not in own:
            named.append((f"the gradient of {name}", 0.0))  # of another stage
            continue
        here, there = own[name].grad, expected[name].grad
        if here is None or there is None:
            named.append((f"the gradient of {name}", 0.0 if here is there else float("inf")))
        else:
            whole = keepings[name].whole(here)
            named.append((f"the gradient of {name}", difference(whole, there, floor)))
    split.gather_buffers()
    buffers = dict(single.named_buffers())
    for name, buffer in split.named_buffers():
        amount = difference(buffer, buffers[name], beside(name, buffers))
        named.append((f"the buffer {name}", amount))
    amounts = _agreed([amount for _, amount in named])
    pairs = [(name, amount) for (name, _), amount in zip(named, amounts, strict=True)]
    found = tuple(Difference(name, amount) for name, amount in pairs if amount > TOLERANCE)
    return found, max(amounts, default=0.0)


def beside(name: str, buffers: Mapping[str, Tensor]) -> float:
    """What a buffer is measured against that is nothing but rounding: those of the same part.

    The mean of what a norm has made is zero, and so is the running mean of the norm behind it.
    """
    part = name.rpartition(".")[0]
    own = (tensor for key, tensor in buffers.items() if key.rpartition(".")[0] == part)
    return ROUNDING * max(map(_size, own), default=0.0)


def _has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.numel())


def difference(
    found: Tensor, expected: Tensor, floor: float = 0.0, of: Tensor | None = None
) -> float:
    """The largest difference of two tensors, as a share of the largest number (or of `floor`).

    That is the largest number of `of`, where `expected` is a part of it.
    """
    of = expected if of is None else of
    if found.shape != expected.shape:
        return float("inf")
    if expected.is_complex() and found.is_complex():
        found, expected, of = (torch.view_as_real(t.resolve_conj()) for t in (found, expected, of))
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    if not expected.numel():
        return 0.0
    same = (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0
    finite = of[of.isfinite()]
    size = max(float(finite.abs().max()) if finite.numel() else 0.0, floor, 1e-30)
    amount = float((found - expected)[~same].abs().max()) / size
    return amount if amount == amount else float("inf")


def _agreed(amounts: list[float]) -> list[float]:
    """The largest on any rank of each, so that all ranks decide alike."""
    if not dist.is_initialized() or not amounts:
        return amounts
    shared = torch.tensor(amounts, dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    found: list[float] = shared.tolist()
    return found


def _name(instruction: Instruction) -> str:
    op = instruction.site.op
    config = [
        instruction.site.rule.factors[f] if f >= 0 else {-1: "-", -2: "+"}[f]
        for f in instruction.site.config
    ]
    return f"operator {op.name} ({op.kind}, {op.origin}), split as {' '.join(config) or '-'}"
