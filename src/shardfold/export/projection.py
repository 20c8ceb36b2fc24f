"""A plan in the words of another stack: the nearest configuration that the stack can be told.

A plan's mesh axes are read by what its products split on them: the batch (data), or anything else
(tensor). Data axes over which most parameters are stored in parts are shards, the others replicas.
Of the configurations of the stack, the nearest has the fewest doublings of degrees between, then
the same recomputation and stage of ZeRO. It is priced again, in three steps, so that what is lost
has causes:

    the plan's degrees, one for all layers    what layers split in their own ways
    the nearest configuration                 what the stack cannot be told
    as the stack runs it                      float32 state, reductions, overlap
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardfold.errors import InputError
from shardfold.export.dtensor import faced, words_on_axes
from shardfold.export.search import Prices
from shardfold.export.targets import RECOMPUTE, Target
from shardfold.export.writers import Job, Written, write
from shardfold.planner.estimated import Estimated
from shardfold.plans.plan import Plan
from shardfold.simulate.tasks import block_of
from shardfold.strategies.stated import Stated

BATCH = "batch"
LEAST = 1e-4  # of the additive cost: operators that are too small to be told of


@dataclass(frozen=True, slots=True)
class Cause:
    """A part of what the projection costs."""

    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Projection:
    """A plan as another stack runs it, and what that costs."""

    stack: str
    version: str
    checked: str
    read: Stated  # the plan's own degrees
    strategy: Stated
    estimated: Estimated
    plan_seconds: float
    causes: tuple[Cause, ...]
    unsaid: tuple[str, ...]
    written: Written

    def as_plain(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "stack": self.stack,
            "version": self.version,
            "checked": self.checked,
            "read_as": str(self.read),
            **self.estimated.as_plain(),
            "plan_seconds": self.plan_seconds,
            "causes": [{"text": each.text, "seconds": each.seconds} for each in self.causes],
            "unsaid": list(self.unsaid),
            "kind": self.written.kind,
            "text": self.written.text,
            "notes": list(self.written.notes),
        }


def degrees_of(plan: Plan) -> Stated:
    """The degrees of a plan, one for all of its layers."""
    data = _data_axes(plan)
    sharded = [axis for axis in data if _stores_parts(plan, axis)]
    shards = math.prod(plan.mesh[axis].size for axis in sharded)
    replicas = math.prod(plan.mesh[axis].size for axis in data) // shards
    tensor = math.prod(axis.size for axis in plan.mesh) // (shards * replicas)
    regathered = sum(math.prod(p.shape) for p in plan.parameters if p.regather)
    total = sum(math.prod(p.shape) for p in plan.parameters)
    zero, reshards = 3 if shards > 1 else 0, shards == 1 or regathered > total / 2
    sequence = tensor > 1 and any("seq" in words_on_axes(*each) for each in faced(plan))
    recompute = _recomputed(plan)
    passes = plan.micro_batches
    found = Stated(replicas, shards, tensor, zero, sequence, recompute, passes)
    found = replace(found, reshards=reshards)
    if plan.pipeline is None:
        return found
    cut = plan.pipeline
    return replace(found, stages=cut.parts, schedule=cut.schedule, chunks=cut.chunks)


def _recomputed(plan: Plan) -> str:
    """Full if most products of what is recomputed from run again, selective if other operators."""
    if not plan.recompute:
        return "none"
    again = {i for first, end in plan.recompute for i in range(first, end)}
    blocks = {block_of(plan.operators[i].module) for i in again}
    products = [
        i
        for i, (op, face) in enumerate(faced(plan))
        if block_of(op.module) in blocks
        and any(word in ("in", "out") for _, word, _ in face.factors)
    ]
    return "full" if 2 * len(again.intersection(products)) > len(products) else "selective"


def _data_axes(plan: Plan) -> list[int]:
    """The axes on which most of the work is split by batch."""
    by_batch, all_work = [0.0] * len(plan.mesh), [0.0] * len(plan.mesh)
    for op, face in faced(plan):
        for axis, word in enumerate(words_on_axes(op, face)):
            all_work[axis] += op.seconds if word else 0.0
            by_batch[axis] += op.seconds if word == BATCH else 0.0
    return [a for a, seconds in enumerate(by_batch) if seconds >= all_work[a] / 2]


def _stores_parts(plan: Plan, axis: int) -> bool:
    """Whether most of the parameters are in parts over an axis."""
    sizes = [(math.prod(p.shape), p.layout[axis].startswith("dim")) for p in plan.parameters]
    return sum(size for size, split in sizes if split) > sum(size for size, _ in sizes) / 2


def nearest(read: Stated, choices: Sequence[Stated]) -> Stated:
    """The configuration with the fewest doublings of degrees between, then the likest."""

    def distance(other: Stated) -> tuple[float, ...]:
        pairs = (
            (read.tensor, other.tensor),
            (read.stages, other.stages),
            (read.shards, other.shards),
            (read.replicas, other.replicas),
            (read.context, other.context),
            (read.experts, other.experts),
        )
        return (
            sum(abs(math.log2(a / b)) for a, b in pairs),
            abs(RECOMPUTE.index(read.recompute) - RECOMPUTE.index(other.recompute)),
            abs(read.zero - other.zero),
            read.reshards != other.reshards,
            abs(math.log2(read.micro_batches / other.micro_batches)),
            read.schedule != other.schedule,
            abs(read.chunks - other.chunks),
        )

    return min(choices, key=lambda each: (distance(each), str(each)))


Seconds = Callable[[Stated], float]  # of a step


def project(
    plan: Plan,
    prices: Prices,
    own: Seconds,
    target: Target,
    version: str,
    job: Job,
    choices: Sequence[Stated],
) -> Projection:
    """The nearest configuration, priced, with the causes of what it costs.

    `own` prices one as the plan is run: by shardfold, in the plan's precision.
    """
    read = degrees_of(plan)
    chosen = nearest(read, choices)
    figures = prices.estimate(chosen)
    return Projection(
        target.name,
        version,
        target.versions[version],
        read,
        chosen,
        figures,
        plan.estimate.step_seconds,
        tuple(_causes(plan, own, read, chosen, figures)),
        tuple(unsaid(plan, read, target)),
        write(target.name, version, chosen, job),
    )


def _causes(
    plan: Plan, own: Seconds, read: Stated, chosen: Stated, figures: Estimated
) -> Iterator[Cause]:
    """What each step of the projection costs; a step that cannot be priced is with the next."""
    before, waiting = plan.estimate.step_seconds, ""
    for stated, text in (
        (read, "one degree for all layers, in the usual patterns"),
        (chosen, f"{chosen} instead of {read}"),
    ):
        if stated is chosen and chosen == read:
            continue
        name = f"{waiting} and {text}" if waiting else text
        try:
            step = own(stated)
        except InputError:
            waiting = name
            continue
        yield Cause(name, step - before)
        before, waiting = step, ""
    habits = "what the stack keeps in float32, sends and overlaps in its own way"
    name = f"{waiting} and {habits}" if waiting else habits
    yield Cause(name, figures.step_seconds - before)


def unsaid(plan: Plan, read: Stated, target: Target) -> Iterator[str]:
    """What of the plan the stack has no words for."""
    if reason := target.refusal(read):
        yield f"{read}: {reason}"
    found: Counter[str] = Counter()
    for op, face in faced(plan):
        is_product = any(word in ("in", "out") for _, word, _ in face.factors)
        is_work = is_product and op.seconds > LEAST * plan.estimate.additive_seconds
        if is_work and op.split and op.split.get(BATCH, 1) != read.data:
            split = " ".join(f"{word}/{n}" for word, n in op.split.items())
            found[f"{re.sub(r'[.][0-9]+[.]', '.*.', op.module) or op.name}: {split}"] += 1
    for text, count in found.most_common():
        yield f"{text} ({count} operators)" if count > 1 else text
    kept = sum(1 for p in plan.parameters if p.regather)
    if read.zero and 0 < kept < len(plan.parameters):
        yield f"{kept} of {len(plan.parameters)} parameters are gathered again in backward"
    if plan.recompute and plan.sketch is not None:
        yield "which operators are recomputed: the stack has its own few ways"
