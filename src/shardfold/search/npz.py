"""Problems as files: one .npz of plain arrays, no pickles, repeated tables stored once.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardfold.errors import ProblemError
from shardfold.search.interning import Array, Ints, Kinds
from shardfold.search.problem import Problem

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
