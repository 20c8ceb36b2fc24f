"""Where two plans of a model differ: operator by operator, equal layers once.

Operators at the same place of repeated blocks (`encoder.*.attention.query`) that differ in the
same way are one line. An operator differs where its split or its collectives do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardfold.errors import PlanError
from shardfold.plans.parts import meshes_of_operators, meshes_of_parameters
from shardfold.plans.plan import AxisEntry, OperatorEntry, ParameterEntry, Plan

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """Operators of one kind at one place that both plans treat alike: splits and collectives.

    The seconds are the sum over `count` operators, under either plan.
    """

    place: str
    kind: str
    count: int
    splits: Pair
    traffic: Pair
    seconds: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Difference:
    """All that differs between two plans, the largest difference in time first."""

    meshes: Pair
    clusters: Pair
    step_seconds: tuple[float, float]
    additive_seconds: tuple[float, float]
    peak_bytes: tuple[float, float]
    operators: int
    lines: tuple[Line, ...]
    parameters: int  # stored in another way

    @property
    def same(self) -> int:
        """Operators that both plans split alike."""
        return self.operators - sum(line.count for line in self.lines)


def difference(first: Plan, second: Plan) -> Difference:
    """Hold two plans of one model against each other."""
    _check(first, second)
    groups: dict[tuple[str, str, Pair, Pair], list[tuple[OperatorEntry, OperatorEntry]]] = {}
    here, there = (
        zip(plan.operators, meshes_of_operators(plan), strict=True) for plan in (first, second)
    )
    for (a, on_a), (b, on_b) in zip(here, there, strict=True):
        splits, sent = (_split(a), _split(b)), (_sent(a, on_a), _sent(b, on_b))
        if splits[0] != splits[1] or set(sent[0]) != set(sent[1]):
            key = (folded(a.module), a.kind, splits, (", ".join(sent[0]), ", ".join(sent[1])))
            groups.setdefault(key, []).append((a, b))
    lines = [_line(*key, members) for key, members in groups.items()]
    e, f = first.estimate, second.estimate
    kept = (map(_kept, plan.parameters, meshes_of_parameters(plan)) for plan in (first, second))
    return Difference(
        meshes=(_meshes(first), _meshes(second)),
        clusters=(first.cluster, second.cluster),
        step_seconds=(e.step_seconds, f.step_seconds),
        additive_seconds=(e.additive_seconds, f.additive_seconds),
        peak_bytes=(e.peak_bytes, f.peak_bytes),
        operators=len(first.operators),
        lines=tuple(sorted(lines, key=lambda at: -abs(at.seconds[0] - at.seconds[1]))),
        parameters=sum(a != b for a, b in zip(*kept, strict=True)),
    )


def folded(module: str) -> str:
    """A module's path with the numbers of repeats left out.

    >>> folded("model.layers.3.mlp")
    'model.layers.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _check(first: Plan, second: Plan) -> None:
    names = [[(entry.name, entry.kind) for entry in plan.operators] for plan in (first, second)]
    if names[0] == names[1] and len(first.parameters) == len(second.parameters):
        return
    if len(names[0]) != len(names[1]):
        what = f"one has {len(names[0])} operators, the other {len(names[1])}"
    else:
        pairs = zip(names[0], names[1], strict=True)
        a, b = next(((a, b) for a, b in pairs if a != b), (("", ""), ("", "")))
        what = f"where one has {a[0]} ({a[1]}), the other has {b[0]} ({b[1]})"
    raise PlanError(f"The plans are for different models: {what}. Compare plans of one model.")


def _line(
    place: str,
    kind: str,
    splits: Pair,
    traffic: Pair,
    members: Sequence[tuple[OperatorEntry, OperatorEntry]],
) -> Line:
    return Line(
        place=place,
        kind=kind.rpartition(".")[2],
        count=len(members),
        splits=splits,
        traffic=traffic,
        seconds=(sum(x.seconds for x, _ in members), sum(y.seconds for _, y in members)),
    )


def _split(entry: OperatorEntry) -> str:
    return _parts(entry.split) or "unsplit"


def _sent(entry: OperatorEntry, mesh: Sequence[AxisEntry]) -> tuple[str, ...]:
    """`forward all-reduce gpu/8`: by level and devices, as axes of two meshes differ in name."""
    found = []
    for c in entry.collectives:
        devices: dict[str, int] = {}
        for axis in (axis for axis in mesh if axis.name in c.axes):
            devices[axis.level] = devices.get(axis.level, 1) * axis.size
        found.append(f"{c.phase} {c.kind.replace('_', '-')} {_parts(devices)}")
    return tuple(dict.fromkeys(found))


def _kept(entry: ParameterEntry, mesh: Sequence[AxisEntry]) -> object:
    """How a parameter is stored: parts of each dim, whatever the axes are called."""
    parts: dict[str, int] = {}
    for state, axis in zip(entry.layout, mesh, strict=True):
        if state.startswith("dim"):
            parts[state] = parts.get(state, 1) * axis.size
    return parts, entry.regather


def _parts(parts: Mapping[str, int]) -> str:
    return " ".join(f"{name}/{count}" for name, count in parts.items())


def _meshes(plan: Plan) -> str:
    return " + ".join(dict.fromkeys(_mesh(mesh) for mesh in plan.meshes_of_parts))


def _mesh(axes: Sequence[AxisEntry]) -> str:
    return "x".join(str(axis.size) for axis in axes) or "1"
