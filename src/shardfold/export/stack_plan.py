"""The best configuration of a stack for a model, with its runners-up and the stack's own file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardfold.cluster import Cluster
from shardfold.errors import InfeasibleError, InputError
from shardfold.export.search import Found, Priced, Prices, Progress, search
from shardfold.export.targets import Sizes, Target, configurations
from shardfold.export.writers import Job, Written, write
from shardfold.graph import Graph
from shardfold.operators.experts import experts_in
from shardfold.planner.batch_slices import Samples, first_input, items_of
from shardfold.planner.estimated import Estimated
from shardfold.strategies.stated import Stated

MOST_RUNNERS_UP = 8
TIE = 5e-4  # of a step: so near, two are as fast
HINT = (
    "Try more devices, fewer tokens in a micro-batch (a larger batch over as many devices has "
    "none to spare), another stack, or shardfold's own plan."
)


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What a stack is to be told, and what that comes to.

    `estimated.plan_seconds` is the step of the free plan, where one was asked for.
    """

    stack: str
    version: str
    checked: str  # how the version's fields were
    strategy: Stated
    estimated: Estimated
    runners_up: tuple[Priced, ...]
    possible: int  # configurations that the stack could be told
    priced: int  # of these; the others are bounded, and no better
    written: Written
    notes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The stack's own file or arguments."""
        return self.written.text

    def as_plain(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "stack": self.stack,
            "version": self.version,
            "checked": self.checked,
            **self.estimated.as_plain(),
            "possible": self.possible,
            "priced": self.priced,
            "kind": self.written.kind,
            "text": self.text,
            "notes": [*self.written.notes, *self.notes],
            "runners_up": [
                {
                    "strategy": str(each.stated),
                    "step_seconds": each.estimated.step_seconds,
                    "rate": each.estimated.rate,
                    "peak_bytes": each.estimated.peak_bytes,
                    "fits": each.estimated.fits,
                }
                for each in self.runners_up
            ],
        }


def job_of(
    graph: Graph,
    samples: Samples,
    layers: int,
    dtype: str | None,
    cluster: Cluster,
    *,
    reduces_half: bool = False,
) -> Job:
    """What a file says besides the strategy; `graph` is of the whole batch."""
    first, count = first_input(graph), samples.count
    if samples.reason:
        count = first.shape[0] if first is not None else 1
    is_text = items_of(graph)[1] == "tokens"
    seq = first.shape[1] if first is not None and is_text else None
    inner = cluster.levels[-1].size if cluster.levels else 1
    nodes = cluster.size // inner
    return Job(count, seq, layers, dtype, cluster.size, nodes, reduces_half)


def sizes_of(samples: Samples, graph: Graph, job: Job, *, has_plan: bool) -> Sizes:
    """What of a model bounds its degrees; a batch that is not cut is taken at once."""
    return Sizes(
        job.samples,
        job.layers,
        is_cut=not samples.reason,
        has_plan=has_plan,
        experts=experts_in(graph),
        has_sequence=job.seq is not None,
        is_half=job.half is not None,
    )


def choices_of(
    target: Target, cluster: Cluster, sizes: Sizes, micro_batches: int | None = None
) -> list[Stated]:
    """All that the stack can be told; refused where there is nothing."""
    found = list(configurations(target, cluster, sizes, micro_batches))
    if not found:
        cut = f" in {micro_batches} micro-batches" if micro_batches else ""
        raise InputError(
            f"{target.name} has no configuration for a batch of {sizes.samples} samples{cut} on "
            f"{cluster.size} devices: the batch must divide by the devices that share it out"
            f"{', and each part by the micro-batches' if cut else ''}."
        )
    return found


def best_for(
    prices: Prices,
    target: Target,
    version: str,
    job: Job,
    sizes: Sizes,
    micro_batches: int | None,
    watch: Progress,
) -> StackPlan:
    """Search what the stack can be told, and write the best down."""
    cluster = prices.request.cluster
    choices = choices_of(target, cluster, sizes, micro_batches)
    write(target.name, version, choices[0], job)  # what the stack lacks is said before the work
    found = search(prices, choices, sizes.samples, watch)
    if not found.priced:
        raise InputError(f"Nothing can be priced for {target.name}: {' '.join(found.refused)}")
    best = _smallest_of_ties(found.priced)
    if not best.estimated.fits:
        raise InfeasibleError(
            needed_bytes=best.estimated.peak_bytes,
            limit_bytes=best.estimated.limit_bytes,
            hint=HINT,
        )
    return StackPlan(
        target.name,
        version,
        target.versions[version],
        best.stated,
        best.estimated,
        tuple(each for each in found.priced if each is not best)[:MOST_RUNNERS_UP],
        found.possible,
        len(found.priced),
        write(target.name, version, best.stated, job),
        tuple(_notes(target, sizes, found)),
    )


def _smallest_of_ties(priced: Sequence[Priced]) -> Priced:
    """Of those that are as fast as the best, the one that holds least."""
    best = priced[0]
    as_fast = [
        each
        for each in priced
        if each.estimated.fits
        and each.estimated.step_seconds <= best.estimated.step_seconds * (1 + TIE)
    ]
    return min(as_fast, key=lambda each: each.estimated.peak_bytes, default=best)


def _notes(target: Target, sizes: Sizes, found: Found) -> Iterator[str]:
    if target.transformers_only:
        yield f"{target.name} trains models of its own: name the one that has this model's sizes."
    if not sizes.has_plan and target.needs_plan:
        yield (
            "The model has no base_model_tp_plan, which tensor parallel of this stack reads: "
            "none was searched."
        )
    if not sizes.is_cut:
        yield "The batch cannot be taken in micro-batches: the loss would be another one."
    for reason in found.refused[:3]:
        yield f"Not priced: {reason}"
    yield f"Not searched: {'; '.join(target.unpriced)}."


def beside(found: StackPlan, seconds: float, peak_bytes: float) -> StackPlan:
    """The same with the figures of the free plan."""
    figures = replace(found.estimated, plan_seconds=seconds, plan_bytes=peak_bytes)
    return replace(found, estimated=figures)
