"""Activations: what is saved for backward, and what activation checkpointing recomputes.

Activation checkpointing drops the activations of some blocks and recomputes them for backward. A
region is a stretch of one block's operators. Forward keeps what the region reads from outside
and drops what its operators would keep; before its backward, the region's operators and the
reshards of what they read run once more. The last operator of a region is the last that keeps an
operand: of it, only the operand is made again, so it does not run twice itself.

    forward:   keep x,  a = norm(x), b = up(a), c = gelu(b), y = down(c)
    backward:           a = norm(x), b = up(a), c = gelu(b), then the gradients of all four

A block is a numbered member of a list of modules, such as `layers.3`, that at least two others
are like. A model without such blocks has nothing to recompute.

One decision pays for the memory of each tensor that is saved for backward. A tensor is kept because
an operator that reads it, or the one that writes it, needs it for its gradient. It is counted once:
where its layout is decided if it has several readers, at its reader if that keeps it, else at its
writer. A region that is run again keeps what it reads from outside, as it lies there, and nothing
that it makes itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.costs.memory_format import access_of
from shardfold.costs.operator_steps import Tensors, operand_local_bytes, points, result_bytes
from shardfold.costs.steps import Values
from shardfold.errors import PlanError
from shardfold.graph import Graph
from shardfold.graph.repeats import MODEL, operator_order
from shardfold.operators import Call, Extra
from shardfold.sharding import Space, Subdims

FEWEST_OPERATORS = 4  # a shorter block has little to drop
FEWEST_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Regions:
    """Stretches of operators that are run again, and the last ones that only read again.

    >>> regions = Regions((range(2, 5),), frozenset({4}))
    >>> [regions.runs_again(i) for i in range(6)]
    [False, False, True, True, False, False]
    >>> [regions.of(i) for i in range(6)]
    [None, None, 0, 0, 0, None]
    """

    ranges: tuple[range, ...] = ()
    readers: frozenset[int] = frozenset()  # last operators, whose results are not needed again

    def of(self, op: int) -> int | None:
        """The number of the region that an operator belongs to: what it reads is read again."""
        at = bisect_right(self.ranges, op, key=lambda each: each.start) - 1
        return at if at >= 0 and op in self.ranges[at] else None

    def runs_again(self, op: int) -> bool:
        """Whether the operator itself is run a second time."""
        return self.of(op) is not None and op not in self.readers

    def __bool__(self) -> bool:
        return bool(self.ranges)


KEEP_ALL = Regions()


def block_regions(graph: Graph, subdims: Subdims) -> Regions:
    """A region for every block of the graph that has others like it."""
    blocks = [block for block in _blocks(graph) if _can_run_twice(graph, block)]
    kinds = [tuple(graph.ops[i].kind for i in block) for block in blocks]
    many: Counter[tuple[str, ...]] = Counter()
    for block, kind in zip(blocks, kinds, strict=True):
        many[kind] += _stands_for(graph, block)
    repeated = (b for b, kind in zip(blocks, kinds, strict=True) if many[kind] >= FEWEST_BLOCKS)
    trimmed = [_trimmed(graph, subdims, block) for block in repeated]
    found = tuple(block for block in trimmed if len(block) >= FEWEST_OPERATORS)
    last = {block[-1] for block in found}
    return Regions(found, frozenset(i for i in last if _keeps_only_operands(graph, subdims, i)))


def attention_regions(graph: Graph, subdims: Subdims) -> Regions:
    """A region for the core of every attention: from its first product to its last.

    That is what selective recomputation runs again (Korthikanti et al. 2022): products of two
    activations, and what stands between them. Their operands are kept.
    """
    cores: list[range] = []
    for block in _blocks(graph):
        products = [i for i in block if _attends(graph, subdims, i)]
        if products and _can_run_twice(graph, block):
            cores.append(range(products[0], products[-1] + 1))
    return Regions(tuple(cores))


def _attends(graph: Graph, subdims: Subdims, op: int) -> bool:
    inputs = [graph.tensors[t] for t in graph.ops[op].inputs]
    products = [t for t in inputs if t.role == "activation" and t.requires_grad]
    rule = subdims.rules[op].rule
    routes = "experts" in rule.operator.words.values()  # which reads the weights of its sum
    return rule.engine == "matrix" and len(products) > 1 and not routes


def stated_regions(ranges: Sequence[tuple[int, int]], graph: Graph, subdims: Subdims) -> Regions:
    """The regions that a plan states for a graph with all its periods; they must be its blocks."""
    blocks = block_regions(graph, subdims) if ranges else KEEP_ALL
    stated = tuple(range(first, end) for first, end in ranges)
    if not set(stated) <= set(blocks.ranges):
        raise PlanError(
            "The plan recomputes operators that are not the model's blocks. Plan again."
        )
    return Regions(stated, blocks.readers)


def in_model(regions: Regions, graph: Graph) -> Regions:
    """The regions of a graph with missing periods, over the operators of the whole model."""
    lengths = {each.start: len(each) for each in regions.ranges}
    order = [op for op, _, _ in operator_order(graph)]
    starts = [at for at, op in enumerate(order) if op in lengths]
    ranges = tuple(range(at, at + lengths[order[at]]) for at in starts)
    return Regions(
        ranges, frozenset(each[-1] for each in ranges if order[each[-1]] in regions.readers)
    )


def _blocks(graph: Graph) -> Iterator[range]:
    """Stretches of consecutive operators of one numbered module."""
    paths = [_block_path(op.origin.module) for op in graph.ops]
    for path, each in groupby(range(len(paths)), paths.__getitem__):
        members = list(each)
        if path:
            yield range(members[0], members[-1] + 1)


def _block_path(module: str) -> str:
    """The outermost numbered module on a path, or nothing.

    >>> _block_path("model.layers.3.mlp.experts.0.up"), _block_path("lm_head")
    ('model.layers.3', '')
    """
    parts = module.split(".")
    for at, part in enumerate(parts):
        if at and part.isdecimal():
            return ".".join(parts[: at + 1])
    return ""


def _can_run_twice(graph: Graph, block: range) -> bool:
    """Whether running the block again changes nothing: batch norm would count a batch twice."""
    names = {operand.name for i in block for operand in graph.ops[i].operands}
    return len(block) >= FEWEST_OPERATORS and "running_mean" not in names


def _stands_for(graph: Graph, block: range) -> int:
    """How many blocks of the model one block of a graph with missing periods stands for."""
    for repeat in graph.repeats:
        period = repeat.period_of(block[0])
        if period is not None:
            return 1 + (repeat.missing if period == MODEL else 0)
    return 1


def _trimmed(graph: Graph, subdims: Subdims, block: range) -> range:
    """The block up to its last operator that keeps anything for backward."""
    keep = [i for i in block if _keeps(graph, subdims, i)]
    return range(block.start, keep[-1] + 1) if keep else range(0)


def _keeps(graph: Graph, subdims: Subdims, op: int) -> bool:
    rule = subdims.rules[op].rule
    trained = any(graph.tensors[t].requires_grad for t in graph.ops[op].results)
    return trained and (bool(rule.saves) or rule.saves_results)


def _keeps_only_operands(graph: Graph, subdims: Subdims, op: int) -> bool:
    """Whether backward needs nothing that the operator computes; a norm needs its statistics."""
    rule = subdims.rules[op].rule
    inner = any(extra.points for extra in extras(graph, subdims, op) if extra.life == "kept")
    return rule.engine == "matrix" and not rule.saves_results and not inner


@dataclass(frozen=True, slots=True)
class Kept:
    """What an operator answers for: some operands, perhaps its result, and what is inside it."""

    operands: tuple[int, ...] = ()
    result: bool = False
    inner: tuple[Extra, ...] = ()


class Saved:
    """Who keeps what, for one graph."""

    def __init__(self, graph: Graph, subdims: Subdims, regions: Regions = KEEP_ALL) -> None:
        self.graph, self.subdims, self.regions = graph, subdims, regions
        self.readers = graph.readers()
        self.writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}

    def by_operator(self, index: int) -> Kept:
        """What the operator at `index` answers for."""
        op, rule = self.graph.ops[index], self.subdims.rules[index].rule
        if not self._has_gradient(index):
            return Kept()
        recomputed = self.regions.of(index) is not None
        operands = tuple(
            k
            for k in (() if recomputed else rule.saves)
            if self.graph.tensors[op.inputs[k]].role == "activation"
            and len(self.readers[op.inputs[k]]) == 1
        )
        several = len(self.readers.get(op.results[0], ())) > 1
        elsewhere = several or self.by_reader(op.results[0])
        entering = not several and any(self._enters(t) for t in op.results)
        result = rule.saves_results and not elsewhere and not recomputed
        made = () if recomputed else extras(self.graph, self.subdims, index)
        inner = tuple(extra for extra in made if extra.points and extra.life == "kept")
        return Kept(operands, result or entering, inner)

    def by_reader(self, tensor: int) -> bool:
        """Whether an operator that reads the tensor keeps it, or a region that it enters."""
        return self._enters(tensor) or any(
            k in self.subdims.rules[i].rule.saves
            and self._has_gradient(i)
            and self.regions.of(i) is None
            for i, k in self.readers.get(tensor, ())
        )

    def by_anyone(self, tensor: int) -> bool:
        """Whether a reader or the writer keeps the tensor."""
        writer = self.writer[tensor]
        writes = self.subdims.rules[writer].rule.saves_results and self.regions.of(writer) is None
        return writes or self.by_reader(tensor)

    def _enters(self, tensor: int) -> bool:
        """Whether a region that is run again reads the tensor from outside."""
        if not self.regions or tensor not in self.writer:
            return False
        home = self.regions.of(self.writer[tensor])
        reading = {self.regions.of(i) for i, _ in self.readers.get(tensor, ())}
        return bool(reading - {None, home})

    def _has_gradient(self, index: int) -> bool:
        return any(self.graph.tensors[t].requires_grad for t in self.graph.ops[index].results)


def saved_bytes(space: Space, tensors: Tensors, kept: Kept, mesh: Mesh) -> Values:
    """Bytes that each configuration keeps until backward, on the fullest device."""
    memory = np.zeros(len(space.configs))
    for k in kept.operands:
        memory += operand_local_bytes(space, k, tensors.inputs[k], tensors.input_atoms[k], mesh)
    for extra in kept.inner:
        size = extra.per_item * points(space, extra.points, mesh)
        memory += np.where(_is_there(space, extra), size, 0.0)
    return memory + result_bytes(space, tensors, mesh) if kept.result else memory


def _is_there(space: Space, extra: Extra) -> NDArray[np.bool_]:
    """For each configuration, whether an operator makes something beside its results."""
    if not extra.factor:
        return np.ones(len(space.configs), dtype=bool)
    members = [f for f in range(len(space.rule.factors)) if space.rule.base(f) == extra.factor]
    is_split = np.isin(space.configs, members).any(axis=1)
    found: NDArray[np.bool_] = np.equal(is_split, extra.is_split)
    return found


def kept_operands(graph: Graph, subdims: Subdims, index: int) -> tuple[int, ...]:
    """The operands that autograd really keeps for the backward of an operator.

    One that only the gradients of others need is kept where one of those flows.
    """
    op, rule = graph.ops[index], subdims.rules[index].rule
    if not any(graph.tensors[t].requires_grad for t in op.results):
        return ()
    flows = [graph.tensors[t].requires_grad for t in op.inputs]
    return tuple(
        k
        for k in rule.saves
        if op.operands[k].name not in rule.operator.remakes
        and (k not in rule.crossed or any(flows[:k] + flows[k + 1 :]))
    )


def keeps_results(graph: Graph, subdims: Subdims, index: int) -> bool:
    """Whether autograd keeps what the operator leaves, not only something made beside it."""
    rule = subdims.rules[index].rule
    flows = any(graph.tensors[t].requires_grad for t in graph.ops[index].results)
    return flows and rule.saves_results and not rule.operator.saves_beside


def extras(graph: Graph, subdims: Subdims, index: int) -> tuple[Extra, ...]:
    """What an operator makes for its backward beside its results."""
    op, operator = graph.ops[index], subdims.rules[index].rule.operator
    if not any(graph.tensors[t].requires_grad for t in op.results):
        return ()
    return operator.extras(Call.of(graph, op), access_of(graph, subdims, index))
