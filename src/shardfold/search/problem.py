"""The search problem: one choice per vertex, a cost per choice, a cost per pair of choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shardfold.errors import ProblemError
from shardfold.search.interning import Array, Ints, Kinds


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Choose one index per vertex to minimise the sum of vertex and edge costs.

        total(x) = sum over v of costs[v][x_v] + sum over (u, v) of edge_costs[u, v][x_u, x_v]

    Arrays may be shared: positions that hold the same array are recognised as alike and their
    work is done once. Arrays must not be written to afterwards.

    >>> stay = np.array([[0.0, 2.0], [2.0, 0.0]])
    >>> problem = Problem((np.array([1.0, 3.0]), np.array([4.0, 1.0])), ((0, 1),), (stay,))
    >>> problem.total((0, 1)), problem.total((1, 1))
    (4.0, 4.0)
    """

    costs: tuple[Array, ...]
    edges: tuple[tuple[int, int], ...] = ()
    edge_costs: tuple[Array, ...] = ()
    bytes: tuple[Array, ...] | None = None
    edge_bytes: tuple[Array, ...] | None = None
    names: tuple[str, ...] = ()

    ends: Ints = field(init=False, repr=False)
    sizes: Ints = field(init=False, repr=False)
    vertex_kinds: Kinds = field(init=False, repr=False)
    edge_kinds: Kinds = field(init=False, repr=False)
    byte_kinds: Kinds | None = field(init=False, repr=False)
    edge_byte_kinds: Kinds | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._set("ends", _ends(self))
        self._set("vertex_kinds", Kinds.find(self.costs))
        self._set("edge_kinds", Kinds.find(self.edge_costs))
        self._set("sizes", _sizes(self))
        _check_edge_shapes(self, self.edge_kinds, "cost")
        _check_finite(self, self.vertex_kinds, self.vertex_name, "cost")
        _check_finite(self, self.edge_kinds, self.edge_name, "cost")
        self._set("byte_kinds", _byte_kinds(self))
        self._set("edge_byte_kinds", _edge_byte_kinds(self))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def has_bytes(self) -> bool:
        """Whether any choice carries bytes."""
        return self.byte_kinds is not None or self.edge_byte_kinds is not None

    def vertex_name(self, vertex: int) -> str:
        """How messages call a vertex."""
        return f"vertex {vertex}" + (f" ({self.names[vertex]})" if self.names else "")

    def edge_name(self, edge: int) -> str:
        """How messages call an edge."""
        u, v = self.edges[edge]
        return f"edge {edge} from {self.vertex_name(u)} to {self.vertex_name(v)}"

    def total(self, choice: Sequence[int] | Ints) -> float:
        """The cost of one choice per vertex."""
        return _total(self, choice, self.vertex_kinds, self.edge_kinds)

    def total_of(self, choice: Ints, vertices: Ints, edges: Ints) -> float:
        """The cost of some vertices and some edges alone, at a choice for all."""
        cost = self.vertex_kinds.taken(vertices).total(choice[vertices])
        return cost + self.edge_kinds.taken(edges).total(choice, self.ends[edges])

    def total_bytes(self, choice: Sequence[int] | Ints) -> float:
        """The bytes of one choice per vertex; 0 where the problem carries none."""
        return _total(self, choice, self.byte_kinds, self.edge_byte_kinds)

    def spread(self, vertices: Ints, ends: Ints, edges: Ints) -> Problem:
        """A larger problem from the same tables: which vertex and which edge each position copies.

        What is alike is known already, so nothing is compared and nothing is checked again.
        """
        found = object.__new__(Problem)
        for at, kinds, arrays in (
            (vertices, ("vertex_kinds", "byte_kinds"), ("costs", "bytes")),
            (edges, ("edge_kinds", "edge_byte_kinds"), ("edge_costs", "edge_bytes")),
        ):
            positions = at.tolist()
            for name in kinds:
                known: Kinds | None = getattr(self, name)
                found._set(name, None if known is None else known.taken(at))
            for name in arrays:
                given: tuple[Array, ...] | None = getattr(self, name)
                copied = None if given is None else tuple(map(given.__getitem__, positions))
                found._set(name, copied)
        found._set("ends", np.asfortranarray(ends))
        found._set("sizes", self.sizes[vertices])
        found._set("edges", tuple(map(tuple, ends.tolist())))
        found._set("names", ())
        return found

    def narrowed(self, of: Ints, first: Ints, kept: Sequence[Ints]) -> Problem:
        """The same problem with the choices `kept` of each class of vertices.

        `of` is the class of each vertex, `first` a vertex of each class, and vertices of a class
        have the same tables.
        """
        found = object.__new__(Problem)
        for name, arrays in (("vertex_kinds", "costs"), ("byte_kinds", "bytes")):
            given: Kinds | None = getattr(self, name)
            kinds = None if given is None else given.cut(of, first, kept)
            found._set(name, kinds)
            found._set(arrays, None if kinds is None else kinds.arrays())
        for name, arrays in (("edge_kinds", "edge_costs"), ("edge_byte_kinds", "edge_bytes")):
            given = getattr(self, name)
            kinds = None if given is None else given.cut_pairs(of[self.ends], kept)
            found._set(name, kinds)
            found._set(arrays, None if kinds is None else kinds.arrays())
        for name in ("edges", "names", "ends"):
            found._set(name, getattr(self, name))
        found._set("sizes", np.array([len(k) for k in kept], dtype=np.int64)[of])
        return found

    def blended(self, cost_weight: float, byte_weight: float) -> Problem:
        """The same problem with `cost_weight` x cost + `byte_weight` x bytes as its cost."""
        blend = object.__new__(Problem)
        weights = cost_weight, byte_weight
        vertices = self.vertex_kinds.blended(self.byte_kinds, weights)
        edges = self.edge_kinds.blended(self.edge_byte_kinds, weights)
        for name in ("edges", "names", "ends", "sizes"):
            blend._set(name, getattr(self, name))
        for name in ("bytes", "edge_bytes", "byte_kinds", "edge_byte_kinds"):
            blend._set(name, None)
        blend._set("vertex_kinds", vertices)
        blend._set("edge_kinds", edges)
        blend._set("costs", vertices.arrays())
        blend._set("edge_costs", edges.arrays())
        return blend


def _ends(problem: Problem) -> Ints:
    """The edges as an (m, 2) array, checked to lie between two vertices that exist."""
    n, edges = len(problem.costs), problem.edges
    if problem.names and len(problem.names) != n:
        raise ProblemError(f"{len(problem.names)} names for {n} vertices; give one per vertex.")
    if len(edges) != len(problem.edge_costs):
        raise ProblemError(f"{len(edges)} edges but {len(problem.edge_costs)} edge tables.")
    try:
        ends = np.array(edges, dtype=np.int64).reshape(len(edges), 2)
    except (ValueError, TypeError) as error:
        raise ProblemError(f"Every edge must be a pair of vertex numbers: {error}.") from error
    wrong = np.flatnonzero((ends < 0).any(axis=1) | (ends >= n).any(axis=1))
    if wrong.size:
        u, v = ends[wrong[0]]
        raise ProblemError(
            f"Edge {wrong[0]} goes from vertex {u} to vertex {v}, "
            f"but the problem has only vertices 0 to {n - 1}."
        )
    loops = np.flatnonzero(ends[:, 0] == ends[:, 1])
    if loops.size:
        raise ProblemError(
            f"Edge {loops[0]} joins {problem.vertex_name(int(ends[loops[0], 0]))} to itself; "
            f"add its diagonal to the vertex cost instead."
        )
    return np.asfortranarray(ends)


def _sizes(problem: Problem) -> Ints:
    """Number of choices per vertex."""
    kinds = problem.vertex_kinds
    for table, vertex in zip(kinds.tables, kinds.first, strict=True):
        if table.ndim != 1:
            raise ProblemError(
                f"The costs of {problem.vertex_name(vertex)} have shape {table.shape}; "
                f"expected one number per choice."
            )
        if table.size == 0:
            raise ProblemError(f"{problem.vertex_name(vertex).capitalize()} has no choices.")
    sizes = np.array([table.size for table in kinds.tables], dtype=np.int64)
    return sizes[kinds.of] if len(sizes) else np.zeros(0, np.int64)


def _check_edge_shapes(problem: Problem, kinds: Kinds, what: str) -> None:
    for table, edge in zip(kinds.tables, kinds.first, strict=True):
        if table.ndim != 2:
            raise ProblemError(
                f"The {what} table of {problem.edge_name(edge)} has shape {table.shape}; "
                f"expected two dimensions."
            )
    if not kinds.tables:
        return
    shapes = np.array([table.shape for table in kinds.tables], dtype=np.int64)[kinds.of]
    expected = problem.sizes[problem.ends]
    wrong = np.flatnonzero((shapes != expected).any(axis=1))
    if wrong.size:
        edge = int(wrong[0])
        raise ProblemError(
            f"The {what} table of {problem.edge_name(edge)} has shape "
            f"{tuple(shapes[edge].tolist())}, but its ends have "
            f"{tuple(expected[edge].tolist())} choices."
        )


def _check_finite(problem: Problem, kinds: Kinds, name: object, what: str) -> None:
    for table, position in zip(kinds.tables, kinds.first, strict=True):
        if np.isfinite(table).all():
            continue
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(table))[0])
        owner = name(position) if callable(name) else str(name)
        raise ProblemError(
            f"The {what} table of {owner} holds {table[at]} at choice {', '.join(map(str, at))}; "
            f"leave illegal choices out instead of giving them an infinite cost."
        )


def _byte_kinds(problem: Problem) -> Kinds | None:
    if problem.bytes is None:
        return None
    if len(problem.bytes) != len(problem.costs):
        raise ProblemError(f"{len(problem.bytes)} byte tables for {len(problem.costs)} vertices.")
    kinds = Kinds.find(problem.bytes)
    shapes = np.array([t.size if t.ndim == 1 else -1 for t in kinds.tables], dtype=np.int64)
    wrong = np.flatnonzero(shapes[kinds.of] != problem.sizes) if len(shapes) else np.zeros(0)
    if wrong.size:
        vertex = int(wrong[0])
        raise ProblemError(
            f"The byte table of {problem.vertex_name(vertex)} has shape "
            f"{kinds.tables[kinds.of[vertex]].shape} for {problem.sizes[vertex]} choices."
        )
    _check_finite(problem, kinds, problem.vertex_name, "byte")
    return kinds


def _edge_byte_kinds(problem: Problem) -> Kinds | None:
    if problem.edge_bytes is None:
        return None
    if len(problem.edge_bytes) != len(problem.edges):
        raise ProblemError(f"{len(problem.edge_bytes)} byte tables for {len(problem.edges)} edges.")
    kinds = Kinds.find(problem.edge_bytes)
    _check_edge_shapes(problem, kinds, "byte")
    _check_finite(problem, kinds, problem.edge_name, "byte")
    return kinds


def _total(
    problem: Problem, choice: Sequence[int] | Ints, vertex: Kinds | None, edge: Kinds | None
) -> float:
    """Sum the chosen entries, one vectorised pass over vertices and one over edges."""
    x = np.asarray(choice, dtype=np.int64)
    if x.shape != problem.sizes.shape:
        raise ProblemError(f"{x.size} choices for {len(problem)} vertices.")
    # Read as unsigned, a negative choice is a huge one: one comparison finds both faults.
    wrong = np.ascontiguousarray(x).view(np.uint64) >= problem.sizes.view(np.uint64)
    if wrong.any():
        v = int(np.argmax(wrong))
        raise ProblemError(
            f"Choice {x[v]} of {problem.vertex_name(v)} is not among its {problem.sizes[v]}."
        )
    cost = 0.0 if vertex is None else vertex.total(x)
    return cost if edge is None else cost + edge.total(x, problem.ends)
