"""What a search problem's vertices and edges stand for.

The decisions are: a configuration for each operator; the layout in which a tensor with several
readers is kept for them; the storage of each parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.costs.parameters import Storage
from shardfold.costs.recompute import KEEP_ALL, Regions
from shardfold.graph import Graph
from shardfold.search import Problem
from shardfold.sharding import Space
from shardfold.sharding.layouts import Layouts


@dataclass(frozen=True, slots=True)
class Vertex:
    """A decision: an operator's configuration, a tensor's layout, or a parameter's storage."""

    what: Literal["op", "tensor", "parameter"]
    index: int  # of the operator or the tensor in the graph
    space: Space | None = None
    layouts: Layouts | None = None
    storage: Storage | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that goes from one decision to another: what one leaves, what the other needs."""

    tensor: int
    source: int
    target: int
    left: Layouts
    needed: Layouts
    regathers: NDArray[np.bool_] | None = None  # of a parameter: gathered again in backward
    drops: NDArray[np.bool_] | None = None  # of a parameter: the gathered copy is not kept
    again: bool = False  # moved once more where the operator that moves it is recomputed
    flows: bool = True  # whether a gradient comes back from the reader
    sums: bool = False  # of a parameter: its reader's gradient is the last, the sum goes with it


@dataclass(frozen=True, slots=True)
class Tabulated:
    """A search problem, and what its vertices and edges stand for."""

    mesh: Mesh
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    problem: Problem
    regions: Regions = KEEP_ALL
    passes: int = 1  # over parts of the batch, in a step


def constant_tensors(graph: Graph) -> set[int]:
    """Tensors that depend on no parameter: masks, positions, rotary tables, shifted labels.

    They carry no gradient and every device can make them from what it already has, so they are
    computed whole everywhere and sliced for free.
    """
    found: set[int] = set()
    for op in graph.ops:
        if all(graph.tensors[t].role in ("input", "buffer") or t in found for t in op.inputs):
            found.update(op.results)
    return found
