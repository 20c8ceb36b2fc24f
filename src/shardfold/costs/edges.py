"""What a tensor costs between two decisions: values forward, gradients backward."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.costs.model import CostModel, price
from shardfold.costs.reshard import reshard, reshard_all
from shardfold.costs.steps import (
    Collective,
    Phase,
    Step,
    Steps,
    Values,
    held,
    joined,
    only,
    recomputed,
)
from shardfold.costs.variables import Edge
from shardfold.graph import Tensor
from shardfold.sharding.layouts import (
    Layouts,
    distinct,
    forward_states,
    gradient_states,
    local_items,
)


def edge_steps(
    left: Layouts,
    needed: Layouts,
    regathers: NDArray[np.bool_],
    mesh: Mesh,
    subdims: tuple[int, ...],
    item_bytes: int,
    requires_grad: bool,
    again: bool = False,
    sums: bool = False,
    holds: bool = False,
) -> Steps:
    """The reshards of an edge, row by row: values forward, gradients backward.

    A parameter that is regathered is gathered once more, before its use in backward. `again`: the
    operator that moves the tensor is recomputed; what it gathers then serves backward, too. `sums`:
    this gradient is the last of several, and what was summed up of them is reduced with it.
    `holds`: it is a parameter's in a step of several passes, and may be held back until the last.
    """
    values = (forward_states(left), forward_states(needed))
    parts = [reshard(*values, mesh.shape, subdims, item_bytes, "forward")]
    if again:
        parts.append(recomputed(parts[0]))
    elif regathers.any():
        second = reshard(*values, mesh.shape, subdims, item_bytes, "backward")
        parts.append(_only(second, regathers))
    if requires_grad:
        gradients = (gradient_states(needed), gradient_states(left))
        back = reshard(*gradients, mesh.shape, subdims, item_bytes, "backward")
        parts.append(held(back) if holds else back)
        if sums:
            parts.append(sum_steps(left, mesh, subdims, item_bytes))
    return joined(parts)


def sum_steps(stored: Layouts, mesh: Mesh, subdims: tuple[int, ...], item_bytes: int) -> Steps:
    """The reduction of a gradient that was summed up, to the layout in which it is stored."""
    whole = (gradient_states(stored), forward_states(stored))
    return held(reshard(*whole, mesh.shape, subdims, item_bytes, "backward"))


def _only(steps: Steps, keep: NDArray[np.bool_]) -> Steps:
    """The same steps without the rows that are not kept."""
    found: list[Step] = []
    for step in steps.steps:
        assert isinstance(step, Collective)
        at = keep[step.rows]
        if at.any():
            found.append(only(step, at))
    return Steps(steps.cases, tuple(found))


class EdgePrices:
    """Tables of seconds and bytes for edges; each pair of distinct layouts is priced once.

    Seconds are those of a training step of so many passes.
    """

    def __init__(self, mesh: Mesh, model: CostModel, passes: int = 1) -> None:
        self.mesh, self.model, self.passes = mesh, model, passes
        self.tables: dict[object, Values] = {}
        self.zeros: dict[tuple[int, ...], Values] = {}

    def seconds(self, edge: Edge, tensor: Tensor, subdims: tuple[int, ...]) -> Values:
        """Seconds for every choice of the source (rows) and of the target (columns)."""
        item_bytes = tensor.type.item_bytes
        values = (forward_states(edge.left), forward_states(edge.needed))
        total = self._table(*values, subdims, item_bytes, "forward")
        if edge.again:
            total = total * 2
        elif edge.regathers is not None and edge.regathers.any():
            second = self._table(*values, subdims, item_bytes, "backward")
            total = total + second * edge.regathers[:, None]
        if tensor.requires_grad and edge.flows:
            gradients = (gradient_states(edge.needed), gradient_states(edge.left))
            waits = edge.regathers is not None and self.passes > 1
            total = total + self._table(*gradients, subdims, item_bytes, "backward", waits).T
            if edge.sums:
                steps = sum_steps(edge.left, self.mesh, subdims, item_bytes)
                total = total + price(steps, self.model, self.passes)[:, None]
        return np.ascontiguousarray(total)

    def bytes(self, edge: Edge, tensor: Tensor, subdims: tuple[int, ...]) -> Values:
        """Bytes of a gathered parameter that is kept through the step, beside the stored part."""
        shape = (len(edge.left), len(edge.needed))
        if edge.drops is None or edge.again:
            return self.zeros.setdefault(shape, np.zeros(shape))
        stored = local_items(forward_states(edge.left), subdims, self.mesh.shape)[:, None]
        used = local_items(forward_states(edge.needed), subdims, self.mesh.shape)[None, :]
        dropped = edge.drops[:, None] | (used <= stored)
        return np.where(dropped, 0.0, used * tensor.type.item_bytes)

    def _table(
        self,
        sources: Layouts,
        targets: Layouts,
        subdims: tuple[int, ...],
        item_bytes: int,
        phase: Phase,
        waits: bool = False,
    ) -> Values:
        rows, of_row = distinct(sources)
        columns, of_column = distinct(targets)
        key = (subdims, item_bytes, phase, waits, rows.tobytes(), columns.tobytes())
        if key not in self.tables:
            steps = reshard_all(rows, columns, self.mesh.shape, subdims, item_bytes, phase)
            costs = price(held(steps) if waits else steps, self.model, self.passes)
            self.tables[key] = costs.reshape(len(rows), len(columns))
        return self.tables[key][of_row][:, of_column]
