"""A plan in sentences: its step, its lower bound, the baselines, how it was made.

An estimated strategy in sentences: its step, its memory, and the plan beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardfold.cluster import from_plain
from shardfold.costs.accuracy import Spread, spread_of
from shardfold.graph.precision import precision_named
from shardfold.planner.batch_slices import items_in
from shardfold.planner.estimated import Estimated, Pipelined
from shardfold.plans.plan import FinalistEntry, MeshEntry, Plan
from shardfold.report.units import number, seconds, size
from shardfold.simulate.tasks import block_of

MOST_MESHES = 6
MOST_KINDS = 4
TIE = 5e-4  # of a step: so near, two are as fast

Tone = Literal["plain", "alarm", "warning", "aside"]


@dataclass(frozen=True, slots=True)
class Sentence:
    """What is said of a plan, and how loud."""

    text: str
    tone: Tone = "plain"


def heading(plan: Plan, model: str | None = None) -> tuple[str, str]:
    """What was planned, on what, and under which assumptions."""
    made = plan.provenance
    shapes = [
        " x ".join(f"{axis.name}={axis.size}" for axis in mesh) or "one device"
        for mesh in plan.meshes_of_parts
    ]
    axes = shapes[0]
    if len(set(shapes)) > 1:
        axes = f"{', '.join(shapes[:-1])} and {shapes[-1]} in the parts of a pipeline"
    elif plan.pipeline is not None:
        axes += f" in each of {plan.pipeline.parts} parts of a pipeline"
    precision = f", {made.request.numbers}" if made.request.numbers else ""
    compiled = ", compiled" if made.request.compile else ""
    parts = f", {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    return (
        f"{model or made.model or 'A plan'} on {plan.cluster}, mesh {axes}",
        f"{number(made.parameters)} parameters, {made.operators:,} operators, "
        f"{made.request.optimizer}{precision}{compiled}, {made.request.cost} costs{parts}",
    )


def sentences(plan: Plan) -> tuple[Sentence, ...]:
    """All that is said of a plan: what is wrong with it first, how it was made last."""
    return (
        *(Sentence(text, "alarm") for text in _too_large(plan)),
        *(Sentence(text, "warning") for text in _without_rule(plan)),
        *map(Sentence, _step(plan)),
        *map(Sentence, _proven(plan)),
        Sentence(f"Precision: {precision_named(plan.provenance.request.numbers)}."),
        *map(Sentence, _compiled(plan)),
        *map(Sentence, _pipelined_plan(plan)),
        Sentence(f"Additive cost, without overlap: {parts(plan)}; {proof(plan)}."),
        *map(Sentence, _against_baselines(plan)),
        *map(Sentence, _preferred(plan)),
        *map(Sentence, _recomputed(plan)),
        *map(Sentence, _accumulated(plan)),
        *map(Sentence, _pinned(plan)),
        Sentence(meshes(plan)),
        Sentence(_unsplit(plan)),
        *map(Sentence, _by_experiment(plan)),
        *(Sentence(str(each), "aside") for each in (spread(plan),) if each is not None),
        *(Sentence(note, "aside") for note in plan.provenance.notes),
        Sentence(_effort(plan), "aside"),
    )


def _step(plan: Plan) -> Iterator[str]:
    """How long a step takes, and how well it uses the devices."""
    found, step = plan.simulation, in_range(plan.estimate.step_seconds, likely_range(plan))
    rate = "".join(f", {each}" for each in throughput(plan))
    if found is None:
        cost = plan.provenance.request.cost
        yield f"Step: {step}{rate}: the additive cost, as {cost} costs know no overlap."
        return
    sent = found.communication_seconds
    hidden = max(0.0, 1 - found.exposed_seconds / sent) if sent else 0.0
    share = f", {hidden:.0%} of communication hidden" if sent else ""
    yield (
        f"Step: {step}, simulated with overlap{rate}, MFU {found.mfu:.1%}{share}; "
        f"the peak of {size(found.peak_bytes)} is reached at {found.peak_at}."
    )


def _proven(plan: Plan) -> Iterator[str]:
    """How much shorter the step of any other plan can be, rounded up."""
    bound, step = plan.estimate.step_lower_bound_seconds, plan.estimate.step_seconds
    staged = plan.estimate.pipeline_lower_bound_seconds
    if step and staged is not None:
        yield _proven_of_pipelines(staged, step)
    if bound is None or not step:
        return
    gap = _gap(bound, step)
    request = plan.provenance.request
    which = [
        *([f"of {plan.micro_batches} micro-batches"] if plan.micro_batches > 1 else []),
        *(["on this mesh"] if request.mesh is not None else []),
        *(["with these pins"] if plan.pinned is not None else []),
        *(["without stages"] if staged is not None else []),
    ]
    words = " ".join(["No plan", *which])
    yield (
        f"{words} has a step that is more than {gap:.1%} shorter in this simulation: "
        f"{seconds(bound)} is a proven lower bound."
    )


def _proven_of_pipelines(bound: float, step: float) -> str:
    if bound >= step:
        return f"No pipeline in the search is faster: none has a step below {seconds(bound)}."
    return (
        f"No pipeline in the search has a step that is more than {_gap(bound, step):.1%} shorter: "
        f"none is below {seconds(bound)}."
    )


def _gap(bound: float, step: float) -> float:
    """How much shorter another step can be, rounded up."""
    return math.ceil(1e3 * max(0.0, 1 - bound / step) - 1e-9) / 1e3


def _compiled(plan: Plan) -> Iterator[str]:
    if plan.provenance.request.compile:
        yield "Compiled: priced as torch.compile fuses and keeps, and run so."


def _pipelined_plan(plan: Plan) -> Iterator[str]:
    """The stages of a plan: which layers each has, and how long it works in a step."""
    found = plan.pipeline
    if found is None:
        return
    chunks = f" with {found.chunks} chunks of the model each" if found.chunks > 1 else ""
    yield (
        f"Pipeline: {found.parts} parts of the cluster{chunks}, schedule {found.schedule}, "
        f"{plan.micro_batches} micro-batches, bubble {found.bubble:.1%}. Operators are as in one "
        "micro-batch; times are for all."
    )
    for place, (stage, mesh) in enumerate(zip(found.stages, plan.meshes_of_parts, strict=False), 1):
        on = f" ({'x'.join(str(axis.size) for axis in mesh) or '1'})" if found.follows else ""
        yield (
            f"Part {place}{on}: {stage.layers}; busy {seconds(stage.busy_seconds)}, at most "
            f"{stage.in_flight} micro-batches in flight, peak {size(stage.peak_bytes)}."
        )


def spread(plan: Plan) -> Spread | None:
    """How far predictions of this kind were off where they were measured."""
    made, stages = plan.provenance, 1 if plan.pipeline is None else plan.pipeline.parts
    if not made.cluster:
        return None
    cost, compiled = made.request.cost, made.request.compile
    return spread_of(cost, from_plain(made.cluster), plan.processes, stages, compiled=compiled)


def likely_range(plan: Plan) -> tuple[float, float] | None:
    """Seconds between which the step will be, as far as measured steps tell."""
    found = spread(plan)
    return None if found is None else found.of(plan.estimate.step_seconds)


def in_range(step: float, likely: tuple[float, float] | None) -> str:
    """A step, and where it will be, as far as that is known."""
    if likely is None:
        return seconds(step)
    return f"{seconds(step)} (likely {seconds(likely[0])} to {seconds(likely[1])})"


def throughput(plan: Plan) -> Iterator[str]:
    """Tokens or samples in a second, where the plan knows its batch."""
    shapes = [(entry.dtype, entry.whole(plan.micro_batches)) for entry in plan.inputs]
    dtype, shape = next(((dtype, shape) for dtype, shape in shapes if shape), ("", ()))
    if not shape or not plan.estimate.step_seconds:
        return
    count, unit = items_in(dtype, shape)
    yield f"{count / plan.estimate.step_seconds:,.0f} {unit}/s"


def parts(plan: Plan) -> str:
    """What the additive cost is made of."""
    e = plan.estimate
    named = {
        "compute": e.compute_seconds,
        "communication": e.communication_seconds,
        "update": e.update_seconds,
    }
    listed = ", ".join(f"{name} {seconds(value)}" for name, value in named.items())
    return f"{seconds(e.additive_seconds)} ({listed})"


def proof(plan: Plan) -> str:
    """How sure the search is that no choice has a lower additive cost."""
    e = plan.estimate
    if plan.pipeline is not None:
        return "of all stages together"
    if e.optimal:
        return "proven optimal" if plan.fits else "proven the least if memory did not count"
    gap = 1 - e.additive_lower_bound_seconds / e.additive_seconds
    return (
        f"at most {gap:.2%} above the least (lower bound {seconds(e.additive_lower_bound_seconds)})"
    )


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to split, in figures: its step, its memory, and whether that is within the limit."""

    name: str
    step_seconds: float
    peak_bytes: float
    fits: bool
    recomputes: bool = False
    ratio: float | None = None  # how many times the plan's step; None: it is the plan

    @property
    def words(self) -> tuple[str, str, str, str, str]:
        """The cells of its row."""
        how = " with recomputation" if self.recomputes else " without recomputation"
        fits = "fits" if self.fits else "DOES NOT FIT"
        told = fits if self.ratio is None or self.fits else fits + how
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}x"
        return self.name, seconds(self.step_seconds), ratio, size(self.peak_bytes), told


def contenders(plan: Plan) -> tuple[Contender, ...]:
    """The plan itself, then the baselines that everybody knows."""
    e = plan.estimate
    own = Contender("this plan", e.step_seconds, e.peak_bytes, plan.fits, bool(plan.recompute))
    known = (
        (
            "data-parallel",
            e.data_parallel_seconds,
            e.data_parallel_bytes,
            e.data_parallel_recomputes,
        ),
        ("fsdp", e.fully_sharded_seconds, e.fully_sharded_bytes, e.fully_sharded_recomputes),
    )
    return own, *(
        Contender(name, step, peak, peak <= e.limit_bytes, again, step / e.step_seconds)
        for name, step, peak, again in known
    )


def limit(plan: Plan) -> str:
    """The limit that memory is held against."""
    return f"limit {size(plan.estimate.limit_bytes)}"


def best_baseline(plan: Plan) -> FinalistEntry | None:
    """The fastest baseline that fits in memory."""
    limit_bytes = plan.estimate.limit_bytes
    fitting = [f for f in plan.finalists if f.is_baseline and f.peak_bytes <= limit_bytes]
    return min(fitting, key=lambda f: f.step_seconds, default=None)


def _against_baselines(plan: Plan) -> Iterator[str]:
    """By how much the step wins over the best baseline that fits."""
    hands, best = [f for f in plan.finalists if f.is_baseline], best_baseline(plan)
    if best is not None:
        wins = best.step_seconds / plan.estimate.step_seconds - 1
        won = "as fast as" if abs(wins) < 5e-4 else f"{abs(wins):.1%} faster than"
        if wins >= 1:
            won = f"{1 + wins:.1f} times as fast as"
        if wins <= -5e-4:  # with pins, which baselines need not follow
            won = f"{abs(wins):.1%} slower than"
        tried = f" (of {len(hands)} tried)" if len(hands) > 1 else ""
        yield f"It is {won} {best.name}, the fastest baseline that fits in memory{tried}."
    elif hands:
        count = f"None of the {len(hands)} baselines fits" if len(hands) > 1 else "No baseline fits"
        yield f"{count} in memory."


def _preferred(plan: Plan) -> Iterator[str]:
    """What a plan that is not quite the fastest was preferred to."""
    e, prefer = plan.estimate, plan.provenance.request.prefer
    fitting = [f for f in plan.finalists if f.peak_bytes <= e.limit_bytes]
    best = min(fitting, key=lambda f: f.step_seconds, default=None)
    if best is None or plan.pinned is not None or plan.pipeline is not None or prefer == "speed":
        return
    gain = 1 - best.step_seconds / e.step_seconds
    if gain >= TIE:
        yield (
            f"A step that is {gain:.1%} shorter needs {size(best.peak_bytes)} and other splits: "
            "--prefer speed takes it."
        )


def _recomputed(plan: Plan) -> Iterator[str]:
    """Which activations are dropped and made again."""
    again = [plan.operators[i] for first, end in plan.recompute for i in range(first, end)]
    if again:
        blocks = len({block_of(op.module) for op in again})
        most = Counter(op.kind.rpartition(".")[2] for op in again if op.seconds > 0)
        names = list(dict.fromkeys(kind for kind, _ in most.most_common()))
        some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        yield (
            f"Activation checkpointing: {len(again):,} operators of {blocks} blocks run again in "
            f"backward ({some}) to save memory."
        )
    price = plan.estimate.gib_price_seconds
    if price:
        yield (
            f"The price of memory at this limit: a GiB more per device would save about "
            f"{seconds(price)} of the step, a GiB less would cost as much or more."
        )


def _accumulated(plan: Plan) -> Iterator[str]:
    """In how many micro-batches a step takes its batch."""
    if plan.micro_batches > 1 and plan.pipeline is None:
        yield (
            f"Gradient accumulation: a step takes its batch in {plan.micro_batches} micro-batches "
            "to save memory. Operators are as in one of them; times and the bound are for all."
        )


def _too_large(plan: Plan) -> Iterator[str]:
    """What to try where no plan fits."""
    if not plan.fits:
        smallest = plan.estimate.min_feasible_bytes
        needs = "" if smallest is None else f"; the smallest plan needs {size(smallest)}"
        yield f"No plan fits in memory{needs}. Try more devices, a smaller batch or bf16."


def meshes(plan: Plan) -> str:
    """Which meshes were tried, and by how much the winner won."""
    if plan.pipeline is not None:
        steps = [entry.step_seconds for entry in plan.meshes if entry.step_seconds is not None]
        if not steps:
            return "Nothing fits without stages."
        behind = min(steps) / plan.estimate.step_seconds - 1
        return f"Without stages the best step is {seconds(min(steps))} ({behind:+.1%})."
    shape = "x".join(str(axis.size) for axis in plan.mesh) or "1"
    others = [entry for entry in plan.meshes if entry.mesh != shape]
    if not others:
        return f"One mesh was tried: {shape}."
    others.sort(key=lambda entry: (entry.step_seconds is None, entry.step_seconds or 0.0))
    won = plan.estimate.step_seconds
    listed = ", ".join(_behind(entry, won) for entry in others[:MOST_MESHES])
    more = f" and {len(others) - MOST_MESHES} more" if len(others) > MOST_MESHES else ""
    return f"Meshes tried: {shape} is best; {listed}{more}."


def _behind(entry: MeshEntry, won: float) -> str:
    behind = -1.0 if entry.step_seconds is None else entry.step_seconds / won - 1
    if abs(behind) < 5e-4:
        return f"{entry.mesh} is as good"
    return f"{entry.mesh} +{behind:.1%}" if behind > 0 else f"{entry.mesh} does not fit"


def _pinned(plan: Plan) -> Iterator[str]:
    """What the user fixed, and what that costs against the best without it."""
    if plan.pinned is None:
        return
    listed = ", ".join(
        f"{pin.pattern}={pin.split} ({pin.operators} operator{'s' * (pin.operators != 1)})"
        for pin in plan.pinned.pins
    )
    yield f"Pinned: {listed}."
    free, step = plan.pinned.free_seconds, plan.estimate.step_seconds
    if plan.fits:
        yield f"The pins cost {seconds(step - free)} of the step ({step / free - 1:.2%})."
    else:
        yield f"Without the pins the best step is {seconds(free)}."


def _without_rule(plan: Plan) -> Iterator[str]:
    """The operators that nothing is known of."""
    for entry in plan.unsplit:
        if entry.reason == "no rule":
            yield (
                f"No rule for {entry.kind} ({entry.count} of them): planned unsplit, at least "
                f"{entry.share:.2%} of the cost, as its arithmetic is unknown. "
                "See docs/how-to/add-a-rule.md."
            )


FUNCTION, KNOWN = "shardfold.function", {"shardfold", "prims"}  # libraries of operators


def _unsplit(plan: Plan) -> str:
    """The other operators that every device computes in full."""
    if plan.processes == len(plan.meshes_of_parts):
        who = "The device" if plan.processes == 1 else "Each stage is on one device, which"
        return f"{who} computes its operators in full."
    rest = [entry for entry in plan.unsplit if entry.reason != "no rule"]
    if not rest:
        return (
            "Every operator could be split." if not plan.unsplit else "All others could be split."
        )
    count, share = sum(u.count for u in rest), sum(u.share for u in rest)
    names = list(dict.fromkeys(u.kind.rpartition(".")[2] for u in rest))
    kinds = ", ".join(names[:MOST_KINDS]) + (", ..." if len(names) > MOST_KINDS else "")
    what = "operator has" if count == 1 else "operators have"
    return (
        f"{count} {what} nothing to split ({kinds}): computed on every device, "
        f"{share:.2%} of the cost."
    )


def _by_experiment(plan: Plan) -> Iterator[str]:
    """The operators that no rule describes, but that were run in parts; what is not seen."""
    counts = Counter[str]()
    for entry in plan.experiments:
        counts[entry.kind.removeprefix("aten.")] += entry.count
    if counts:
        listed = ", ".join(f"{kind} ({count})" for kind, count in counts.items())
        yield f"Without a rule, but with splits found by experiment: {listed}."
    libraries = {kind.partition(".")[0] for kind in counts if "." in kind}
    if FUNCTION in counts or libraries - KNOWN:
        yield (
            "Of functions and operators of your own, what they read and write is priced, not what "
            "they compute inside."
        )


def _effort(plan: Plan) -> str:
    """How long the planning took."""
    made = plan.provenance
    return (
        f"Captured in {seconds(made.capture_seconds)}, searched in {seconds(made.search_seconds)}."
    )


def estimate_lines(found: Estimated, model: str) -> Iterator[str]:
    """The step, its rate, memory by class, communication by kind, and the plan beside it."""
    yield f"{model} on {found.cluster}: {found.strategy}"
    yield ""
    each = f"{found.rate_per_device:,.0f} {found.unit}/s per device"
    hfu = f", HFU {found.hfu:.1%} with what is recomputed" if found.hfu > found.mfu else ""
    step = in_range(found.step_seconds, found.step_range_seconds)
    yield f"Step: {step}, {each}, MFU {found.mfu:.1%}{hfu}."
    if found.pipeline is not None:
        yield from _pipelined(found.pipeline)
    yield from _estimated_memory(found)
    yield _exposed(found)
    if found.plan_seconds is not None:
        yield _beside_plan(found)


def _pipelined(found: Pipelined) -> Iterator[str]:
    """Where the model is cut, and what each stage does."""
    yield f"Pipeline: {len(found.stages)} stages, {found.schedule}, bubble {found.bubble:.1%}."
    for place, stage in enumerate(found.stages, 1):
        each = (
            f"forward {seconds(stage.forward_seconds)}, backward {seconds(stage.backward_seconds)}"
        )
        peak = f"{stage.in_flight} in flight, peak {size(stage.peak_bytes)}"
        yield f"  {place}: {stage.layers}: {each}, {peak}"


def _estimated_memory(found: Estimated) -> Iterator[str]:
    fits = "it fits" if found.fits else "IT DOES NOT FIT"
    fullest = " on the fullest stage" if found.pipeline is not None else ""
    peak = f"{size(found.peak_bytes)} of {size(found.limit_bytes)}{fullest}"
    yield f"Memory: a peak of {peak}: {fits}."
    parts = sorted(found.peak_by_class.items(), key=lambda item: -item[1])
    yield "  " + ", ".join(f"{name} {size(value)}" for name, value in parts)


def _exposed(found: Estimated) -> str:
    listed = [
        f"{each.kind.replace('_', '-')} {seconds(each.exposed_seconds)} of {seconds(each.seconds)}"
        for each in found.communication
    ]
    if not listed:
        return "Communication: none."
    share = found.exposed_seconds / found.step_seconds
    return f"Exposed communication ({share:.1%} of the step): {', '.join(listed)}."


def _beside_plan(found: Estimated) -> str:
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
