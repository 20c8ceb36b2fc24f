"""Random bits that depend on a global position alone, so that every split draws the same ones.

A position's bits are splitmix64 of (position, key); the key mixes the seed, the step and the
operator. Nothing is stored and nothing is sent: a device computes the bits of its own part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardfold.run.operators.site import GOLDEN, Context
from shardfold.run.parts import Bounds, Extent

FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
BITS = 53


def keep_mask(
    dims: Sequence[Sequence[tuple[int, Bounds]]], p: float, context: Context, operator: int
) -> Tensor:
    """Where a dropout with probability `p` keeps its input: true or false for each element.

    `dims` are the pieces of each dim: size and local range, major first.
    """
    place = linear_positions(dims, context.device)
    # Traced, the factor is data: a compiler takes positions for indices, and would compute
    # products with a number that it knows without ever wrapping around.
    factor = context.clock[2] if context.traced else _signed(GOLDEN)
    bits = _mix(place * factor + _key(context, operator))
    return _shifted(bits, 64 - BITS) >= int(p * 2**BITS)


def _key(context: Context, operator: int) -> int | Tensor:
    """Seed, step and operator mixed: a number, or a tensor where a compiler must see it change."""
    if not context.traced:
        seed, step, _ = context.clock.tolist()
        return _signed(_mix_int(_mix_int(_mix_int(seed) + step) + operator))
    key: Tensor = context.clock[0]
    for more in (context.clock[1], operator, 0):
        key = _mix(key + _signed(GOLDEN)) + more
    return key


def linear_positions(dims: Sequence[Sequence[tuple[int, Bounds]]], device: torch.device) -> Tensor:
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
