"""Why a plan splits an operator as it does: the alternatives, and where their difference lies.

A plan beside the best one in another setting: what changes, and what keeping the old costs.
"""

from __future__ import annotations

import textwrap

from shardfold.plans.plan import AxisEntry, OperatorEntry, Plan, Value
from shardfold.report.units import seconds, size


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
        from shardfold.explanation.text import as_text

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
