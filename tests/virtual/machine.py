"""Runs a training step of a graph on virtual devices, by any choice of its tables.

Every device runs the operators on its own parts, forward and backward; between operators the
parts move by the listed steps and by nothing else. After each operator the parts are compared
with what one device computes, so that the first wrong step is named.

An operator that exchanges words inside (a norm whose features are split) is run whole, and its
results and gradients are laid out as its configuration says: what such an exchange must send is
the rule's own affair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardfold.costs import Edge
from shardfold.costs.steps import Collective
from shardfold.graph import Op
from shardfold.sharding import Space
from shardfold.sharding.layouts import forward_states, gradient_states
from shardfold.simulate.decoded import DecodedChoice
from virtual.interpreter import call, run
from virtual.local import Place, local_results
from virtual.movement import Array, Device, Shards, collect, devices, perform, place, region

Layout = Sequence[int]
Key = tuple[str, int]  # ("vertex", number) where a decision keeps a tensor, ("tensor", index)


class Machine:
    """One choice on one mesh; `leaves` are the inputs, parameters and buffers."""

    def __init__(self, decoded: DecodedChoice, leaves: dict[int, Tensor]) -> None:
        self.decoded, self.graph, self.subdims = decoded, decoded.graph, decoded.subdims
        self.tables, self.choice = decoded.tables, decoded.choice
        self.shape = self.tables.mesh.shape
        self.devices = devices(self.shape)
        self.rng = np.random.default_rng(0)
        for tensor, value in leaves.items():
            value.requires_grad_(self.graph.tensors[tensor].requires_grad)
        self.truth = run(self.graph, leaves)
        self.values: dict[Key, Shards] = {}
        self.gradients: dict[Key, Shards] = {}
        self.tapes: dict[int, dict[Device, tuple[list[Tensor], list[Tensor]]]] = {}

    def check(self) -> None:
        """Run forward and backward; every operator and every parameter must come out right."""
        for number, op in enumerate(self.graph.ops):
            self._forward(number, op)
        for number, op in reversed(list(enumerate(self.graph.ops))):
            if any(self.graph.tensors[t].requires_grad for t in op.results):
                self._backward(number, op)
        self._check_parameters()

    # Forward

    def _forward(self, number: int, op: Op) -> None:
        v = number
        space = self._space(v)
        operands = [self._operand(v, k, op) for k in range(len(op.inputs))]
        layouts = [self._row(space.result_layouts(k), v) for k in range(len(op.results))]
        if self._exchanges(space, v):
            pairs = zip(op.results, layouts, strict=True)
            results = [self._place(t, self.truth[t], layout) for t, layout in pairs]
        else:
            results = self._run(number, op, operands, layouts)
        for tensor, layout, shards in zip(op.results, layouts, results, strict=True):
            self._compare(tensor, shards, layout, self.truth[tensor], f"{op.name} gives")
            self.values["tensor", tensor] = shards
        for at, edge in self._edges(source=v):
            if self.tables.vertices[edge.target].what == "tensor":
                moved = self._move(at, self.values["tensor", edge.tensor], "forward")
                self.values["vertex", edge.target] = moved

    def _operand(self, v: int, position: int, op: Op) -> Shards:
        tensor = op.inputs[position]
        needed = forward_states(self._row(self._space(v).operand_layouts(position), v))
        found = self._edge_into(v, position)
        if found is None:  # an input, or what follows from inputs alone: whole everywhere
            shards = self._place(tensor, self.truth[tensor], needed)
        else:
            at, edge = found
            if self.tables.vertices[edge.source].what == "parameter":
                stored = forward_states(edge.left[self.choice[edge.source]])
                values = self._place(tensor, self.truth[tensor], stored)
            else:
                values = self.values[self._key(edge)]
            shards = self._move(at, values, "forward")
        self._compare(tensor, shards, needed, self.truth[tensor], f"{op.name} reads")
        return shards

    def _run(
        self, number: int, op: Op, operands: list[Shards], layouts: list[Layout]
    ) -> list[Shards]:
        v = number
        tape = self.tapes[number] = {}
        for device in self.devices:
            given = [self._tensor(t, operands[k][device]) for k, t in enumerate(op.inputs)]
            parts = zip(op.results, layouts, strict=True)
            shapes = [self._merged(t, self._local_atoms(t, lay, device)) for t, lay in parts]
            where = Place(op, self._space(v), self.choice[v], self.shape, device)
            tape[device] = (given, local_results(where, given, shapes))
        return [
            {
                device: _array(made[k], self._local_atoms(t, layouts[k], device))
                for device, (_, made) in tape.items()
            }
            for k, t in enumerate(op.results)
        ]

    # Backward

    def _backward(self, number: int, op: Op) -> None:
        v = number
        space = self._space(v)
        for at, edge in self._edges(source=v):
            if self.tables.vertices[edge.target].what == "tensor":
                self._return_kept(at, edge)
        sent = [self.gradients.get(("tensor", t)) for t in op.results]
        if number in self.tapes:
            found = self._local_gradients(number, op, sent)
        else:
            found = self._whole_gradients(v, op, space, sent)
        summed: list[Edge] = []
        for k, tensor in enumerate(op.inputs):
            into = self._edge_into(v, k)
            if into is not None and self.graph.tensors[tensor].requires_grad:
                self._add(into[1], self._move(into[0], found[k], "backward"))
                summed += [into[1]] if into[1].reduces_sum else []
        for edge in summed:
            self._reduce_sum(edge)

    def _return_kept(self, at: int, edge: Edge) -> None:
        """The gradient of a tensor with several readers goes back to its producer."""
        if edge.tensor == self.graph.loss:
            whole = edge.needed[self.choice[edge.target]]
            one = torch.ones_like(self.truth[edge.tensor])
            self.gradients["vertex", edge.target] = self._place(edge.tensor, one, whole)
        shards = self.gradients.get(("vertex", edge.target))
        if shards is not None and self.graph.tensors[edge.tensor].requires_grad:
            self._add(edge, self._move(at, shards, "backward"))

    def _reduce_sum(self, edge: Edge) -> None:
        """All readers of a parameter have added to its gradient: the sum goes to its storage."""
        key = self._key(edge)
        for step in self._steps(edge, "sum", "backward"):
            self.gradients[key] = perform(step, self.gradients[key], self.shape)

    def _add(self, edge: Edge, shards: Shards) -> None:
        key = self._key(edge)
        before = self.gradients.get(key)
        self.gradients[key] = (
            shards if before is None else {d: before[d] + shards[d] for d in shards}
        )

    def _local_gradients(self, number: int, op: Op, sent: list[Shards | None]) -> list[Shards]:
        found: list[Shards] = [{} for _ in op.inputs]
        for device, (given, made) in self.tapes[number].items():
            gradients = [None if s is None else torch.from_numpy(np.array(s[device])) for s in sent]
            for k, gradient in enumerate(_pull_back(made, given, gradients)):
                shape = self._subdims_of(op.inputs[k], given[k])
                found[k][device] = gradient.numpy().reshape(shape)
        return found

    def _whole_gradients(
        self, v: int, op: Op, space: Space, sent: list[Shards | None]
    ) -> list[Shards]:
        given = [self.truth[t].detach().clone() for t in op.inputs]
        for tensor, value in zip(op.inputs, given, strict=True):
            value.requires_grad_(self.graph.tensors[tensor].requires_grad)
        gradients = []
        for k, (tensor, shards) in enumerate(zip(op.results, sent, strict=True)):
            layout = _gradient(self._row(space.result_layouts(k), v))
            subdims = self.subdims.tensors[tensor]
            whole = None if shards is None else collect(shards, subdims, layout, self.shape)
            gradients.append(None if whole is None else torch.from_numpy(whole))
        pulled = _pull_back(call(op, given), given, gradients)
        return [
            self._place(t, pulled[k], _gradient(self._row(space.operand_layouts(k), v)))
            for k, t in enumerate(op.inputs)
        ]

    def _check_parameters(self) -> None:
        trained = [
            (v, x)
            for v, x in enumerate(self.tables.vertices)
            if x.what == "parameter" and self.graph.tensors[x.index].requires_grad
        ]
        loss, leaves = self.truth[self.graph.loss], [self.truth[x.index] for _, x in trained]
        expected = torch.autograd.grad(loss, leaves, allow_unused=True)
        for (v, vertex), truth in zip(trained, expected, strict=True):
            assert vertex.layouts is not None
            if truth is not None:
                name = f"the gradient of {self.graph.tensors[vertex.index].name}"
                stored = forward_states(vertex.layouts[self.choice[v]])
                self._compare(vertex.index, self.gradients["vertex", v], stored, truth, name)

    # Edges and steps

    def _edges(self, source: int) -> list[tuple[int, Edge]]:
        return [(n, e) for n, e in enumerate(self.tables.edges) if e.source == source]

    def _edge_into(self, op: int, position: int) -> tuple[int, Edge] | None:
        """The edge of one operand, if it has one."""
        found = self.tables.wiring.operand_edge[op][position]
        return None if found is None else (found, self.tables.edges[found])

    def _key(self, edge: Edge) -> Key:
        is_op = self.tables.vertices[edge.source].what == "op"
        return ("tensor", edge.tensor) if is_op else ("vertex", edge.source)

    def _move(self, at: int, shards: Shards, phase: str) -> Shards:
        """Perform the steps of one edge: those of values forward, those of gradients backward."""
        what = "value" if phase == "forward" else "gradient"
        for step in self._steps(self.tables.edges[at], what, phase):
            shards = perform(step, shards, self.shape)
        return shards

    def _steps(self, edge: Edge, what: str, phase: str) -> list[Collective]:
        one = edge.at(self.choice[edge.source], self.choice[edge.target])
        legs = [leg for leg in one.legs() if (leg.what, leg.phase) == (what, phase)]
        steps = [step for leg in legs for step in one.steps(leg, self.shape).case(0)]
        return [step for step in steps if isinstance(step, Collective)]

    def _exchanges(self, space: Space, v: int) -> bool:
        inner = {exchange.factor for exchange in space.rule.rule.exchanges}
        return any(space.rule.base(int(f)) in inner for f in self._row(space.configs, v) if f >= 0)

    def _space(self, v: int) -> Space:
        space = self.tables.vertices[v].space
        assert space is not None
        return space

    def _row(self, rows: Array, v: int) -> Array:
        return rows[self.choice[v]]

    # Shapes

    def _place(self, tensor: int, value: Tensor, layout: Layout) -> Shards:
        array = value.detach().double().numpy().reshape(self.subdims.tensors[tensor])
        return place(array, layout, self.shape, self.rng)

    def _local_atoms(self, tensor: int, layout: Layout, device: Device) -> list[int]:
        parts = region(self.subdims.tensors[tensor], layout, self.shape, device)
        return [part.stop - part.start for part in parts]

    def _merged(self, tensor: int, local: Sequence[int]) -> list[int]:
        shape = [1] * len(self.graph.tensors[tensor].type.shape)
        for dim, size in zip(self.subdims.dims[tensor], local, strict=True):
            shape[dim] *= size
        return shape

    def _tensor(self, tensor: int, array: Array) -> Tensor:
        """A part as torch takes it: atoms merged into dims, a leaf where gradients flow."""
        value = torch.from_numpy(np.array(array)).reshape(self._merged(tensor, array.shape))
        value = value.to(self.truth[tensor].dtype)
        value.subdims = array.shape  # type: ignore[attr-defined]
        return value.requires_grad_(self.graph.tensors[tensor].requires_grad)

    def _subdims_of(self, tensor: int, part: Tensor) -> tuple[int, ...]:
        return part.subdims  # type: ignore[attr-defined,no-any-return]

    def _compare(
        self, tensor: int, shards: Shards, layout: Layout, truth: Tensor, where: str
    ) -> None:
        subdims = self.subdims.tensors[tensor]
        found = collect(shards, subdims, layout, self.shape)
        wanted = truth.detach().double().numpy().reshape(subdims)
        name = self.graph.tensors[tensor].name
        # Some models round to float32 on the way, whatever the dtype of their weights.
        finite = wanted[np.isfinite(wanted)]
        close = 1e-5 * max(1.0, float(np.abs(finite).max(initial=0.0)))
        assert np.allclose(found, wanted, rtol=1e-5, atol=close), (where, name, list(layout))


def _array(value: Tensor, shape: Sequence[int]) -> Array:
    array: Array = value.detach().double().numpy().reshape(tuple(shape))
    return array


def _gradient(layout: Array) -> Array:
    states: Array = gradient_states(layout[None])[0]
    return states


def _pull_back(
    made: list[Tensor], given: list[Tensor], gradients: list[Tensor | None]
) -> list[Tensor]:
    """The gradients of what was given; zero where none flows."""
    wanted = [t for t in given if t.requires_grad]
    pairs = [
        (m, g.reshape(m.shape).to(m.dtype))
        for m, g in zip(made, gradients, strict=True)
        if g is not None and m.requires_grad
    ]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if pairs and wanted:
        results, sent = zip(*pairs, strict=True)
        found = torch.autograd.grad(results, wanted, sent, allow_unused=True)
    flows = {id(t): g for t, g in zip(wanted, found, strict=True)}
    return [
        torch.zeros(t.shape, dtype=torch.float64) if (g := flows.get(id(t))) is None else g
        for t in given
    ]
