"""Plans from any choice: the best, the baselines, and random legal ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import msgspec

from draws import covering
from shardfold.api import plan
from shardfold.capture import capture
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import optimizer_named, pricing_named, tabulate
from shardfold.operators import rules_of
from shardfold.plans import Plan
from shardfold.plans.batch import inputs_of
from shardfold.plans.entries import operator_entries, parameter_entries, tensor_entries
from shardfold.sharding import find_subdims
from shardfold.simulate.decoded import DecodedChoice
from shardfold.strategies.baselines import batch_factors, fully_sharded, replicated

from .jobs import build


class Chooser:
    """All choices of one model on one mesh, and a plan for any of them."""

    def __init__(
        self, model: Any, args: Any, kwargs: Any, cluster: str, mesh: str, **given: Any
    ) -> None:
        self.rules = given.pop("rules", {})
        self.cluster = parse(cluster)
        self.mesh = mesh_from_text(mesh, self.cluster)
        self.graph = capture(model, args, kwargs, **given)
        pricing = pricing_named("roofline")
        self.subdims = find_subdims(
            self.graph, rules_of(self.graph, {**pricing.rules, **self.rules})
        )
        self.prices = pricing.model(self.cluster, self.mesh)
        self.optimizer = optimizer_named("adamw")
        self.tables = tabulate(self.graph, self.subdims, self.mesh, self.prices, self.optimizer)
        self._best = plan(
            model, args, kwargs, cluster=self.cluster, mesh=self.mesh, rules=self.rules, **given
        )

    def plan(self, choice: tuple[int, ...]) -> Plan:
        """The best plan with every decision replaced; its estimate is not this one's."""
        decoded = DecodedChoice(
            self.graph, self.subdims, self.tables, choice, self.prices, self.optimizer
        )
        return msgspec.structs.replace(
            self.best(),
            operators=operator_entries(decoded),
            tensors=tensor_entries(decoded),
            parameters=parameter_entries(decoded),
            inputs=inputs_of(decoded),
        )

    def best(self) -> Plan:
        return self._best

    def baselines(self) -> Iterator[Plan]:
        batch = batch_factors(self.graph, self.subdims)
        for choose in (replicated, fully_sharded):
            yield self.plan(choose(self.tables, batch))

    def random(self, seed: int) -> Plan:
        """Any configuration for each operator, any layout for each tensor, any storage."""
        return self.plan(self.random_choice(seed))

    def random_choice(self, seed: int) -> tuple[int, ...]:
        """One of each decision's options."""
        rng = random.Random(seed)
        return tuple(rng.randrange(len(c)) for c in self.tables.problem.costs)

    def splitting(
        self, count: int, kind: str, wanted: Callable[[int], Iterable[str]]
    ) -> dict[str, Plan]:
        """Random plans in which the operators of a kind that can split a wanted factor do so.

        Each time by another of the configurations that do; no plan, where none of them can.
        """
        found = {}
        for number in range(count):
            choice, bases, can = list(self.random_choice(number)), set(wanted(number)), False
            for v, vertex in enumerate(self.tables.vertices):
                if vertex.space is None or self.graph.ops[vertex.index].kind != kind:
                    continue
                rule, configs = vertex.space.rule, vertex.space.configs.tolist()
                split = [{rule.base(f) for f in config if f >= 0} for config in configs]
                rows = [row for row, factors in enumerate(split) if bases & factors]
                if rows:
                    choice[v], can = rows[number % len(rows)], True
            if can:
                found[f"random {number}"] = self.plan(tuple(choice))
        return found

    def covering(self, count: int, first: int = 0) -> dict[str, Plan]:
        """Random plans that try every configuration, layout and storage before one comes twice."""
        sizes = [len(costs) for costs in self.tables.problem.costs]
        numbers = range(first, first + count)
        return {f"random {number}": self.plan(covering(sizes, number)) for number in numbers}


@cache
def chooser(name: str, cluster: str, mesh: str) -> Chooser:
    """The choices of a model of the zoo or of these tests: made once, whoever asks."""
    return Chooser(*build(name), cluster, mesh)
