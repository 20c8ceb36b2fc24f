"""A run in two parts, each a run of its own, so that the parts can be treated differently.

A graph holds three periods of a long run: the first, the one that stands for all that are left out
(the model period), and the last. The first `first` periods and the rest become two runs; the last
period before the border stands alone, as it is read by another kind of period than the others.
For that the graph gets the four periods around the border, as copies of the model period under
their own names.

    before: 0 1 ... 9            ten periods, three in the graph
    after:  0 1 ... 4  5  6 7 ... 9   five, one and four; seven in the graph
"""

from __future__ import annotations

from dataclasses import replace

from shardfold.graph.graph import Graph
from shardfold.graph.repeats import MODEL, Repeat
from shardfold.graph.values import Op, Operand, Tensor


def divided(graph: Graph, number: int, first: int) -> Graph:
    """The same model with its run `number` as two: of the periods before `first`, and after.

    A part of a few periods is no run: all of them are in the graph.
    """
    repeat = graph.repeats[number]
    if not 0 < first < repeat.count:
        raise ValueError(f"A run of {repeat.count} periods cannot be divided after {first}.")
    before = _part(range(first - 1), tail=1)
    after = _part(range(first, repeat.count), tail=repeat.traced - MODEL - 1)
    wanted = [*before, first - 1, *after]
    old = [*range(MODEL + 1), *range(repeat.count - (repeat.traced - MODEL - 1), repeat.count)]
    copier = _Copier(graph, repeat)
    middle = [op for p in wanted if p not in old for op in copier.copy(p)]
    border = repeat.start + (MODEL + 1) * repeat.length
    rest = [copier.rewired(op) for op in graph.ops[border:]]
    starts = (repeat.start, repeat.start + (len(before) + 1) * repeat.length)
    parts = (
        replace(
            repeat, start=start, traced=len(traced), count=len(all_), paths=_paths(repeat, all_)
        )
        for start, traced, all_ in zip(
            starts, (before, after), (range(first - 1), range(first, repeat.count)), strict=True
        )
        if len(traced) < len(all_)
    )
    later = (replace(each, start=each.start + len(middle)) for each in graph.repeats[number + 1 :])
    return replace(
        graph,
        tensors=tuple(copier.tensors),
        ops=(*graph.ops[:border], *middle, *rest),
        repeats=(*graph.repeats[:number], *parts, *later),
    )


def _part(periods: range, tail: int) -> list[int]:
    """The periods of a part that are in the graph: two at its head, and its tail."""
    if len(periods) <= MODEL + 1 + tail:
        return list(periods)
    return [*periods[: MODEL + 1], *periods[len(periods) - tail :]]


def _paths(repeat: Repeat, periods: range) -> tuple[tuple[str, ...], ...]:
    return repeat.paths[periods.start : periods.stop]


class _Copier:
    """Copies the model period, one after the other, each reading what the one before wrote."""

    def __init__(self, graph: Graph, repeat: Repeat) -> None:
        self.repeat, self.tensors = repeat, list(graph.tensors)
        self.model = [graph.ops[i] for i in repeat.ops(MODEL)]
        before = [graph.ops[i] for i in repeat.ops(MODEL - 1)]
        pairs = zip(before, self.model, strict=True)
        self.following = {
            old: new
            for ours, theirs in pairs
            for old, new in zip(ours.results, theirs.results, strict=True)
        }
        self.written = {t for op in self.model for t in op.results}
        self.last = {t: t for t in self.written}  # the model period's tensors in the newest copy

    def copy(self, period: int) -> list[Op]:
        """The operators of a period that the graph left out."""
        own: dict[int, int] = {}
        for tensor in (t for op in self.model for t in (*op.inputs, *op.results)):
            if tensor not in own:
                own[tensor] = self._tensor(tensor, period)
        ops = [self._op(op, own, period) for op in self.model]
        self.last = {t: own[t] for t in self.written}
        return ops

    def rewired(self, op: Op) -> Op:
        """An operator after the copies, which reads the newest of them."""
        operands = tuple(replace(o, tensor=self.last.get(o.tensor, o.tensor)) for o in op.operands)
        return op if operands == op.operands else replace(op, operands=operands)

    def _tensor(self, tensor: int, period: int) -> int:
        """The period's own tensor; the one before's for what that wrote; else the shared one."""
        if tensor in self.following:
            return self.last[self.following[tensor]]
        old: Tensor = self.tensors[tensor]
        names = tuple(self._renamed(name, period) for name in old.names)
        if tensor not in self.written and (old.role == "activation" or names == old.names):
            return tensor
        self.tensors.append(replace(old, names=names))
        return len(self.tensors) - 1

    def _op(self, op: Op, own: dict[int, int], period: int) -> Op:
        origin = replace(op.origin, module=self._renamed(op.origin.module, period))
        return Op(
            self._renamed(op.name, period),
            op.kind,
            tuple(Operand(o.name, own[o.tensor]) for o in op.operands),
            tuple(own[t] for t in op.results),
            op.attributes,
            origin,
        )

    def _renamed(self, name: str, period: int) -> str:
        return self.repeat.renamed(name, period - MODEL - 1)
