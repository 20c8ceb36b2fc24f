"""The entries of a plan: every operator, shared tensor and parameter of every layer, in words.

Layers that are described alike share their entries, which are put under the names of each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from shardfold.costs.steps import Collective, Compute, Step, times
from shardfold.graph.repeats import places
from shardfold.plans.plan import (
    CollectiveEntry,
    ExperimentEntry,
    OperatorEntry,
    ParameterEntry,
    TensorEntry,
    UnsplitEntry,
)
from shardfold.sharding import Space, Subdims
from shardfold.sharding.configs import CONFIG_WORDS
from shardfold.sharding.layouts import REPLICATED, STATE_WORDS, Layouts
from shardfold.simulate.decoded import DecodedChoice, RunSteps, UnrolledChoice

Entry = TypeVar("Entry")
Renamed = Callable[[Sequence[str]], Entry]  # an entry, under the paths of a period's blocks


# Of a graph under one choice


def operator_entries(
    at: DecodedChoice, within: Iterable[int] | None = None
) -> tuple[OperatorEntry, ...]:
    """An entry for every operator, in execution order, or for those of a range."""
    every = range(len(at.graph.ops))
    return tuple(_operator(at, op) for op in (every if within is None else within))


def _operator(at: DecodedChoice, index: int) -> OperatorEntry:
    op, space = at.graph.ops[index], at.tables.wiring.sides.spaces[index]
    row, steps = space.configs[at.choice[index]].tolist(), at.steps[index]
    return OperatorEntry(
        op.name,
        op.kind,
        op.origin.module,
        op.origin.source,
        tuple(factor_name(space, factor) for factor in row),
        at.splits.of(index, space, row),
        sum(at.total(step) for step in steps),
        _collectives(steps, at),
    )


def _collectives(steps: list[Step], at: DecodedChoice) -> tuple[CollectiveEntry, ...]:
    names = at.tables.mesh.names
    entries: dict[tuple[str, str, tuple[str, ...], float], list[float]] = defaultdict(list)
    for step in steps:
        if isinstance(step, Collective) and step.kind != "slice":
            axes = tuple(names[a] for a in step.axes)
            key = (step.phase, step.kind, axes, float(step.bytes[0]))
            count = step.repeats * times(step, at.micro_batches)
            entries[key].extend([at.seconds(step) / step.repeats] * count)
    return tuple(
        CollectiveEntry(phase, kind, axes, size, len(each), math.fsum(each))
        for (phase, kind, axes, size), each in entries.items()
    )


def tensor_entries(at: DecodedChoice) -> tuple[TensorEntry, ...]:
    """An entry for every tensor that several operators read."""
    vertices = enumerate(at.tables.vertices)
    return tuple(_tensor(at, v) for v, vertex in vertices if vertex.what == "tensor")


def _tensor(at: DecodedChoice, v: int) -> TensorEntry:
    vertex = at.tables.vertices[v]
    assert vertex.layouts is not None
    layout = layout_words(at.subdims, vertex.index, vertex.layouts, at.choice[v])
    return TensorEntry(at.graph.tensors[vertex.index].name, layout)


def parameter_entries(at: DecodedChoice) -> tuple[ParameterEntry, ...]:
    """An entry for every parameter; one that no operator reads is stored whole."""
    return tuple(_parameter(at, index) for index in at.graph.parameters())


def _parameter(at: DecodedChoice, index: int) -> ParameterEntry:
    tensor = at.graph.tensors[index]
    v = at.tables.wiring.storage_vertex.get(index)
    if v is None:
        layout = (STATE_WORDS[REPLICATED],) * len(at.tables.mesh.axes)
        return ParameterEntry(tensor.names, tensor.type.shape, layout, False)
    storage = at.tables.vertices[v].storage
    assert storage is not None
    layout = layout_words(at.subdims, index, storage.layouts, at.choice[v])
    regathers = bool(storage.regathers[at.choice[v]])
    return ParameterEntry(tensor.names, tensor.type.shape, layout, regathers)


def layout_words(subdims: Subdims, tensor: int, layouts: Layouts, choice: int) -> tuple[str, ...]:
    """Per axis: `dim 1` (`dim 1.0` where only a piece of the dim is split), or a word for none."""
    dims = subdims.dims[tensor]
    found = []
    for state in layouts[choice].tolist():
        if state < 0:
            found.append(STATE_WORDS[state])
            continue
        dim = dims[state]
        piece = f".{state - dims.index(dim)}" if dims.count(dim) > 1 else ""
        found.append(f"dim {dim}{piece}")
    return tuple(found)


def factor_name(space: Space, factor: int) -> str:
    """A factor in the rule's own name; `-` for none, `+` where a partial sum passes."""
    return CONFIG_WORDS.get(factor) or space.rule.factors[factor]


# Of a model with all its layers


def every_operator(model: UnrolledChoice) -> tuple[OperatorEntry, ...]:
    """An entry for every operator of the model, in execution order."""
    found: list[OperatorEntry] = []
    at, own = 0, model.decoded
    for run in model.runs:
        found += operator_entries(own, range(at, run.repeat.start))
        for order, made in run.each(_operators_of):
            found += [entry(run.repeat.paths[order]) for entry in made]
        at = run.repeat.end
    return (*found, *operator_entries(own, range(at, len(own.graph.ops))))


def _operators_of(
    run: RunSteps, who: DecodedChoice, period: int, paths: Sequence[str]
) -> list[Renamed[OperatorEntry]]:
    def renamed(entry: OperatorEntry) -> Renamed[OperatorEntry]:
        name, module = (_apart(text, paths) for text in (entry.name, entry.module))
        return lambda to: replace(entry, name=_joined(name, to), module=_joined(module, to))

    return [renamed(entry) for entry in operator_entries(who, run.repeat.ops(period))]


def every_tensor(model: UnrolledChoice) -> tuple[TensorEntry, ...]:
    """An entry for every tensor that several operators read, as they are written."""
    return tuple(entry for _, entry in placed_tensors(model))


def placed_tensors(model: UnrolledChoice) -> list[tuple[int, TensorEntry]]:
    """The same, each with the operator of the model that writes it."""
    graph, vertices = model.decoded.graph, model.decoded.tables.vertices
    place, writers = places(graph), graph.writers()
    found = [
        (place[writers[vertices[v].index][0]], _tensor(model.decoded, v))
        for v in model.outside
        if vertices[v].what == "tensor"
    ]
    for run in model.runs:
        first, length = place[run.repeat.start], run.repeat.length
        for order, made in run.each(_tensors_of):
            paths, start = run.repeat.paths[order], first + order * length
            found += [
                (start + (writers[index][0] - run.repeat.start) % length, entry(paths))
                for index, entry in made
            ]
    return sorted(found, key=lambda pair: pair[0])


def _tensors_of(
    run: RunSteps, who: DecodedChoice, period: int, paths: Sequence[str]
) -> list[tuple[int, Renamed[TensorEntry]]]:
    """The shared tensors of a period, with their numbers in the graph."""

    def renamed(entry: TensorEntry) -> Renamed[TensorEntry]:
        name = _apart(entry.name, paths)
        return lambda to: replace(entry, name=_joined(name, to))

    found = run.vertices(who, period, "tensor")
    return [(who.tables.vertices[v].index, renamed(_tensor(who, v))) for v in found]


def every_parameter(model: UnrolledChoice) -> tuple[ParameterEntry, ...]:
    """An entry for every parameter of the model, by name."""
    return tuple(entry for _, entry in placed_parameters(model))


def placed_parameters(model: UnrolledChoice) -> list[tuple[int, ParameterEntry]]:
    """The same, each with the first operator of the model that reads it."""
    own = model.decoded
    place, readers = places(own.graph), own.graph.readers()
    inside = {
        own.tables.vertices[v].index
        for run in model.runs
        for period in range(run.repeat.traced)
        for v in run.vertices(own, period, "parameter")
    }
    found = [
        (min((place[op] for op, _ in readers.get(index, ())), default=0), _parameter(own, index))
        for index in own.graph.parameters()
        if index not in inside
    ]
    for run in model.runs:
        first, length = place[run.repeat.start], run.repeat.length
        for order, made in run.each(_parameters_of):
            found += [(first + order * length, entry(run.repeat.paths[order])) for entry in made]
    return sorted(found, key=lambda pair: pair[1].names)


def _parameters_of(
    run: RunSteps, who: DecodedChoice, period: int, paths: Sequence[str]
) -> list[Renamed[ParameterEntry]]:
    def renamed(entry: ParameterEntry) -> Renamed[ParameterEntry]:
        names = [_apart(name, paths) for name in entry.names]
        return lambda to: replace(entry, names=tuple(_joined(name, to) for name in names))

    found = run.vertices(who, period, "parameter")
    return [renamed(_parameter(who, who.tables.vertices[v].index)) for v in found]


Name = tuple[int, str]  # the block among its period's, -1 for none; what follows its path


def _apart(name: str, paths: Sequence[str]) -> Name:
    for k, path in enumerate(paths):
        if name == path or name.startswith(f"{path}."):
            return k, name[len(path) :]
    return -1, name


def _joined(name: Name, paths: Sequence[str]) -> str:
    return name[1] if name[0] < 0 else paths[name[0]] + name[1]


def unsplit_entries(model: UnrolledChoice, additive_seconds: float) -> tuple[UnsplitEntry, ...]:
    """Operators that every device computes in full because nothing else was on offer.

    On one device that is no lack of an operator's: there, only those without a rule are listed.
    """
    is_alone = model.decoded.tables.mesh.size == 1
    groups: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for at, vertices, count in model.weighted():
        for v in vertices:
            space = at.tables.vertices[v].space
            if space is None or len(space.configs) > 1:
                continue
            if is_alone and space.rule.rule.known:
                continue
            work = [step for step in at.steps[v] if isinstance(step, Compute)]
            group = groups[at.graph.ops[v].kind, _reason(space)]
            group[0] += count
            group[1] += count * sum(at.total(step) for step in work)
    entries = [
        UnsplitEntry(kind, int(count), seconds, seconds / additive_seconds, reason)
        for (kind, reason), (count, seconds) in groups.items()
    ]
    return tuple(sorted(entries, key=lambda entry: (-entry.seconds, entry.kind)))


def experiment_entries(model: UnrolledChoice) -> tuple[ExperimentEntry, ...]:
    """Operators that have no rule, but splits that were found by experiment."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for at, vertices, count in model.weighted():
        for v in vertices:
            space = at.tables.vertices[v].space
            if space is not None and space.rule.rule.found:
                counts[at.graph.ops[v].kind, str(space.rule.rule)] += int(count)
    return tuple(
        ExperimentEntry(kind, count, splits) for (kind, splits), count in sorted(counts.items())
    )


def _reason(space: Space) -> str:
    """Why an operator has but one configuration."""
    if not space.rule.rule.known:
        return "no rule"
    return "no dim that divides" if not any(space.rule.splittable) else "depends on no parameter"
