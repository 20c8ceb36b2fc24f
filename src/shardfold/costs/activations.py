"""Activations: what is saved for backward, and what activation checkpointing recomputes.

Activation checkpointing drops some activations and computes them again for backward. It is decided
operator by operator. Of an operator that *runs again* nothing is kept: neither what it reads, nor
its results, nor what it makes beside them. What it reads must be there when it runs again: made
again as well, or kept, as it lies there.

    forward:   keep x and b,  a = norm(x), b = up(a), c = gelu(b), y = down(c)
    backward:  c = gelu(b), the gradients of down and gelu, a = norm(x), those of up and norm

Here `norm` and `gelu` run again. `up` and `down` do not, but their backward reads what is made
again. A *region* is a set of operators of one block that run again together, just before the first
backward that needs something of them: those of which one reads what another makes.

A block is a numbered member of a list of modules, such as `layers.3`, that at least two others
are like. A model without such blocks has nothing to recompute. What goes from one block to the next
is kept.

One decision pays for the memory of each tensor that is saved for backward. A tensor is kept because
an operator that reads it, or the one that writes it, needs it for its gradient. It is counted once:
where its layout is decided if it has several readers, at its reader if that keeps it, else at its
writer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, takewhile

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.costs.fusion import Fusion
from shardfold.costs.memory_format import access_of, aliases, fusion_of
from shardfold.costs.operator_steps import Tensors, operand_local_bytes, points, result_bytes
from shardfold.costs.steps import Values
from shardfold.errors import PlanError
from shardfold.graph import Graph, Op
from shardfold.graph.repeats import MODEL, operator_order
from shardfold.operators import Call, Extra
from shardfold.sharding import Space, Subdims

FEWEST_OPERATORS = 4  # a shorter block has little to drop
FEWEST_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Region:
    """Operators of a block that run again together, and what else reads what they make.

    >>> Region((2, 4), ((3, 0), (7, 1))).end
    7
    """

    ops: tuple[int, ...]  # in order
    reads: tuple[tuple[int, int], ...] = ()  # operands that others keep, but for this: made again

    @property
    def end(self) -> int:
        """The operator whose backward is the first that needs it."""
        return max(self.ops[-1], *(op for op, _ in self.reads), -1)

    def shifted(self, by: int) -> Region:
        """The same where operators are numbered otherwise."""
        return Region(
            tuple(op + by for op in self.ops), tuple((op + by, k) for op, k in self.reads)
        )

    @property
    def visited(self) -> list[int]:
        """All operators that something is brought to again, in order."""
        return sorted({*self.ops, *(op for op, _ in self.reads)})


@dataclass(frozen=True)
class Regions:
    """All that runs again.

    >>> regions = Regions((Region((2, 3), ((4, 0),)),))
    >>> [regions.runs_again(i) for i in range(6)]
    [False, False, True, True, False, False]
    >>> regions.brings_again(4, 0), regions.brings_again(4, 1), regions.brings_again(3, 1)
    (True, False, True)
    """

    regions: tuple[Region, ...] = ()

    @cached_property
    def _home(self) -> dict[int, int]:
        return {op: at for at, region in enumerate(self.regions) for op in region.ops}

    @cached_property
    def _reads(self) -> dict[tuple[int, int], int]:
        return {read: at for at, region in enumerate(self.regions) for read in region.reads}

    def of(self, op: int) -> int | None:
        """The number of the region in which an operator runs again."""
        return self._home.get(op)

    def runs_again(self, op: int) -> bool:
        """Whether the operator is run a second time."""
        return op in self._home

    def reads_again(self, op: int, operand: int) -> bool:
        """Whether an operator that runs once finds an operand made again."""
        return (op, operand) in self._reads

    def brings_again(self, op: int, operand: int) -> bool:
        """Whether an operand is moved once more, to where the operator needs it."""
        return op in self._home or (op, operand) in self._reads

    @property
    def ops(self) -> list[int]:
        """All operators that run again."""
        return sorted(self._home)

    def __bool__(self) -> bool:
        return bool(self.regions)


KEEP_ALL = Regions()


class Blocks:
    """The blocks of a graph that have others like them, and what may run again there."""

    def __init__(self, graph: Graph, subdims: Subdims) -> None:
        self.graph, self.subdims = graph, subdims
        self.ranges = tuple(_alike(graph))
        self.starts = {block.start: block for block in self.ranges}
        self.aliases = aliases(graph, subdims)
        self.readers, self.writer = graph.readers(), _writers(graph)

    def regions(self, again: Collection[int], *, whole: bool = False) -> Regions:
        """What runs again if these operators shall, as far as that is needed.

        An operator runs again if it keeps something beside what it reads, or if what it makes is
        needed. A view follows the memory that it is a view of. With `whole` all of them run again,
        and what others read of them is kept, as if they were a function by themselves.
        """
        found: list[Region] = []
        chosen = {i for i in again if self.may_run_again(i)}
        for block in self.ranges:
            inside = chosen.intersection(block)
            again = inside if whole else self._needed(block, inside)
            others = () if whole else [i for i in block if i not in again]
            found += self._of_block(again, others)
        return Regions(tuple(found))

    def may_run_again(self, op: int) -> bool:
        """Whether running it twice changes nothing: batch norm would count a batch twice."""
        return not self.subdims.rules[op].rule.operator.writes

    def kept_of(self, op: int, again: Collection[int]) -> Iterator[int]:
        """The operands of an operator that its backward reads, and that are made again."""
        for operand in kept_operands(self.graph, self.subdims, op):
            if self.writer.get(self.graph.ops[op].inputs[operand]) in again:
                yield operand

    def is_view(self, op: int) -> bool:
        """Whether the results share the memory of the first operand."""
        return self.graph.ops[op].results[0] in self.aliases

    def _needed(self, block: range, chosen: set[int]) -> set[int]:
        again = set(chosen)
        for op in reversed(block):  # a view of what is kept, read by what runs again
            if self.is_view(op) and any(i in again for i in self._read_by(op, block)):
                again.add(op)
        for op in block:  # a view of what is made again
            if self.is_view(op) and self.writer.get(self.graph.ops[op].inputs[0]) in again:
                again.add(op)
        for op in reversed(block):
            if op in again and not self._is_needed(op, block, again):
                again.discard(op)
        return again

    def _is_needed(self, op: int, block: range, again: set[int]) -> bool:
        if keeps_inside(self.graph, self.subdims, op):
            return True
        made = set(self.graph.ops[op].results)
        for reader in self._read_by(op, block):
            inputs = self.graph.ops[reader].inputs
            kept = {inputs[k] for k in kept_operands(self.graph, self.subdims, reader)}
            if reader in again or made & kept:
                return True
        return False

    def _made_for(self, op: int, again: set[int]) -> set[int]:
        return {w for t in self.graph.ops[op].inputs if (w := self.writer.get(t)) in again}

    def _read_by(self, op: int, block: range) -> list[int]:
        results = self.graph.ops[op].results
        return [i for t in results for i, _ in self.readers.get(t, ()) if i in block]

    def _of_block(self, again: set[int], others: Sequence[int]) -> Iterator[Region]:
        """Those of which one reads what another makes, or that one backward reads, together."""
        group = {op: {op} for op in again}
        together = [{op, *self._made_for(op, again)} for op in again]
        for op in others:
            inputs = self.graph.ops[op].inputs
            together.append({self.writer[inputs[k]] for k in self.kept_of(op, again)})
        for members in together:
            joined = set[int]().union(*(group[op] for op in members))
            group |= dict.fromkeys(joined, joined)
        for _, members in sorted({min(each): each for each in group.values()}.items()):
            reads = tuple((op, k) for op in others for k in self.kept_of(op, members))
            yield Region(tuple(sorted(members)), reads)


def block_regions(graph: Graph, subdims: Subdims, *, whole: bool = False) -> Regions:
    """Everything of every block: full recomputation; `whole`: even what is not needed."""
    blocks = Blocks(graph, subdims)
    every = [i for block in blocks.ranges for i in _trimmed(graph, subdims, block)]
    return blocks.regions(every, whole=whole)


def attention_regions(graph: Graph, subdims: Subdims, *, whole: bool = False) -> Regions:
    """The core of every attention, from its first product to its last, as Megatron-LM does it.

    That is what selective recomputation runs again (Korthikanti et al. 2022): products of two
    activations, and what stands between them. Their operands are kept; with `whole` the result is,
    too.
    """
    blocks = Blocks(graph, subdims)
    cores: list[int] = []
    for block in blocks.ranges:
        products = [i for i in block if _attends(graph, subdims, i)]
        cores += range(products[0], products[-1] + 1) if products else ()
    return blocks.regions(cores, whole=whole)


def product_regions(graph: Graph, subdims: Subdims) -> Regions:
    """All but attention and every second product, beginning with the first, as torchtitan does it.

    Its `selective` with the option `op` saves the results of attention and of the first, third,
    ... product with a weight of a block.
    """
    blocks = Blocks(graph, subdims)
    again: list[int] = []
    for block in blocks.ranges:
        weighed = [i for i in block if _is_product(graph, subdims, i, attends=False)]
        kept = {*weighed[::2], *(i for i in block if _is_product(graph, subdims, i, attends=True))}
        again += [i for i in _trimmed(graph, subdims, block) if i not in kept]
    return blocks.regions(again)


POLICIES: dict[str, Callable[[Graph, Subdims], Regions]] = {
    "always": block_regions,
    "attention": attention_regions,
    "products": product_regions,
}
"""What runs again by a word, whatever the memory."""


def _is_product(graph: Graph, subdims: Subdims, op: int, *, attends: bool) -> bool:
    is_product = subdims.rules[op].rule.engine == "matrix"
    return is_product and _attends(graph, subdims, op) == attends


def _attends(graph: Graph, subdims: Subdims, op: int) -> bool:
    inputs = [graph.tensors[t] for t in graph.ops[op].inputs]
    products = [t for t in inputs if t.role == "activation" and t.requires_grad]
    rule = subdims.rules[op].rule
    routes = "experts" in rule.operator.words.values()  # which reads the weights of its sum
    return rule.engine == "matrix" and len(products) > 1 and not routes


def stated_regions(ranges: Sequence[tuple[int, int]], graph: Graph, subdims: Subdims) -> Regions:
    """The regions that a plan states for a graph with all its periods."""
    if not ranges:
        return KEEP_ALL
    blocks = Blocks(graph, subdims)
    inside = {op for block in blocks.ranges for op in block if blocks.may_run_again(op)}
    last = max(inside, default=-1)  # a stranger's range may be of any length
    stated = [op for first, end in ranges for op in range(first, min(end, last + 2))]
    if not set(stated) <= inside:
        raise PlanError(
            "The plan recomputes operators that are in none of the model's repeated blocks, or "
            "that may not run twice. Plan again."
        )
    return blocks.regions(stated)


def in_model(regions: Regions, graph: Graph) -> tuple[tuple[int, int], ...]:
    """What runs again of the whole model, as stretches (first, end) that each lie in one block."""
    again = set(regions.ops)
    order = operator_order(graph)
    block_of = {op: block.start for block in _alike(graph) for op in block}
    places = [(at, op, copy) for at, (op, _, copy) in enumerate(order) if op in again]

    def stretch(numbered: tuple[int, tuple[int, int, int | None]]) -> object:
        number, (at, op, copy) = numbered
        return at - number, block_of[op], copy

    groups = (list(each) for _, each in groupby(enumerate(places), stretch))
    return tuple((each[0][1][0], each[-1][1][0] + 1) for each in groups)


def _alike(graph: Graph) -> list[range]:
    """The blocks of which there are enough of one kind, long enough; inner ones come first."""
    found: list[range] = []
    inside: set[int] = set()  # of the blocks that were found
    for depth in range(_depth(graph), 0, -1):
        new = [block for block in _alike_at(graph, depth) if inside.isdisjoint(block)]
        inside.update(*new)
        found += new
    return sorted(found, key=lambda block: block.start)


def _alike_at(graph: Graph, depth: int) -> list[range]:
    blocks = [block for block in _blocks(graph, depth) if len(block) >= FEWEST_OPERATORS]
    kinds = [tuple(graph.ops[i].kind for i in block) for block in blocks]
    many: Counter[tuple[str, ...]] = Counter()
    for block, kind in zip(blocks, kinds, strict=True):
        many[kind] += _stands_for(graph, block)
    return [b for b, kind in zip(blocks, kinds, strict=True) if many[kind] >= FEWEST_BLOCKS]


def _blocks(graph: Graph, depth: int) -> Iterator[range]:
    """Stretches of consecutive operators of one numbered module."""
    paths = [_block_path(op.origin.module, depth) for op in graph.ops]
    for path, each in groupby(range(len(paths)), paths.__getitem__):
        members = list(each)
        if path:
            yield range(members[0], members[-1] + 1)


def _depth(graph: Graph) -> int:
    """How deep lists of lists are nested."""
    modules = {op.origin.module for op in graph.ops}
    return max((_numbers(module.split("."))[1] for module in modules), default=0)


def _block_path(module: str, depth: int) -> str:
    """The outermost numbered module on a path, or nothing; of lists of lists, so many deep.

    >>> _block_path("model.layers.3.mlp.experts.0.up", 2), _block_path("lm_head", 1)
    ('model.layers.3', '')
    >>> _block_path("stages.0.2.conv1", 1), _block_path("stages.0.2.conv1", 2)
    ('stages.0', 'stages.0.2')
    """
    parts = module.split(".")
    first, count = _numbers(parts)
    return ".".join(parts[: first + min(count, depth)]) if count else ""


def _numbers(parts: Sequence[str]) -> tuple[int, int]:
    """Where the first numbers of a path are, and how many follow one another.

    >>> _numbers("stages.0.2.conv1".split(".")), _numbers(["lm_head"])
    ((1, 2), (1, 0))
    """
    first = next((at for at, part in enumerate(parts) if at and part.isdecimal()), len(parts))
    return first, sum(1 for _ in takewhile(str.isdecimal, parts[first:]))


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


def keeps_inside(graph: Graph, subdims: Subdims, op: int) -> bool:
    """Whether backward needs something that the operator makes; a norm needs its statistics."""
    if not graph.has_gradient(op):
        return False
    inner = any(extra.life == "kept" for extra in extras(graph, subdims, op))
    return inner or subdims.rules[op].rule.saves_results


def _writers(graph: Graph) -> dict[int, int]:
    return {t: i for i, op in enumerate(graph.ops) for t in op.results}


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
        self.fusion = fusion_of(graph, subdims)
        self.readers = graph.readers()
        self.writer = _writers(graph)

    def by_operator(self, index: int) -> Kept:
        """What the operator at `index` answers for."""
        op, rule = self.graph.ops[index], self.subdims.rules[index].rule
        if not self._has_gradient(index):
            return Kept()
        recomputed = self.regions.runs_again(index)
        if self.fusion is not None:
            return self._compiled(self.fusion, index, recomputed)
        operands = tuple(
            k
            for k in (() if recomputed else rule.saves)
            if self.graph.tensors[op.inputs[k]].role == "activation"
            and len(self.readers[op.inputs[k]]) == 1
            and not self.regions.reads_again(index, k)
        )
        several = len(self.readers.get(op.results[0], ())) > 1
        elsewhere = several or self.by_reader(op.results[0])
        entering = not several and any(self._enters(t) for t in op.results)
        result = rule.saves_results and not elsewhere and not recomputed
        made = () if recomputed else extras(self.graph, self.subdims, index)
        inner = tuple(extra for extra in made if extra.points and extra.life == "kept")
        return Kept(operands, result or entering, inner)

    def _compiled(self, fusion: Fusion, index: int, recomputed: bool) -> Kept:
        """Of a compiled step: results that its partitioner keeps, unless several share them."""
        op = self.graph.ops[index]
        own = [t for t in op.results if len(self.readers.get(t, ())) < 2]
        entering = any(self._enters(t) for t in own)
        kept = not recomputed and any(t in fusion.kept for t in own)
        made = () if recomputed else extras(self.graph, self.subdims, index)
        inner = tuple(extra for extra in made if extra.points and extra.life == "kept")
        return Kept((), kept or entering, inner)

    def by_reader(self, tensor: int) -> bool:
        """Whether an operator that reads the tensor keeps it, or a region that it enters."""
        if self.fusion is not None:
            return self._enters(tensor) or tensor in self.fusion.kept
        return self._enters(tensor) or any(
            k in self.subdims.rules[i].rule.saves
            and self._has_gradient(i)
            and not self.regions.brings_again(i, k)
            for i, k in self.readers.get(tensor, ())
        )

    def by_anyone(self, tensor: int) -> bool:
        """Whether a reader or the writer keeps the tensor."""
        if self.fusion is not None:
            return self.by_reader(tensor)
        writer = self.writer[tensor]
        saves = self.subdims.rules[writer].rule.saves_results
        writes = saves and not self.regions.runs_again(writer)
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
    is_own = graph.is_compiled  # then only parameters are told here
    flows = [graph.tensors[t].requires_grad for t in op.inputs]
    return tuple(
        k
        for k in rule.saves
        if op.operands[k].name not in rule.operator.remakes
        and not (is_own and graph.tensors[op.inputs[k]].role == "activation")
        and (k not in rule.crossed or any(flows[:k] + flows[k + 1 :]))
    )


def keeps_results(graph: Graph, subdims: Subdims, index: int) -> bool:
    """Whether autograd keeps what the operator leaves, not only something made beside it."""
    rule = subdims.rules[index].rule
    flows = any(graph.tensors[t].requires_grad for t in graph.ops[index].results)
    flows = flows and not graph.is_compiled
    return flows and rule.saves_results and not rule.operator.saves_beside


def extras(graph: Graph, subdims: Subdims, index: int) -> tuple[Extra, ...]:
    """What an operator makes for its backward beside its results."""
    op, operator = graph.ops[index], subdims.rules[index].rule.operator
    if not any(graph.tensors[t].requires_grad for t in op.results):
        return ()
    access = access_of(graph, subdims, index)
    found = operator.extras(Call.of(graph, op), access)
    if access.is_float8:
        found += _float8_copies(op)
    fusion = fusion_of(graph, subdims)
    if fusion is not None and index in fusion.masks:
        return (Extra(-1, 1.0),)
    if access.fused is None:
        return found
    # Fused with others, only a few numbers of each row are left of it, and what a dropout drew.
    is_drawn = operator.memory == "dropout"
    return tuple(extra for extra in found if extra.over or is_drawn)


def _float8_copies(op: Op) -> tuple[Extra, ...]:
    """Of what a product multiplies: its operands, backward its result's gradient, too."""
    names = [operand.name for operand in op.operands]
    matrices = [k for k, name in enumerate(names) if name not in ("bias", "self") or len(names) < 3]
    forward = tuple(Extra(k, 1.0, life="forward") for k in matrices)
    backward = tuple(Extra(k, 1.0, life="backward") for k in (*matrices, -1))
    return forward + backward
