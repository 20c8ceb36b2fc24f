"""Splits of the whole model as the entries of a plan, and plans whose parts follow several of them.

Every part of a pipeline follows one way of splitting all the model, on its own mesh, of which it
runs the stretches that are its stages. The plan has for each operator the entry of the part that
runs it. What a part has to know of the rest (how what it receives would be written, for one) is in
its choice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from shardfold.cluster import Cluster
from shardfold.costs.activations import in_model
from shardfold.plans.batch import inputs_of
from shardfold.plans.entries import every_operator, placed_parameters, placed_tensors
from shardfold.plans.plan import (
    AxisEntry,
    Choice,
    InputEntry,
    OperatorEntry,
    ParameterEntry,
    Storage,
    TensorEntry,
)
from shardfold.simulate.decoded import UnrolledChoice

Entry = TypeVar("Entry")
Other = TypeVar("Other")


@dataclass(frozen=True, slots=True)
class Whole:
    """Splits of the whole model: the entries of a plan, with the operators that they belong to."""

    mesh: tuple[AxisEntry, ...]
    operators: Sequence[tuple[int, OperatorEntry]]
    tensors: Sequence[tuple[int, TensorEntry]]
    parameters: Sequence[tuple[int, ParameterEntry]]
    inputs: tuple[InputEntry, ...]
    recompute: Sequence[tuple[int, int]]

    @classmethod
    def of(
        cls,
        model: UnrolledChoice,
        cluster: Cluster,
        cuts: Mapping[str, tuple[str, int]] = MappingProxyType({}),
    ) -> Whole:
        """A choice in words; `cluster` is the part of it that the mesh is of."""
        tables, graph = model.decoded.tables, model.decoded.graph
        return cls(
            tuple(
                AxisEntry(axis.name, axis.size, cluster.levels[axis.level].name)
                for axis in tables.mesh.axes
            ),
            list(enumerate(every_operator(model))),
            placed_tensors(model),
            placed_parameters(model),
            inputs_of(model.decoded, cuts),
            in_model(tables.regions, graph),
        )


@dataclass(frozen=True, slots=True)
class Joined:
    """What several ways of splitting the model make of a plan's entries, and the rest of each."""

    operators: tuple[OperatorEntry, ...]
    tensors: tuple[TensorEntry, ...]
    parameters: tuple[ParameterEntry, ...]
    recompute: tuple[tuple[int, int], ...]
    choices: tuple[Choice, ...]


def joined(wholes: Sequence[Whole], begins: Sequence[int], chosen: Sequence[int]) -> Joined:
    """Put them together: `chosen` is for each stage, of which `begins` are the first operators."""

    def choice_at(operator: int) -> int:
        return chosen[bisect_right(begins, operator) - 1]

    def own(of: Callable[[Whole], Sequence[tuple[int, Entry]]]) -> tuple[Entry, ...]:
        every = [of(whole) for whole in wholes]
        return tuple(every[choice_at(place)][k][1] for k, (place, _) in enumerate(every[0]))

    def rest(
        number: int, entries: Sequence[tuple[int, Entry]], of: Callable[[Entry], Other]
    ) -> tuple[Other | None, ...]:
        return tuple(None if choice_at(at) == number else of(entry) for at, entry in entries)

    choices = [
        Choice(
            whole.mesh,
            rest(number, whole.operators, lambda entry: entry.config),
            rest(number, whole.tensors, lambda entry: entry.layout),
            rest(number, whole.parameters, lambda entry: Storage(entry.layout, entry.regather)),
            tuple(entry.layout for entry in whole.inputs),
        )
        for number, whole in enumerate(wholes)
    ]
    again = [
        stretch
        for number, whole in enumerate(wholes)
        for stretch in whole.recompute
        if choice_at(stretch[0]) == number
    ]
    return Joined(
        own(lambda whole: whole.operators),
        own(lambda whole: whole.tensors),
        own(lambda whole: whole.parameters),
        tuple(sorted(again)),
        tuple(choices),
    )
