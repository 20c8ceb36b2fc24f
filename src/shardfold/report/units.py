"""Numbers as people read them: seconds, bytes and counts in the unit that fits."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Seconds in the unit that reads best.

    >>> seconds(0.00123)
    '1.23 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        found = value / scale
        if found >= 0.9995:
            digits = 2 if found < 9.995 else 1 if found < 99.95 else 0
            return f"{found:,.{digits}f} {unit}"
    return "0 s"


def size(value: float) -> str:
    """Bytes in the unit that reads best.

    >>> size(3 * 2**30), size(513 * 2**10)
    ('3.0 GiB', '513 KiB')
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            digits = 1 if value < 99.95 * scale else 0
            return f"{value / scale:,.{digits}f} {unit}"
    return f"{value:.0f} B"


def number(value: float) -> str:
    """A count in the unit that reads best.

    >>> number(62_378_344)
    '62.4M'
    """
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.0f}"
