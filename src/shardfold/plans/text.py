"""A plan as text: repeated blocks once with their count, then totals against the baselines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardfold.plans.plan import CollectiveEntry, OperatorEntry, Plan

SHORT = {
    "all_reduce": "reduce",
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "all_to_all": "swap",
    "halo": "halo",
}
SMALLEST_SHARE = 0.005


@dataclass(slots=True)
class Row:
    """Operators of one place in a repeated block, all split alike."""

    place: str
    kind: str
    split: str
    count: int = 0
    seconds: float = 0.0
    collectives: list[CollectiveEntry] = field(default_factory=list)


def rows_of(operators: Iterable[OperatorEntry]) -> list[Row]:
    """Fold operators whose places differ only in numbers, in order of first appearance."""
    rows: dict[tuple[str, str, str, tuple[tuple[str, ...], ...]], Row] = {}
    for entry in operators:
        place = re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.module)
        split = split_words(entry)
        traffic = tuple(sorted((c.phase, c.kind, *c.axes) for c in entry.collectives))
        kind = entry.kind.rpartition(".")[2]
        row = rows.setdefault((place, kind, split, traffic), Row(place, kind, split))
        row.count += 1
        row.seconds += entry.seconds
        row.collectives.extend(entry.collectives)
    return list(rows.values())


def split_words(entry: OperatorEntry) -> str:
    """`batch/4 heads/8`, or `unsplit`."""
    return " ".join(f"{name}/{parts}" for name, parts in entry.split.items()) or "unsplit"


def traffic_words(collectives: Iterable[CollectiveEntry], count: int) -> str:
    """Collectives of one operator of the row: `>` forward, `<` backward, bytes summed."""
    totals: dict[tuple[str, str, str], float] = {}
    for c in collectives:
        key = (">" if c.phase == "forward" else "<", SHORT[c.kind], "+".join(c.axes))
        totals[key] = totals.get(key, 0.0) + c.bytes * c.count
    parts = [
        f"{way}{kind} {axes} {size(total / count)}" for (way, kind, axes), total in totals.items()
    ]
    return ", ".join(parts)


def as_text(plan: Plan) -> str:
    """The whole plan as plain text."""
    return "\n".join([*_head(plan), "", *_table(plan), "", *_totals(plan)])


def _head(plan: Plan) -> list[str]:
    mesh = " x ".join(f"{axis.name}={axis.size}" for axis in plan.mesh) or "one device"
    made = plan.provenance
    return [
        f"Plan for {plan.cluster}: {made.parameters / 1e6:,.1f}M parameters, "
        f"{made.operators} operators, {made.optimizer}, {made.cost} costs",
        f"Mesh: {mesh} (of {len(plan.meshes)} tried)",
    ]


def _table(plan: Plan) -> list[str]:
    total = plan.estimate.step_seconds
    rows = rows_of(plan.operators)
    shown = [row for row in rows if row.seconds >= SMALLEST_SHARE * total]
    lines = []
    for row in shown:
        place = _shorten(f"{row.place or '(model)'}", 40)
        times = f"x{row.count}" if row.count > 1 else ""
        lines.append(f"{row.seconds / total:6.1%}  {place:40} {row.kind} {times}".rstrip())
        traffic = traffic_words(row.collectives, row.count)
        lines.append(f"        {row.split}" + (f"  |  {traffic}" if traffic else ""))
    hidden = len(rows) - len(shown)
    if hidden:
        rest = 1 - sum(row.seconds for row in shown) / total
        lines.append(f"{rest:6.1%}  {hidden} more kinds of operator, each under 0.5%")
    return lines


def _totals(plan: Plan) -> list[str]:
    e = plan.estimate
    proof = "proven optimal" if e.optimal else f"at least {seconds(e.lower_bound_seconds)}"
    lines = [
        f"Step {seconds(e.step_seconds)} ({proof}): compute {seconds(e.compute_seconds)}, "
        f"communication {seconds(e.communication_seconds)}, update {seconds(e.update_seconds)}",
        *_against("Data parallel", e.data_parallel_seconds, e.data_parallel_bytes, plan),
        *_against("Fully sharded", e.fully_sharded_seconds, e.fully_sharded_bytes, plan),
        f"Memory {size(e.peak_bytes)} of {size(e.device_bytes)} per device: "
        + ("fits" if plan.fits else "DOES NOT FIT")
        + " (parameters, gradients, optimizer state, saved activations)",
    ]
    whole = [u for u in plan.unsplit if u.reason == "no rule"]
    for entry in whole:
        lines.append(
            f"Unsplit for want of a rule: {entry.kind} x{entry.count}, {entry.share:.2%} of the step"
        )
    constant = sum(u.share for u in plan.unsplit if u.reason != "no rule")
    if constant:
        count = sum(u.count for u in plan.unsplit if u.reason != "no rule")
        lines.append(
            f"Computed whole on every device: {count} operators, {constant:.2%} of the step"
        )
    return lines


def _against(name: str, other_seconds: float, other_bytes: float, plan: Plan) -> list[str]:
    ratio = other_seconds / plan.estimate.step_seconds
    fits = "" if other_bytes <= plan.estimate.device_bytes else ", does not fit"
    return [
        f"{name} {seconds(other_seconds)}, {size(other_bytes)} per device{fits}: "
        f"this plan is {ratio:.2f} times as fast"
    ]


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[-(width - 1) :]


def seconds(value: float) -> str:
    """Seconds in the unit that reads best.

    >>> seconds(0.00123)
    '1.23 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def size(value: float) -> str:
    """Bytes in the unit that reads best.

    >>> size(3 * 2**30)
    '3.0 GiB'
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"
