"""Pipelines: how many stages and micro-batches, which schedule, which splits, and where to cut.

    for stages:               equal parts of the cluster, the outermost links between them
        for micro-batches:    that the bound on pipelines leaves a chance    pipeline_bound.py
            for meshes:       of one part, at most two axes, blocks recomputed where memory binds
                for choices:  the least additive cost, what fits in memory, and baselines
                    cut:      the slowest stage as fast as can be, within memory
                    simulate all stages, one after the other or in chunks of the model
    for the best:             finer meshes, GPipe, equal layers, parts with choices of their own
    for parts of other sizes: as they are asked for, each with a choice of its own

One choice of splits is made for the whole model on the mesh of a part. Then the sum of the stages'
times does not depend on where the model is cut, and the least step, sum + (micro-batches - 1) x
slowest, has the fastest slowest stage. At last, each part may follow another of the choices that
were met, with its own mesh, splits and recomputation: `cuts.py` finds the cuts and the choices with
the least such step together, within the memory that the micro-batches in flight leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardfold.costs.activations import KEEP_ALL
from shardfold.errors import (
    ClusterError,
    InfeasibleError,
    InputError,
    ModelError,
    ShardfoldError,
)
from shardfold.graph import Graph
from shardfold.pipeline.cut import cut_unequally, equal
from shardfold.planner.batch_slices import Samples
from shardfold.planner.case import Candidate, Case, ResolvedRequest, Source
from shardfold.planner.micro_batches import check_number
from shardfold.planner.options import MicroBatches
from shardfold.planner.pipeline_bound import PipelineBound
from shardfold.planner.pipeline_plan import (
    COARSE,
    MOST_CHUNKS,
    PipelinePlan,
    Setup,
    alike,
    cut_best,
    stage_numbers,
    with_layers,
    with_own_choices,
)
from shardfold.planner.proposals import MOST_HIDDEN, list_baselines
from shardfold.planner.stated_run import ChosenRun
from shardfold.progress import Stage, Watch

ROUNDS = 3  # of searches within another limit
SHY = 0.99  # of the limit that a peak above it asks for
FEW = 4  # pipelines of which GPipe and equal layers are tried
CLOSE = 0.9  # of the step with the least additive cost: no baseline on that mesh is much shorter
FEWEST = 3  # numbers of stages that are looked at, where there is a plan without to be beaten
PER_STAGE = (4, 2, 8, 1)  # micro-batches for each stage that are tried, the usual number first


@dataclass(frozen=True)
class SearchedPipelines:
    """The fastest pipeline that fits, if it is faster than any plan without stages, and a bound."""

    plan: PipelinePlan | None
    bound_seconds: float | None  # on the step of any pipeline; None: there are too few layers


def search_pipelines(
    graphs: Callable[[int], Graph],
    micro_batches: Callable[[int], Sequence[int]],
    request: ResolvedRequest,
    bound: PipelineBound,
    wish: int | None,
    best_seconds: float,
    watch: Watch,
) -> SearchedPipelines:
    """The fastest pipeline that fits; none where none is faster than `best_seconds`.

    `micro_batches` lists the numbers to try for so many stages: the first that may win is tried for
    every number of stages, the others for the best. A wished-for number of stages is planned
    whatever it takes, or refused with the reason.
    """
    numbers = [wish] if wish is not None else stage_numbers(request.cluster)
    search = _Search(request, math.inf if wish is not None else best_seconds)
    refusals, seen = list[ShardfoldError](), set[tuple[int, int, bool]]()

    def hopeful(stages: int) -> list[int]:
        tries = micro_batches(stages)
        return [m for m in tries if bound.least_step(stages, m) < search.best_seconds]

    def guess(stages: int) -> float:
        try:
            setup = Setup.of(graphs, request, stages, 1)
            return _guessed_seconds(setup, hopeful(stages)[0], bound.host.model)
        except ShardfoldError:
            return math.inf

    def look(tries: Sequence[tuple[int, int]], *, finely: bool = False) -> None:
        for number, (stages, count) in enumerate(tries):
            if count not in hopeful(stages) or (stages, count, finely) in seen:
                continue
            seen.add((stages, count, finely))
            watch(Stage("searching pipelines", number, len(tries)))
            try:
                search.look(Setup.of(graphs, request, stages, count, finely=finely))
            except (ClusterError, InputError, ModelError) as error:
                refusals.append(error)

    left = [stages for stages in numbers if hopeful(stages)]
    if search.rival < math.inf and len(left) > FEWEST:
        left = sorted(left, key=guess)[:FEWEST]
    look([(stages, hopeful(stages)[0]) for stages in left if hopeful(stages)])
    close = search.close() if search.found else left  # where the usual number was refused
    look([(stages, count) for stages in close for count in micro_batches(stages)])
    look(search.winning(), finely=True)
    if wish is not None and not search.found:
        raise refusals[0]
    possible = [(n, m) for n in numbers if n <= bound.layers for m in micro_batches(n)]
    least = min((bound.least_step(*each) for each in possible), default=None)
    return SearchedPipelines(search.best(), least)


def micro_batches_for(stages: int, wish: MicroBatches, samples: Samples) -> list[int]:
    """The numbers of micro-batches that are tried for so many stages, the usual one first."""
    if isinstance(wish, int):
        check_number(wish, samples)
        return [wish]
    known = samples.divisors()
    near = [stages * each for each in PER_STAGE if stages * each in known]
    return near or known[-1:] or [1]


def _guessed_seconds(setup: Setup, micro_batches: int, host_seconds: float) -> float:
    """A step of so many micro-batches, by the additive cost of the whole batch on each part."""
    cases, stages = setup.cases, setup.pipeline.devices
    meshes = range(len(cases.prices))
    least = min(cases.on(mesh, KEEP_ALL, setup.asked).solve().cost for mesh in meshes)
    waiting = (stages - 1) / (micro_batches * setup.most_chunks)
    return max(least, host_seconds * micro_batches) / stages * (1 + waiting)


@dataclass
class _Search:
    request: ResolvedRequest
    rival: float  # a step that is to be beaten
    found: list[PipelinePlan] = field(default_factory=list)

    @property
    def best_seconds(self) -> float:
        """The fastest that fits so far."""
        faster = (each for each in self.found if each.seconds < self.rival and each.fits)
        return min((each.seconds for each in faster), default=self.rival)

    def close(self) -> list[int]:
        """The number of stages of the fastest, where another number of micro-batches may win."""
        best = min(self.found, key=lambda each: each.order, default=None)
        if best is None or CLOSE * best.seconds >= self.rival:
            return []
        return [best.setup.pipeline.devices]

    def winning(self) -> list[tuple[int, int]]:
        """The stages and micro-batches of the fastest, where it beats the rival."""
        fitting = [each for each in self.found if each.fits and each.seconds < self.rival]
        best = min(fitting, key=lambda each: each.seconds, default=None)
        return [] if best is None else [(best.setup.pipeline.devices, best.micro_batches)]

    def best(self) -> PipelinePlan | None:
        """The fastest: of the best few, equal layers and GPipe are tried, too."""
        hopeful = [each for each in self.found if each.hoped_seconds < self.rival]
        order = sorted(hopeful, key=lambda each: each.order)
        firsts = {each.setup.pipeline.devices: each for each in reversed(order)}
        few = [*order[:FEW], *(each for each in firsts.values() if each not in order[:FEW])]
        others = [other for each in few for other in (_equal_layers(each), _as_gpipe(each))]
        others += self._of_own_choices(few)
        won = min((*few, *others), key=lambda each: each.order, default=None)
        return won if won is None or won.seconds < self.rival else None

    def _of_own_choices(self, few: Sequence[PipelinePlan]) -> Iterator[PipelinePlan]:
        """Of each cut of the cluster that the best few are on: parts that follow choices met."""
        for setup in dict.fromkeys(each.setup for each in few):
            met = [p for p in self.found if p.setup is setup and p.staged.pipeline.chunks == 1]
            every = [_unlike(met)] * setup.pipeline.devices
            found = with_own_choices(setup, every, self.request.limit)
            if found is not None and len(set(found.followed)) > 1:
                yield found

    def look(self, setup: Setup) -> None:
        """Try every mesh of one cut of the cluster; blocks are recomputed where memory binds."""
        for regions in setup.regions():
            for mesh in range(len(setup.cases.prices)):
                self._case(setup, setup.cases.on(mesh, regions, setup.asked))
            own = [each for each in self.found if each.setup is setup]
            if own and min(own, key=lambda each: each.seconds).fits:
                return

    def _case(self, setup: Setup, case: Case) -> None:
        fastest = Candidate(case, case.solve())
        if self._is_hopeless(setup, MOST_HIDDEN * fastest.solution.lower_bound):
            return
        known = len(self.found)
        at = self._take(setup, fastest)
        for _ in range(ROUNDS):
            total = at.candidate.solution.bytes or 0.0
            if at.hoped_seconds >= self.best_seconds or at.fits or not total:
                break
            room = total * self.request.limit / at.peak_bytes * SHY
            try:
                found = case.solve_within(room + case.fixed_bytes, fastest=fastest.solution)
            except InfeasibleError:
                break
            candidate = replace(fastest, solution=found)
            if self._is_hopeless(setup, candidate.unhidden_seconds):
                break
            at = self._take(setup, candidate)
        if CLOSE * min(each.seconds for each in self.found[known:]) >= self.best_seconds:
            return
        baselines = list_baselines([fastest], self.request.limit)
        for candidate in sorted(baselines, key=lambda c: c.unhidden_seconds):
            if not self._is_hopeless(setup, candidate.unhidden_seconds):
                self._take(setup, candidate)

    def _is_hopeless(self, setup: Setup, seconds: float) -> bool:
        """Whether work that takes so long on one part of the cluster cannot win on all of them.

        Each part does its share at best, and waits while the first micro-batch passes the others.
        """
        stages, count = setup.pipeline.devices, setup.pipeline.micro_batches
        return seconds / stages * (1 + (stages - 1) / (count * MOST_CHUNKS)) >= self.best_seconds

    def _take(self, setup: Setup, candidate: Candidate) -> PipelinePlan:
        """Cut the model for a choice, and simulate it; in chunks, too, where that may win."""
        chosen = alike(candidate, setup.untied)
        run = ChosenRun(chosen.case, chosen.case.decode(chosen.choice))
        found = cut_best(setup, chosen, run, setup.pipeline, {})
        self.found.append(found)
        if found.hoped_seconds < self.best_seconds:
            self.found += _in_chunks(found)
        return found


def _unlike(met: Sequence[PipelinePlan]) -> list[PipelinePlan]:
    """The fastest under each mesh and recomputation, whether it fits or not, and those that fit."""
    found: dict[object, PipelinePlan] = {}
    for each in sorted(met, key=lambda plan: plan.seconds):
        case = each.candidate.case
        for kind in ("any", each.fits):
            found.setdefault((str(case.mesh), case.recomputed, kind), each)
    smallest = min(met, key=lambda plan: plan.peak_bytes)
    return list(dict.fromkeys([*found.values(), smallest]))


def _equal_layers(plan: PipelinePlan) -> PipelinePlan:
    staged = plan.staged
    counts = equal(len(plan.setup.layers), staged.pipeline.stages)
    return with_layers(
        plan.setup, plan.candidate, staged.run, staged.pipeline, counts, staged.known
    )


def _as_gpipe(plan: PipelinePlan) -> PipelinePlan:
    """The same splits with all forwards first."""
    staged, gpipe = plan.staged, replace(plan.setup.pipeline, schedule="gpipe")
    return cut_best(plan.setup, plan.candidate, staged.run, gpipe, staged.known)


def _in_chunks(plan: PipelinePlan) -> Iterator[PipelinePlan]:
    """The same splits with several chunks of the model on every part."""
    setup, staged = plan.setup, plan.staged
    chunks = 2
    while chunks <= MOST_CHUNKS and setup.pipeline.devices * chunks <= len(setup.layers):
        try:
            pipeline = replace(setup.pipeline, schedule="interleaved", chunks=chunks)
        except InputError:
            return
        yield cut_best(setup, plan.candidate, staged.run, pipeline, staged.known)
        chunks *= 2


def search_unequal(
    graphs: Callable[[int], Graph],
    micro_batches: Sequence[int],
    request: ResolvedRequest,
    sizes: Sequence[int],
    watch: Watch,
) -> PipelinePlan:
    """The fastest pipeline on parts of these sizes; refused where there is none."""
    found, refusals = list[PipelinePlan](), list[InputError | ModelError]()
    for number, count in enumerate(micro_batches):
        watch(Stage("searching pipelines", number, len(micro_batches)))
        try:
            found.append(_fastest(graphs, request, sizes, count))
        except (InputError, ModelError) as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return min(found, key=lambda plan: plan.order)


def _fastest(
    graphs: Callable[[int], Graph], request: ResolvedRequest, sizes: Sequence[int], count: int
) -> PipelinePlan:
    """Of so many micro-batches; where nothing fits, the fastest that does not."""
    links = cut_unequally(request.cluster, sizes)
    setups: dict[int, Setup] = {}
    for part, size in enumerate(sizes):
        if size not in setups:
            meshes = links.clusters[part].meshes(COARSE)
            setups[size] = Setup.on_part(graphs, request, links, part, count, meshes)
    known = {size: list(_choices(setup)) for size, setup in setups.items()}
    met = [known[size] for size in sizes]
    for limit in (request.limit, float("inf")):
        found = with_own_choices(setups[sizes[0]], met, limit)
        if found is not None:
            return found
    raise AssertionError("Without a limit every cut fits.")


def _choices(setup: Setup) -> list[PipelinePlan]:
    """The least additive cost and the fewest bytes on every mesh, under every recomputation."""
    found = []
    for regions in dict.fromkeys(setup.regions()):
        for mesh in range(len(setup.cases.prices)):
            case = setup.cases.on(mesh, regions, setup.asked)
            fastest = Candidate(case, case.solve())
            smallest = Candidate(case, case.solve_smallest(), Source.SMALLEST, "smallest")
            found += [_priced(setup, each) for each in (fastest, smallest)]
    return found


def _priced(setup: Setup, candidate: Candidate) -> PipelinePlan:
    chosen = alike(candidate, setup.untied)
    run = ChosenRun(chosen.case, chosen.case.decode(chosen.choice))
    counts = equal(len(setup.layers), setup.pipeline.stages)
    return with_layers(setup, chosen, run, setup.pipeline, counts, {})
