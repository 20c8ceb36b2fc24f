"""Pipelines as people state them: equal layers in stages, a baseline's splits within each.

    for stages and micro-batches: of the numbers that are searched, too
        for meshes of a part:     at most two axes; blocks recomputed where nothing fits otherwise
            for baselines:        in every degree, the least additive cost first
                for schedules:    all forwards first; in turns; in chunks

The best of each schedule is kept, one that fits before one that does not. What is no faster than
all of them, however well its communication is hidden, is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from shardfold.errors import ClusterError, InputError, ModelError, ShardfoldError
from shardfold.graph import Graph
from shardfold.pipeline import Pipeline
from shardfold.pipeline.cut import equal
from shardfold.planner.case import Candidate, Case, ResolvedRequest
from shardfold.planner.pipeline_plan import (
    Known,
    PipelinePlan,
    Setup,
    alike,
    stage_numbers,
    with_layers,
)
from shardfold.planner.proposals import list_baselines
from shardfold.planner.stated_run import ChosenRun

SCHEDULES = ("gpipe", "1f1b", "interleaved")


def equal_layers(
    graphs: Callable[[int], Graph],
    micro_batches: Callable[[int], Sequence[int]],
    request: ResolvedRequest,
    watch: Callable[[int, int], None],
) -> Mapping[str, PipelinePlan] | ShardfoldError:
    """The best of each schedule; where there is none, why."""
    search, refusals = _Search(request.limit), list[ShardfoldError]()
    tries = [(n, m) for n in stage_numbers(request.cluster) for m in micro_batches(n)]
    for number, (stages, count) in enumerate(tries):
        watch(number, len(tries))
        try:
            search.look(Setup.of(graphs, request, stages, count))
        except (ClusterError, InputError, ModelError) as error:
            refusals.append(error)
    if not search.best:
        return refusals[0] if refusals else ClusterError("One device has no stages.")
    return search.best


@dataclass
class _Search:
    limit: float
    best: dict[str, PipelinePlan] = field(default_factory=dict)  # by schedule

    def look(self, setup: Setup) -> None:
        for regions in setup.regions():
            fits = False
            for mesh in range(len(setup.cases.prices)):
                fits |= self._case(setup, setup.cases.on(mesh, regions, setup.asked))
            if fits:
                return

    def _case(self, setup: Setup, case: Case) -> bool:
        """Whether any of the baselines on a mesh fits."""
        listed = list_baselines([Candidate(case, case.solve())], self.limit)
        fits = False
        for candidate in sorted(listed, key=lambda each: each.floor_seconds):
            for plan in self._plans(setup, candidate):
                fits |= plan.fits
                known = self.best.get(plan.staged.pipeline.schedule)
                if known is None or plan.order < known.order:
                    self.best[plan.staged.pipeline.schedule] = plan
        return fits

    def _plans(self, setup: Setup, candidate: Candidate) -> Iterator[PipelinePlan]:
        """A baseline under every schedule under which it may be the best."""
        least = candidate.floor_seconds
        pipelines = [p for p in _pipelines(setup) if self._may_win(p, least)]
        if not pipelines:
            return
        chosen, passes = alike(candidate, setup.untied), Known()
        run = ChosenRun(chosen.case, chosen.case.decode(chosen.choice))
        for pipeline in pipelines:
            counts = equal(len(setup.layers), pipeline.stages)
            yield with_layers(setup, chosen, run, pipeline, counts, passes)

    def _may_win(self, pipeline: Pipeline, seconds: float) -> bool:
        """Whether work that takes so long on one part can beat the best of its schedule."""
        best = self.best.get(pipeline.schedule)
        rival = best.seconds if best is not None and best.fits else inf
        waiting = (pipeline.devices - 1) / (pipeline.micro_batches * pipeline.chunks)
        return seconds / pipeline.devices * (1 + waiting) < rival


def _pipelines(setup: Setup) -> Iterator[Pipeline]:
    for schedule in SCHEDULES:
        chunks = 2 if schedule == "interleaved" else 1
        while chunks <= (setup.most_chunks if schedule == "interleaved" else 1):
            try:
                yield replace(setup.pipeline, schedule=schedule, chunks=chunks)
            except InputError:
                break
            chunks *= 2
