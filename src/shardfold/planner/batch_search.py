"""The largest batch that fits, and the one with the best rate.

Memory grows with the batch, nearly along a line: the largest is looked for where the line between
one that fits and one that does not meets the limit. Where memory does otherwise, the gap is halved.
A larger batch often has the better rate, but not always (a limit that binds makes a plan
recompute), so for the rate all doublings and the largest are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from shardfold.errors import InputError

MOST = 2**24  # samples: what fits beyond this has no use
MOST_LINES = 6  # that are followed before a gap is halved


@dataclass(frozen=True, slots=True)
class Tried:
    """A batch and what it comes to."""

    samples: int
    rate: float  # tokens or samples in a second
    peak_bytes: float
    fits: bool


def largest(
    try_batch: Callable[[int], Tried], unit: int, limit_bytes: float, known: Sequence[Tried] = ()
) -> tuple[Tried, list[Tried]]:
    """The largest multiple of `unit` that fits, and all that was tried.

    >>> found, tried = largest(lambda n: Tried(n, 1.0, n, n <= 100), 8, 100)
    >>> found.samples, len(tried)
    (96, 4)
    """
    tried = list(known) or [try_batch(unit)]
    if not tried[0].fits:
        raise InputError(
            f"Not even a batch of {unit} samples fits: it needs "
            f"{tried[0].peak_bytes / 2**30:.1f} GiB on a device."
        )
    sides: list[bool] = []  # whether what was tried fits, since the last halving
    while True:
        good = max((t for t in tried if t.fits), key=lambda t: t.samples)
        bad = min((t for t in tried if not t.fits), key=lambda t: t.samples, default=None)
        top = MOST // unit + 1 if bad is None else bad.samples // unit
        first = good.samples // unit
        if top - first <= 1:
            return good, tried
        if len(sides) == MOST_LINES:
            sides, guess = [], (2 * first if bad is None else (first + top) // 2)
        elif bad is None:
            guess = _beyond(tried, limit_bytes) // unit
        else:
            guess = _between(good, bad, limit_bytes, sides) // unit
        tried.append(try_batch(unit * min(max(guess, first + 1), top - 1)))
        sides.append(tried[-1].fits)


def _beyond(tried: Sequence[Tried], limit_bytes: float) -> int:
    """Where the line through the two largest batches meets the limit; all of them fit."""
    *others, last = sorted(tried, key=lambda each: each.samples)
    if not others or last.peak_bytes <= others[-1].peak_bytes:
        return 2 * last.samples
    one = others[-1]
    slope = (last.peak_bytes - one.peak_bytes) / (last.samples - one.samples)
    return int(min(last.samples + (limit_bytes - last.peak_bytes) / slope, MOST))


def _between(good: Tried, bad: Tried, limit_bytes: float, sides: Sequence[bool]) -> int:
    """Where the line between one that fits and one that does not meets the limit.

    Lines that end on one side again and again count less of the other side's distance
    (the Illinois method).
    """
    below, above = limit_bytes - good.peak_bytes, bad.peak_bytes - limit_bytes
    again = len(list(takewhile(lambda fits: fits == sides[-1], reversed(sides))))
    factor = 0.5 ** max(again - 1, 0)
    below, above = (below, factor * above) if sides and sides[-1] else (factor * below, above)
    if above <= 0 or below + above <= 0:
        return (good.samples + bad.samples) // 2
    return int(good.samples + (bad.samples - good.samples) * below / (below + above))


def best(try_batch: Callable[[int], Tried], unit: int, limit_bytes: float) -> Tried:
    """Of the doublings of `unit` and the largest that fits, the one with the best rate."""
    doublings = [try_batch(unit)]
    while doublings[-1].fits and 2 * doublings[-1].samples <= MOST:
        doublings.append(try_batch(2 * doublings[-1].samples))
    _, tried = largest(try_batch, unit, limit_bytes, doublings)
    fitting = [each for each in tried if each.fits]
    return max(fitting, key=lambda each: (each.rate, -each.samples))
