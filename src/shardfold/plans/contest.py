"""Strategies by hand and other searches beside the exact one, on the same tables.

All are priced by the additive cost model that the search minimises: a method's step is the total
of its choice. A strategy by hand is tried on every mesh and keeps its best, one that fits in
memory before one that does not. The other searches get the mesh on which the exact one won,
random moves that of the best strategy by hand, from which they start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardfold.costs import Optimizer
from shardfold.costs.model import VOLUME
from shardfold.costs.steps import Collective
from shardfold.errors import InputError, nearest
from shardfold.graph import Graph
from shardfold.plans.assemble import Assembly
from shardfold.plans.choose import Candidate, Chosen
from shardfold.plans.strategies import STRATEGIES, Choice, Setting, Unfit
from shardfold.search import Problem, Solution
from shardfold.search.draws import draws
from shardfold.search.greedy import greedy
from shardfold.search.ilp import ilp
from shardfold.search.mcmc import mcmc
from shardfold.search.solution import Statistics
from shardfold.spaces import Atoms

EXACT = "exact"
SEARCHES = ("greedy", "random", "mcmc", "ilp")
METHODS = (EXACT, *STRATEGIES, *SEARCHES)
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

    `communication_bytes` is what the busiest device sends in a step; `search_seconds` leaves out
    the making of tables, which all methods share.
    """

    method: str
    mesh: str | None = None
    step_seconds: float | None = None
    peak_bytes: float | None = None
    fits: bool | None = None
    communication_bytes: float | None = None
    search_seconds: float | None = None
    proven: bool = False
    note: str = ""


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
    atoms: Atoms
    chosen: Chosen
    optimizer: Optimizer
    effort: Effort = Effort()

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
        if name == EXACT:
            return self._exact()
        return self._strategy(name) if name in STRATEGIES else self._search(name)

    def _exact(self) -> Result:
        best = self.chosen.best
        seconds = best.solution.statistics.seconds
        proven = self.chosen.is_optimal
        return self._priced(EXACT, best, best.solution.choice, seconds, proven=proven)

    def _strategy(self, name: str) -> Result:
        found = self._by_hand(name)
        if isinstance(found, Unfit):
            return Result(name, note=f"does not apply: {found.reason}")
        return self._priced(name, found.candidate, found.choice, found.seconds)

    def _by_hand(self, name: str) -> _ByHand | Unfit:
        """A strategy on the mesh that suits it best; tried once, as random moves ask again."""
        if name not in self._tried:
            begin = time.perf_counter()
            choices = [(c, s, STRATEGIES[name](s)) for c, s in self._settings]
            seconds = time.perf_counter() - begin
            applied = [
                _ByHand(setting.rank(choice), candidate, choice, seconds)
                for candidate, setting, choice in choices
                if not isinstance(choice, Unfit)
            ]
            reasons = [choice for _, _, choice in choices if isinstance(choice, Unfit)]
            self._tried[name] = min(applied, key=lambda f: f.rank) if applied else reasons[0]
        return self._tried[name]

    @cached_property
    def _tried(self) -> dict[str, _ByHand | Unfit]:
        return {}

    @cached_property
    def _settings(self) -> tuple[tuple[Candidate, Setting], ...]:
        limit = self.chosen.limit_bytes
        return tuple(
            (candidate, Setting(self.graph, self.atoms, candidate.tabulated, limit))
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
        step, peak = problem.total(choice), problem.total_bytes(choice)
        best = self.chosen.best.solution.cost
        fits = peak <= self.chosen.limit_bytes
        return Result(
            method=name,
            mesh=str(candidate.mesh),
            step_seconds=step,
            peak_bytes=peak,
            fits=fits,
            communication_bytes=self.sent_bytes(candidate, choice),
            search_seconds=seconds,
            proven=proven,
            note=_note(name, step / best, fits),
        )

    @cached_property
    def _priced_choices(self) -> dict[str, tuple[Candidate, Choice]]:
        return {}

    def chosen_by(self, name: str) -> Chosen:
        """What a method that has a result chose, in the shape from which a plan is made."""
        if name == EXACT:
            return self.chosen
        candidate, choice = self._priced_choices[name]
        problem = candidate.tabulated.problem
        solution = Solution(
            choice,
            problem.total(choice),
            is_optimal=False,
            lower_bound=self.chosen.lower_bound,
            bytes=problem.total_bytes(choice),
            statistics=Statistics(name),
        )
        return replace(self.chosen, best=replace(candidate, solution=solution))

    def sent_bytes(self, candidate: Candidate, choice: Choice) -> float:
        """Bytes that one device sends in a step."""
        tabulated = candidate.tabulated
        assembly = Assembly(
            self.graph, self.atoms, tabulated, choice, candidate.model, self.optimizer
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
        if name not in METHODS:
            raise InputError(f"Unknown method {name!r}. {nearest(name, METHODS)}")


def speedups(results: Sequence[Result]) -> Mapping[str, float]:
    """How many times faster than data parallel each method's step is, where both are known."""
    steps = {r.method: r.step_seconds for r in results if r.step_seconds}
    base = steps.get("data-parallel")
    return {} if base is None else {name: base / step for name, step in steps.items() if step}


def _note(name: str, ratio: float, fits: bool) -> str:
    if name == EXACT:
        return ""
    if abs(ratio - 1) <= TIE:
        return "ties with exact"
    return "faster than what fits" if ratio < 1 and not fits else ""


def _variables(problem: Problem) -> int:
    """Of the integer program: one a choice, and one an entry of an edge's table."""
    return int(problem.sizes.sum()) + sum(table.size for table in problem.edge_costs)
