"""A plan as one part of its pipeline follows it, and where each process is among the parts.

Parts of the cluster may follow choices of their own, on meshes of their own. The plan's entries are
then those of the parts that run them; for one part, its choice fills in how it sees the rest of the
model. Without stages, or where all parts follow the plan's own splits, that is the plan itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

from msgspec.structs import replace

from shardfold.errors import PlanError
from shardfold.plans.plan import AxisEntry, Choice, Plan

Mesh = tuple[AxisEntry, ...]
Own = TypeVar("Own")
Other = TypeVar("Other")


def sizes_of_parts(plan: Plan) -> tuple[int, ...]:
    """How many devices each part of the cluster has."""
    return tuple(math.prod(axis.size for axis in mesh) for mesh in plan.meshes_of_parts)


def firsts_of_parts(plan: Plan) -> tuple[int, ...]:
    """The rank that each part of the cluster begins with."""
    return tuple(accumulate(sizes_of_parts(plan), initial=0))[:-1]


def seat(plan: Plan, rank: int) -> tuple[int, int]:
    """The part of the cluster that a rank is in, and its number there."""
    for part, (first, size) in enumerate(
        zip(firsts_of_parts(plan), sizes_of_parts(plan), strict=True)
    ):
        if rank < first + size:
            return part, rank - first
    raise PlanError(f"The plan is for {plan.processes} processes, and this is number {rank}.")


def choice_number(plan: Plan, part: int) -> int:
    """Which choice a part follows: parts with the same number are laid out alike."""
    found = plan.pipeline
    return 0 if found is None or not found.follows else found.follows[part]


def is_laid_out_alike(plan: Plan) -> bool:
    """Whether all parts of the cluster follow one choice."""
    return len({choice_number(plan, part) for part in range(len(plan.meshes_of_parts))}) == 1


def meshes_of_operators(plan: Plan) -> list[Mesh]:
    """The mesh that each operator of the plan is laid out on."""
    return _meshes(plan, len(plan.operators), [c.operators for c in _choices(plan)])


def meshes_of_parameters(plan: Plan) -> list[Mesh]:
    """The mesh that each parameter of the plan is laid out on."""
    return _meshes(plan, len(plan.parameters), [c.parameters for c in _choices(plan)])


def _choices(plan: Plan) -> tuple[Choice, ...]:
    return () if plan.pipeline is None else plan.pipeline.choices


def _meshes(plan: Plan, count: int, others: Sequence[Sequence[object]]) -> list[Mesh]:
    """An entry is of the choice that has no other in its place."""
    found = [plan.mesh] * count
    for choice, listed in zip(_choices(plan), others, strict=True):
        found = [choice.mesh if k is None else m for k, m in zip(listed, found, strict=True)]
    return found


def on_part(plan: Plan, part: int) -> Plan:
    """The plan as one part of the cluster follows it: mesh, splits and storage of all the model."""
    found = plan.pipeline
    if found is None or not found.follows:
        return plan
    choice = found.choices[found.follows[part]]
    operators = [
        own if config is None else replace(own, config=config)
        for own, config in _pairs("operators", plan.operators, choice.operators)
    ]
    tensors = [
        own if layout is None else replace(own, layout=layout)
        for own, layout in _pairs("tensors", plan.tensors, choice.tensors)
    ]
    parameters = [
        own if other is None else replace(own, layout=other.layout, regather=other.regather)
        for own, other in _pairs("parameters", plan.parameters, choice.parameters)
    ]
    inputs = [
        replace(own, layout=layout) for own, layout in _pairs("inputs", plan.inputs, choice.inputs)
    ]
    return replace(
        plan,
        mesh=choice.mesh,
        operators=tuple(operators),
        tensors=tuple(tensors),
        parameters=tuple(parameters),
        inputs=tuple(inputs),
    )


def check_choice(plan: Plan, choice: Choice) -> None:
    """Refuse a choice that is not of this plan's model."""
    _pairs("operators", plan.operators, choice.operators)
    _pairs("tensors", plan.tensors, choice.tensors)
    _pairs("parameters", plan.parameters, choice.parameters)
    _pairs("inputs", plan.inputs, choice.inputs)


def _pairs(what: str, own: Sequence[Own], others: Sequence[Other]) -> list[tuple[Own, Other]]:
    if len(own) != len(others):
        raise PlanError(
            f"A choice that a part of the pipeline follows has {len(others)} {what}, the plan "
            f"{len(own)}. Plan again."
        )
    return list(zip(own, others, strict=True))
