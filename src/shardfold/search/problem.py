"""The search problem: one choice per vertex, a cost per choice, a cost per pair of choices.

As a file, it is one .npz of plain arrays, without pickles, with repeated tables stored once.

    n                          number of vertices
    vc_of (n,), V0, V1, ...    costs of vertex v: V{vc_of[v]}, one number per choice
    edges (m, 2)               edge i goes from vertex edges[i, 0] to vertex edges[i, 1]
    ec_of (m,), E0, E1, ...    costs of edge i: E{ec_of[i]}, choices of the one by the other's

and where they are known:

    ops (n,), dims (n,)        names of the vertices, and a JSON list each
    cfg_of (n,), C0, C1, ...   what the choices of a vertex stand for, a row of integers each
    vb_of (n,), VB0, ...       bytes of the choices of a vertex, like V
    eb_of (m,), EB0, ...       bytes of the choices at both ends of an edge, like E
    meta                       JSON: anything about where the problem comes from

Other keys are left alone.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError)


class _Archive:
    """An open .npz whose faults become errors that name the file and the key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._arrays = np.load(path, allow_pickle=False)
            self.keys = frozenset(self._arrays.files)
        except FileNotFoundError as error:
            raise ProblemError(f"There is no file {path}.") from error
        except (*_DAMAGED, AttributeError) as error:
            raise ProblemError(
                f"{path} is not a problem file: it is truncated, pickled or no .npz ({error})."
            ) from error

    def __getitem__(self, key: str) -> np.ndarray[Any, Any]:
        if key not in self.keys:
            raise ProblemError(f"{self._path} has no array {key!r}.")
        try:
            return np.asarray(self._arrays[key])
        except _DAMAGED as error:
            raise ProblemError(
                f"Array {key!r} of {self._path} cannot be read: it is truncated or holds "
                f"pickled objects ({error})."
            ) from error

    def numbers(self, key: str) -> Ints:
        """An array of integers."""
        array = self[key]
        if array.dtype.kind not in "iu":
            raise ProblemError(f"Array {key!r} of {self._path} must hold integers.")
        return array.astype(np.int64)

    def tables(self, index: str, prefix: str, owner: str, count: int) -> tuple[Array, ...]:
        """The table of each of `count` owners, each distinct table read once."""
        of = self.numbers(index)
        if of.shape != (count,):
            raise ProblemError(
                f"Array {index!r} of {self._path} has shape {of.shape}; expected one number for "
                f"each {owner}, {count} in all."
            )
        read: dict[int, Array] = {}
        for position, number in enumerate(of.tolist()):
            if number in read:
                continue
            if f"{prefix}{number}" not in self.keys:
                raise ProblemError(
                    f"{self._path}: {owner} {position} refers to table {prefix}{number}, "
                    f"which is not in the file."
                )
            table = self[f"{prefix}{number}"]
            if table.dtype.kind not in "fiu":
                raise ProblemError(f"Table {prefix}{number} of {self._path} must hold numbers.")
            read[number] = table.astype(np.float64)
        return tuple(read[number] for number in of.tolist())


def read_problem(path: str | Path) -> Problem:
    """Read a problem; a `ProblemError` says which array, vertex or edge is wrong."""
    archive = _Archive(Path(path))
    n = int(archive.numbers("n"))
    edges = archive.numbers("edges")
    if edges.size == 0:
        edges = edges.reshape(0, 2)
    if edges.ndim != 2 or edges.shape[1] != 2:
        raise ProblemError(f"Array 'edges' of {path} has shape {edges.shape}; expected (m, 2).")
    m = len(edges)
    keys = archive.keys
    return Problem(
        costs=archive.tables("vc_of", "V", "vertex", n),
        edges=tuple(map(tuple, edges.tolist())),
        edge_costs=archive.tables("ec_of", "E", "edge", m),
        bytes=archive.tables("vb_of", "VB", "vertex", n) if "vb_of" in keys else None,
        edge_bytes=archive.tables("eb_of", "EB", "edge", m) if "eb_of" in keys else None,
        names=_names(archive, n),
    )


def _names(archive: _Archive, n: int) -> tuple[str, ...]:
    if "ops" not in archive.keys:
        return ()
    names = tuple(str(name) for name in archive["ops"].reshape(-1).tolist())
    return names if len(names) == n and any(names) else ()


def write_problem(
    problem: Problem, path: str | Path, *, meta: Mapping[str, object] | None = None
) -> None:
    """Write a problem so that `read_problem` gives it back, repeated tables once."""
    sizes, of = np.unique(problem.sizes, return_inverse=True)
    arrays: dict[str, Any] = {
        "n": np.int64(len(problem)),
        "ops": np.array(problem.names or [""] * len(problem), dtype=np.str_),
        "dims": np.array(["[]"] * len(problem), dtype=np.str_),
        "cfg_of": of.reshape(-1),
        "edges": np.ascontiguousarray(problem.ends),
        "meta": np.str_(json.dumps(dict(meta or {}))),
    }
    for number, size in enumerate(sizes.tolist()):
        arrays[f"C{number}"] = np.arange(size, dtype=np.int32)[:, None]
    _put(arrays, "vc_of", "V", problem.vertex_kinds)
    _put(arrays, "ec_of", "E", problem.edge_kinds)
    _put(arrays, "vb_of", "VB", problem.byte_kinds)
    _put(arrays, "eb_of", "EB", problem.edge_byte_kinds)
    with Path(path).open("wb") as file:
        np.savez_compressed(file, **arrays)


def _put(arrays: dict[str, Any], index: str, prefix: str, kinds: Kinds | None) -> None:
    if kinds is None:
        return
    arrays[index] = kinds.of
    for number, table in enumerate(kinds.tables):
        arrays[f"{prefix}{number}"] = table
