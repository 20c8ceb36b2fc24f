"""An operator called on small random tensors: shrunk sizes, numbers that it accepts, gradients.

Sizes are shrunk so that equal ones stay equal and divisors stay divisors; sizes up to `KEPT` stay.
Numbers are float64 and seeds are fixed, so that every process draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardfold.capture.program import Invocation, Slot

KEPT = 3  # sizes up to this stay as they are
SIZES = (6, 4, 10, 8, 14, 16, 22, 20, 26, 28)  # of shrunk dims, for each different size in turn
MOST_ITEMS = 1 << 20  # of all operands together
# The numbers of operands: of either sign; below, or above 1; a few that recur; matrices that can
# be inverted; and signs for the last operand.
DRAWS = ("normal", "positive", "large", "few", "definite", "signs")
CONSTANTS = range(2, 17)  # what may be a count of repeats, windows, groups

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Small:
    """A call on small tensors, its results, and the gradients for those that were sent back."""

    call: Invocation
    operands: list[Tensor]
    results: list[Tensor]
    sent: list[Tensor]
    gradients: list[Tensor | None]


class UnsteadyError(Exception):
    """A call gave something else the second time."""


def scalars_of(call: Invocation) -> list[int]:
    """The numbers among the arguments that may be a count."""
    leaves = pytree.tree_leaves(list(call.arguments.values()))
    numbers = [v for v in leaves if isinstance(v, int | float) and not isinstance(v, bool)]
    return sorted({int(v) for v in numbers if math.isfinite(v) and v == int(v)})


def shrunk(shapes: Sequence[Shape], scalars: Sequence[int]) -> Iterator[tuple[Shape, ...]]:
    """Small shapes to try, the most shrunk first; the last are the call's own, if small.

    Where no shape is small enough for the call to be made, one of the sizes is kept.
    """
    sizes = sorted({n for shape in shapes for n in shape if n > KEPT})
    taken = {n for shape in shapes for n in shape if n <= KEPT} | set(scalars)
    large = max((c for c in scalars if c not in CONSTANTS), default=0)
    tries = [_smaller(sizes, scalars, taken, *how) for how in ((1, 0), (2, 0), (1, large))]
    tries += [{**tries[1], kept: kept} for kept in sizes]
    for small in [*tries, {}]:
        tried = tuple(tuple(small.get(n, n) for n in shape) for shape in shapes)
        if sum(map(math.prod, tried)) <= MOST_ITEMS:
            yield tried


def _smaller(
    sizes: Sequence[int], scalars: Sequence[int], taken: set[int], power: int, least: int
) -> dict[int, int]:
    """A small size for each size, from the smallest on; divisible by the same counts to a power.

    Different sizes stay different: what is smaller than the next that is free stays as it is.
    """
    small: dict[int, int] = {}
    for n in sizes:
        step = math.lcm(*(c**power for c in scalars if c in CONSTANTS and n % c**power == 0))
        fits = (least + step * k for k in SIZES)
        unused = (m for m in fits if m not in taken and m not in small.values())
        small[n] = min(n, next(unused, n))
    return small


def _draw(shape: Shape, dtype: str, how: str, high: int, rng: torch.Generator) -> Tensor:
    kind = getattr(torch, dtype)
    if kind == torch.bool:
        return torch.rand(shape, generator=rng) > 0.5
    if not (kind.is_floating_point or kind.is_complex):
        return torch.randint(high, shape, generator=rng).to(kind)
    if kind.is_complex:
        return torch.randn(shape, generator=rng, dtype=torch.complex128)
    if how in ("positive", "large"):
        low = 0.1 if how == "positive" else 1.1
        return torch.rand(shape, generator=rng, dtype=torch.float64) * 0.8 + low
    if how == "few":
        return torch.randint(3, shape, generator=rng).double()
    drawn = torch.randn(shape, generator=rng, dtype=torch.float64) * 1.5
    if how == "signs":
        return torch.where(drawn > 0, 1.0, -1.0).to(torch.float64)
    if how == "definite" and len(shape) > 1 and shape[-1] == shape[-2]:
        return drawn @ drawn.mT + shape[-1] * torch.eye(shape[-1], dtype=torch.float64)
    return drawn


def run(call: Invocation, operands: Sequence[Tensor]) -> list[Tensor]:
    """The results of a call on the given operands, which it does not change."""

    def fill(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [fill(v) for v in value]
        return operands[value.position] if isinstance(value, Slot) else value

    given = {name: fill(value) for name, value in call.arguments.items()}
    function = given.get("name")
    made = function(list(operands)) if callable(function) else call.target(**given)
    return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]


def gradients_of(
    results: Sequence[Tensor], sent: Sequence[Tensor], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of those leaves that have one."""
    pairs = [(r, s.to(r.dtype)) for r, s in zip(results, sent, strict=True) if r.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    made = torch.autograd.grad(
        [r for r, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True
    )
    found = iter(made)
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def leaf(tensor: Tensor, has_gradient: bool = True) -> Tensor:
    """A copy, with a gradient if it can have one."""
    floating = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_(floating and has_gradient)


def small_call(
    call: Invocation,
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    how: str,
    seed: int,
    has_gradient: bool = True,
) -> Small | None:
    """The call on tensors of these shapes; None if it fails, or if all it gives is alike."""
    rng = torch.Generator().manual_seed(seed)
    tables = zip(shapes, dtypes, strict=True)
    high = min((n for s, d in tables if d[0] in "fbc" for n in s if n > 1), default=4)
    last = max((k for k, d in enumerate(dtypes) if d[0] in "fb" and d != "bool"), default=0)
    ways = ["normal" if how == "signs" and k != last else how for k in range(len(shapes))]
    drawn = zip(shapes, dtypes, ways, strict=True)
    operands = [_draw(shape, dtype, way, high, rng) for shape, dtype, way in drawn]
    try:
        leaves = [leaf(t, has_gradient) for t in operands]
        results = run(call, leaves)
        if not results or not all(map(_says_something, results)):
            return None
        sent = [torch.randn(r.shape, generator=rng, dtype=torch.float64) for r in results]
        gradients = gradients_of(results, sent, leaves)
        again = run(call, leaves)
        more = gradients_of(again, sent, leaves)
    except Exception:  # whatever an operator of anybody's raises: it cannot be tried so
        return small_call(call, shapes, dtypes, how, seed, False) if has_gradient else None
    pairs = [*zip(again, results, strict=True), *zip(more, gradients, strict=True)]
    if not all(are_close(a, b) for a, b in pairs if a is not None and b is not None):
        raise UnsteadyError
    return Small(call, operands, [r.detach() for r in results], sent, gradients)


def kept_by(call: Invocation, leaves: Sequence[Tensor]) -> tuple[tuple[int, ...], bool]:
    """The operands of a call that autograd keeps, and whether it keeps a result."""
    kept: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results = run(call, leaves)
    saved = tuple(k for k, t in enumerate(leaves) if t.untyped_storage().data_ptr() in kept)
    own = {t.untyped_storage().data_ptr() for t in leaves}
    others = {r.untyped_storage().data_ptr() for r in results} - own
    return saved, bool(others & kept)


def _says_something(result: Tensor) -> bool:
    """Whether a result is finite, and has different values where it has several."""
    if result.is_floating_point() and not bool(torch.isfinite(result).all()):
        return False
    first = 0 if result.numel() == 1 else result.flatten()[:1]
    return bool((result != first).any())


def are_close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same but for rounding; integers exactly."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return bool(torch.equal(a, b))
    coarse = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps) > 1e-12
    tolerance = 1e-4 if coarse else 1e-8
    return bool(torch.allclose(a.detach(), b.detach().to(a.dtype), tolerance, tolerance))
