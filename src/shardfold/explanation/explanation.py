"""Why a plan splits an operator as it does: the value, and what `print(explanation)` shows.

The alternatives, and where their difference lies; and a plan beside the best one in another
setting: what changes, and what keeping the old costs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from shardfold.graph.graph import without
from shardfold.plans.plan import AxisEntry, OperatorEntry, Plan, Value
from shardfold.report.plan_table import axes_words, collective_words
from shardfold.report.units import seconds, size
from shardfold.sharding.names import in_words


class Alternative(Value, frozen=True):
    """Another split of one operator, with everything else chosen anew around it.

    A bound below the additive cost says how far the search was from proving it. Without a cost,
    only the bound is known, as memory binds and others are better; without either, nothing fits.
    """

    split: dict[str, int]
    additive_seconds: float | None
    additive_lower_bound_seconds: float | None
    peak_bytes: float | None


class Term(Value, frozen=True):
    """A part of the difference between two plans; negative where the alternative is cheaper."""

    what: str
    seconds: float


class Change(Value, frozen=True):
    """An operator that is split otherwise once the alternative is forced."""

    name: str
    module: str
    kind: str
    before: dict[str, int]
    after: dict[str, int]


class Holding(Value, frozen=True):
    """What an operator would choose if it were alone, and what its neighbours would pay for that.

    `saved_seconds` is in its own work and collectives; `holders` has the dearest moves first.
    """

    split: dict[str, int]
    saved_seconds: float
    holders: tuple[Term, ...]


class Turn(Value, frozen=True):
    """Another split wins once something is scaled by `factor`; at `holds` the plan's still did."""

    what: str
    factor: float
    holds: float
    split: dict[str, int]
    additive_seconds: float


class Skipped(Value, frozen=True):
    """What could not be looked at, or not far enough to say anything, and why."""

    what: str
    reason: str


class Turning(Value, frozen=True):
    """What turns an operator's split, what does not, and what was not looked at."""

    turns: tuple[Turn, ...]
    steady: tuple[Turn, ...]
    skipped: tuple[Skipped, ...]


class Reason(Value, frozen=True):
    """One operator: its split, the alternatives from the best on, and what parts it from the first.

    The terms add up to the runner-up's difference; `changes` has the nearest operators first.
    `holding` is None where the operator has the split that it would choose by itself; `turning`
    where it was not asked for, or where another split is already better by the sum of costs.
    """

    operator: OperatorEntry
    alike: int  # operators at the same place of other blocks with the same split, itself included
    is_pinned: bool
    additive_seconds: float
    alternatives: tuple[Alternative, ...]
    terms: tuple[Term, ...]
    changes: tuple[Change, ...]
    holding: Holding | None = None
    turning: Turning | None = None
    experiment: str = ""  # the rule that an experiment found, where none was written
    memory: str = ""  # what backward reads of its results, kept or recomputed

    @property
    def runner_up(self) -> Alternative | None:
        """The best alternative, if any fits."""
        first = next(iter(self.alternatives), None)
        return None if first is None or first.additive_seconds is None else first


class Explanation(Value, frozen=True):
    """Reasons for some operators of a plan, all on the plan's mesh.

    Reasons are in parts of the additive cost, in which nothing overlaps; `step_seconds` is the
    plan's step. `optimal` says that no choice has a lower additive cost.
    """

    cluster: str
    mesh: tuple[AxisEntry, ...]
    step_seconds: float
    additive_seconds: float
    optimal: bool
    limit_bytes: float | None  # None: nothing fits, so that the limit is left aside
    limit_binds: bool  # whether a faster plan exists that does not fit
    reasons: tuple[Reason, ...]
    left_out: int  # operators that match as well, but take next to no time
    prefix: int = 0  # leading names that all modules share, and that are not shown
    is_simulated: bool = False  # whether the plan was chosen by its simulated step
    micro_batches: int = 1  # passes of a step

    def __str__(self) -> str:
        return as_text(self)


WIDTH = 80


class Kept(Value, frozen=True):
    """The old plan's choice, priced in the new setting; or why it is not possible there."""

    step_seconds: float | None
    peak_bytes: float | None
    reason: str = ""


class WhatIf(Value, frozen=True):
    """The plan as it is, the best plan if things change, and the old choice in the new setting."""

    before: Plan
    after: Plan
    kept: Kept

    def __str__(self) -> str:
        lines = [f"Now:     {_line(self.before)}", f"What if: {_line(self.after)}", self._kept()]
        return "\n".join(
            line for text in lines for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")
        )

    def _kept(self) -> str:
        if self.kept.step_seconds is None or self.kept.peak_bytes is None:
            return f"The old splits are not possible there: {self.kept.reason}"
        more = self.kept.step_seconds / self.after.estimate.step_seconds - 1
        limit = self.after.estimate.limit_bytes
        fits = "" if self.kept.peak_bytes <= limit else f", more than the limit of {size(limit)}"
        return (
            f"The old splits would take {seconds(self.kept.step_seconds)} there ({more:+.2%}) and "
            f"{size(self.kept.peak_bytes)} a device{fits}."
        )


def _line(plan: Plan) -> str:
    mesh = "x".join(str(axis.size) for axis in plan.mesh) or "1"
    e = plan.estimate
    fits = "" if plan.fits else ", which does not fit"
    return (
        f"{seconds(e.step_seconds)} a step on {plan.cluster}, mesh {mesh}, "
        f"{size(e.peak_bytes)} a device{fits}."
    )


MOST_ALTERNATIVES = 8
MOST_CHANGES = 6
MOST_TERMS = 6
MOST_HOLDERS = 3
SMALL_TERM = 0.01  # of the largest term: those below are taken together
NOTHING = Term("", 0.0)
SIMULATED = "The plan was chosen by its simulated step, so other splits may cost less."


def as_text(found: Explanation, everything: bool = False) -> str:
    """The whole explanation; without `everything`, the best alternatives and largest terms."""
    axes = " x ".join(f"{axis.name}={axis.size}" for axis in found.mesh) or "one device"
    best = "the least there is" if found.optimal else "not proven to be the least"
    step, cost = seconds(found.step_seconds), seconds(found.additive_seconds)
    if found.micro_batches > 1:
        step += f" for {found.micro_batches} micro-batches"
    how = " (simulated)" if found.is_simulated else ""
    lines = [*_filled(f"On {found.cluster}, mesh {axes}: a step takes {step}{how}.", "")]
    lines.extend(_filled(f"Its additive cost, without overlap, is {cost}, {best}.", ""))
    lines.extend(_filled(f"Alternatives are the best plans on this mesh {_limit(found)}.", ""))
    if found.is_simulated and not found.optimal:
        lines.extend(_filled(SIMULATED, ""))
    for reason in found.reasons:
        lines.extend(["", *_reason(reason, found, everything)])
    if found.left_out:
        lines.extend(["", *_filled(_left_out(found.left_out), "")])
    return "\n".join(lines)


def _limit(found: Explanation) -> str:
    if found.limit_bytes is None:
        return "without regard to memory, as no plan fits"
    binds = "binds: faster plans do not fit" if found.limit_binds else "does not bind"
    return f"within {size(found.limit_bytes)} a device; the limit {binds}"


def _left_out(count: int) -> str:
    what = "operator is" if count == 1 else "operators are"
    return f"{count} further {what} left out as small; --all shows every one."


def _reason(reason: Reason, found: Explanation, everything: bool) -> list[str]:
    return [
        *_heading(reason, found.prefix),
        *_filled(_chosen(reason, found.mesh), "  "),
        *_experiment(reason),
        *_filled(reason.memory, "  "),
        *_alternatives(reason, everything),
        *_why(reason, found.prefix, everything),
        *_held(reason),
        *_turns(reason),
    ]


def _experiment(reason: Reason) -> list[str]:
    if not reason.experiment:
        return []
    return list(_filled(f"No rule, but splits found by experiment: {reason.experiment}.", "  "))


def _heading(reason: Reason, prefix: int) -> list[str]:
    entry = reason.operator
    alike = f", and {reason.alike - 1} alike" if reason.alike > 1 else ""
    title = f"{called(entry, prefix)} ({entry.name}{alike})"
    return textwrap.wrap(title, WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def called(entry: OperatorEntry | Change, prefix: int) -> str:
    """An operator's place in the model, as the table shows it, and its kind."""
    module = without(entry.module, prefix)
    return " ".join(filter(None, (module, entry.kind.rpartition(".")[2])))


def _chosen(reason: Reason, mesh: Sequence[AxisEntry]) -> str:
    entry = reason.operator
    pinned = ", pinned" if reason.is_pinned else ""
    share = entry.seconds / reason.additive_seconds
    traffic = "; ".join(
        f"{collective_words(c.phase, c.kind)} {axes_words(c.axes, mesh)} {size(c.bytes)}"
        f"{f' x{c.count}' * (c.count > 1)} {seconds(c.seconds)}"
        for c in entry.collectives
    )
    return (
        f"split {in_words(entry.split)}{pinned}: {seconds(entry.seconds)}, {share:.1%} of the "
        f"cost; {'collectives: ' + traffic if traffic else 'no collectives'}."
    )


def _alternatives(reason: Reason, everything: bool) -> list[str]:
    if not reason.alternatives:
        return ["  No other split is possible."]
    shown = reason.alternatives if everything else reason.alternatives[:MOST_ALTERNATIVES]
    width = max(len("instead"), *(len(in_words(a.split)) for a in shown))
    lines = [f"  {'instead':{width}} {'cost':>9} {'more':>9}"]
    lines.extend(f"  {in_words(a.split):{width}} {_figures(a, reason)}" for a in shown)
    if len(shown) < len(reason.alternatives):
        lines.append(f"  and {len(reason.alternatives) - len(shown)} more")
    return lines


def _figures(alternative: Alternative, reason: Reason) -> str:
    bound, cost = alternative.additive_lower_bound_seconds, alternative.additive_seconds
    if bound is None:
        return f"{'does not fit':>9}"
    shown = bound if cost is None else cost
    more = shown - reason.additive_seconds
    note = "  at least" if cost is None else ""
    if cost is not None and bound < cost * (1 - 1e-9):
        note = f"  (bound {seconds(bound)})"
    return f"{seconds(shown):>9} {signed(more):>9} {more / reason.additive_seconds:>+8.2%}{note}"


def signed(value: float) -> str:
    """Seconds with a sign; differences that are rounding are `0 s`."""
    text = seconds(abs(value))
    return text if text == "0 s" else f"{'-' if value < 0 else '+'}{text}"


def _why(reason: Reason, prefix: int, everything: bool) -> list[str]:
    second = reason.runner_up
    if second is None:
        return []
    words = in_words(second.split)
    return [
        *_filled(f"With {words} the cost changes by {_terms(reason, everything)}.", "  "),
        *_filled(f"With {words} {_changes(reason.changes, prefix, everything)}.", "  "),
    ]


def _held(reason: Reason) -> Iterable[str]:
    """Whether neighbours hold the operator to its split, and which."""
    found = reason.holding
    if found is None:
        return _filled("By itself it would choose the same: no neighbour forces it.", "  ")
    alone, saved = in_words(found.split), seconds(found.saved_seconds)
    same = " in another arrangement" if found.split == reason.operator.split else ""
    text = f"By itself it would choose {alone}{same}, which saves {saved} of its own"
    if not found.holders:
        return _filled(f"{text}; no move of a neighbour is against it.", "  ")
    shown = found.holders[:MOST_HOLDERS]
    held = ", ".join(f"{signed(term.seconds)} in {term.what}" for term in shown)
    return _filled(f"{text}. What holds it: {held}.", "  ")


def _turns(reason: Reason) -> Iterable[str]:
    """What would have to change for another split to win."""
    found = reason.turning
    if found is None:
        return
    for turn in found.turns:
        still = "" if turn.holds == 1.0 else f" (at {_scale(turn.holds)} it still is not)"
        yield from _filled(
            f"With {_change(turn.what, turn.factor)} it would be {in_words(turn.split)}{still}.",
            "  ",
        )
    if found.steady:
        same = ", ".join(_change(turn.what, turn.factor) for turn in found.steady)
        yield from _filled(f"It would be the same with {same}.", "  ")
    reasons: dict[str, list[str]] = {}
    for each in found.skipped:
        reasons.setdefault(each.reason, []).append(each.what)
    for reason_text, names in reasons.items():
        text = f"Not looked at: {', '.join(names)}: {reason_text.rstrip('.')}."
        yield from _filled(text, "  ")


def _change(what: str, factor: float) -> str:
    """`node links 2.3 times as fast`, `a batch 1/4 as large`."""
    if what == "batch":
        return f"a batch {_scale(factor)} as large"
    if what == "memory":
        return f"{_scale(factor)} the memory"
    return f"{what} {_scale(factor)} as fast"


def _scale(factor: float) -> str:
    if factor >= 1:
        return f"{factor:.3g} times"
    return f"1/{1 / factor:.3g}"


def _terms(reason: Reason, everything: bool) -> str:
    least = 0.0 if everything else SMALL_TERM * abs(next(iter(reason.terms), NOTHING).seconds)
    shown = [term for term in reason.terms if abs(term.seconds) >= least]
    shown = shown if everything else shown[:MOST_TERMS]
    rest = reason.terms[len(shown) :]
    parts = [f"{signed(term.seconds)} in {term.what}" for term in shown]
    if rest:
        total = sum(term.seconds for term in rest)
        parts.append(
            f"{signed(total)} in {len(rest)} smaller terms"
            if len(rest) > 1
            else f"{signed(total)} in {rest[0].what}"
        )
    return ", ".join(parts) or "nothing: it is as good"


def _changes(found: Sequence[Change], prefix: int, everything: bool) -> str:
    if not found:
        return "no other operator is split otherwise"
    groups: dict[str, list[Change]] = {}
    for change in found:
        words = f"from {in_words(change.before)} to {in_words(change.after)}"
        groups.setdefault(words, []).append(change)
    shown = list(groups.items())[: None if everything else MOST_CHANGES]
    parts = [f"{_names(members, prefix, everything)} {words}" for words, members in shown]
    left = len(found) - sum(len(members) for _, members in shown)
    more = f"; and {left} further" if left else ""
    return f"{len(found)} other operators change: {'; '.join(parts)}{more}"


def _names(members: Sequence[Change], prefix: int, everything: bool) -> str:
    shown = members if everything else members[:3]
    more = f" and {len(members) - len(shown)} more" if len(members) > len(shown) else ""
    return ", ".join(called(change, prefix) for change in shown) + more


def _filled(text: str, indent: str) -> Iterable[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )
