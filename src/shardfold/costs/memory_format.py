"""Which results are no new memory: views of an operand, and copies that are not made.

A view shares its operand's memory. `contiguous` and `reshape` copy only what does not lie in
order, a cast only what has another dtype, dropout only where it drops something. So the order of
the dims in memory is followed through the graph: a transpose changes it, pointwise operators keep
it, attention leaves heads inside positions, everything else writes in order.

    x [b s (h d)]  -view-> [b s h d]  -transpose-> [b h s d], lies as b s h d: still x's memory

What running an operator takes that its rule does not say: found once for a whole graph.

Whether its operands lie in memory as a kernel likes them: a transposed, sliced or broadcast operand
takes the slower path of an elementwise kernel, and a reshape of one is a copy. And whether the
gradient of an operand is added to that of a later reader: a pass over memory of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shardfold.graph import Graph, Op

RESHAPED = (
    "view _unsafe_view unsqueeze squeeze unflatten view_as detach alias flatten reshape reshape_as"
).split()
PERMUTED = "transpose permute t swapaxes movedim".split()
CUT = (
    "slice narrow select unbind split split_with_sizes chunk tensor_split expand expand_as "
    "broadcast_to diagonal unfold"
).split()
COPIED_IF_NEEDED = "contiguous reshape flatten reshape_as".split()
CASTS = "to _to_copy type_as".split()
DROPOUTS = "dropout native_dropout alpha_dropout feature_dropout".split()

Order = tuple[int, ...] | None  # dims from the slowest to the fastest in memory; None: with gaps


def aliases(graph: Graph) -> Mapping[int, int]:
    """For each result that shares the memory of an operand: that operand's tensor."""
    return _Follower(graph).run()


def drops_nothing(op: Op) -> bool:
    """Whether a dropout is none."""
    return not op.attributes.get("p", 0.5) or op.attributes.get("train") is False


class _Follower:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.orders: dict[int, Order] = {}
        self.found: dict[int, int] = {}

    def run(self) -> Mapping[int, int]:
        for op in self.graph.ops:
            name = op.kind.rpartition(".")[2]
            source = op.inputs[0] if op.inputs else -1
            if source >= 0 and self._shares(op, name, source):
                self.found.update(dict.fromkeys(op.results, source))
                order = self._order_of_view(op, name, source)
            else:
                order = self._order_of_result(op, name)
            for result in op.results:
                kept = order is not None and len(order) == self._rank(result)
                self.orders[result] = (
                    order if kept else None if name in CUT else self._plain(result)
                )
        return self.found

    def _shares(self, op: Op, name: str, source: int) -> bool:
        types = self.graph.tensors
        if name in COPIED_IF_NEEDED:
            return self._in_order(source)
        if name in CASTS:
            return types[source].type.dtype == types[op.results[0]].type.dtype
        if name in DROPOUTS:
            return drops_nothing(op)
        return name in RESHAPED or name in PERMUTED or name in CUT

    def _order_of_view(self, op: Op, name: str, source: int) -> Order:
        before = self._order(source)
        if before is None:
            return None
        if name in PERMUTED:
            moved = _permutation(op, name, len(before))
            place = {dim: at for at, dim in enumerate(moved)}
            return tuple(place[dim] for dim in before)
        if name in CUT:
            return None
        if self._rank(source) == self._rank(op.results[0]):
            return before
        return self._plain(op.results[0]) if self._in_order(source) else None

    def _order_of_result(self, op: Op, name: str) -> Order:
        result = op.results[0]
        if name == "scaled_dot_product_attention" and self._rank(result) == 4:
            return (0, 2, 1, 3)
        if name in COPIED_IF_NEEDED or name == "clone":
            return self._plain(result)
        shape = self.graph.tensors[result].type.shape
        for tensor in op.inputs if name in POINTWISE else ():
            if self.graph.tensors[tensor].type.shape == shape:
                order = self._order(tensor)
                return order if order is not None else self._plain(result)
        return self._plain(result)

    def _order(self, tensor: int) -> Order:
        return self.orders.get(tensor, self._plain(tensor))

    def _in_order(self, tensor: int) -> bool:
        """Whether the dims of a tensor, but for those of size 1, lie in memory as they stand."""
        order, shape = self._order(tensor), self.graph.tensors[tensor].type.shape
        if order is None:
            return False
        wide = [dim for dim in order if shape[dim] > 1]
        return wide == sorted(wide)

    def _rank(self, tensor: int) -> int:
        return len(self.graph.tensors[tensor].type.shape)

    def _plain(self, tensor: int) -> tuple[int, ...]:
        return tuple(range(self._rank(tensor)))


def _permutation(op: Op, name: str, rank: int) -> Sequence[int]:
    """For each dim of the result, the operand's."""
    order = list(range(rank))
    if name == "permute":
        return [dim % rank for dim in op.attributes["dims"]]
    if name == "movedim":
        source, target = (_listed(op.attributes[k]) for k in ("source", "destination"))
        moved = {t % rank: s % rank for s, t in zip(source, target, strict=True)}
        rest = iter(dim for dim in order if dim not in moved.values())
        return [moved[dim] if dim in moved else next(rest) for dim in order]
    if rank > 1:
        names = ("axis0", "axis1") if name == "swapaxes" else ("dim0", "dim1")
        i, j = (op.attributes.get(key, k) % rank for k, key in enumerate(names))
        order[i], order[j] = order[j], order[i]
    return order


def _listed(value: int | Sequence[int]) -> Sequence[int]:
    return (value,) if isinstance(value, int) else value


POINTWISE = frozenset(
    "add sub mul div neg pow exp log sqrt rsqrt silu gelu relu sigmoid tanh to _to_copy type_as "
    "dropout native_dropout where masked_fill maximum minimum clamp abs square softplus".split()
)


KEEPS_ORDER = {"aten.dropout", "aten.detach"}
VIEWS = {"aten.view", "aten.unflatten", "aten.unsqueeze", "aten.squeeze"}  # never a copy
EXPERTS = "shardfold.expert_linear"
COPIES = {
    "aten.contiguous",
    "aten.clone",
    "aten.reshape",
    "aten.flatten",
    "aten._unsafe_view",
    EXPERTS,  # of its rows, if they are not in order
}
PARTS = {"aten.split", "aten.chunk", "aten.split_with_sizes", "aten.slice", "aten.narrow"}
PICKS = {"aten.select", "aten.unbind"}


@dataclass(frozen=True, slots=True)
class Habit:
    """One operator's kind, the arguments that its kernel depends on, and how its operands lie."""

    kind: str = ""
    window: tuple[int, ...] = ()  # kernel and stride of a convolution
    is_causal: bool = False
    is_idle: bool = False  # a dropout of nothing: no kernel at all
    copies: bool = False  # a view that must move its elements
    is_strided: bool = False
    adds: tuple[float, ...] = ()  # per operand: additions of its gradient to other readers'
    is_sorted: bool = False  # an operator before has sorted the same rows for the same experts


class _Same:
    """A graph by identity, so that it can be a key."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __hash__(self) -> int:
        return id(self.graph)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.graph is other.graph


def habit_of(graph: Graph, index: int) -> Habit:
    """The habit of the operator at `index`; all of a graph's are found together."""
    return _habits(_Same(graph))[index]


@lru_cache(maxsize=4)
def _habits(key: _Same) -> tuple[Habit, ...]:
    graph = key.graph
    orders: dict[int, Order] = {
        i: tuple(range(len(t.type.shape)))
        for i, t in enumerate(graph.tensors)
        if t.role != "activation"
    }
    readers = Counter(tensor for op in graph.ops for tensor in op.inputs)
    found = []
    sorted_for: set[tuple[int, int]] = set()
    for op in graph.ops:
        copies, strided = _lay(graph, op, orders)
        # As many gradients as readers are added up: all readers bear an equal share of it.
        adds = tuple(
            1.0 - 1.0 / readers[t] if graph.tensors[t].requires_grad else 0.0 for t in op.inputs
        )
        habit = _habit(graph, op, copies, strided, adds)
        if op.kind == EXPERTS:
            sent = (op.inputs[2], graph.tensors[op.inputs[1]].type.shape[0])
            habit = replace(habit, is_sorted=sent in sorted_for)
            sorted_for.add(sent)
        found.append(habit)
    return tuple(found)


def _habit(graph: Graph, op: Op, copies: bool, strided: bool, adds: tuple[float, ...]) -> Habit:
    window: tuple[int, ...] = ()
    if op.kind.startswith("aten.conv") and len(op.inputs) > 1:
        stride = op.attributes.get("stride", 1)
        first = stride if isinstance(stride, int) else stride[0]
        window = (*graph.tensors[op.inputs[1]].type.shape[2:], first)
    return Habit(
        op.kind,
        window,
        bool(op.attributes.get("is_causal", False)),
        op.kind == "aten.dropout" and not op.attributes.get("p"),
        copies,
        strided,
        adds,
    )


def _lay(graph: Graph, op: Op, orders: dict[int, Order]) -> tuple[bool, bool]:
    """Note how the operator's results lie; whether it copies, and whether it reads by strides."""
    shapes = [graph.tensors[t].type.shape for t in op.inputs]
    first = orders.get(op.inputs[0]) if op.inputs else None
    copies = strided = False
    for tensor in op.results:
        rank = len(graph.tensors[tensor].type.shape)
        plain: Order = tuple(range(rank))
        found = plain
        if op.kind in ("aten.transpose", "aten.permute", "aten.t", "aten.swapaxes"):
            found = _permuted(op, first, len(shapes[0]))
        elif op.kind in VIEWS:
            found = plain if _is_plain(first) else None
        elif op.kind in COPIES:
            copies = not _is_plain(first)
        elif op.kind in ("aten.expand", "aten.expand_as"):
            found = None
        elif op.kind in PARTS | PICKS:
            at = op.attributes.get("dim", 0)
            found = plain if at == 0 and _is_plain(first) else None
        elif op.kind in KEEPS_ORDER or op.kind == "aten.scaled_dot_product_attention":
            found = first
        elif op.kind.startswith("aten.") and shapes and len(shapes[0]) == rank:
            found, strided = _elementwise(graph, op, shapes, orders, rank)
        orders[tensor] = found
    return copies, strided


def _permuted(op: Op, order: Order, rank: int) -> Order:
    if order is None:
        return None
    moves = list(range(rank))
    if op.kind == "aten.permute":
        moves = [d % rank for d in op.attributes["dims"]]
    elif rank > 1:
        a, b = (op.attributes.get(name, k) % rank for k, name in enumerate(("dim0", "dim1")))
        moves[a], moves[b] = moves[b], moves[a]
    return tuple(moves.index(d) for d in order)


def _elementwise(
    graph: Graph, op: Op, shapes: list[Any], orders: dict[int, Order], rank: int
) -> tuple[Order, bool]:
    """Operands that lie alike and are as large as the result are read in one run."""
    size = max(math.prod(shape) for shape in shapes)
    full = [orders.get(t) for t, s in zip(op.inputs, shapes, strict=True) if math.prod(s) == size]
    broadcast = any(1 < math.prod(s) < size for s in shapes)
    alike = len(set(full)) == 1 and full[0] is not None
    order = full[0] if alike and full[0] is not None and len(full[0]) == rank else None
    return (order or tuple(range(rank))), broadcast or not alike


def _is_plain(order: Order) -> bool:
    return order is not None and order == tuple(range(len(order)))
