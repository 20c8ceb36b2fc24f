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
class Run:
    """A stretch of `copies` equal blocks, each of `period` vertices from vertex `begin` on.

    Block t hangs on two joints only, joint + (t and t + 1) * period; the second is one of its own
    vertices. `edges` are the edges of block 0; those of block t are t * len(edges) further on.
    """

    period: int
    copies: int
    joint: int
    begin: int
    edges: Ints

    @property
    def end(self) -> int:
        """The first vertex after the last block."""
        return self.begin + self.copies * self.period

    @property
    def last(self) -> int:
        """The joint after the last block."""
        return self.joint + self.copies * self.period


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """A run folded away: the eliminations inside block 0, and then of joints between blocks.

    `vertex` is the table of such a joint and `powers[k]` the table between joints 2^k blocks apart.
    The run begins with pieces of the longest such length. The joints between those, but for the
    last, all take one of the choices `steady`, which cost `staying` for all of them together.
    """

    run: Run
    inside: Steps
    vertex: int
    powers: tuple[int, ...]
    steady: Ints
    staying: Array

    @property
    def piece(self) -> int:
        """Blocks in one of the longest pieces."""
        return 1 << len(self.powers) - 1

    @property
    def spare(self) -> int:
        """Pieces that are equal to the second, since the joints at their ends are."""
        return max(self.run.copies // self.piece - 4, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the blocks of a run chose: how many times each distinct row occurs.

    A row is the choice of the joint before a block, and of the block's own vertices.
    """

    run: Run
    rows: Ints
    counts: Ints


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
