"""The matrix work of a step at the device's peak rate: what utilisation is measured against."""

from __future__ import annotations

from math import fsum

import numpy as np

from shardfold.cluster import Device, Mesh
from shardfold.costs.steps import Compute
from shardfold.costs.work import Tensors, operator_steps
from shardfold.graph import Graph
from shardfold.spaces import Atoms, Space


def matrix_steps(graph: Graph, atoms: Atoms) -> list[Compute]:
    """The matrix products of a whole step, unsplit, forward and backward."""
    found = []
    for index, rule in enumerate(atoms.rules):
        space = Space(rule, np.zeros((1, 0), dtype=np.int8))
        steps = operator_steps(space, Tensors.of(graph, atoms, index), Mesh(())).steps
        found += [s for s in steps if isinstance(s, Compute) and s.engine == "matrix"]
    return found


def model_flops(graph: Graph, atoms: Atoms) -> float:
    """Operations of all matrix products of a step; what is computed twice is counted once."""
    return fsum(float(step.flops[0]) for step in matrix_steps(graph, atoms))


def ideal_seconds(graph: Graph, atoms: Atoms, device: Device) -> float:
    """Seconds that one device at its peak rate would take for them."""
    steps = matrix_steps(graph, atoms)
    return fsum(float(step.flops[0]) / device.peak(step.dtype) for step in steps)
