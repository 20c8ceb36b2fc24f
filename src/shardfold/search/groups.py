"""The state of folding: what is left of a problem, and what was eliminated how."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardfold.search.kinds import Array, Ints, Mask
from shardfold.search.store import Store


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Vertices eliminated alike: the table numbers around each, each one's neighbour per edge."""

    vertex: int
    edges: tuple[int, ...]
    members: Ints
    neighbours: tuple[Ints, ...]


Step = tuple[int, int, int, int, int, int]
"""An elimination: a vertex, its table, and twice a neighbour and the table towards it; -1: none."""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Eliminations one by one; vertices are numbered by their place in `ids`."""

    steps: list[Step]
    ids: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The same eliminations in block after block, each between a joint and the next.

    `inside` are those of block 0; block t has them t * period further on.
    """

    inside: Steps
    period: int
    copies: int
    joint: int


@dataclass(slots=True, eq=False)
class Folding:
    """What is left of a problem, and how to get back: the state that rounds work on.

    Vertices are numbered 0..len(ids)-1 here; `ids` are their numbers in the problem. Those that
    are `locked` are never eliminated.
    """

    store: Store
    ids: Ints
    sizes: Ints
    kind: Ints
    ends: Ints
    edge_kind: Ints
    groups: list[Group | Steps | Blocks] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    constants: list[Array] = field(default_factory=list)
    locked: Mask | None = None
