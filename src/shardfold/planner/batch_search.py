"""The largest batch that fits, and the one with the best rate.

Memory grows with the batch, so the largest is found by doubling and then halving the gap: about
twice the binary logarithm of its size in steps of `unit`. A larger batch often has the better rate,
but not always (a limit that binds makes a plan recompute), so for the rate all doublings and the
largest are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardfold.errors import InputError

MOST = 2**24  # samples: what fits beyond this has no use


@dataclass(frozen=True, slots=True)
class Tried:
    """A batch and what it comes to."""

    samples: int
    rate: float  # tokens or samples in a second
    peak_bytes: float
    fits: bool


def largest(try_batch: Callable[[int], Tried], unit: int) -> tuple[Tried, list[Tried]]:
    """The largest multiple of `unit` that fits, and all that was tried.

    >>> found, tried = largest(lambda n: Tried(n, 1.0, n, n <= 100), 8)
    >>> found.samples, len(tried)
    (96, 7)
    """
    tried = [try_batch(unit)]
    if not tried[0].fits:
        raise InputError(
            f"Not even a batch of {unit} samples fits: it needs "
            f"{tried[0].peak_bytes / 2**30:.1f} GiB on a device."
        )
    good, bad = 1, 0
    while not bad:
        if unit * good * 2 > MOST:
            break
        tried.append(try_batch(unit * good * 2))
        if tried[-1].fits:
            good *= 2
        else:
            bad = good * 2
    while bad - good > 1:
        middle = (good + bad) // 2
        tried.append(try_batch(unit * middle))
        good, bad = (middle, bad) if tried[-1].fits else (good, middle)
    return next(each for each in tried if each.samples == unit * good), tried


def best(try_batch: Callable[[int], Tried], unit: int) -> Tried:
    """Of the doublings of `unit` and the largest that fits, the one with the best rate."""
    _, tried = largest(try_batch, unit)
    fitting = [each for each in tried if each.fits]
    return max(fitting, key=lambda each: (each.rate, -each.samples))
