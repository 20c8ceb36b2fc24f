"""Compiled steps: what inductor fuses, what never lies in memory, and what backward keeps.

`torch.compile` makes one kernel of pointwise operators, casts, views and reductions of rows that
follow one another. Such a kernel reads once what others left, and writes what others need; nothing
between is in memory. Products, attention, convolutions, sorts and scatters stay kernels of their
own. Operators can be in one kernel if no other kernel stands between them: so each has a stage,
the number of kernels before it, and neighbours of one stage are a group.

    x1 = x + attended          stage 2 |  one kernel: reads x and attended, writes x1 and n
    n = norm(x1)               stage 2 |
    h = up(n)                          a product
    g = gelu(h)                stage 3 |  one kernel

Backward likewise, over gradients. It computes cheap results again from what was kept: the
partitioner of AOTAutograd keeps the fewest bytes from which all that backward needs can be made by
operators that fuse (a minimum cut). It keeps what a product needs itself, since that would have to
be written anyway, and makes nothing again whose operand was read before the last product and is
read again (a sum with what went around a product), no concatenation and no small result of a
reduction. A tensor that no kernel would write counts twice (torch 2.13,
`torch/_functorch/partitioners.py`, `solve_min_cut`). Of an operator whose gradient passes or does
not, it may keep a byte an item that says which; of a dropout and of most pools it always does.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardfold.graph import Graph, Op
from shardfold.operators import Operator
from shardfold.operators.kernels import Fused
from shardfold.search.minimum_cut import SINK, SOURCE, Arc, minimum_cut
from shardfold.sharding import Subdims

# Memory that a description says to be new, but made element by element.
SPREAD = ("pointwise", "cast", "dropout", "joined", "copy", "copy if needed")
VIEWS = ("view", "permuted", "cut", "broadcast")
# Bytes that a copy moves in the time in which a fused kernel moves one: read off eight models that
# were compiled on an H200 (benchmarks/results/foreign-h200-compiled.json). One that reduces rows
# reads them again for what it makes of the result.
BY_ELEMENTS, BY_ROWS = 1.15, 2.2
# Their gradient passes or does not, item by item; which of it is a byte.
GATES = {f"aten.{name}" for name in "relu relu6 hardtanh leaky_relu threshold clamp".split()}
GATES |= {"aten.clamp_min", "aten.clamp_max"}
FLAT = ("aten.linear", "aten.mm", "aten.addmm")  # as they are, of matrices
LARGEST_WINDOW = 25  # of a maximum whose place is kept (torch/_inductor/lowering.py)
SMALL = 4.0  # a reduction that leaves a smaller part is not made again
SAME = ("view", "permuted", "copy if needed", "cast", "dropout")  # all elements, and no others


def is_fused(operator: Operator, engine: str) -> bool:
    """Whether inductor makes an operator a part of a kernel with others."""
    if engine == "matrix" or operator.is_convolution or operator.memory == "attention":
        return False
    return operator.memory in (*SPREAD, *VIEWS) or bool(operator.fuses) or engine == "none"


@dataclass(frozen=True)
class Fusion:
    """How the operators of a graph are put together, and what is in memory.

    Tensors stand for all views of them.
    """

    ops: tuple[Fused | None, ...]  # of each operator; None: a kernel of its own
    kept: frozenset[int]  # for backward
    absent: frozenset[int]  # tensors that are never in memory
    absent_gradients: frozenset[int]
    keepers: Mapping[int, tuple[int, ...]]  # of each that is kept: operators whose backward reads
    masks: frozenset[int]  # operators of which a byte an item is kept


def fused(graph: Graph, subdims: Subdims, aliases: Mapping[int, int]) -> Fusion:
    """What a compiler makes of a graph."""
    return _Fuser(graph, subdims, aliases).run()


@dataclass
class _Group:
    """Operators that are one kernel: what it reads and writes, by tensor."""

    ops: list[int] = field(default_factory=list)
    reads: dict[object, float] = field(default_factory=dict)
    writes: dict[object, float] = field(default_factory=dict)
    extra: float = 0.0  # of reductions that read again
    kernels: int = 1
    has_rows: bool = False  # some operator needs a whole row before it can go on

    @property
    def bytes(self) -> float:
        """As a copy would take as long for."""
        least = sum(self.reads.values()) + sum(self.writes.values()) + self.extra
        return least * (BY_ROWS if self.has_rows else BY_ELEMENTS)


def _keeps_offsets(op: Op) -> bool:
    """Whether a pool keeps where in its window each maximum was: a byte, and not its operand."""
    windows = op.attributes.get("kernel_size")
    if not op.kind.startswith("aten.max_pool") or windows is None:
        return False
    rank = int(op.kind[len("aten.max_pool")])
    sides = [windows] if isinstance(windows, int) else list(windows)
    return math.prod(sides * (rank if len(sides) == 1 else 1)) <= LARGEST_WINDOW


class _Fuser:
    def __init__(self, graph: Graph, subdims: Subdims, aliases: Mapping[int, int]) -> None:
        self.graph, self.aliases = graph, aliases
        self.rules = [rule.rule for rule in subdims.rules]
        self.fuses = [is_fused(rule.operator, rule.engine) for rule in self.rules]
        self.idle = [r.operator.is_idle(op) for r, op in zip(self.rules, graph.ops, strict=True)]
        self.writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}
        self.readers: dict[int, list[int]] = {}
        for i, op in enumerate(graph.ops):
            for t in dict.fromkeys(map(self.root, op.inputs)):
                if not (self.is_view(i) and t == self.root(op.results[0])):
                    self.readers.setdefault(t, []).append(i)

    def root(self, tensor: int) -> int:
        """The tensor whose memory a view shares."""
        while tensor in self.aliases:
            tensor = self.aliases[tensor]
        return tensor

    def is_view(self, op: int) -> bool:
        """Whether an operator's results share the memory of its operand."""
        return self.graph.ops[op].results[0] in self.aliases

    def size(self, tensor: int) -> float:
        return float(self.graph.tensors[tensor].type.bytes)

    def made(self, op: int) -> Iterator[int]:
        """The results that are new memory."""
        return (t for t in self.graph.ops[op].results if t not in self.aliases)

    def is_activation(self, tensor: int) -> bool:
        return self.graph.tensors[tensor].role == "activation"

    def run(self) -> Fusion:
        forward = self._groups(self._stages())
        backward = self._groups(self._backward_stages())
        needed = [self._needed(i) for i in range(len(self.graph.ops))]
        chosen = self._kept(needed)
        kept = frozenset(t for t in chosen if t >= 0)
        gates = frozenset(~t for t in chosen if t < 0)
        masks = gates | {i for i, op in enumerate(self.graph.ops) if _keeps_offsets(op)}
        needed = [frozenset() if i in gates else each for i, each in enumerate(needed)]
        absent = self._absent(forward, kept)
        absent_gradients = self._absent_gradients(backward)
        keepers = self._keepers(needed, kept)
        ahead = self._forward_traffic(forward, absent)
        back = self._backward_traffic(backward, needed, kept, absent_gradients)
        bearers = self._bearers(ahead, back)
        return Fusion(bearers, kept, absent, absent_gradients, keepers, masks)

    # Groups

    def _stages(self) -> list[int]:
        """For each operator, how many kernels stand before it on the longest way."""
        found = [0] * len(self.graph.ops)
        after: dict[int, int] = {}
        for i, op in enumerate(self.graph.ops):
            stage = max((after.get(t, 0) for t in op.inputs), default=0)
            if self._reduces_first(i):
                stage += 1  # its statistics are complete before anything is made of them
            found[i] = stage
            ends = not self.fuses[i] or self._ends_group(i)
            after.update(dict.fromkeys(op.results, stage + ends))
        return found

    def _backward_stages(self) -> list[int]:
        found = [0] * len(self.graph.ops)
        before: dict[int, int] = {}
        for i in reversed(range(len(self.graph.ops))):
            op = self.graph.ops[i]
            stage = max((before.get(t, 0) for t in op.results), default=0)
            if self._reduces_first(i):
                stage += 1
            found[i] = stage
            for t in op.inputs:
                before[t] = max(before.get(t, 0), stage + (not self.fuses[i]))
        return found

    def _reduces_first(self, op: int) -> bool:
        """Whether an operator needs statistics of other elements than those of its own row."""
        operator = self.rules[op].operator
        return operator.fuses == "by channels"

    def _needs_row(self, op: int) -> bool:
        return self.rules[op].operator.fuses in ("rows", "reduction")

    def _ends_group(self, op: int) -> bool:
        """Whether an operator sums over other dims than the last: no row is complete before."""
        if self.rules[op].operator.fuses != "reduction":
            return False
        before = self.graph.tensors[self.graph.ops[op].inputs[0]].type.shape
        after = self.graph.tensors[self.graph.ops[op].results[0]].type.shape
        rows = math.prod(after)
        kept = 1
        for size in before:  # leading dims that stay make the rows
            if kept == rows:
                break
            kept *= size
        return rows == 1 or kept != rows

    def _groups(self, stages: Sequence[int]) -> list[int]:
        """For each operator the number of its group; neighbours of one stage are in one."""
        parent = list(range(len(self.graph.ops)))

        def find(i: int) -> int:
            while parent[i] != i:
                parent[i] = parent[parent[i]]
                i = parent[i]
            return i

        for tensor, readers in self.readers.items():
            writer = self.writer.get(tensor)
            near = [writer, *readers] if writer is not None else readers
            joined = [i for i in near if self.fuses[i] and not self.idle[i]]
            by_stage: dict[int, int] = {}
            for i in joined:
                first = by_stage.setdefault(stages[i], i)
                if self.is_activation(tensor):
                    parent[find(i)] = find(first)
        for i in range(len(self.graph.ops)):  # a view is where its operand is made
            if self.is_view(i):
                at = self.writer.get(self.root(self.graph.ops[i].results[0]))
                if at is not None and self.fuses[at] and stages[at] == stages[i]:
                    parent[find(i)] = find(at)
        return [find(i) for i in range(len(self.graph.ops))]

    # What backward needs and what is kept for it

    def _needed(self, op: int) -> frozenset[int]:
        """The activations that the backward of an operator reads."""
        if not self.graph.has_gradient(op) or self.idle[op] or _keeps_offsets(self.graph.ops[op]):
            return frozenset()
        rule, inputs = self.rules[op], self.graph.ops[op].inputs
        flows = [self.graph.tensors[t].requires_grad for t in inputs]
        operands = [
            self.root(inputs[k])
            for k in rule.saves
            if k not in rule.crossed or any(flows[:k] + flows[k + 1 :])
        ]
        if rule.saves_results and not rule.operator.saves_beside:
            operands += map(self.root, self.graph.ops[op].results)
        return frozenset(t for t in operands if self.is_activation(t))

    def _kept(self, needed: Sequence[frozenset[int]]) -> frozenset[int]:
        """The fewest bytes from which all that is needed can be made by operators that fuse.

        A negative number is a byte an item that says where the gradient of that operator passes.
        What another kernel reads is kept, and not made again. It may be kept as the view that the
        kernel reads: then what fuses has no use for it.
        """
        apart = [(i, t) for i, each in enumerate(needed) for t in each if not self.fuses[i]]
        itself = {t for _, t in apart}
        viewed = {t for i, t in apart if self._views(i, t)}
        banned = self._banned()
        entrance: dict[int, int] = {}  # a tensor is kept by the arc from there to the next vertex
        arcs: list[Arc] = []
        asked: deque[int] = deque()

        def into(tensor: int) -> int:
            if tensor not in entrance:
                entrance[tensor] = 2 + 2 * len(entrance)
                asked.append(tensor)
            return entrance[tensor]

        for i, each in enumerate(needed):
            is_gate = self.fuses[i] and self.graph.ops[i].kind in GATES and bool(each)
            for tensor in (~i,) if is_gate else each:
                if not self.fuses[i] and self._views(i, tensor):
                    continue
                arcs.append((into(tensor) + 1, SINK, math.inf))
        while asked:
            tensor = asked.popleft()
            here = entrance[tensor]
            arcs.append((here, here + 1, self._weight(tensor)))
            if tensor < 0:
                parents = needed[~tensor]
            elif tensor in itself or self.writer[tensor] in banned:
                arcs.append((SOURCE, here, math.inf))
                continue
            else:
                inputs = self.graph.ops[self.writer[tensor]].inputs
                parents = frozenset(filter(self.is_activation, map(self.root, inputs)))
            arcs += [(into(each) + 1, here, math.inf) for each in sorted(parents)]
        _, made = minimum_cut(2 + 2 * len(entrance), arcs, nearest="sink")
        cut = (t for t, v in entrance.items() if v in made and v + 1 not in made)
        return frozenset({*cut, *viewed})

    def _views(self, op: int, tensor: int) -> bool:
        """Whether a kernel reads a tensor as a view: all but products and convolutions of it."""
        called = self.graph.ops[op]
        if tensor not in called.inputs:
            return True
        is_flat = len(self.graph.tensors[tensor].type.shape) == 2
        return not (self.rules[op].operator.is_convolution or (is_flat and called.kind in FLAT))

    def _weight(self, tensor: int) -> float:
        """Bytes to keep; twice where no kernel of forward would write them."""
        if tensor < 0:
            result = self.graph.ops[~tensor].results[0]
            return 2.0 * math.prod(self.graph.tensors[result].type.shape)
        at, readers = self.writer[tensor], self.readers.get(tensor, ())
        opens = self._opens(at)
        is_inner = all(self._joins(at, r) or (opens and self._views(r, tensor)) for r in readers)
        return self.size(tensor) * (2.0 if is_inner else 1.0)

    def _joins(self, op: int, reader: int) -> bool:
        """Whether one kernel may be both: it may end in a concatenation, and not begin with one."""
        if self.rules[reader].operator.memory == "joined":
            return True
        return self._opens(op) and self.fuses[reader]

    def _opens(self, op: int) -> bool:
        """Whether what an operator leaves may be read in its kernel, as the partitioner sees it.

        It takes one of several results for a kernel that fuses: attention, and a pool with places.
        """
        memory = self.rules[op].operator.memory
        if memory == "attention" or _keeps_offsets(self.graph.ops[op]):
            return True
        return self.fuses[op] and memory != "joined"

    def _banned(self) -> set[int]:
        """The operators that are not run again."""
        found = {i for i, fuses in enumerate(self.fuses) if not fuses}
        for i, op in enumerate(self.graph.ops):
            operator = self.rules[i].operator
            read = sum(map(self.size, op.inputs))
            is_small = SMALL * sum(map(self.size, op.results)) < read
            if operator.memory == "joined" or (operator.fuses == "reduction" and is_small):
                found.add(i)
        for tensor, readers in self.readers.items():
            at = self.writer.get(tensor)
            if at is None or not self._opens(at) or len(readers) < 2:
                continue
            first = self._first_apart(readers)
            found |= {r for r in readers if r > first and self._joins(at, r)}
        return found

    def _first_apart(self, readers: Sequence[int]) -> int:
        """The first operator after some that is in none of their kernels, up to the last one."""
        last, waiting = max(readers), [(r, True) for r in readers]
        heapq.heapify(waiting)
        seen = set(waiting)
        while waiting:
            op, is_joined = heapq.heappop(waiting)
            if not is_joined:
                return op
            for result in self.graph.ops[op].results:
                for r in self.readers.get(self.root(result), ()):
                    following = (r, self._joins(op, r))
                    if op < r <= last and following not in seen:
                        seen.add(following)
                        heapq.heappush(waiting, following)
        return last

    def _sources(self, tensor: int, kept: frozenset[int]) -> set[int]:
        """What is read to make a tensor once more."""
        found, asked, seen = set[int](), [tensor], {tensor}
        while asked:
            each = asked.pop()
            if each in kept or not self.is_activation(each):
                found.add(each)
                continue
            for t in set(map(self.root, self.graph.ops[self.writer[each]].inputs)) - seen:
                seen.add(t)
                asked.append(t)
        return found

    def _keepers(
        self, needed: Sequence[frozenset[int]], kept: frozenset[int]
    ) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for i, each in enumerate(needed):
            for t in {s for tensor in each for s in self._sources(tensor, kept)} & kept:
                found.setdefault(t, []).append(i)
        return {t: tuple(ops) for t, ops in found.items()}

    # What is in memory

    def _absent(self, group: Sequence[int], kept: frozenset[int]) -> frozenset[int]:
        """Results that only their own kernel reads."""
        return frozenset(
            t
            for i in range(len(self.graph.ops))
            if self.fuses[i]
            for t in self.made(i)
            if t not in kept
            and t != self.graph.loss
            and all(self.fuses[r] and group[r] == group[i] for r in self.readers.get(t, ()))
        )

    def _absent_gradients(self, group: Sequence[int]) -> frozenset[int]:
        """Gradients that the kernel which makes them takes up."""
        found = set()
        for tensor, readers in self.readers.items():
            at = self.writer.get(tensor)
            if at is None or not self.fuses[at] or not self.graph.tensors[tensor].requires_grad:
                continue
            if all(self.fuses[r] and group[r] == group[at] for r in readers):
                found.add(tensor)
        views = (t for t in self.aliases if self.root(t) in found)
        return frozenset({*found, *views})

    # Traffic

    def _forward_traffic(self, group: Sequence[int], absent: frozenset[int]) -> dict[int, _Group]:
        found: dict[int, _Group] = {}
        for i, op in enumerate(self.graph.ops):
            if not self.fuses[i] or self.idle[i]:
                continue
            each = found.setdefault(group[i], _Group())
            each.ops.append(i)
            each.has_rows |= self._needs_row(i)
            for k, t in enumerate(map(self.root, op.inputs)):
                if t in absent or (self.is_view(i) and t == self.root(op.results[0])):
                    continue
                at = self.writer.get(t)
                if at is None or not self.fuses[at] or group[at] != group[i]:
                    sparse = k in self.rules[i].sparse
                    size = self.size(op.results[0]) if sparse else self.size(t)
                    each.reads[t] = max(each.reads.get(t, 0.0), size)
            each.writes.update({t: self.size(t) for t in self.made(i) if t not in absent})
            if self._reduces_first(i):  # the statistics read it, too
                each.extra += self.size(self.root(op.inputs[0]))
                each.kernels += 1
        return found

    def _backward_traffic(
        self,
        group: Sequence[int],
        needed: Sequence[frozenset[int]],
        kept: frozenset[int],
        absent: frozenset[int],
    ) -> dict[int, _Group]:
        found: dict[int, _Group] = {}
        for i, op in enumerate(self.graph.ops):
            if not self.fuses[i] or self.idle[i] or not self.graph.has_gradient(i):
                continue
            if not any(self.graph.tensors[t].requires_grad for t in op.inputs):
                continue
            if self.rules[i].operator.memory in SAME and self.is_view(i):
                continue  # a gradient is viewed as it is
            each = found.setdefault(group[i], _Group())
            each.ops.append(i)
            each.has_rows |= self._needs_row(i)
            for t in self.made(i):
                each.reads.update(self._gradients_of(t, group[i], group))
            for t in {s for n in needed[i] for s in self._sources(n, kept)}:
                each.reads[t] = self.size(t)
            for t in dict.fromkeys(map(self.root, op.inputs)):
                if not self.graph.tensors[t].requires_grad:
                    continue
                if t not in absent and self.is_activation(t):
                    each.writes["gradient", t] = self.size(t)
            if self._reduces_first(i):
                each.extra += 2 * self.size(self.root(op.inputs[0]))
                each.kernels += 1
            else:
                self._sum_up(each, i)
        for each in found.values():  # what it makes and takes up itself is not read
            for key in each.writes.keys() & each.reads.keys():
                del each.reads[key]
        return found

    def _gradients_of(self, tensor: int, here: int, group: Sequence[int]) -> dict[object, float]:
        """The gradients of a tensor that other kernels left: one of each kernel that read it."""
        if not self.graph.tensors[tensor].requires_grad:
            return {}
        others = [r for r in self.readers.get(tensor, ()) if self.graph.has_gradient(r)]
        kernels = [r for r in others if not self.fuses[r]]
        left: dict[object, float] = {("from", tensor, r): self.size(tensor) for r in kernels}
        if any(self.fuses[r] and group[r] != here for r in others):
            left["gradient", tensor] = self.size(tensor)
        return left

    def _sum_up(self, each: _Group, op: int) -> None:
        """Gradients of parameters that many rows share: a sum over rows, in a kernel by itself.

        It reads the gradient of the result, and what that is multiplied with.
        """
        called, tensors = self.graph.ops[op], self.graph.tensors
        whole = self.size(called.results[0])
        trained = [
            t for t in called.inputs if not self.is_activation(t) and tensors[t].requires_grad
        ]
        each.writes.update({("gradient", t): self.size(t) for t in trained})
        if any(self.size(t) < whole for t in trained):
            each.extra += 2 * whole if self.rules[op].saves else whole
            each.kernels += 1

    def _bearers(
        self, ahead: Mapping[int, _Group], back: Mapping[int, _Group]
    ) -> tuple[Fused | None, ...]:
        """The largest operator of each group bears its traffic."""
        found: list[Fused | None] = [Fused() if fuses else None for fuses in self.fuses]
        for groups, is_forward in ((ahead, True), (back, False)):
            for each in groups.values():
                if not each.bytes:
                    continue
                at = max(each.ops, key=lambda i: (self.size(self.graph.ops[i].results[0]), i))
                before = found[at] or Fused()
                calls = float(each.kernels)
                found[at] = (
                    Fused(each.bytes, before.backward_bytes, calls, before.backward_kernels)
                    if is_forward
                    else Fused(before.forward_bytes, each.bytes, before.forward_kernels, calls)
                )
        return tuple(found)
