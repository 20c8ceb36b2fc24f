"""The largest batch that fits, and the one with the best rate.

Memory grows with the batch, nearly along a line: the largest is looked for where the line through
two that were tried meets the limit. Where memory does otherwise, the gap is halved. A larger batch
often has the better rate, but not always (a limit that binds makes a plan recompute), so for the
rate all doublings and the largest are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def largest(
    try_batch: Callable[[int], Tried], unit: int, limit_bytes: float, known: Sequence[Tried] = ()
) -> tuple[Tried, list[Tried]]:
    """The largest multiple of `unit` that fits, and all that was tried.

    >>> found, tried = largest(lambda n: Tried(n, 1.0, n, n <= 100), 8, 100)
    >>> found.samples, len(tried)
    (96, 5)
    """
    tried = list(known) or [try_batch(unit)]
    if not tried[0].fits:
        raise InputError(
            f"Not even a batch of {unit} samples fits: it needs "
            f"{tried[0].peak_bytes / 2**30:.1f} GiB on a device."
        )
    while True:
        good = max(each.samples for each in tried if each.fits) // unit
        bad = min((each.samples // unit for each in tried if not each.fits), default=None)
        top = MOST // unit + 1 if bad is None else bad
        if top - good <= 1:
            return next(each for each in tried if each.samples == unit * good), tried
        guess = _on_the_line(tried, limit_bytes, unit)
        if len(tried) % 3 == 0:  # lines that miss do not go on for ever
            guess = 2 * good if bad is None else (good + bad) // 2
        tried.append(try_batch(unit * min(max(guess, good + 1), top - 1)))


def _on_the_line(tried: Sequence[Tried], limit_bytes: float, unit: int) -> int:
    """Where the line through the two batches nearest to the limit meets it, in units."""
    if len(tried) < 2:
        return 2 * tried[0].samples // unit
    one, two = sorted(tried, key=lambda each: abs(each.peak_bytes - limit_bytes))[:2]
    slope = (two.peak_bytes - one.peak_bytes) / (two.samples - one.samples)
    if slope <= 0:
        return 2 * max(one.samples, two.samples) // unit
    return int(min(one.samples + (limit_bytes - one.peak_bytes) / slope, MOST) // unit)


def best(try_batch: Callable[[int], Tried], unit: int, limit_bytes: float) -> Tried:
    """Of the doublings of `unit` and the largest that fits, the one with the best rate."""
    doublings = [try_batch(unit)]
    while doublings[-1].fits and 2 * doublings[-1].samples <= MOST:
        doublings.append(try_batch(2 * doublings[-1].samples))
    _, tried = largest(try_batch, unit, limit_bytes, doublings)
    fitting = [each for each in tried if each.fits]
    return max(fitting, key=lambda each: (each.rate, -each.samples))
