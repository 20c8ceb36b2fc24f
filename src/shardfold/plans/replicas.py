"""A plan for every layer of a model of which the graph holds only a few periods.

What a period's operators cost depends on its own choices and on those of the periods before and
after it. So each distinct triple of choices is described once, at the model period of the graph
with its neighbours set to match, and the entries are given the names of every period they hold
for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardfold.costs.steps import Compute
from shardfold.costs.unfold import Copies, Unfolded
from shardfold.graph.repeat import MODEL, operator_order
from shardfold.plans.assemble import Assembly
from shardfold.plans.plan import OperatorEntry, ParameterEntry, TensorEntry, UnsplitEntry

Ints = NDArray[np.int64]


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
        own = self.assembly.operators()
        found: list[OperatorEntry] = []
        at = 0
        for run in self.runs:
            found += own[at : run.repeat.start]
            found += run.operators(own)
            at = run.repeat.end
        return (*found, *own[at:])

    def tensors(self) -> tuple[TensorEntry, ...]:
        """An entry for every tensor that several operators read, as they are written."""
        graph = self.assembly.graph
        place = {(op, copy): k for k, (op, _, copy) in enumerate(operator_order(graph))}
        writer = {t: i for i, op in enumerate(graph.ops) for t in op.results}
        found = []
        for vertex, assembly, run, order in self._decisions("tensor"):
            entry = assembly.tensor(vertex)
            op = writer[assembly.tabulated.vertices[vertex].index]
            if run is not None:
                entry = msgspec.structs.replace(entry, name=run.renamed(entry.name, order))
                op, copy = run.place_of(op, order)
                found.append((place[op, copy], entry))
            else:
                found.append((place[op, None], entry))
        return tuple(entry for _, entry in sorted(found, key=lambda pair: pair[0]))

    def parameters(self) -> tuple[ParameterEntry, ...]:
        """An entry for every parameter of the model, by name."""
        inside = {
            self.assembly.tabulated.vertices[v].index
            for run in self.runs
            for v in run.copies.traced.reshape(-1).tolist()
            if self.assembly.tabulated.vertices[v].what == "parameter"
        }
        graph = self.assembly.graph
        found = [
            entry
            for index, entry in zip(graph.parameters(), self.assembly.parameters(), strict=True)
            if index not in inside
        ]
        for vertex, assembly, run, order in self._decisions("parameter"):
            if run is not None:
                entry = assembly.parameter(assembly.tabulated.vertices[vertex].index)
                names = tuple(run.renamed(name, order) for name in entry.names)
                found.append(msgspec.structs.replace(entry, names=names))
        return tuple(sorted(found, key=lambda entry: entry.names))

    def _decisions(self, what: str) -> Iterator[tuple[int, Assembly, _Run | None, int]]:
        """Every decision of a kind: its vertex, who describes it, its run, its period."""
        in_runs = {v for run in self.runs for v in run.copies.traced.reshape(-1).tolist()}
        for v, vertex in enumerate(self.assembly.tabulated.vertices):
            if vertex.what == what and v not in in_runs:
                yield v, self.assembly, None, 0
        for run in self.runs:
            for order in range(run.repeat.count):
                assembly, period = run.described(order)
                for v in run.copies.traced[period].tolist():
                    if assembly.tabulated.vertices[v].what == what:
                        yield v, assembly, run, order

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
                group[1] += times * sum(assembly.seconds(s) for s in work)
        entries = [
            UnsplitEntry(kind, int(count), seconds, seconds / step_seconds, reason)
            for (kind, reason), (count, seconds) in groups.items()
        ]
        return tuple(sorted(entries, key=lambda entry: (-entry.seconds, entry.kind)))

    def _weighted(self) -> Iterator[tuple[Assembly, Sequence[int], int]]:
        """Who describes which vertices, and how many times they stand in the model."""
        in_runs = {v for run in self.runs for v in run.copies.traced.reshape(-1).tolist()}
        vertices = range(len(self.assembly.tabulated.vertices))
        yield self.assembly, [v for v in vertices if v not in in_runs], 1
        for run in self.runs:
            described = [run.described(order) for order in range(run.repeat.count)]
            who = {id(assembly): assembly for assembly, _ in described}
            counts = Counter((id(assembly), period) for assembly, period in described)
            for (key, period), times in counts.items():
                yield who[key], run.copies.traced[period].tolist(), times


@dataclass(frozen=True, slots=True)
class _Named:
    """An entry whose name and module lie under a block, to be put under another one."""

    entry: OperatorEntry
    name: tuple[int, str]  # the block among its period's, -1 for none; what follows its path
    module: tuple[int, str]

    @classmethod
    def of(cls, entry: OperatorEntry, paths: Sequence[str]) -> _Named:
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


def _apart(name: str, paths: Sequence[str]) -> tuple[int, str]:
    for k, path in enumerate(paths):
        if name == path or name.startswith(f"{path}."):
            return k, name[len(path) :]
    return -1, name


class _Run:
    """One run: which assembly describes which of its periods."""

    def __init__(self, assembly: Assembly, copies: Copies, rows: Ints) -> None:
        self.assembly, self.copies, self.rows = assembly, copies, rows
        self.repeat = copies.repeat
        self.order = copies.repeat.order()
        self.known: dict[object, Assembly] = {}

    def described(self, order: int) -> tuple[Assembly, int]:
        """The assembly, and the traced period in it, that describe the order-th period."""
        if order == 0:
            return self.assembly, 0
        if order == self.repeat.count - 1:
            return self._with([MODEL], self.rows[order - 1 : order]), self.repeat.traced - 1
        around = [MODEL - 1, MODEL, MODEL + 1]
        return self._with(around, self.rows[order - 1 : order + 2]), MODEL

    def _with(self, periods: list[int], rows: Ints) -> Assembly:
        """The assembly with the choices of some traced periods set to the given ones."""
        key = (tuple(periods), rows.tobytes())
        if key not in self.known:
            choice = np.array(self.assembly.choice)
            choice[self.copies.traced[periods]] = rows
            self.known[key] = self.assembly.choosing(tuple(choice.tolist()))
        return self.known[key]

    def operators(self, own: Sequence[OperatorEntry]) -> list[OperatorEntry]:
        """The entries of every period; `own` are those of the graph's operators."""
        found: list[OperatorEntry] = []
        known: dict[tuple[int, int], list[_Named]] = {}
        for order in range(self.repeat.count):
            assembly, period = self.described(order)
            key = (id(assembly), period)
            if key not in known:
                ops = self.repeat.ops(period)
                entries = own if assembly is self.assembly else assembly.operators()
                named = entries[ops.start : ops.stop]
                known[key] = [_Named.of(e, self.repeat.paths[self._path(order)]) for e in named]
            paths = self.repeat.paths[order]
            found += [named.under(paths) for named in known[key]]
        return found

    def _path(self, order: int) -> int:
        """The period whose names the describing one bears."""
        return order if order in (0, self.repeat.count - 1) else MODEL

    def renamed(self, name: str, order: int) -> str:
        """A name of whichever period describes the order-th, as it is in the order-th."""
        if order in (0, self.repeat.count - 1):
            return name
        return self.repeat.renamed(name, order - MODEL - 1)

    def place_of(self, op: int, order: int) -> tuple[int, int | None]:
        """An operator of the describing period, as (operator, copy) of the order-th period."""
        period, copy = self.order[order]
        _, described = self.described(order)
        return op + (period - described) * self.repeat.length, copy
