"""What `plan` decides last: the best plan without pipeline stages, or a pipeline that beats it.

    without stages            the planning loop                             planner.py
    with stages               where the bound leaves them a chance          pipelines.py
                              with as many devices as was asked for         pipelines.py
    the plan has stages if    a number of them was asked for,
                              nothing fits without, or
                              they take 5% off the step (with --prefer speed: anything)

Many numbers of micro-batches are compared, on graphs that are read off two captures. The winner's
is captured, too: where that is another graph, the search is made again, on captures alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from shardfold.errors import InfeasibleError, InputError
from shardfold.planner.case import Candidate, ResolvedRequest
from shardfold.planner.compare_methods import EqualLayers
from shardfold.planner.equal_layers import equal_layers
from shardfold.planner.micro_batches import Captures
from shardfold.planner.options import Request
from shardfold.planner.pipeline_bound import PipelineBound
from shardfold.planner.pipeline_plan import PipelinePlan
from shardfold.planner.pipelines import (
    SearchedPipelines,
    micro_batches_for,
    search_pipelines,
    search_unequal,
)
from shardfold.planner.planner import select_plan
from shardfold.planner.select import Selection
from shardfold.progress import Stage, Watch

WORTH = 0.95  # of the best step without stages: what takes longer is not worth having them
HOSTED = 0.9  # of a step: a host that asks for as much of it decides how long it is


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned, and the model as it is captured for that."""

    request: Request
    search: ResolvedRequest
    captures: Captures
    staged: Callable[[], Captures]  # whose graphs can be cut between all layers
    watch: Watch

    @property
    def may_have_stages(self) -> bool:
        """Whether stages are looked for: asked for, or free to win where they can be simulated."""
        request = self.request
        return request.may_have_stages and (request.wants_stages or self.search.pricing.overlaps)

    def micro_batches(self, captures: Captures, stages: int) -> list[int]:
        """The numbers that are tried for so many stages."""
        return micro_batches_for(stages, self.request.micro_batches, captures.samples)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What won without stages, the pipeline that beats it, if any, and the seconds of search."""

    selection: Selection
    pipelines: SearchedPipelines
    seconds: float

    @property
    def best(self) -> Candidate | PipelinePlan:
        """What the plan is made of."""
        return self.pipelines.plan or self.selection.winner

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        piped = self.pipelines.plan
        return self.selection.fits if piped is None else piped.fits


def choose(question: Question) -> Chosen:
    """The best plan, with or without stages."""
    search, refusal = question.search, None
    try:
        selection, seconds = without_stages(question)
    except InfeasibleError as error:
        if not question.may_have_stages:
            raise
        refusal = error
        free = replace(question, search=replace(search, limit_bytes=None))
        selection, seconds = without_stages(free)
        selection = replace(selection, limit_bytes=search.limit)
    pipelines, more = _with_stages(question, selection, refusal)
    return Chosen(selection, pipelines, seconds + more)


def without_stages(question: Question) -> tuple[Selection, float]:
    """What is selected over the numbers of micro-batches asked for; seconds of search."""
    captures, request = question.captures, question.request
    started, before = time.perf_counter(), captures.seconds
    wish = 1 if request.compile else request.micro_batches
    found = select_plan(captures, wish, question.search, question.watch)
    return found, time.perf_counter() - started - (captures.seconds - before)


def _with_stages(
    question: Question, selection: Selection, refusal: InfeasibleError | None
) -> tuple[SearchedPipelines, float]:
    """The best pipeline, where one is wished for or worth it; seconds of search.

    `refusal` says why there is no plan without stages, where there is none.
    """
    request, rival = question.request, math.inf
    if not question.may_have_stages:
        return SearchedPipelines(None, None), 0.0
    if not question.search.pricing.overlaps:
        raise InputError("Stages are simulated, which these costs do not know: pipeline=off.")
    captures = question.staged()
    started, before = time.perf_counter(), captures.seconds
    bound = PipelineBound.of([c.case for c in selection.searched])
    if selection.fits:
        rival = _step_to_beat(request, selection.winner)
    wish = request.pipeline if isinstance(request.pipeline, int) else None
    wish = len(request.part_sizes) or wish
    numbers = partial(question.micro_batches, captures)

    def search() -> SearchedPipelines:
        graphs, sizes = captures.likely_graph, request.part_sizes
        if len(set(sizes)) > 1:
            given = (numbers(len(sizes)), question.search, sizes, question.watch)
            return SearchedPipelines(search_unequal(graphs, *given), None)
        return search_pipelines(
            graphs, numbers, question.search, bound, wish, rival, question.watch
        )

    found = search()
    while not _are_confirmed(captures, [found.plan] if found.plan else []):
        found = search()
    best = found.plan
    if best is not None and not best.fits and request.memory_limit is not None:
        needed, limit = best.peak_bytes, question.search.limit
        if request.wants_stages or (refusal is not None and needed < refusal.needed_bytes):
            refusal = InfeasibleError(needed_bytes=needed, limit_bytes=limit, hint=best.hint)
    if refusal is not None and (best is None or not best.fits):
        raise refusal
    if best is not None and not best.fits and not request.wants_stages:
        best = None
    seconds = time.perf_counter() - started - (captures.seconds - before)
    return replace(found, plan=best), seconds


def best_of_equal_layers(question: Question) -> EqualLayers:
    """The best pipelines of equal layers, which are baselines, or why there are none."""
    if not question.search.pricing.overlaps:
        return InputError("Stages are simulated, which these costs do not know.")
    captures, watch = question.staged(), question.watch

    def search() -> EqualLayers:
        return equal_layers(
            captures.likely_graph,
            partial(question.micro_batches, captures),
            question.search,
            lambda done, total: watch(Stage("pipelines of equal layers", done, total)),
        )

    found = search()
    while isinstance(found, Mapping) and not _are_confirmed(captures, found.values()):
        found = search()
    return found


def _step_to_beat(request: Request, plain: Candidate) -> float:
    """What the step of a pipeline has to be below to be taken, beside the best without stages.

    Where the host decides, stages would only share out what it asks for: compiling spares that.
    """
    if request.prefer == "speed":
        return plain.seconds
    return 0.0 if plain.host_seconds > HOSTED * plain.seconds else WORTH * plain.seconds


def _are_confirmed(captures: Captures, plans: Iterable[PipelinePlan]) -> bool:
    """Whether the micro-batches of these plans are what the model makes of them."""
    return all(captures.confirm(plan.micro_batches) for plan in plans)
