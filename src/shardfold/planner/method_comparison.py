"""The plan, baselines and other searches beside one another, on the same tables.

Each has two prices: the simulated step, in which communication runs beside work and which judges,
and the additive cost, which the searches minimise. A baseline is tried on every mesh in every
degree and keeps its best, one that fits in memory before one that does not. The other searches get
the mesh on which the exact one won, random moves that of the best baseline, from which they start.
Under a cost model without overlap, the additive cost is the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from shardfold.costs import Optimizer
from shardfold.costs.model import VOLUME
from shardfold.costs.steps import Collective
from shardfold.errors import InputError, nearest
from shardfold.graph import Graph
from shardfold.planner.mesh_search import Candidate, Chosen
from shardfold.planner.planner import Decision
from shardfold.planner.proposals import Field, Finalist, proposed
from shardfold.planner.select import Judge, Judged, Verdict
from shardfold.search import Problem, unproven
from shardfold.search.baselines import draws, greedy, mcmc
from shardfold.search.ilp import ilp
from shardfold.sharding import Subdims
from shardfold.simulate import Simulation
from shardfold.simulate.decoded import Assembly
from shardfold.strategies.named import STRATEGIES, Choice, Setting, Unfit, check_renamed, every

PLAN = "plan"
DATA_PARALLEL = "data-parallel"
EXACT = "exact"
SEARCHES = ("greedy", "random", "mcmc", "ilp")
METHODS = (PLAN, EXACT, *STRATEGIES, *SEARCHES)
TIE = 1e-9  # relative: what rounding can explain


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
    `additive_seconds` the sum. `communication_bytes` is what the busiest device sends in a step;
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


@dataclass(frozen=True, slots=True)
class _ByHand:
    """A strategy's best choice, the mesh it is on, and how long all meshes took."""

    rank: tuple[bool, float]
    candidate: Candidate
    choice: Choice
    seconds: float


@dataclass(frozen=True)
class Contest:
    """The tables of a model on every mesh of a cluster, and what the exact search chose."""

    graph: Graph
    subdims: Subdims
    chosen: Chosen
    optimizer: Optimizer
    effort: Effort = Effort()
    decision: Decision | None = None  # with the simulator's verdict
    judge: Judge | None = None

    def results(
        self, methods: Sequence[str], watch: Callable[[int, int], None]
    ) -> tuple[Result, ...]:
        """One result a method, in the order of `METHODS`; each says whether it ties."""
        found = []
        ordered = [name for name in METHODS if name in methods]
        for number, name in enumerate(ordered):
            watch(number, len(ordered))
            found.append(self._result(name))
        return tuple(found)

    def _result(self, name: str) -> Result:
        if name == PLAN:
            return self._plan()
        if name == EXACT:
            return self._exact()
        return self._strategy(name) if name in STRATEGIES else self._search(name)

    def _plan(self) -> Result:
        """What `plan` returns: the best of all finalists, or of all sums."""
        decided = self.chosen if self.decision is None else self.decision.chosen
        best = decided.best
        return self._priced(PLAN, best, tuple(best.solution.choice), 0.0, proven=decided.is_optimal)

    def _exact(self) -> Result:
        best = self.chosen.best
        seconds = best.solution.statistics.seconds
        proven = self.chosen.is_optimal
        return self._priced(EXACT, best, tuple(best.solution.choice), seconds, proven=proven)

    def _strategy(self, name: str) -> Result:
        found = self._by_hand(name)
        if isinstance(found, Unfit):
            return Result(name, note=f"does not apply: {found.reason}")
        return self._priced(name, found.candidate, found.choice, found.seconds)

    def _by_hand(self, name: str) -> _ByHand | Unfit:
        """A strategy on the mesh that suits it best; tried once, as random moves ask again."""
        if name not in self._tried:
            begin = time.perf_counter()
            choices = [(c, s, every(name, s)) for c, s in self._settings]
            seconds = time.perf_counter() - begin
            applied = [
                _ByHand(self._rank(candidate, setting, choice), candidate, choice, seconds)
                for candidate, setting, found in choices
                for choice in found
            ]
            reasons = [STRATEGIES[name](s) for _, s, found in choices if not found]
            unfit = next((r for r in reasons if isinstance(r, Unfit)), Unfit("on no mesh"))
            self._tried[name] = min(applied, key=lambda f: f.rank) if applied else unfit
        return self._tried[name]

    def _rank(self, candidate: Candidate, setting: Setting, choice: Choice) -> tuple[bool, float]:
        """What is better comes first: what fits in memory, then the shorter step."""
        if self.judge is None:
            return setting.rank(choice)
        found = self._simulated(candidate, choice)
        return (found.peak_bytes > self.chosen.limit_bytes, found.step_seconds)

    def _simulated(self, candidate: Candidate, choice: Choice) -> Simulation:
        assert self.judge is not None
        key = (id(candidate.tabulated), tuple(choice))
        if key not in self._simulations:
            field = Field(self.graph, self.subdims, (candidate,))
            finalist = proposed("", field, candidate, choice)
            self._simulations[key] = self.judge.judged([finalist])[0].simulation
        return self._simulations[key]

    @cached_property
    def _simulations(self) -> dict[tuple[int, Choice], Simulation]:
        return {}

    @cached_property
    def _tried(self) -> dict[str, _ByHand | Unfit]:
        return {}

    @cached_property
    def _settings(self) -> tuple[tuple[Candidate, Setting], ...]:
        limit = self.chosen.limit_bytes
        return tuple(
            (candidate, Setting(self.graph, self.subdims, candidate.tabulated, limit))
            for candidate in self.chosen.tried
        )

    def _search(self, name: str) -> Result:
        candidate, start = self.chosen.best, None
        if name == "mcmc":
            # As FlexFlow: from the expert's strategy, here the best of them on its own mesh.
            tried = list(map(self._by_hand, STRATEGIES))
            best = min((f for f in tried if isinstance(f, _ByHand)), key=lambda f: f.rank)
            candidate, start = best.candidate, best.choice
        problem = candidate.tabulated.problem
        most = self.effort.ilp_variables
        if name == "ilp" and _variables(problem) > most:
            return Result(
                name, note=f"skipped: {_variables(problem):,} variables, more than {most:,}"
            )
        begin = time.perf_counter()
        try:
            choice, proven = self._searched(name, problem, start)
        except InputError as error:
            return Result(name, note=str(error).rstrip("."))
        return self._priced(name, candidate, choice, time.perf_counter() - begin, proven=proven)

    def _searched(self, name: str, problem: Problem, start: Choice | None) -> tuple[Choice, bool]:
        """The choice that another search finds, and whether it proves it."""
        if name == "ilp":
            limit = self.chosen.limit_bytes if self.chosen.smallest_bytes is None else None
            answer = ilp(problem, memory_limit=limit, seconds=self.effort.ilp_seconds)
        elif name == "mcmc":
            answer = mcmc(problem, start=start, moves=self.effort.moves)
        else:
            answer = greedy(problem) if name == "greedy" else draws(problem)
        return tuple(map(int, answer.choice)), answer.lower_bound is None

    def _priced(
        self, name: str, candidate: Candidate, choice: Choice, seconds: float, proven: bool = False
    ) -> Result:
        self._priced_choices[name] = (candidate, choice)
        problem = candidate.tabulated.problem
        total, peak = problem.total(choice), problem.total_bytes(choice)
        simulation = None if self.judge is None else self._simulated(candidate, choice)
        peak = peak if simulation is None else simulation.peak_bytes
        fits = peak <= self.chosen.limit_bytes
        return Result(
            method=name,
            mesh=str(candidate.mesh),
            step_seconds=total if simulation is None else simulation.step_seconds,
            additive_seconds=total,
            peak_bytes=peak,
            fits=fits,
            communication_bytes=self.sent_bytes(candidate, choice),
            search_seconds=seconds,
            proven=proven,
            note=_note(name, total / self.chosen.best.solution.cost, fits),
            exposed_seconds=None if simulation is None else simulation.exposed_seconds,
            mfu=None if simulation is None else simulation.mfu,
        )

    @cached_property
    def _priced_choices(self) -> dict[str, tuple[Candidate, Choice]]:
        return {}

    def chosen_by(self, name: str) -> Chosen:
        """What a method that has a result chose, in the shape from which a plan is made."""
        if name == PLAN and self.decision is not None:
            return self.decision.chosen
        if name in (PLAN, EXACT):
            return self.chosen
        candidate, choice = self._priced_choices[name]
        problem = candidate.tabulated.problem
        solution = unproven(problem, choice, name, self.chosen.lower_bound)
        return replace(self.chosen, best=replace(candidate, solution=solution))

    def verdict_on(self, name: str) -> Verdict | None:
        """What the simulator says of a method's choice, held against the plan's own finalists."""
        if self.judge is None or self.decision is None or self.decision.verdict is None:
            return None
        if name == PLAN:
            return self.decision.verdict
        candidate, choice = self._priced_choices[name]
        field = Field(self.graph, self.subdims, (candidate,))
        winner = Judged(Finalist(name, candidate, field), self._simulated(candidate, choice))
        return replace(self.decision.verdict, chosen=self.chosen_by(name), winner=winner)

    def sent_bytes(self, candidate: Candidate, choice: Choice) -> float:
        """Bytes that one device sends in a step."""
        tabulated = candidate.tabulated
        assembly = Assembly(
            self.graph, self.subdims, tabulated, choice, candidate.model, self.optimizer
        )
        shape = tabulated.mesh.shape
        return sum(
            VOLUME[step.kind](math.prod(shape[a] for a in step.axes))
            * float(step.bytes[0])
            * step.repeats
            for steps in assembly.steps.values()
            for step in steps
            if isinstance(step, Collective) and step.kind != "slice"
        )


def check_methods(methods: Sequence[str]) -> None:
    """Refuse a method that does not exist."""
    for name in methods:
        check_renamed(name)
        if name not in METHODS:
            raise InputError(f"Unknown method {name!r}. {nearest(name, METHODS)}")


def _note(name: str, ratio: float, fits: bool) -> str:
    if name in (PLAN, EXACT):
        return ""
    if abs(ratio - 1) <= TIE:
        return "has the additive cost of exact"
    return "does not fit" if ratio < 1 and not fits else ""


def _variables(problem: Problem) -> int:
    """Of the integer program: one a choice, and one an entry of an edge's table."""
    return int(problem.sizes.sum()) + sum(table.size for table in problem.edge_costs)
