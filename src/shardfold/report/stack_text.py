"""The best configuration of a stack in lines: its file, its figures, its runners-up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardfold.export.projection import Projection
from shardfold.export.search import Priced
from shardfold.export.stack_plan import StackPlan
from shardfold.planner.estimated import Estimated
from shardfold.report.summary_text import TIE, in_range
from shardfold.report.units import seconds, size

MOST_UNSAID = 10


def stack_plan_lines(found: StackPlan, model: str, saved: str | None = None) -> Iterator[str]:
    """What to tell the stack, and what that comes to."""
    e = found.estimated
    yield f"{model} on {e.cluster} with {found.stack} {found.version}: {found.strategy}"
    yield ""
    yield from found.text.rstrip("\n").splitlines() if saved is None else [f"Saved to {saved}"]
    yield ""
    step = in_range(e.step_seconds, e.step_range_seconds)
    yield f"Step: {step}, {e.rate:,.0f} {e.unit}/s, MFU {e.mfu:.1%}."
    if e.pipeline is not None:
        pipe = e.pipeline
        yield f"Pipeline: {len(pipe.stages)} stages, {pipe.schedule}, bubble {pipe.bubble:.1%}."
    yield f"Memory: a peak of {size(e.peak_bytes)} of {size(e.limit_bytes)} per device."
    yield from _beside_plan(e)
    yield from _runners_up(found)
    yield ""
    yield (
        f"Of {found.possible:,} configurations of {found.stack}, {found.priced} were priced; the "
        "others cannot be faster, or do not fit."
    )
    yield from (*found.written.notes, *found.notes)
    yield f"Fields of {found.stack} {found.version}: {found.checked}."


def projection_lines(found: Projection, model: str, saved: str | None = None) -> Iterator[str]:
    """A plan as another stack runs it: its words, its figures, what it costs and what is lost."""
    e = found.estimated
    yield f"{model} on {e.cluster} with {found.stack} {found.version}: {found.strategy}"
    yield f"The plan's own degrees: {found.read}."
    yield ""
    text = found.written.text.rstrip("\n").splitlines()
    yield from text if saved is None else [f"Saved to {saved}"]
    yield ""
    step = in_range(e.step_seconds, e.step_range_seconds)
    yield f"Step: {step}, {e.rate:,.0f} {e.unit}/s, MFU {e.mfu:.1%}."
    fits = "it fits" if e.fits else "IT DOES NOT FIT"
    yield f"Memory: a peak of {size(e.peak_bytes)} of {size(e.limit_bytes)} per device: {fits}."
    lost = e.step_seconds / found.plan_seconds - 1
    yield f"The plan takes {seconds(found.plan_seconds)}; the projection {lost:+.1%}, of which:"
    for cause in found.causes:
        yield f"  {cause.seconds / found.plan_seconds:+.1%}  {cause.text}"
    if found.unsaid:
        yield f"What {found.stack} cannot express:"
        yield from (f"  {text}" for text in found.unsaid[:MOST_UNSAID])
        if len(found.unsaid) > MOST_UNSAID:
            yield f"  and {len(found.unsaid) - MOST_UNSAID} more (--json has them)"
    yield from found.written.notes
    yield f"Fields of {found.stack} {found.version}: {found.checked}."


def _beside_plan(found: Estimated) -> Iterator[str]:
    if found.plan_seconds is None:
        return
    ratio, free = found.step_seconds / found.plan_seconds, seconds(found.plan_seconds)
    if ratio > 1 + TIE:
        yield f"shardfold's own plan is {ratio:.2f} times as fast: {free}."
    elif ratio >= 1 - TIE:
        yield f"shardfold's own plan is as fast: {free}."
    else:
        yield f"shardfold's own plan takes {free}: it has no pipeline, nor ZeRO of other stacks."


def _runners_up(found: StackPlan) -> Iterator[str]:
    if not found.runners_up:
        return
    yield ""
    yield "Runners-up:"
    yield from aligned(
        [("step", "slower", "peak", "strategy"), *(_row(each, found) for each in found.runners_up)]
    )


def _row(each: Priced, found: StackPlan) -> tuple[str, ...]:
    e = each.estimated
    ratio = e.step_seconds / found.estimated.step_seconds - 1
    peak = size(e.peak_bytes) + ("" if e.fits else " (too large)")
    return seconds(e.step_seconds), f"{ratio:+.1%}", peak, str(each.stated)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of a table, two spaces between columns; the last column is to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row[:-1], widths, strict=False)]
        yield "  " + "  ".join([*cells, row[-1]])
