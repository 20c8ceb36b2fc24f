"""Mixtures that send every row through every expert become the one operator of experts.

Such a block copies its rows for each expert, multiplies them by all matrices at once, and weights
them by shares that are zero for all but k experts of a row:

    y[t] = sum over e of f_e(share[t, e] * x[t])    or    sum over e of share[t, e] * f_e(x[t])
    f_e(x) = down[e] between(up[e] x),     share = g(constants, scattered into at expert[t, k])

Where the shares are proven to be zero off the k, and `f_e(0)` is zero or not read, only the k
count, in either pass: what is scattered over is a constant, and has no gradient. The rows then go
to their experts as in any other block (`experts.py`). What the proof does not reach stays as it is.

The proof follows the dims of rows, experts and features back from the sum over the experts
(`followed_dims.py`); a product asks both sides.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from shardfold.capture.experts import FEATURES, between_of, described
from shardfold.capture.followed_dims import (
    REGROUPED,
    VIEWS,
    Dim,
    Dims,
    followed,
    joined,
    named,
    shape_of,
)
from shardfold.operators.experts import Between

ATEN = torch.ops.aten
PRODUCTS = {ATEN.bmm.default, ATEN.matmul.default}
SCATTERS = {ATEN.scatter.src, ATEN.scatter_.src, ATEN.scatter.value, ATEN.scatter_.value}
ZEROS = {ATEN.zeros.default, ATEN.zeros_like.default, ATEN.new_zeros.default}
FULLS = {ATEN.full.default, ATEN.full_like.default, ATEN.new_full.default}
SAME = {ATEN.to.dtype, ATEN._to_copy.default, ATEN.type_as.default, ATEN.detach.default}
TRIAL = 3  # rows of each of two experts

_KNOWN: dict[object, Between | None] = {}  # by the code between two products


def dispatched(program: ExportedProgram) -> None:
    """Put the operator of experts, in place, where every row goes through every expert."""
    graph = program.graph_module.graph
    sums = [node for node in graph.nodes if node.target is ATEN.sum.dim_IntList]
    written = _written(graph) if sums else set()
    for total in sums:
        mixture = _Reading(total, written).mixture()
        if mixture is not None:
            mixture.send(total)
            program.graph_module.recompile()


@dataclass(frozen=True, slots=True)
class Mixture:
    """A sum over all experts of which only k count for a row."""

    rows: fx.Node
    share: fx.Node  # of all experts
    expert: fx.Node  # the k of each row
    is_weighted_first: bool
    up: fx.Node  # [experts, in, inner]
    down: fx.Node  # [experts, inner, out]
    between: Between

    def send(self, total: fx.Node) -> None:
        """Send the rows to their experts, and let all who read the sum read what comes back."""
        with total.graph.inserting_before(total):
            emit = _Emitter(total)
            x = emit(ATEN.reshape.default, self.rows, [-1, shape_of(self.rows)[-1]])
            expert = emit(ATEN.reshape.default, self.expert, [-1, shape_of(self.expert)[-1]])
            share = emit(ATEN.reshape.default, self.share, [-1, shape_of(self.up)[0]])
            share = emit(ATEN.gather.default, share, 1, expert)
            count, each = shape_of(expert)
            if self.is_weighted_first:  # then each copy of a row is a row of its own
                if each > 1:
                    x = emit(ATEN.unsqueeze.default, x, 1)
                    share = emit(ATEN.unsqueeze.default, share, 2)
                x = emit(ATEN.mul.Tensor, x, share)
                x = emit(ATEN.reshape.default, x, [count * each, -1])
                expert = emit(ATEN.reshape.default, expert, [count * each, 1])
                own = x.meta["val"]
                share = emit(
                    ATEN.ones.default,
                    list(expert.meta["val"].shape),
                    dtype=own.dtype,
                    device=own.device,
                )
            up, down = (emit(ATEN.transpose.int, w, 1, 2) for w in (self.up, self.down))
            block = torch.ops.shardfold.routed_experts.default
            y = emit(block, x, expert, share, up, down, str(self.between))
            if self.is_weighted_first and each > 1:
                y = emit(ATEN.reshape.default, y, [count, each, -1])
                y = emit(ATEN.sum.dim_IntList, y, [1])
            y = emit(ATEN.reshape.default, y, list(shape_of(total)))
        total.replace_all_uses_with(y)


class _Emitter:
    """Adds nodes that come from the same line as another."""

    def __init__(self, like: fx.Node) -> None:
        self.node = like

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        given = fx.map_arg(args, lambda node: node.meta["val"])
        with self.node.meta["val"].fake_mode:
            made = target(*given, **kwargs)
        node = self.node.graph.call_function(target, args, kwargs)
        node.meta = {**self.node.meta, "val": made}
        return node


@dataclass(slots=True)
class _Reading:
    """What is found on the way back from a sum; `seen` are the nodes whose values it relies on."""

    total: fx.Node
    written: set[fx.Node]  # memory that is written in place somewhere
    sizes: dict[str, int] = field(default_factory=dict)  # of rows, experts, features
    seen: list[fx.Node] = field(default_factory=list)

    def mixture(self) -> Mixture | None:
        """The mixture that the sum is; None if it is none, or nothing proves it."""
        shape = shape_of(self.total.args[0])
        summed: Any = self.total.args[1]
        lead = [int(d) % len(shape) for d in summed or ()] if shape else []
        if len(lead) != 1 or lead[0] == len(shape) - 1:
            return None
        experts = shape[lead[0]]
        self.sizes = {"e": experts, "t": math.prod(shape[:-1]) // max(experts, 1), "n": shape[-1]}
        names = ["e" if d == lead[0] else "t" for d in range(len(shape) - 1)] + ["n"]
        factors = self.factors(self.total.args[0], named(names, shape))
        products = [node for node, dims in factors if self.order(dims) == "etn"]
        after = [node for node, dims in factors if self.order(dims) == "te"]
        if len(products) != 1 or len(after) + 1 != len(factors):
            return None
        (second,) = products
        first = self.source(second.args[0]) if self.is_of_experts(second) else None
        if first is None or not self.is_of_experts(first):
            return None
        given = shape_of(first.args[0])
        self.sizes["m"] = given[-1]
        wanted = tuple(self.whole(name) for name in "etm")[-len(given) :]
        factors = self.factors(first.args[0], wanted)
        rows = [node for node, dims in factors if self.order(dims) == "tm"]
        before = [node for node, dims in factors if self.order(dims) == "te"]
        shares = [*before, *after]
        if len(rows) != 1 or len(before) + 1 != len(factors) or len(shares) != 1:
            return None
        up, down = (product.args[1] for product in (first, second))
        assert isinstance(up, fx.Node)
        assert isinstance(down, fx.Node)
        if len({_dtype(node) for node in (*rows, *shares, up, down, self.total)}) != 1:
            return None
        off = self.off(shares[0])
        between = self.between(first, second.args[0], bool(before))
        if off is None or off[0] != 0 or between is None:
            return None
        self.seen += (*rows, *shares, up, down)
        if any(_memory(node) in self.written for node in self.seen):
            return None
        return Mixture(rows[0], shares[0], off[1], bool(before), up, down, between)

    def whole(self, name: str) -> Dim:
        """A dim that is all of one coordinate."""
        return ((name, 1, self.sizes[name]),) if self.sizes[name] > 1 else ()

    def order(self, dims: Dims) -> str:
        """`te` if the elements are all rows by all experts, row-major; empty if not all of them."""
        pieces = joined(piece for dim in dims for piece in dim)
        is_all = all((apart, size) == (1, self.sizes[name]) for name, apart, size in pieces)
        return "".join(name for name, _, _ in pieces) if is_all else ""

    def is_of_experts(self, node: fx.Node) -> bool:
        """Whether a product has a matrix for each expert, and all rows for each."""
        if node.target not in PRODUCTS:
            return False
        shape, matrices = shape_of(node), shape_of(node.args[1])
        lead = (self.sizes["e"], self.sizes["t"])
        return len(matrices) == 3 and matrices[0] == lead[0] > 1 and shape[:-1] == lead

    def factors(self, node: Any, dims: Dims) -> list[tuple[fx.Node, Dims]]:
        """What a tensor with these dims is the product of, each with the dims that it has."""
        pairs = zip(shape_of(node), dims, strict=True)
        dims = tuple(() if size == 1 else dim for size, dim in pairs)
        if self.order(dims) in ("te", "tm") or node.target in PRODUCTS:
            return [(node, dims)]
        self.seen.append(node)
        given = node.all_input_nodes
        if node.target is ATEN.mul.Tensor and len(given) == 2:
            split = ((each, dims[len(dims) - len(shape_of(each)) :]) for each in given)
            return [factor for each, own in split for factor in self.factors(each, own)]
        source = followed(node, dims)
        return [(node, dims)] if source is None else self.factors(node.args[0], source)

    def source(self, node: Any) -> fx.Node | None:
        """The one product that a tensor is made of, with nothing else."""
        found, asked = set[fx.Node](), [node]
        while asked:
            each = asked.pop()
            if each.target in PRODUCTS:
                found.add(each)
            elif each.op != "call_function" or not each.all_input_nodes or _draws(each):
                return None
            else:
                asked += [one for one in each.all_input_nodes if one not in self.seen]
            self.seen.append(each)
        return found.pop() if len(found) == 1 else None

    def between(self, first: fx.Node, inner: Any, needs_zero: bool) -> Between | None:
        """What stands between the products, if it is of each row of each expert by itself."""
        module = _function(first, inner)
        wide, narrow = shape_of(first)[-1], shape_of(inner)[-1]
        if module is None or wide % narrow or shape_of(inner)[:-1] != shape_of(first)[:-1]:
            return None
        dtype, key = _dtype(first), (module.code, _dtype(first), wide // narrow, needs_zero)
        if key not in _KNOWN:
            try:
                _KNOWN[key] = _tried(module, FEATURES * (wide // narrow), dtype, needs_zero)
            except (RuntimeError, TypeError, IndexError):  # of sizes that are in the code
                _KNOWN[key] = None
        return _KNOWN[key]

    def off(self, node: Any) -> tuple[float, fx.Node] | None:
        """The number that stands everywhere but at k experts of each row, and which these are."""
        self.seen.append(node)
        given = node.all_input_nodes
        if node.target in SCATTERS:
            return self._scattered(node)
        if node.target is ATEN.mul.Tensor and len(given) == 2:
            sides = (self.off(each) for each in given if shape_of(each) == shape_of(node))
            return next((side for side in sides if side is not None and side[0] == 0), None)
        found = self.off(node.args[0]) if given and node.args[0] is given[0] else None
        if found is None:
            return None
        value, expert = found
        if node.target in SAME or node.target in REGROUPED:
            return found
        if node.target is ATEN.div.Tensor and len(given) == 2:
            is_zero = value == 0 and shape_of(given[0]) == shape_of(node)
            return found if is_zero else None
        if node.target is ATEN.softmax.int and value == -math.inf:
            return (0.0, expert) if self.is_last(node, node.args[1]) else None
        if len(given) == 1 and torch.Tag.pointwise in node.target.tags and not _draws(node):
            one = torch.full((1,), value, dtype=_dtype(given[0]))
            return float(node.target(one, *node.args[1:], **node.kwargs)), expert
        return None

    def is_last(self, node: fx.Node, dim: Any) -> bool:
        """Whether a dim is the last one, and that of the experts."""
        shape = shape_of(node)
        return dim in (-1, len(shape) - 1) and shape[-1] == self.sizes["e"]

    def _scattered(self, node: fx.Node) -> tuple[float, fx.Node] | None:
        base, dim, index = node.args[:3]
        assert isinstance(base, fx.Node)
        assert isinstance(index, fx.Node)
        if not self.is_last(node, dim) or shape_of(index)[:-1] != shape_of(base)[:-1]:
            return None
        if shape_of(index)[-1] != 1 and not _are_distinct(index):
            return None
        self.seen.append(index)
        if base.target in ZEROS:
            return 0.0, index
        if base.target not in FULLS:
            return None
        value = base.args[1 if base.target is not ATEN.new_full.default else 2]
        return (float(value), index) if isinstance(value, int | float) else None


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None


def _draws(node: fx.Node) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _are_distinct(index: Any) -> bool:
    """Whether no index comes twice in a row: they are the places of the largest."""
    while index.target in VIEWS and shape_of(index)[-1:] == shape_of(index.args[0])[-1:]:
        index = index.args[0]
    if index.target is not operator.getitem or index.args[1] != 1:
        return False
    largest = index.args[0]
    dims = len(shape_of(largest.args[0]))
    dim = largest.args[2] if len(largest.args) > 2 else -1
    return largest.target is ATEN.topk.default and dim in (-1, dims - 1)


# -- what stands between the products


def _function(first: fx.Node, inner: Any) -> fx.GraphModule | None:
    """What is done to one product for the next, as a function of it.

    Where halves of the features are taken by their numbers, they are taken as halves.
    """
    graph, wide = fx.Graph(), shape_of(first)[-1]
    made: dict[fx.Node, Any] = {first: graph.placeholder("rows")}

    def copy(node: fx.Node) -> Any:
        if node not in made:
            for each in node.all_input_nodes:
                copy(each)
            half = _half(node, wide)
            if half is None:
                made[node] = graph.node_copy(node, made.__getitem__)
            else:
                halves = graph.call_function(ATEN.chunk.default, (made[node.args[0]], 2, -1))
                made[node] = (
                    halves if half < 0 else graph.call_function(operator.getitem, (halves, half))
                )
        return made[node]

    graph.output(copy(inner))
    return fx.GraphModule(torch.nn.Module(), graph)


def _half(node: fx.Node, wide: int) -> int | None:
    """Which half of the features a node takes, -1 for both; None if it does something else."""
    given = shape_of(node.args[0]) if node.args else ()
    if given[-1:] != (wide,) or wide % 2:
        return None
    last, half = (-1, len(given) - 1), wide // 2
    if node.target is ATEN.slice.Tensor and len(node.args) == 4 and node.args[1] in last:
        start, end = node.args[2] or 0, node.args[3]
        if (start, end) == (0, half):
            return 0
        return 1 if start == half and isinstance(end, int) and end >= wide else None
    if node.target in (ATEN.split.Tensor, ATEN.split_with_sizes.default):
        dim = node.args[2] if len(node.args) > 2 else 0
        return -1 if dim in last and node.args[1] in (half, [half, half]) else None
    return None


def _tried(
    module: fx.GraphModule, wide: int, dtype: torch.dtype | None, needs_zero: bool
) -> Between | None:
    """Describe a function of each expert's rows, if it does the same for each expert alone."""

    def of_rows(rows: Tensor) -> Any:
        return module(rows.unsqueeze(0)).squeeze(0)

    assert dtype is not None
    found = described(of_rows, wide, dtype)
    if found is None:
        return None
    own = between_of(str(found))
    rows = torch.linspace(-3.0, 2.0, 2 * TRIAL * wide).view(2, TRIAL, wide).to(dtype)
    together = module(rows)
    is_alike = all(torch.equal(own(rows[k]), together[k]) for k in range(2))
    is_zero = not needs_zero or not own(torch.zeros_like(rows[0])).any()
    return found if is_alike and is_zero else None


# -- writes


def _memory(node: fx.Node) -> fx.Node:
    """The node whose memory a node's value may lie in."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        aliased = [] if schema is None else schema.arguments
        found = next((k for k, a in enumerate(aliased) if a.alias_info is not None), None)
        if node.target is operator.getitem:
            found = 0
        if found is None or found >= len(node.args) or not isinstance(node.args[found], fx.Node):
            return node
        node = node.args[found]
    return node


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Memory that is written in place, except by a scatter into what was made for it."""
    found = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            is_fresh = node.target in SCATTERS and len(getattr(value, "users", ())) == 1
            if is_write and isinstance(value, fx.Node) and not is_fresh:
                found.add(_memory(value))
    return found
