"""An estimated strategy in lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from shardfold.planner.estimate import Estimated
from shardfold.report.units import seconds, size

TIE = 5e-4  # of a step: so near, two are as fast


def lines(found: Estimated, model: str) -> Iterator[str]:
    """The step, its rate, memory by class, communication by kind, and the plan beside it."""
    yield f"{model} on {found.cluster}: {found.strategy}"
    yield ""
    each = f"{found.rate_per_device:,.0f} {found.unit}/s per device"
    hfu = f", HFU {found.hfu:.1%} with what is recomputed" if found.hfu > found.mfu else ""
    yield f"Step: {seconds(found.step_seconds)}, {each}, MFU {found.mfu:.1%}{hfu}."
    yield from _memory(found)
    yield _communication(found)
    if found.plan_seconds is not None:
        yield _plan(found)


def _memory(found: Estimated) -> Iterator[str]:
    fits = "it fits" if found.fits else "IT DOES NOT FIT"
    yield f"Memory: a peak of {size(found.peak_bytes)} of {size(found.limit_bytes)}: {fits}."
    parts = sorted(found.peak_by_class.items(), key=lambda item: -item[1])
    yield "  " + ", ".join(f"{name} {size(value)}" for name, value in parts)


def _communication(found: Estimated) -> str:
    listed = [
        f"{each.kind.replace('_', '-')} {seconds(each.exposed_seconds)} of {seconds(each.seconds)}"
        for each in found.communication
    ]
    if not listed:
        return "Communication: none."
    share = found.exposed_seconds / found.step_seconds
    return f"Exposed communication ({share:.1%} of the step): {', '.join(listed)}."


def _plan(found: Estimated) -> str:
    assert found.plan_seconds is not None
    assert found.plan_bytes is not None
    step = f"{seconds(found.plan_seconds)} with a peak of {size(found.plan_bytes)}"
    ratio = found.step_seconds / found.plan_seconds
    if not found.fits:
        return f"The best plan that fits takes {step}."
    if ratio > 1 + TIE:
        return f"The best plan is {ratio:.2f} times as fast: {step}."
    if ratio >= 1 - TIE:
        return f"The best plan is as fast: {step}."
    return f"The plan is slower ({step}): it is within its limits, pins or mesh."
