"""The plan, baselines and other searches beside one another, on the same tables.

Each has two prices: the simulated step, in which communication runs beside work and which judges,
and the additive cost, which the searches minimise. A baseline is tried on every mesh in every
degree and keeps its best, one that fits in memory before one that does not. The other searches get
the mesh of the additive optimum, random moves that of the best baseline, from which they start.
Under a cost model without overlap, the additive cost is the step. Pipelines of equal layers are
baselines, too (`equal_layers.py`); stages have no additive cost of one mesh.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from shardfold.costs.model import VOLUME
from shardfold.costs.steps import Collective
from shardfold.errors import InputError, ShardfoldError, nearest
from shardfold.planner.case import Candidate, Source, simulate
from shardfold.planner.equal_layers import SCHEDULES
from shardfold.planner.pipeline_plan import PipelinePlan
from shardfold.planner.pipelines import SearchedPipelines
from shardfold.planner.select import ROUNDING, Selection
from shardfold.search import Problem
from shardfold.search.baselines import draws, greedy, mcmc
from shardfold.search.ilp import ilp
from shardfold.strategies.baselines import STRATEGIES, Choice, Setting, Unfit, check_renamed, every

SELECTED = "selected"  # what `plan` returns
DATA_PARALLEL = "data-parallel"
OPTIMUM = "additive-optimum"  # the optimum of the additive model
SEARCHES = ("greedy", "random", "mcmc", "ilp")
METHODS = (SELECTED, OPTIMUM, *STRATEGIES, *SCHEDULES, *SEARCHES)
RENAMED = {"plan": SELECTED, "exact": OPTIMUM}


@dataclass(frozen=True, slots=True)
class Effort:
    """How much the other searches may spend."""

    moves: int = 50_000  # of mcmc
    ilp_seconds: float = 60.0
    ilp_variables: int = 300_000  # larger integer programs are skipped


@dataclass(frozen=True, slots=True)
class Result:
    """What one method came to. Where it gave nothing, `note` says why and the figures are None.

    `step_seconds` is the simulated step, or the sum where the costs know no overlap;
    `additive_seconds` the sum, which stages do not have. `communication_bytes` is what the busiest
    device sends in a step;
    `search_seconds` leaves out the making of tables, which all methods share.
    """

    method: str
    mesh: str | None = None
    step_seconds: float | None = None
    additive_seconds: float | None = None
    peak_bytes: float | None = None
    fits: bool | None = None
    communication_bytes: float | None = None
    search_seconds: float | None = None
    proven: bool = False
    note: str = ""
    exposed_seconds: float | None = None
    mfu: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What each method came to on one model and cluster: its step, and its additive cost."""

    cluster: str
    cost: str
    optimizer: str
    dtype: str
    limit_bytes: float
    operators: int
    tables_seconds: float  # making the tables on every mesh, and the exact search on them
    results: tuple[Result, ...]

    @property
    def baseline(self) -> str | None:
        """What speed-ups are over: data parallel if it fits, else the fastest baseline."""
        fitting = {
            r.method: r.step_seconds
            for r in self.results
            if r.method in STRATEGIES and r.step_seconds is not None and r.fits
        }
        if DATA_PARALLEL in fitting:
            return DATA_PARALLEL
        return min(fitting, key=lambda name: fitting[name], default=None)

    @property
    def speedups(self) -> Mapping[str, float]:
        """How many times faster than the baseline each method's step is."""
        steps = {r.method: r.step_seconds for r in self.results if r.step_seconds}
        base = self.baseline
        return {} if base is None else {name: steps[base] / step for name, step in steps.items()}

    def as_plain(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        over = self.speedups
        results = [{**asdict(r), "speedup": over.get(r.method)} for r in self.results]
        return {**asdict(self), "baseline": self.baseline, "results": results}


EqualLayers = Mapping[str, PipelinePlan] | ShardfoldError  # by schedule, or why there are none


@dataclass(frozen=True)
class Methods:
    """All methods on the cases of one model, each tried once: random moves ask for baselines."""

    selection: Selection
    effort: Effort
    stages: PipelinePlan | None  # that the plan has
    search_equal_layers: Callable[[], EqualLayers]

    def results(
        self, methods: Sequence[str], watch: Callable[[int, int], None]
    ) -> tuple[Result, ...]:
        """A result for each method, in the order of `METHODS`; each says whether it ties."""
        found = []
        ordered = [name for name in METHODS if name in methods]
        for number, name in enumerate(ordered):
            watch(number, len(ordered))
            found.append(self._result(name))
        return tuple(found)

    def found_by(self, name: str) -> tuple[Selection, SearchedPipelines]:
        """What a method that has a result came to, in the shape from which a plan is made."""
        if name == SELECTED:
            return self.selection, SearchedPipelines(self.stages, None)
        if name in SCHEDULES:
            found, _ = self._equal_layers
            assert isinstance(found, Mapping)
            return replace(self.selection, pins=()), SearchedPipelines(found[name], None)
        won = replace(self.selection, winner=self._candidates[name], pins=())
        return won, SearchedPipelines(None, None)

    def _result(self, name: str) -> Result:
        if name in STRATEGIES:
            found, seconds = self._baseline(name)
            if isinstance(found, Unfit):
                return Result(name, note=f"does not apply: {found.reason}")
            return self._price(name, found, seconds)
        if name in SCHEDULES:
            return self._schedule(name)
        if name == SELECTED and self.stages is not None:
            return _of_stages(name, self.stages, 0.0)
        if name == SELECTED:
            return self._price(name, self.selection.winner, 0.0, self.selection.is_optimal)
        if name == OPTIMUM:
            best = self.selection.additive
            seconds = best.solution.statistics.seconds
            return self._price(name, best, seconds, self.selection.proves(best))
        return self._search(name)

    def _schedule(self, name: str) -> Result:
        """A pipeline of equal layers."""
        found, seconds = self._equal_layers
        if isinstance(found, ShardfoldError):
            return Result(name, note=f"does not apply: {str(found).rstrip('.')}")
        if name not in found:
            return Result(name, note="does not apply: no stage has layers for two chunks")
        return _of_stages(name, found[name], seconds)

    @cached_property
    def _equal_layers(self) -> tuple[EqualLayers, float]:
        """The best pipelines of equal layers, and the time for all."""
        begin = time.perf_counter()
        found = self.search_equal_layers()
        return found, time.perf_counter() - begin

    def _baseline(self, name: str) -> tuple[Candidate | Unfit, float]:
        """A strategy in the degree and on the mesh that suit it best, and the time for all."""
        if name not in self._baselines:
            begin = time.perf_counter()
            choices = [(c, s, every(name, s)) for c, s in self._settings]
            seconds = time.perf_counter() - begin
            found = [
                self._simulate(candidate.choosing(choice, Source.BASELINE, name))
                for candidate, _, each in choices
                for choice in each
            ]
            reasons = [STRATEGIES[name](s) for _, s, each in choices if not each]
            unfit = next((r for r in reasons if isinstance(r, Unfit)), Unfit("on no mesh"))
            self._baselines[name] = (min(found, key=self._order) if found else unfit, seconds)
        return self._baselines[name]

    def _order(self, candidate: Candidate) -> tuple[bool, float]:
        """What is better comes first: what fits in memory, then the shorter step."""
        return (candidate.peak_bytes > self.selection.limit_bytes, candidate.seconds)

    def _simulate(self, candidate: Candidate) -> Candidate:
        """The candidate with its step, where the cost model knows overlap; each choice once."""
        if not self.selection.simulated:
            return candidate
        key = (id(candidate.case.tables), tuple(candidate.choice))
        if key not in self._simulated:
            self._simulated[key] = simulate(candidate)
        return replace(candidate, simulation=self._simulated[key].simulation)

    @cached_property
    def _simulated(self) -> dict[tuple[int, Choice], Candidate]:
        return {}

    @cached_property
    def _baselines(self) -> dict[str, tuple[Candidate | Unfit, float]]:
        return {}

    @cached_property
    def _candidates(self) -> dict[str, Candidate]:
        return {}

    @cached_property
    def _settings(self) -> tuple[tuple[Candidate, Setting], ...]:
        limit = self.selection.limit_bytes
        return tuple(
            (c, Setting(c.case.graph, c.case.subdims, c.case.tables, limit))
            for c in self.selection.searched
        )

    def _search(self, name: str) -> Result:
        at, start = self.selection.additive, None
        if name == "mcmc":
            # As FlexFlow: from the expert's strategy, here the best of them on its own mesh.
            tried = [self._baseline(each)[0] for each in STRATEGIES]
            at = min((c for c in tried if isinstance(c, Candidate)), key=self._order)
            start = tuple(at.choice)
        problem, most = at.case.tables.problem, self.effort.ilp_variables
        if name == "ilp" and _variables(problem) > most:
            note = f"skipped: {_variables(problem):,} variables, more than {most:,}"
            return Result(name, note=note)
        begin = time.perf_counter()
        try:
            choice, proven = self._run(name, problem, start)
        except InputError as error:
            return Result(name, note=str(error).rstrip("."))
        seconds = time.perf_counter() - begin
        return self._price(name, at.choosing(choice, Source.METHOD, name), seconds, proven)

    def _run(self, name: str, problem: Problem, start: Choice | None) -> tuple[Choice, bool]:
        """The choice that another search finds, and whether it proves it."""
        if name == "ilp":
            limit, fits = self.selection.limit_bytes, self._fits(self.selection.additive)
            answer = ilp(
                problem, memory_limit=limit if fits else None, seconds=self.effort.ilp_seconds
            )
        elif name == "mcmc":
            answer = mcmc(problem, start=start, moves=self.effort.moves)
        else:
            answer = greedy(problem) if name == "greedy" else draws(problem)
        return tuple(map(int, answer.choice)), answer.lower_bound is None

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.peak_bytes <= self.selection.limit_bytes

    def _price(
        self, name: str, candidate: Candidate, seconds: float, proven: bool = False
    ) -> Result:
        found = replace(self._simulate(candidate), label=name)
        self._candidates[name] = found
        total, fits, simulation = found.solution.cost, self._fits(found), found.simulation
        return Result(
            method=name,
            mesh=found.mesh,
            step_seconds=found.seconds,
            additive_seconds=total,
            peak_bytes=found.peak_bytes,
            fits=fits,
            communication_bytes=sent_bytes(found),
            search_seconds=seconds,
            proven=proven,
            note=_note(name, total / self.selection.additive.solution.cost, fits),
            exposed_seconds=None if simulation is None else simulation.exposed_seconds,
            mfu=None if simulation is None else simulation.mfu,
        )


def _of_stages(name: str, plan: PipelinePlan, seconds: float) -> Result:
    """The figures of a pipeline; what its stages do is in the note."""
    found, pipeline = plan.simulation, plan.staged.pipeline
    told = [
        plan.candidate.label if name in SCHEDULES else pipeline.schedule,
        f"{plan.micro_batches} micro-batches",
        *([f"{pipeline.chunks} chunks"] if pipeline.chunks > 1 else []),
        *(["recomputed"] if plan.candidate.case.recomputed else []),
    ]
    return Result(
        method=name,
        mesh=plan.mesh,
        step_seconds=found.step_seconds,
        peak_bytes=found.peak_bytes,
        fits=plan.fits,
        search_seconds=seconds,
        note=f"{pipeline.devices} stages, {', '.join(told)}",
        exposed_seconds=found.exposed_seconds,
        mfu=found.mfu,
    )


def sent_bytes(candidate: Candidate) -> float:
    """Bytes that one device sends in a step."""
    shape = candidate.case.mesh.shape
    return sum(
        VOLUME[step.kind](math.prod(shape[a] for a in step.axes))
        * float(step.bytes[0])
        * step.repeats
        for steps in candidate.case.decode(candidate.choice).decoded.steps.values()
        for step in steps
        if isinstance(step, Collective) and step.kind != "slice"
    )


def check_methods(methods: Sequence[str]) -> None:
    """Refuse a method that does not exist."""
    for name in methods:
        check_renamed(name)
        if name in RENAMED:
            raise InputError(f"{name!r} is now called {RENAMED[name]!r}.")
        if name not in METHODS:
            raise InputError(f"Unknown method {name!r}. {nearest(name, METHODS)}")


def _note(name: str, ratio: float, fits: bool) -> str:
    if name in (SELECTED, OPTIMUM):
        return ""
    if abs(ratio - 1) <= ROUNDING:
        return "has the least additive cost"
    return "does not fit" if ratio < 1 and not fits else ""


def _variables(problem: Problem) -> int:
    """Of the integer program: one a choice, and one an entry of an edge's table."""
    return int(problem.sizes.sum()) + sum(table.size for table in problem.edge_costs)
