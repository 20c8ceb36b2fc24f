"""Random bits by position in one pass over memory, in Triton.

The same bits as `counter_rng.random_bits` has: splitmix64 of (position, key), of which 53 are used.
A part of a tensor is given as where it begins in the whole, and as runs: how many elements, and how
far they are apart in the whole (`counter_rng.runs`). Imported where a GPU draws, and only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 6  # runs that the kernel knows
BITS_ALONE, MASK, DROPOUT = 0, 1, 2  # what is written
BLOCK = 1024

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)

STEPS = [*(f"n{k}" for k in range(1, MOST)), *(f"s{k}" for k in range(MOST))]
RUNTIME = ["base", "key", "threshold", *STEPS]  # of which a kernel is not compiled for each value


@triton.jit
def mixed(value):
    """The 53 bits of positions times GOLDEN plus the key, all in 64 bits without a sign."""
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    return (value ^ (value >> 31)) >> 11


@triton.jit
def _farther(place, rest, n, s):
    """One run of several: how far elements are by it, and what is left of their indices."""
    return place + (rest % n).to(tl.uint64) * s.to(tl.uint64), rest // n


@triton.jit(do_not_specialize=RUNTIME)
def _draw(
    x, y, kept, count, base, key, threshold, scale,
    n1, n2, n3, n4, n5, s0, s1, s2, s3, s4, s5,
    FORM: tl.constexpr, RUNS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    index = (first.to(tl.int64) if WIDE else first) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    rest = index
    place = tl.zeros([BLOCK], tl.uint64) + base.to(tl.uint64)
    if RUNS > 5:
        place, rest = _farther(place, rest, n5, s5)
    if RUNS > 4:
        place, rest = _farther(place, rest, n4, s4)
    if RUNS > 3:
        place, rest = _farther(place, rest, n3, s3)
    if RUNS > 2:
        place, rest = _farther(place, rest, n2, s2)
    if RUNS > 1:
        place, rest = _farther(place, rest, n1, s1)
    place += rest.to(tl.uint64) * s0.to(tl.uint64)
    bits = mixed(place * GOLDEN + key.to(tl.uint64))
    if FORM == 0:
        tl.store(y + index, bits.to(tl.int64), mask=inside)
    else:
        keeps = bits >= threshold.to(tl.uint64)
        tl.store(kept + index, keeps, mask=inside)
        if FORM == 2:
            given = tl.load(x + index, mask=inside).to(tl.float32)
            # A product, as torch has it: what is no number stays none.
            found = given * keeps.to(tl.float32) * scale
            tl.store(y + index, found.to(y.dtype.element_ty), mask=inside)


def _launch(
    form: int, tensors: Sequence[Tensor], part: Any, key: int, threshold: int, scale: float
) -> None:
    base, found = part
    count = tensors[0].numel()
    if not count:
        return
    more = MOST - len(found)
    lengths = [length for length, _ in found[1:]] + [1] * more
    steps = [step for _, step in found] + [1] * more
    x, y, kept = tensors
    _draw[(triton.cdiv(count, BLOCK),)](
        x, y, kept, count, base, key, threshold, scale, *lengths, *steps,
        FORM=form, RUNS=len(found), WIDE=count >= 2**31 - BLOCK, BLOCK=BLOCK,
    )  # fmt: skip


def bits(shape: Sequence[int], part: Any, key: int, device: torch.device) -> Tensor:
    """An integer below 2**53 for each element."""
    found = torch.empty(tuple(shape), dtype=torch.int64, device=device)
    _launch(BITS_ALONE, (found, found, found), part, key, 0, 1.0)
    return found


def mask(shape: Sequence[int], part: Any, key: int, threshold: int, device: torch.device) -> Tensor:
    """Whether each element's bits reach the threshold."""
    found = torch.empty(tuple(shape), dtype=torch.bool, device=device)
    _launch(MASK, (found, found, found), part, key, threshold, 1.0)
    return found


def dropout(x: Tensor, part: Any, key: int, threshold: int, scale: float) -> tuple[Tensor, Tensor]:
    """A tensor after dropout, and which elements were kept; both lie as the tensor does.

    The part's runs are in the order of the tensor's memory, which has no gaps.
    """
    y, kept = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    _launch(DROPOUT, (x, y, kept), part, key, threshold, scale)
    return y, kept
