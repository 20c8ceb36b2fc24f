"""How many examples a property draws, and choices that leave nothing out for long."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import settings

SHARES = {"quick": 0.2, "fuzz": 4.0}  # of what `make test` draws


def draws(count: int) -> settings:
    """The settings of a property that draws `count` examples in `make test`."""
    share = SHARES.get(settings.get_current_profile_name(), 1.0)
    return settings(max_examples=max(1, round(share * count)))


def covering(sizes: Iterable[int], number: int) -> tuple[int, ...]:
    """The `number`-th of a series of random choices, an entry below each size.

    Every entry takes all its values, in an order of its own, before one comes again: so a few
    choices try what many independent ones would.

    >>> [covering([3, 2], number)[0] for number in range(3)]
    [1, 2, 0]
    """
    found = []
    for place, size in enumerate(sizes):
        turn, at = divmod(number, size)
        found.append(random.Random(f"{place} {turn}").sample(range(size), size)[at])
    return tuple(found)
