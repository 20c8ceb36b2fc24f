"""Random bits that depend on a global position alone, so that every split draws the same ones.

A position's bits are splitmix64 of (position, key); the key mixes the seed, the step and the
operator. Nothing is stored and nothing is sent: a device computes the bits of its own part.

Dropout and the operators that draw numbers one by one (uniform, normal, integers, coins, choices)
draw them by global position: every split, and one device, get the same. A device that drew its own
would hold other copies than the rest. What draws without positions is refused when it is captured.

On a GPU with Triton a kernel draws them in one pass (`dropout_kernels.py`). A compiler is given
operators of torch instead: some passes, which it puts together as it likes.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardfold.capture.graph_builder import UNREPEATABLE
from shardfold.errors import RunError
from shardfold.runtime.ops.local_op import GOLDEN, Context, Local, Site
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.shards import Bounds, Extent, Place

FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
BITS = 53
OLDEST = (8, 0)  # of the GPUs that Triton knows, those that multiply bfloat16

Dims = Sequence[Sequence[tuple[int, Bounds]]]  # pieces of each dim: size and local range


def keep_mask(dims: Dims, p: float, context: Context, operator: int) -> Tensor:
    """Where a dropout with probability `p` keeps its input: true or false for each element.

    `dims` are the pieces of each dim: size and local range, major first.
    """
    threshold, kernels = threshold_of(p), kernels_for(context)
    part = runs(dims)
    if kernels is None or len(part[1]) > kernels.MOST:
        kept = random_bits(dims, context, operator) >= threshold
    else:
        key = key_of(context, operator)
        kept = kernels.mask(_shape(dims), part, key, threshold, context.device)
    if context.drawn is not None:
        context.drawn.append(kept)
    return kept


def threshold_of(p: float) -> int:
    """The least bits of an element that a dropout keeps."""
    return int(p * 2**BITS)


def random_bits(dims: Dims, context: Context, operator: int) -> Tensor:
    """An integer below 2**53 for each element."""
    kernels, part = kernels_for(context), runs(dims)
    if kernels is not None and len(part[1]) <= kernels.MOST:
        found: Tensor = kernels.bits(_shape(dims), part, key_of(context, operator), context.device)
        return found
    return _bits(dims, context, operator)


def _bits(dims: Dims, context: Context, operator: int) -> Tensor:
    """The same by operators of torch."""
    place = linear_positions(dims, context.device)
    # Traced, the factor is data: a compiler takes positions for indices, and would compute
    # products with a number that it knows without ever wrapping around.
    factor = context.clock[2] if context.traced else _signed(GOLDEN)
    return _shifted(_mix(place * factor + key_of(context, operator)), 64 - BITS)


def key_of(context: Context, operator: int) -> int | Tensor:
    """Seed, step and operator mixed: a number, or a tensor where a compiler must see it change."""
    if not context.traced:
        seed, step, _ = context.clock.tolist()
        return _signed(_mix_int(_mix_int(_mix_int(seed) + step) + operator))
    key: Tensor = context.clock[0]
    for more in (context.clock[1], operator, 0):
        key = _mix(key + _signed(GOLDEN)) + more
    return key


def kernels_for(context: Context) -> Any:
    """The kernels that draw in one pass, where there are any: not for a compiler."""
    is_gpu = context.device.type == "cuda" and not context.traced
    return _tried(context.device) if is_gpu else None


@cache
def _tried(device: torch.device) -> Any:
    """The kernels, if this machine builds them and they draw the same bits as torch does."""
    if importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(device) < OLDEST:
        return None
    dims = [[(3, (1, 3))], [(500, (100, 357))]]
    context = Context(Groups(Place((), ())), device, seed=1)
    try:
        from shardfold.runtime.ops import dropout_kernels

        found = dropout_kernels.bits(_shape(dims), runs(dims), key_of(context, 0), device)
        trouble = "" if torch.equal(found, _bits(dims, context, 0)) else "other bits were drawn"
    except Exception as error:  # whatever a compiler of kernels may lack
        trouble = f"{type(error).__name__}: {str(error)[:200]}"
    if trouble:
        warnings.warn(
            f"Triton's kernels do not run here ({trouble}): operators of torch draw dropout, "
            "with the same masks and in several times the time. Triton needs a C compiler.",
            stacklevel=2,
        )
        return None
    return dropout_kernels


def runs(dims: Dims, order: Sequence[int] | None = None) -> tuple[int, list[tuple[int, int]]]:
    """Where a part begins in the whole; and how many elements how far apart, major first.

    The dims may be in another order, as they lie in memory.

    >>> runs([[(4, (1, 3))], [(6, (0, 6))], [(5, (2, 4))]])
    (32, [(12, 5), (2, 1)])
    """
    base, step = 0, 1
    of_dims: list[list[tuple[int, int]]] = [[] for _ in dims]
    for dim in reversed(range(len(dims))):
        for size, (low, high) in reversed(dims[dim]):
            of_dims[dim].insert(0, (high - low, step))
            base, step = base + low * step, step * size
    found: list[tuple[int, int]] = []
    for length, step in (run for dim in order or range(len(dims)) for run in of_dims[dim]):
        if length != 1 and found and found[-1][1] == length * step:
            found[-1] = (found[-1][0] * length, step)
        elif length != 1:
            found.append((length, step))
    return base, found or [(1, 1)]


def _shape(dims: Dims) -> list[int]:
    return [math.prod(high - low for _, (low, high) in pieces) for pieces in dims]


def linear_positions(dims: Dims, device: torch.device) -> Tensor:
    """The index of every local element in the whole tensor, flattened."""
    found = torch.zeros((), dtype=torch.int64, device=device)
    for pieces in dims:
        for size, (low, high) in pieces:
            own = torch.arange(low, high, device=device)
            found = found.unsqueeze(-1) * size + own
        if not pieces:
            found = found.unsqueeze(-1)
        elif len(pieces) > 1:
            found = found.flatten(found.dim() - len(pieces))
    return found


def pieces_of(extent: Extent) -> list[list[tuple[int, Bounds]]]:
    """The pieces of every dim of a tensor's local part."""
    return [extent.pieces(dim) for dim in range(extent.rank)]


def _signed(value: int) -> int:
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: Tensor, by: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shifted(value, 30)) * _signed(FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(SECOND)
    return value ^ _shifted(value, 31)


def _mix_int(value: int) -> int:
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


SECOND_DRAW = 1 << 32  # added to an operator's number where an element needs two numbers


def _refused(site: Site) -> Local:
    raise RunError(
        f"Operator {site.op.name} ({site.op.kind}, {site.op.origin}) draws random numbers, which "
        "would differ between devices and from one device. Use nn.Dropout, or draw outside the "
        "model and pass the numbers in."
    )


Draw = Callable[[Site, Tensor, Tensor, Sequence[Tensor]], Tensor]


def _drawn(draw: Draw) -> Callable[[Site], Local]:
    """An operator that draws a number for each element of its result, by position.

    `draw` is given two uniform numbers in [0, 1) for each element, and the operands, if any.
    """

    def local(site: Site) -> Local:
        pieces = pieces_of(site.results[0])

        def call(tensors: Sequence[Tensor], context: Context) -> Any:
            first, second = (
                random_bits(pieces, context, site.number + more).double() * 2.0**-BITS
                for more in (0, SECOND_DRAW)
            )
            given = [t.detach() for t in tensors]
            found = draw(site, first, second, given).to(_dtype(site, given, context))
            if context.drawn is not None:
                context.drawn.append(found)
            return found

        return call

    return local


def _dtype(site: Site, operands: Sequence[Tensor], context: Context) -> torch.dtype:
    """Of a drawn result: as the call says, or as its operand, or the usual one."""
    told = site.call.arguments.get("dtype")
    given = told if isinstance(told, torch.dtype) else None  # a schema's default is a number
    if given is None and operands and site.op.kind != "aten.multinomial":
        return operands[0].dtype
    is_integer = site.op.kind.startswith(("aten.randint", "aten.randperm", "aten.multinomial"))
    usual = torch.int64 if is_integer else torch.get_default_dtype()
    found: torch.dtype = context.target.constant(given or usual)
    return found


def _number(site: Site, name: str, default: float, operands: Sequence[Tensor]) -> Any:
    """An argument that is a number, or one for each element."""
    at = site.position(name)
    return float(site.argument(name, default)) if at is None else operands[at].double()


def _uniform(site: Site, first: Tensor, second: Tensor, operands: Sequence[Tensor]) -> Tensor:
    low, high = float(site.argument("from", 0.0)), float(site.argument("to", 1.0))
    return low + (high - low) * first


def _normal(site: Site, first: Tensor, second: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """By Box and Muller."""
    found = (-2 * torch.log1p(-first)).sqrt() * (2 * math.pi * second).cos()
    std, mean = (_number(site, name, n, operands) for name, n in (("std", 1.0), ("mean", 0.0)))
    made: Tensor = found * std + mean
    return made


def _log_normal(site: Site, first: Tensor, second: Tensor, operands: Sequence[Tensor]) -> Tensor:
    found = (-2 * torch.log1p(-first)).sqrt() * (2 * math.pi * second).cos()
    return (found * float(site.argument("std", 2.0)) + float(site.argument("mean", 1.0))).exp()


def _cauchy(site: Site, first: Tensor, second: Tensor, operands: Sequence[Tensor]) -> Tensor:
    median, sigma = float(site.argument("median", 0.0)), float(site.argument("sigma", 1.0))
    return median + sigma * (math.pi * (first - 0.5)).tan()


def _geometric(site: Site, first: Tensor, second: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """The first success among tosses."""
    return (torch.log1p(-first) / math.log1p(-float(site.argument("p")))).ceil().clamp(min=1)


def _integer(site: Site, first: Tensor, second: Tensor, operands: Sequence[Tensor]) -> Tensor:
    low, high = int(site.argument("low", 0)), int(site.argument("high"))
    return low + (first * (high - low)).floor()


def _order(site: Site, first: Tensor, second: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """That of random numbers."""
    return first.argsort()


def _coin(site: Site, first: Tensor, second: Tensor, operands: Sequence[Tensor]) -> Tensor:
    p = site.argument("p")
    return first < (operands[0].double() if p is None else float(p))


def _exponential(site: Site, first: Tensor, second: Tensor, operands: Sequence[Tensor]) -> Tensor:
    return -torch.log1p(-first) / float(site.argument("lambd", 1.0))


def _choice(site: Site, first: Tensor, second: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Places in rows of weights, one after the other: those taken before have no weight left."""
    weights, chosen = operands[0].double(), []
    for number in first.unbind(-1):
        below = weights.cumsum(-1)
        at = torch.searchsorted(below, (number[..., None] * below[..., -1:]), right=True)
        chosen.append(at.clamp(max=weights.shape[-1] - 1))
        if not site.argument("replacement", False):
            weights = weights.scatter(-1, chosen[-1], 0.0)
    return torch.cat(chosen, -1)


TABLE: Mapping[str, Callable[[Site], Local]] = {
    **{f"aten.{name}": _drawn(_uniform) for name in ("rand", "rand_like", "uniform")},
    **{f"aten.{name}": _drawn(_normal) for name in ("randn", "randn_like", "normal")},
    **{f"aten.{name}": _drawn(_integer) for name in ("randint", "randint_like")},
    "aten.randperm": _drawn(_order),
    "aten.multinomial": _drawn(_choice),
    "aten.log_normal": _drawn(_log_normal),
    "aten.cauchy": _drawn(_cauchy),
    "aten.geometric": _drawn(_geometric),
    "aten.bernoulli": _drawn(_coin),
    "aten.exponential": _drawn(_exponential),
    **dict.fromkeys(UNREPEATABLE, _refused),
}
