"""A plan beside the best one in another setting: what changes, and what keeping the old costs."""

from __future__ import annotations

import textwrap

from shardfold.plans.plan import Plan, Value
from shardfold.plans.units import seconds, size

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
