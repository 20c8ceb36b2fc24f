"""A plan for every layer of a model of which the graph holds only a few periods.

What a period's operators cost depends on its own choices and on those of the periods before and
after it. So each distinct triple of choices is described once, at the model period of the graph
with its neighbours set to match, and the entries are given the names of every period they hold
for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardfold.costs.steps import Compute
from shardfold.costs.unroll import Copies, Unfolded
from shardfold.graph.repeats import MODEL, places
from shardfold.plans.plan import OperatorEntry, ParameterEntry, TensorEntry, UnsplitEntry
from shardfold.simulate.decoded import Assembly

Ints = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class Whole:
    """The solved problem of a whole model; `assembly` describes the graph's own vertices."""

    assembly: Assembly
    unfolded: Unfolded
    choice: Ints  # of every vertex of the unfolded problem

    @cached_property
    def runs(self) -> list[_Run]:
        """The runs, with who describes each of their periods."""
        return [_Run(self.assembly, run, run.rows(self.choice)) for run in self.unfolded.runs]

    def operators(self) -> tuple[OperatorEntry, ...]:
        """An entry for every operator of the model, in execution order."""
        found: list[OperatorEntry] = []
        at = 0
        for run in self.runs:
            found += self.assembly.operators(range(at, run.repeat.start))
            found += run.operators()
            at = run.repeat.end
        return (*found, *self.assembly.operators(range(at, len(self.assembly.graph.ops))))

    def tensors(self) -> tuple[TensorEntry, ...]:
        """An entry for every tensor that several operators read, as they are written."""
        graph, vertices = self.assembly.graph, self.assembly.tabulated.vertices
        place = places(graph)
        writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}
        found = [
            (place[writer[vertices[v].index]], self.assembly.tensor(v))
            for v in self._outside
            if vertices[v].what == "tensor"
        ]
        for run in self.runs:
            first, length = place[run.repeat.start], run.repeat.length
            for order, made in run.each(run.tensors):
                paths, start = run.repeat.paths[order], first + order * length
                found += [
                    (start + (writer[index] - run.repeat.start) % length, entry.under(paths))
                    for index, entry in made
                ]
        return tuple(entry for _, entry in sorted(found, key=lambda pair: pair[0]))

    def parameters(self) -> tuple[ParameterEntry, ...]:
        """An entry for every parameter of the model, by name."""
        vertices = self.assembly.tabulated.vertices
        inside = {
            vertices[v].index
            for run in self.runs
            for v in run.copies.traced.reshape(-1).tolist()
            if vertices[v].what == "parameter"
        }
        graph = self.assembly.graph
        found = [
            entry
            for index, entry in zip(graph.parameters(), self.assembly.parameters(), strict=True)
            if index not in inside
        ]
        for run in self.runs:
            for order, made in run.each(run.parameters):
                found += [entry.under(run.repeat.paths[order]) for entry in made]
        return tuple(sorted(found, key=lambda entry: entry.names))

    @cached_property
    def _outside(self) -> list[int]:
        """The vertices that are in no run."""
        in_runs = {v for run in self.runs for v in run.copies.traced.reshape(-1).tolist()}
        return [v for v in range(len(self.assembly.tabulated.vertices)) if v not in in_runs]

    def totals(self) -> dict[str, float]:
        """Seconds of local work, of communication and of the update."""
        totals = {"compute": 0.0, "communication": 0.0, "update": 0.0}
        for assembly, vertices, times in self._weighted():
            for kind, seconds in assembly.totals(vertices).items():
                totals[kind] += times * seconds
        return totals

    def unsplit(self, step_seconds: float) -> tuple[UnsplitEntry, ...]:
        """Operators that every device computes in full because nothing else was on offer."""
        groups: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for assembly, vertices, times in self._weighted():
            for v in vertices:
                space = assembly.tabulated.vertices[v].space
                if space is None or len(space.configs) > 1:
                    continue
                op = assembly.graph.ops[assembly.tabulated.vertices[v].index]
                work = [s for s in assembly.steps[v] if isinstance(s, Compute)]
                group = groups[op.kind, assembly.reason(space)]
                group[0] += times
                group[1] += times * sum(assembly.total(s) for s in work)
        entries = [
            UnsplitEntry(kind, int(count), seconds, seconds / step_seconds, reason)
            for (kind, reason), (count, seconds) in groups.items()
        ]
        return tuple(sorted(entries, key=lambda entry: (-entry.seconds, entry.kind)))

    def _weighted(self) -> Iterator[tuple[Assembly, Sequence[int], int]]:
        """Who describes which vertices, and how many times they stand in the model."""
        yield self.assembly, self._outside, 1
        for run in self.runs:
            described = [run.described(order) for order in range(run.repeat.count)]
            who = {id(assembly): assembly for assembly, _ in described}
            counts = Counter((id(assembly), period) for assembly, period in described)
            for (key, period), times in counts.items():
                yield who[key], run.copies.traced[period].tolist(), times


Name = tuple[int, str]  # the block among its period's, -1 for none; what follows its path


@dataclass(frozen=True, slots=True)
class _Operator:
    """An entry whose name and module lie under a block, to be put under another one."""

    entry: OperatorEntry
    name: Name
    module: Name

    @classmethod
    def of(cls, entry: OperatorEntry, paths: Sequence[str]) -> _Operator:
        """Take an entry's names apart."""
        return cls(entry, _apart(entry.name, paths), _apart(entry.module, paths))

    def under(self, paths: Sequence[str]) -> OperatorEntry:
        """The entry with its names under other blocks."""
        (a, name), (b, module) = self.name, self.module
        e = self.entry
        return OperatorEntry(
            name if a < 0 else paths[a] + name,
            e.kind,
            module if b < 0 else paths[b] + module,
            e.source,
            e.config,
            e.split,
            e.seconds,
            e.collectives,
        )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """As `_Operator`, for a tensor."""

    entry: TensorEntry
    name: Name

    def under(self, paths: Sequence[str]) -> TensorEntry:
        """The entry with its name under another block."""
        return TensorEntry(_joined(self.name, paths), self.entry.layout)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """As `_Operator`, for a parameter."""

    entry: ParameterEntry
    names: tuple[Name, ...]

    def under(self, paths: Sequence[str]) -> ParameterEntry:
        """The entry with its names under other blocks."""
        e, names = self.entry, tuple(_joined(name, paths) for name in self.names)
        return ParameterEntry(names, e.shape, e.layout, e.regather)


def _apart(name: str, paths: Sequence[str]) -> Name:
    for k, path in enumerate(paths):
        if name == path or name.startswith(f"{path}."):
            return k, name[len(path) :]
    return -1, name


def _joined(name: Name, paths: Sequence[str]) -> str:
    return name[1] if name[0] < 0 else paths[name[0]] + name[1]


class _Run:
    """One run: which assembly describes which of its periods."""

    def __init__(self, assembly: Assembly, copies: Copies, rows: Ints) -> None:
        self.assembly, self.copies, self.rows = assembly, copies, rows
        self.repeat = copies.repeat
        self.known: dict[object, Assembly] = {}

    def described(self, order: int) -> tuple[Assembly, int]:
        """The assembly, and the traced period in it, that describe the order-th period."""
        return self._turns[order]

    @cached_property
    def _turns(self) -> list[tuple[Assembly, int]]:
        last = self.repeat.count - 1
        between = [
            (self._with([MODEL - 1, MODEL, MODEL + 1], self.rows[order - 1 : order + 2]), MODEL)
            for order in range(1, last)
        ]
        closing = self._with([MODEL], self.rows[last - 1 : last]), self.repeat.traced - 1
        return [(self.assembly, 0), *between, closing]

    def each(self, make: Callable[[Assembly, int, Sequence[str]], T]) -> Iterator[tuple[int, T]]:
        """What `make` gives for each period, made once for all that are described alike.

        It is given the assembly, the traced period in it, and the paths of that period's blocks.
        """
        known: dict[tuple[int, int], T] = {}
        for order, (assembly, period) in enumerate(self._turns):
            key = (id(assembly), period)
            if key not in known:
                bearer = MODEL if period == MODEL else order
                known[key] = make(assembly, period, self.repeat.paths[bearer])
            yield order, known[key]

    def _with(self, periods: list[int], rows: Ints) -> Assembly:
        """The assembly with the choices of some traced periods set to the given ones."""
        key = (tuple(periods), rows.tobytes())
        if key not in self.known:
            choice = np.array(self.assembly.choice)
            choice[self.copies.traced[periods]] = rows
            self.known[key] = self.assembly.choosing(tuple(choice.tolist()))
        return self.known[key]

    def operators(self) -> list[OperatorEntry]:
        """The entries of every period."""
        paths = self.repeat.paths
        return [op.under(paths[order]) for order, made in self.each(self._operators) for op in made]

    def _operators(self, who: Assembly, period: int, paths: Sequence[str]) -> list[_Operator]:
        return [_Operator.of(entry, paths) for entry in who.operators(self.repeat.ops(period))]

    def tensors(
        self, who: Assembly, period: int, paths: Sequence[str]
    ) -> list[tuple[int, _Tensor]]:
        """The shared tensors of a period, with their numbers in the graph."""
        found = []
        for v in self._vertices(who, period, "tensor"):
            entry = who.tensor(v)
            named = _Tensor(entry, _apart(entry.name, paths))
            found.append((who.tabulated.vertices[v].index, named))
        return found

    def parameters(self, who: Assembly, period: int, paths: Sequence[str]) -> list[_Parameter]:
        """The parameters of a period."""
        vertices = who.tabulated.vertices
        found = self._vertices(who, period, "parameter")
        entries = [who.parameter(vertices[v].index) for v in found]
        return [_Parameter(e, tuple(_apart(name, paths) for name in e.names)) for e in entries]

    def _vertices(self, who: Assembly, period: int, what: str) -> list[int]:
        vertices = who.tabulated.vertices
        return [v for v in self.copies.traced[period].tolist() if vertices[v].what == what]
