"""Activation checkpointing: blocks whose activations are dropped and recomputed for backward.

A region is a stretch of one block's operators. Forward keeps what the region reads from outside
and drops what its operators would keep; before its backward, the region's operators and the
reshards of what they read run once more. The last operator of a region is the last that keeps an
operand: of it, only the operand is made again, so it does not run twice itself.

    forward:   keep x,  a = norm(x), b = up(a), c = gelu(b), y = down(c)
    backward:           a = norm(x), b = up(a), c = gelu(b), then the gradients of all four

A block is a numbered member of a list of modules, such as `layers.3`, that at least two others
are like. A model without such blocks has nothing to recompute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardfold.errors import PlanError
from shardfold.graph import Graph
from shardfold.graph.repeats import MODEL, operator_order
from shardfold.sharding import Subdims

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
    return Regions(found, frozenset(i for i in last if _keeps_only_operands(subdims, i)))


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


def _keeps_only_operands(subdims: Subdims, op: int) -> bool:
    """Whether backward needs nothing that the operator computes; a norm needs its statistics."""
    rule = subdims.rules[op].rule
    return rule.engine == "matrix" and not rule.saves_results
