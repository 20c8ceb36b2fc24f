"""Mixture-of-experts as one operator: each row times the matrix of the expert it was sent to.

    expert_linear: x[... m], w[e n m], expert[...] -> y[... n],  y[r] = w[expert[r]] x[r]

The usual forms are no good to a planner: gathering a matrix per row (`batched_mm`) writes
rows * n * m elements that a real kernel never makes, and sorting the rows by expert
(`grouped_mm`) loses the batch dims. This one keeps the dims of the rows, so that rows, n, m and
e can each be split. A row whose expert is not in 0..e-1 gives zeros: a device that holds some of
the experts subtracts the first one's index, and the partial results add up.

Rows are put in the order of their experts, so that each matrix meets rows that lie together: one
gather, a product for each expert, one scatter. How many rows an expert has is the one thing that
the host must know, so it waits for the device once in a call; `SortedLinear` takes rows that were
sorted for another call, and waits for nothing.

A whole block of experts is one operator too (`shardfold.capture.experts` says which): its rows are
gathered in the experts' order once, and stay in it between the products.

Work: 2 * rows * n * m operations forward, twice that backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from shardfold.capture.experts import between_of

GROUPED_ITEMS = 8  # of bf16 in 16 bytes


@dataclass(frozen=True, slots=True)
class Sorted:
    """The rows of the experts at hand, in the experts' order, and how many each has."""

    order: Tensor
    counts: list[int]
    places: Tensor | None  # where each row went, if all did: they are taken back faster than put

    @classmethod
    def of(cls, expert: Tensor, experts: int) -> Sorted:
        """Rows of other experts are sorted to the end, and left out."""
        order, found = asked(expert, experts)
        ends: list[int] = found.tolist()
        order = order[: ends[-1]]
        places = _inverse(order) if len(order) == expert.numel() else None
        return cls(order, [b - a for a, b in pairwise([0, *ends])], places)

    def placed(self, sorted_rows: Tensor, count: int) -> Tensor:
        """Rows back in their places among so many; zeros for those of other experts."""
        if self.places is not None:
            return sorted_rows.index_select(0, self.places)
        zeros = sorted_rows.new_zeros(count, sorted_rows.shape[1])
        return zeros.index_copy(0, self.order, sorted_rows)


def asked(expert: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Rows by expert, and where each expert's end: all that the host has to ask for."""
    to = expert.reshape(-1)
    keys, order = torch.where((to >= 0) & (to < experts), to, experts).sort(stable=True)
    marks = torch.arange(experts, device=to.device, dtype=keys.dtype)
    return order, torch.searchsorted(keys, marks, right=True)


def _inverse(order: Tensor) -> Tensor:
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(rows).scatter_(0, order, rows)


@torch.library.custom_op("shardfold::expert_linear", mutates_args=())
def expert_linear(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Multiply each row of `x` by the matrix of its expert."""
    return _values(x, weight, Sorted.of(expert, weight.shape[0]), expert.shape)


def _values(x: Tensor, weight: Tensor, found: Sorted, rows: torch.Size) -> Tensor:
    mine = x.reshape(-1, x.shape[-1]).index_select(0, found.order)
    y = _multiplied(mine, weight.transpose(1, 2), found, rows.numel())
    return y.view(*rows, weight.shape[1])


def _multiplied(mine: Tensor, matrices: Tensor, found: Sorted, rows: int) -> Tensor:
    """Sorted rows times their experts' matrices, back in their places; zeros elsewhere."""
    return found.placed(_products(mine, matrices, found.counts), rows)


def _products(rows: Tensor, matrices: Tensor, counts: list[int]) -> Tensor:
    """Each expert's rows, which lie together, times its own matrix."""
    if _runs_grouped(rows, matrices):
        return _grouped_mm(rows, matrices, _ends(counts, rows.device))
    products = rows.new_empty(len(rows), matrices.shape[2])
    pieces = zip(rows.split(counts), products.split(counts), strict=True)
    for (given, product), matrix in zip(pieces, matrices.to(rows.dtype).unbind(), strict=True):
        if len(given):
            torch.mm(given, matrix, out=product)
    return products


def _runs_grouped(left: Tensor, right: Tensor) -> bool:
    """Whether one kernel runs all products: in bf16, from Hopper on, of rows of whole 16 bytes."""
    kinds = (left.dtype, right.dtype) == (torch.bfloat16, torch.bfloat16)
    if not kinds or not left.is_cuda or not len(left):
        return False
    features = (left.shape[1], right.shape[-1])
    aligned = all(count % GROUPED_ITEMS == 0 for count in features)
    return aligned and torch.cuda.get_device_capability(left.device) >= (9, 0)


def _grouped_mm(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Products of one kernel: of rows that lie together, or of the sums over them."""
    public = getattr(torch.nn.functional, "grouped_mm", None)
    found: Tensor = (public or torch._grouped_mm)(left, right, offs=ends)
    return found


def _ends(counts: list[int], device: torch.device) -> Tensor:
    """Where each expert's rows end."""
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


@expert_linear.register_fake
def _(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    return x.new_empty(*expert.shape, weight.shape[1])


@torch.library.custom_op("shardfold::expert_linear_backward", mutates_args=())
def expert_linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, expert: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of `x` and of `weight`, empty where they are not wanted.

    That of a weight is, for each expert, the sum of its rows' outer products.
    """
    return _gradients(dy, x, weight, Sorted.of(expert, weight.shape[0]), wanted)


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, found: Sorted, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    rows = dy.shape[:-1]
    mine = dy.reshape(-1, dy.shape[-1]).index_select(0, found.order)
    dx, dw = x.new_empty(0), weight.new_empty(0)
    if wanted[0]:
        dx = _multiplied(mine, weight, found, rows.numel()).to(x.dtype).view(*rows, x.shape[-1])
    if wanted[1]:
        given = x.reshape(-1, x.shape[-1]).index_select(0, found.order).to(dy.dtype)
        dw = _outer(mine, given, found.counts).to(weight.dtype)
    return dx, dw


def _outer(mine: Tensor, given: Tensor, counts: list[int]) -> Tensor:
    """For each expert, the sum of the outer products of its rows."""
    if _runs_grouped(mine, given):
        found = _grouped_mm(mine.t(), given, _ends(counts, mine.device))
        empty = [number for number, count in enumerate(counts) if not count]
        if empty:
            found[empty] = 0
        return found
    dw = given.new_zeros(len(counts), mine.shape[1], given.shape[1])
    pieces = zip(mine.t().split(counts, 1), given.split(counts), strict=True)
    for (left, right), own in zip(pieces, dw.unbind(), strict=True):
        if len(right):
            torch.mm(left, right, out=own)
    return dw


@expert_linear_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, expert: Tensor, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    rows = (*expert.shape, x.shape[-1]) if wanted[0] else (0,)
    return x.new_empty(rows), weight.new_empty(weight.shape if wanted[1] else (0,))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    wanted = list(ctx.needs_input_grad[:2])
    dx, dw = expert_linear_backward(dy, *ctx.saved_tensors, wanted)
    return dx if wanted[0] else None, dw if wanted[1] else None, None


expert_linear.register_autograd(_backward, setup_context=_save)


class SortedLinear(torch.autograd.Function):
    """The same for rows that were sorted before: nothing is waited for, in either pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, found: Sorted, rows: torch.Size) -> Tensor:
        """Multiply each row by the matrix of its expert."""
        ctx.save_for_backward(x, weight)
        ctx.found = found
        return _values(x, weight, found, rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The gradients of the rows and of the matrices."""
        wanted = list(ctx.needs_input_grad[:2])
        x, weight = ctx.saved_tensors
        dx, dw = _gradients(dy, x, weight, ctx.found, wanted)
        return dx if wanted[0] else None, dw if wanted[1] else None, None, None


class Grouped(torch.autograd.Function):
    """Rows that lie in the order of their experts, each expert's times its own matrix."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        """Multiply each expert's rows by its matrix."""
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return _products(rows, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """The gradients of the rows and of the matrices."""
        rows, weight = ctx.saved_tensors
        dx = _products(dy, weight, ctx.counts).to(rows.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return dx, None, None
        dw = _outer(dy, rows.to(dy.dtype), ctx.counts).to(weight.dtype)
        return dx, dw, None


class Taken(torch.autograd.Function):
    """The same for rows that are taken from where they lie, each for several experts.

    The rows are kept as they lie, and taken once more for the gradient of the matrices.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, found: Sorted, each: int) -> Tensor:
        """Take each expert's rows, and multiply them by its matrix."""
        ctx.save_for_backward(x, weight)
        ctx.found, ctx.each = found, each
        rows = x.index_select(0, found.order // each)
        return _products(rows, weight.transpose(1, 2), found.counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The gradients of the rows, summed over their experts, and of the matrices."""
        x, weight = ctx.saved_tensors
        found, dx, dw = ctx.found, None, None
        if ctx.needs_input_grad[0]:
            placed = found.placed(_products(dy, weight, found.counts), len(x) * ctx.each)
            dx = placed.view(len(x), ctx.each, -1).sum(1).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = x.index_select(0, found.order // ctx.each).to(dy.dtype)
            dw = _outer(dy, rows, found.counts).to(weight.dtype)
        return dx, dw, None, None


@dataclass(frozen=True, slots=True)
class Block:
    """The weights of some experts, and what stands between their two products."""

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    between: Callable[[Tensor], Tensor]

    def __call__(self, first: Tensor, counts: list[int]) -> Tensor:
        """What the experts make of rows, given the first product of each in the experts' order."""
        inner = self.between(_biased(first, self.up_bias, counts))
        return _biased(Grouped.apply(inner, self.down, counts), self.down_bias, counts)


def _biased(y: Tensor, bias: Tensor | None, counts: list[int]) -> Tensor:
    if bias is None:
        return y
    repeats = torch.tensor(counts, device=bias.device)
    own = torch.arange(len(counts), device=bias.device).repeat_interleave(repeats)
    return y + bias.to(y.dtype).index_select(0, own)


def run_block(x: Tensor, expert: Tensor, share: Tensor, block: Block) -> Tensor:
    """Each row through those of its experts that the block has, weighted and added up."""
    found = Sorted.of(expert, block.up.shape[0])
    first = Taken.apply(x, block.up, found, expert.shape[1])
    return combined(block(first, found.counts), found, share, x.dtype)


def combined(y: Tensor, found: Sorted, share: Tensor, dtype: torch.dtype) -> Tensor:
    """Results back in their rows' places, weighted and added up; zeros for experts elsewhere."""
    placed = found.placed(y, share.numel()).view(*share.shape, -1)
    return (placed * share.unsqueeze(-1)).sum(1).to(dtype)


def routed_experts(
    x: Tensor,
    expert: Tensor,
    share: Tensor,
    up: Tensor,
    down: Tensor,
    between: str,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """A whole block of experts."""
    return run_block(x, expert, share, Block(up, down, up_bias, down_bias, between_of(between)))


torch.library.impl("shardfold::routed_experts", "CompositeExplicitAutograd")(routed_experts)


@torch.library.custom_op("shardfold::routed_experts_backward", mutates_args=())
def routed_experts_backward(
    dy: Tensor, given: list[Tensor], between: str, wanted: list[bool]
) -> list[Tensor]:
    """The gradients of what is wanted of the operands; forward runs once more."""
    leaves = [t.detach().requires_grad_(w) for t, w in zip(given, wanted, strict=True)]
    recorded = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.AutogradFunctionality, False
    )
    with recorded, torch.enable_grad():  # which the kernels of an operator are not, as a rule
        y = routed_experts(*leaves[:5], between, *leaves[5:7])  # type: ignore[call-arg]
        return list(torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy))


@routed_experts_backward.register_fake
def _(dy: Tensor, given: list[Tensor], between: str, wanted: list[bool]) -> list[Tensor]:
    return [torch.empty_like(t) for t, is_wanted in zip(given, wanted, strict=True) if is_wanted]


def _save_block(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(t for t in inputs if isinstance(t, Tensor)))
    ctx.between = inputs[5]


def _block_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad)
    count = len(ctx.saved_tensors)
    wanted = [*needed[:5], *needed[6:]][:count]
    found = iter(routed_experts_backward(dy, ctx.saved_tensors, ctx.between, wanted))
    return tuple(next(found) if is_needed else None for is_needed in needed)


torch.library.register_autograd(
    "shardfold::routed_experts", _block_backward, setup_context=_save_block
)


def experts_forward(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A transformers block, eagerly: `x` [rows, hidden] to its `chosen` [rows, k] experts.

    Has the signature of transformers' registry of experts' implementations, and reads the flags
    that transformers sets on such a block.
    """
    spread = x.unsqueeze(1).expand(-1, chosen.shape[1], -1)
    if module.has_gate:
        y = module._apply_gate(_project(module, "gate_up_proj", spread, chosen))
    else:
        y = module.act_fn(_project(module, "up_proj", spread, chosen))
    y = _project(module, "down_proj", y, chosen)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y)
    return (y * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _project(module: Any, name: str, x: Tensor, chosen: Tensor) -> Tensor:
    weight = getattr(module, name)
    y = expert_linear(x, weight.transpose(1, 2) if module.is_transposed else weight, chosen)
    return y + getattr(module, f"{name}_bias")[chosen] if module.has_bias else y
