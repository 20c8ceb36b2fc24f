"""Small things that go together: which of them share a collective, and how that is told."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from shardfold.run.groups import Axes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launched:
    """A collective that stands for several of the plan's: the axes and bytes of each."""

    kind: str
    axes: Axes
    members: tuple[tuple[Axes, int], ...]
    bytes: int


def shared_out(
    items: Iterable[T],
    key: Callable[[T], Hashable | None],
    size: Callable[[T], int],
    limit: int,
) -> Iterator[list[T]]:
    """Cut items into buckets of one key, each closed when it holds `limit` bytes.

    What has no key, or fills a bucket alone, is by itself.

    >>> list(shared_out(["a", "bb", "cccc", "d"], lambda s: 0, len, 3))
    [['a', 'bb'], ['cccc'], ['d']]
    """
    open_ones: dict[Hashable, list[T]] = {}
    for item in items:
        kind = key(item)
        if kind is None or size(item) >= limit:
            yield [item]
            continue
        bucket = open_ones.setdefault(kind, [])
        bucket.append(item)
        if sum(map(size, bucket)) >= limit:
            yield open_ones.pop(kind)
    yield from open_ones.values()
