"""Which results are no new memory: views of an operand, and copies that are not made.

A view shares its operand's memory. `contiguous` and `reshape` copy only what does not lie in
order, a cast only what has another dtype, dropout only where it drops something. So the order of
the dims in memory is followed through the graph: a transpose changes it, pointwise operators keep
it, attention leaves heads inside positions, everything else writes in order.

    x [b s (h d)]  -view-> [b s h d]  -transpose-> [b h s d], lies as b s h d: still x's memory
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
