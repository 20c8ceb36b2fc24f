"""Random small graphs: a few products, sums, views and elementwise operators over a few tensors.

Tensors are read again at random (shared activations), and so are parameters (tied weights).
"""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from shardfold.graph import Graph, Op, Operand
from virtual.sketch import Sketch

SIZES = (2, 3, 4, 6, 8)


@st.composite
def graphs(draw: st.DrawFn, max_ops: int = 3, sizes: tuple[int, ...] = SIZES) -> Graph:
    """A graph of one to `max_ops` operators, and their sum as the loss."""
    sketch = Sketch()
    size = st.sampled_from(sizes)
    first = sketch.input(draw(size), draw(size))
    known = [sketch.linear(first, sketch.parameter(draw(size), sketch.shape(first)[-1]))]
    for _ in range(draw(st.integers(0, max_ops - 1))):
        # Mostly the newest tensor, so that the graph is deep; an older one is thereby shared.
        x = draw(st.sampled_from([*known, *known[-1:] * 2]))
        known.append(draw(_operator(sketch, x, known, size)))
    loose = [t for t in known if not any(t in op.inputs for op in sketch.ops)]
    loss = sketch.sum(loose[0])
    for other in loose[1:]:
        loss = sketch.add(loss, sketch.sum(other))
    return sketch.graph(loss)


@st.composite
def _operator(
    draw: st.DrawFn, sketch: Sketch, x: int, known: list[int], size: st.SearchStrategy[int]
) -> int:
    shape = sketch.shape(x)
    kinds = ["linear", "relu"]
    twins = [t for t in known if sketch.shape(t) == shape]
    halves = [k for k, n in enumerate(shape) if n % 2 == 0 and n > 2]
    if len(twins) > 1:
        kinds.append("add")
    if halves and len(shape) < 4:
        kinds.append("cut")
    if len(shape) > 2:
        kinds += ["merge", "transpose"]
    if any(sketch.shape(t)[-1:] == shape[-1:] for t in _weights(sketch)):
        kinds += ["tied", "tied"]
    kind = draw(st.sampled_from(kinds))
    if kind == "linear":
        return sketch.linear(x, sketch.parameter(draw(size), shape[-1]))
    if kind == "tied":
        fitting = [t for t in _weights(sketch) if sketch.shape(t)[-1] == shape[-1]]
        return sketch.linear(x, draw(st.sampled_from(fitting)))
    if kind == "add":
        return sketch.add(x, draw(st.sampled_from([t for t in twins if t != x])))
    if kind == "cut":
        at = draw(st.sampled_from(halves))
        return sketch.view(x, *shape[:at], 2, shape[at] // 2, *shape[at + 1 :])
    if kind == "merge":
        merged = (shape[0] * shape[1], *shape[2:])
        return sketch.view(x, *merged) if _in_order(sketch, x) else sketch.reshape(x, *merged)
    if kind == "transpose":
        return sketch.transpose(x, 0, 1)
    return sketch.relu(x)


def _in_order(sketch: Sketch, tensor: int) -> bool:
    """Whether the elements surely lie in the order of the dims.

    Dims that were transposed cannot be merged by a view: torch refuses it, and capture writes a
    reshape there.
    """
    made = next((op for op in sketch.ops if tensor in op.results), None)
    if made is None or made.kind == "aten.linear":
        return True
    return made.kind != "aten.transpose" and all(_in_order(sketch, t) for t in made.inputs)


def _weights(sketch: Sketch) -> list[int]:
    return [i for i, t in enumerate(sketch.tensors) if t.role == "parameter"]


def shuffled(graph: Graph, seed: int) -> Graph:
    """The same computation: other names, another topological order, tensors renumbered."""
    rng = random.Random(seed)
    order, waiting = [], list(graph.ops)
    known = {i for i, t in enumerate(graph.tensors) if t.role != "activation"}
    while waiting:
        op = rng.choice([op for op in waiting if known.issuperset(op.inputs)])
        waiting.remove(op)
        order.append(op)
        known.update(op.results)
    places = list(range(len(graph.tensors)))
    rng.shuffle(places)
    tensors = sorted(range(len(places)), key=places.__getitem__)
    renamed = tuple(replace(graph.tensors[t], names=(f"t{rng.random()}",)) for t in tensors)
    ops = tuple(_moved(op, places, f"o{rng.random()}") for op in order)
    return Graph(renamed, ops, places[graph.loss])


def _moved(op: Op, places: list[int], name: str) -> Op:
    operands = tuple(Operand(o.name, places[o.tensor]) for o in op.operands)
    return replace(op, name=name, operands=operands, results=tuple(places[r] for r in op.results))
