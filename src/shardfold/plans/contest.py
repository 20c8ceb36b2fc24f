"""Strategies by hand and other searches beside the exact one, on the same tables.

All are priced by the additive cost model that the search minimises: a method's step is the total
of its choice. A strategy by hand is tried on every mesh and keeps its best, one that fits in
memory before one that does not. The other searches get the mesh on which the exact one won.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardfold.costs import Optimizer
from shardfold.costs.model import VOLUME
from shardfold.costs.steps import Collective
from shardfold.errors import InputError, nearest
from shardfold.graph import Graph
from shardfold.plans.assemble import Assembly
from shardfold.plans.choose import Candidate, Chosen
from shardfold.plans.strategies import STRATEGIES, Choice, Setting, Unfit
from shardfold.search import Problem
from shardfold.search.draws import draws
from shardfold.search.greedy import greedy
from shardfold.search.ilp import ilp
from shardfold.search.mcmc import mcmc
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
        begin = time.perf_counter()
        found: list[tuple[Setting, Candidate, Choice]] = []
        reason = ""
        for candidate in self.chosen.tried:
            setting = self._setting(candidate)
            choice = STRATEGIES[name](setting)
            if isinstance(choice, Unfit):
                reason = choice.reason
            else:
                found.append((setting, candidate, choice))
        if not found:
            return Result(name, note=f"does not apply: {reason}")
        _, best, choice = min(found, key=lambda each: each[0].rank(each[2]))
        return self._priced(name, best, choice, time.perf_counter() - begin)

    def _setting(self, candidate: Candidate) -> Setting:
        return Setting(self.graph, self.atoms, candidate.tabulated, self.chosen.limit_bytes)

    def _search(self, name: str) -> Result:
        best = self.chosen.best
        problem = best.tabulated.problem
        if name == "ilp" and _variables(problem) > self.effort.ilp_variables:
            return Result(
                name,
                note=f"skipped: {_variables(problem):,} variables, more than "
                f"{self.effort.ilp_variables:,}",
            )
        start = self._start() if name == "mcmc" else ()
        begin = time.perf_counter()
        try:
            choice, proven = self._searched(name, problem, start)
        except InputError as error:
            return Result(name, note=str(error))
        return self._priced(name, best, choice, time.perf_counter() - begin, proven=proven)

    def _searched(self, name: str, problem: Problem, start: Choice) -> tuple[Choice, bool]:
        """The choice that another search finds, and whether it proves it."""
        limit = self.chosen.limit_bytes if self.chosen.smallest_bytes is None else None
        seconds = self.effort.ilp_seconds
        if name == "ilp":
            answer = ilp(problem, memory_limit=limit, seconds=seconds)
        elif name == "mcmc":
            answer = mcmc(problem, start=start, moves=self.effort.moves)
        else:
            answer = greedy(problem) if name == "greedy" else draws(problem)
        return tuple(map(int, answer.choice)), answer.lower_bound is None

    def _start(self) -> Choice:
        """Where random moves begin: the fastest strategy by hand, as in FlexFlow."""
        setting = self._setting(self.chosen.best)
        tried = [strategy(setting) for strategy in STRATEGIES.values()]
        return min((c for c in tried if not isinstance(c, Unfit)), key=setting.rank)

    def _priced(
        self, name: str, candidate: Candidate, choice: Choice, seconds: float, proven: bool = False
    ) -> Result:
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
