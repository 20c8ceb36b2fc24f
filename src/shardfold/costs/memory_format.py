"""Strides and aliases: which results are views of an operand, and who reads by strides.

A view shares its operand's memory. `contiguous` and `reshape` copy only what does not lie in
order, a cast only what has another dtype, dropout only where it drops something. So the order of
the dims in memory is followed through the graph: a transpose changes it, pointwise operators keep
it, attention leaves heads inside positions, everything else writes in order.

    x [b s (h d)]  -view-> [b s h d]  -transpose-> [b h s d], lies as b s h d: still x's memory

A transposed, sliced or broadcast operand takes the slower path of an elementwise kernel, and a
reshape of one is a copy. And where the gradient of an operand is added to that of a later reader,
that is a pass over memory of its own.

Gradients have an order, too, which is followed backward: the gradient of a slice is written into
zeros that lie in order, whatever its operand did, so that the reshape before a transpose, which was
free forward, copies backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from shardfold.costs.fusion import Fusion, fused
from shardfold.graph import Graph, Op
from shardfold.graph.repeats import readings
from shardfold.operators import Access, Call, Operator
from shardfold.operators.kernels import pointwise
from shardfold.operators.operator import SHARED
from shardfold.sharding import Subdims

CHANNELS_LAST = (0, 2, 3, 1)
LINEAR = ("aten.linear", "aten.addmm", "aten.mm")
Order = tuple[int, ...] | None  # dims from the slowest to the fastest in memory; None: with gaps


def aliases(graph: Graph, subdims: Subdims) -> Mapping[int, int]:
    """For each result that shares the memory of an operand: that operand's tensor."""
    return _Follower(graph, subdims).run()


class _Follower:
    def __init__(self, graph: Graph, subdims: Subdims) -> None:
        self.graph, self.subdims = graph, subdims
        self.orders: dict[int, Order] = {}
        self.found: dict[int, int] = {}

    def run(self) -> Mapping[int, int]:
        for op, rule in zip(self.graph.ops, self.subdims.rules, strict=True):
            operator = rule.rule.operator
            source = op.inputs[0] if op.inputs else -1
            if source >= 0 and self._shares(op, operator, source):
                self.found.update(dict.fromkeys(op.results, source))
                order = self._order_of_view(op, operator, source)
            else:
                order = self._order_of_result(op, operator)
            has_gaps = operator.memory in ("cut", "broadcast")
            for result in op.results:
                kept = order is not None and len(order) == self._rank(result)
                self.orders[result] = order if kept else None if has_gaps else self._plain(result)
        return self.found

    def _shares(self, op: Op, operator: Operator, source: int) -> bool:
        types = self.graph.tensors
        if operator.memory == "copy if needed":
            before, after = types[source].type.shape, types[op.results[0]].type.shape
            is_view = before != after and _of_view(self._order(source), before, after) is not None
            return is_view or self._in_order(source)
        if operator.memory == "cast":
            return types[source].type.dtype == types[op.results[0]].type.dtype
        return operator.memory in SHARED or operator.is_idle(op)

    def _order_of_view(self, op: Op, operator: Operator, source: int) -> Order:
        before = self._order(source)
        if before is None:
            return None
        if operator.permutes is not None:
            return _permuted(before, operator.permutes(Call.of(self.graph, op)))
        if operator.memory in ("cut", "broadcast"):
            return None
        shapes = [self.graph.tensors[t].type.shape for t in (source, op.results[0])]
        if len(shapes[0]) == len(shapes[1]):
            return before
        return _of_view(before, *shapes)

    def _order_of_result(self, op: Op, operator: Operator) -> Order:
        result = op.results[0]
        if operator.memory == "attention" and self._rank(result) == 4:
            return (0, 2, 1, 3)
        shape = self.graph.tensors[result].type.shape
        keeps = operator.memory in ("pointwise", "cast", "dropout")
        for tensor in op.inputs if keeps else ():
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


def _permuted(order: tuple[int, ...], moved: list[int]) -> Order:
    """The order of a view, given for each of its dims the operand's."""
    return tuple(moved.index(dim) for dim in order)


class _Same:
    """A graph and its subdims by identity, so that they can be a key."""

    def __init__(self, graph: Graph, subdims: Subdims) -> None:
        self.graph, self.subdims = graph, subdims

    def __hash__(self) -> int:
        return hash((id(self.graph), id(self.subdims)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        return self.graph is other.graph and self.subdims is other.subdims


def fusion_of(graph: Graph, subdims: Subdims) -> Fusion | None:
    """How a compiler puts the operators of a graph together; None: they run one by one."""
    return _fusion(_Same(graph, subdims)) if graph.is_compiled else None


@lru_cache(maxsize=4)
def _fusion(key: _Same) -> Fusion:
    return fused(key.graph, key.subdims, aliases(key.graph, key.subdims))


def access_of(graph: Graph, subdims: Subdims, index: int) -> Access:
    """How the operator at `index` meets memory; found for all operators of a graph together."""
    return _accesses(_Same(graph, subdims))[index]


@lru_cache(maxsize=4)
def _accesses(key: _Same) -> tuple[Access, ...]:
    graph = key.graph
    orders: dict[int, Order] = {
        i: tuple(range(len(t.type.shape)))
        for i, t in enumerate(graph.tensors)
        if t.role != "activation"
    }
    readers = readings(graph)
    found = []
    done: set[object] = set()
    operators = [rule.rule.operator for rule in key.subdims.rules]
    laid = [_lay(graph, op, known, orders) for op, known in zip(graph.ops, operators, strict=True)]
    backward = _Gradients(graph, orders).run(operators)
    fusion, in_float8 = fusion_of(graph, key.subdims), _float8(graph)
    for index, (op, operator) in enumerate(zip(graph.ops, operators, strict=True)):
        copies, strided, across = laid[index]
        # As many gradients as readers are added up: all readers bear an equal share of it.
        adds = tuple(
            1.0 - 1.0 / readers[t] if graph.tensors[t].requires_grad else 0.0 for t in op.inputs
        )
        shared = None if operator.shares is None else operator.shares(Call.of(graph, op))
        is_shared = shared is not None and shared in done
        done.add(shared)
        idle = operator.is_idle(op)
        is_last = bool(op.inputs) and orders.get(op.inputs[0]) == CHANNELS_LAST
        access = (op.kind, op.attributes, idle, copies, strided, adds, is_shared)
        compiled, fused = fusion is not None, None if fusion is None else fusion.ops[index]
        float8 = index in in_float8
        found.append(Access(*access, across, *backward[index], is_last, compiled, float8, fused))
    return tuple(found)


def _float8(graph: Graph) -> frozenset[int]:
    """The linear layers that multiply in float8: all but the head, where the precision says so."""
    if not graph.precision.is_float8:
        return frozenset()
    found = [
        index
        for index, op in enumerate(graph.ops)
        if op.kind in LINEAR and any(graph.tensors[t].role == "parameter" for t in op.inputs)
    ]
    is_head = found and not any(part.isdecimal() for part in _module(graph, found[-1]))
    return frozenset(found[:-1] if is_head else found)


def _module(graph: Graph, op: int) -> list[str]:
    return graph.ops[op].origin.module.split(".")


@dataclass
class _Gradients:
    """How gradients lie, from the last operator to the first."""

    graph: Graph
    orders: Mapping[int, Order]  # of the tensors themselves
    found: dict[int, Order] = field(default_factory=dict)

    def run(self, operators: Sequence[Operator]) -> list[tuple[bool, bool, bool]]:
        """For each operator: whether it copies its gradient, reads it by strides, and across."""
        each = [
            self._pass(op, known)
            for op, known in zip(reversed(self.graph.ops), reversed(operators), strict=True)
        ]
        return each[::-1]

    def _pass(self, op: Op, operator: Operator) -> tuple[bool, bool, bool]:
        tensors = self.graph.tensors
        given = [t for t in op.results if tensors[t].requires_grad]
        for tensor in given:  # what nobody reads is the loss
            self.found.setdefault(tensor, tuple(range(len(tensors[tensor].type.shape))))
        if not given or not any(tensors[t].requires_grad for t in op.inputs):
            return False, False, False
        after, shape = self.found[given[0]], tensors[given[0]].type.shape
        copies = strided = False
        for tensor in dict.fromkeys(op.inputs):
            if not tensors[tensor].requires_grad:
                continue
            own = tensors[tensor].type.shape
            before: Order = tuple(range(len(own)))
            if operator.permutes is not None:
                moved = operator.permutes(Call.of(self.graph, op))
                before = None if after is None else tuple(moved[dim] for dim in after)
            elif operator.memory in ("view", "copy", "copy if needed"):
                kept = _of_view(after, shape, own)
                before, copies = (before, True) if kept is None else (kept, False)
            elif operator.memory in ("pointwise", "cast", "dropout"):
                strided = after is None or after != self.orders.get(given[0])
                before = after if own == shape and after is not None else before
            elif operator.memory == "joined":
                before = _of_first(after, len(own)) if op.attributes.get("dim", 0) == 0 else None
            elif operator.memory == "attention":
                lies = self.orders.get(tensor)
                before = before if lies is None else lies
            elif operator.memory == "cut":
                strided = any(not _is_plain(self.found[t]) for t in given)
            elif operator.is_convolution:
                copies = after != self.orders.get(given[0])
                if self.orders.get(tensor) == CHANNELS_LAST:
                    before = CHANNELS_LAST
            elif operator.memory == "new":
                copies = not _is_plain(after)
            self._add(tensor, before)
        lies = self.orders.get(given[0])
        reads = after is not None and lies is not None and strided and after[-1:] != lies[-1:]
        return copies, strided, reads or (copies and not _ends_with_last(after))

    def _add(self, tensor: int, order: Order) -> None:
        """A sum of gradients lies as the first of them."""
        if tensor in self.found and self.found[tensor] is None:
            order = tuple(range(len(self.graph.tensors[tensor].type.shape)))
            self.found[tensor] = order
        self.found.setdefault(tensor, order)


def _lay(
    graph: Graph, op: Op, operator: Operator, orders: dict[int, Order]
) -> tuple[bool, bool, bool]:
    """Note how the operator's results lie; whether it copies, reads by strides, and across rows."""
    shapes = [graph.tensors[t].type.shape for t in op.inputs]
    first = orders.get(op.inputs[0]) if op.inputs else None
    copies = strided = across = False
    for tensor in op.results:
        shape = graph.tensors[tensor].type.shape
        plain: Order = tuple(range(len(shape)))
        found = plain
        if operator.permutes is not None:
            moved = operator.permutes(Call.of(graph, op))
            found = None if first is None else _permuted(first, moved)
        elif operator.memory == "view":
            found = _of_view(first, shapes[0], shape)
        elif operator.memory == "copy if needed" and shapes[0] != shape:
            kept = _of_view(first, shapes[0], shape)
            copies, across, found = kept is None, not _ends_with_last(first), kept or plain
        elif operator.memory in ("copy", "copy if needed") or operator.reads_in_order:
            copies, across = not _is_plain(first), not _ends_with_last(first)
        elif operator.memory == "broadcast":
            found = None
        elif operator.memory == "cut":
            at = op.attributes.get("dim", 0)
            found = plain if at == 0 and _is_plain(first) else None
        elif operator.memory == "joined":
            strided = any(not _is_plain(orders.get(t)) for t in op.inputs)
        elif operator.memory in ("attention", "dropout"):
            found = first
            strided = operator.memory == "attention" and not all(
                _ends_with_last(orders.get(t)) for t in op.inputs
            )
        elif operator.is_convolution or operator.keeps_channels:
            keeps = first == CHANNELS_LAST and len(shape) == 4
            found = first if keeps else plain
            if operator.is_convolution and not keeps:
                copies, across = not _is_plain(first), not _ends_with_last(first)
        elif operator.kernels is not pointwise and operator.memory == "new":
            found = plain
        elif op.kind.startswith("aten.") and len(shape) in map(len, shapes):
            found, strided, across = _elementwise(op, shapes, orders, len(shape))
        orders[tensor] = found
    return copies, strided, across


def _elementwise(
    op: Op, shapes: list[Any], orders: dict[int, Order], rank: int
) -> tuple[Order, bool, bool]:
    """Operands that lie alike and are as large as the result are read in one run.

    Worst is an operand whose neighbours are not the result's: it is read across.
    """
    size = max(math.prod(shape) for shape in shapes)
    full = [orders.get(t) for t, s in zip(op.inputs, shapes, strict=True) if math.prod(s) == size]
    broadcast = any(1 < math.prod(s) < size for s in shapes)
    alike = len(set(full)) == 1 and full[0] is not None
    order = full[0] if alike and full[0] is not None and len(full[0]) == rank else None
    found = order or tuple(range(rank))
    across = any(lies and found and lies[-1] - len(lies) != found[-1] - rank for lies in full)
    return found, broadcast or not alike, across


def _of_first(order: Order, rank: int) -> Order:
    """How a part along the first dim lies; of a stack, which has that dim more, if it can."""
    if order is None or len(order) == rank:
        return order
    return tuple(dim - 1 for dim in order[1:]) if order[0] == 0 else None


def _of_view(order: Order, before: Sequence[int], after: Sequence[int]) -> Order:
    """How a view with other dims lies; none if only a copy has these dims.

    A dim is split where it lies, and dims that are merged have to lie side by side:

        [b hw c] lies as b c hw -> [b h w c] lies as b c h w
    """
    if before == after:
        return order
    plain = tuple(range(len(after)))
    if order is None or _is_plain(order) or not math.prod(before):
        return plain if order is not None else None
    lies = [dim for dim in order if before[dim] > 1]
    found: list[int] = []
    for own, new in sorted(_groups(before, after), key=lambda pair: lies.index(pair[0][0])):
        at = lies.index(own[0])
        if lies[at : at + len(own)] != own:
            return None
        found += new
    ones = [dim for dim in plain if dim not in found]
    return plain if found == sorted(found) else (*ones, *found)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The dims before and after that hold the same elements, in groups as small as can be."""
    left, right = ([d for d, n in enumerate(shape) if n > 1] for shape in (before, after))
    found = []
    while left and right:
        own, new = [left.pop(0)], [right.pop(0)]
        while (one := math.prod(before[d] for d in own)) != (
            other := math.prod(after[d] for d in new)
        ):
            (own if one < other else new).append((left if one < other else right).pop(0))
        found.append((own, new))
    return found


def _ends_with_last(order: Order) -> bool:
    """Whether the last dim is the fastest in memory; what has gaps has them elsewhere."""
    return order is None or order[-1:] == (len(order) - 1,)


def _is_plain(order: Order) -> bool:
    return order is not None and order == tuple(range(len(order)))
