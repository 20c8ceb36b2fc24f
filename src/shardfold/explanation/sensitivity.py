"""What would have to change for another split to win: links, memory, the batch.

For a setting scaled by a factor the problem is made and solved anew, on the plan's mesh, so that
every statement is exact at the factors that it names: "at 2.2 times the split still wins, at 2.3
times another does". Where the ends of a range have different winners, the factor between is found
by bisection of its logarithm; between two factors with the same winner nothing is claimed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardfold.cluster import Cluster
from shardfold.costs import Pricing, optimizer_named
from shardfold.errors import ShardfoldError
from shardfold.explanation.explanation import Skipped, Turn, Turning
from shardfold.graph import Graph
from shardfold.plans.plan import Plan
from shardfold.plans.read import mesh_on, tables_for
from shardfold.search.subproblem import Subproblem, restrict
from shardfold.sharding import Subdims
from shardfold.sharding.names import Key
from shardfold.simulate.decoded import DecodedChoice
from shardfold.strategies.pins import held, parse_pins, refused

FURTHEST = 16.0
FINEST = 1.05  # the ratio of two factors between which nothing more is asked
BATCHES = (2.0, 4.0)
NO_TIME = "there was no time (--seconds)"

Scaled = Callable[[float], tuple[Graph, Subdims]]  # the model with a batch that many times as large


@dataclass(frozen=True)
class Setting:
    """A plan's model, cluster and limit, one of which may be scaled, with its tables."""

    plan: Plan
    graph: Graph
    subdims: Subdims
    cluster: Cluster
    pricing: Pricing
    limit_bytes: float | None

    @cached_property
    def tables(self) -> DecodedChoice:
        """The tables on the plan's mesh, without a choice."""
        mesh = mesh_on(self.plan, self.cluster)
        model = self.pricing.model(self.cluster, mesh)
        optimizer = optimizer_named(self.plan.provenance.request.optimizer)
        return tables_for(self.plan, self.graph, self.subdims, mesh, model, optimizer)

    @cached_property
    def left(self) -> Subproblem:
        """The choices that the plan's pins leave."""
        tables = self.tables.tables
        pins = parse_pins(self.plan.provenance.request.pins)
        kept, refusal = held(pins, self.tables.splits, tables)
        if refusal is not None:
            raise refused({str(tables.mesh): refusal}, self.graph)
        return restrict(tables.problem, kept)

    def links(self, level: int, factor: float) -> Setting:
        """With the links of one level that many times as fast."""
        levels = list(self.cluster.levels)
        at = levels[level]
        levels[level] = replace(
            at,
            bandwidth=at.bandwidth * factor,
            latency_seconds=at.latency_seconds / factor,
            rated_bandwidth=at.rated_bandwidth and at.rated_bandwidth * factor,
        )
        return replace(self, cluster=replace(self.cluster, levels=tuple(levels)))

    def memory(self, factor: float) -> Setting:
        """With that many times the memory limit."""
        assert self.limit_bytes is not None
        return replace(self, limit_bytes=self.limit_bytes * factor)

    def batch(self, scaled: Scaled, factor: float) -> Setting:
        """With a batch that many times as large."""
        graph, subdims = scaled(factor)
        return replace(self, graph=graph, subdims=subdims)

    def winner(self, seconds: float) -> Winner:
        """The best choice in this setting, on the plan's mesh; refused where nothing fits."""
        found = self.left.solve(self.limit_bytes, seconds=seconds)
        return Winner(replace(self.tables, choice=tuple(found.choice)), found.cost)


@dataclass(frozen=True)
class Winner:
    """The best choice of a setting."""

    decoded: DecodedChoice
    additive_seconds: float

    def split(self, v: int) -> dict[str, int]:
        """How operator vertex v is split."""
        vertex = self.decoded.tables.vertices[v]
        assert vertex.space is not None
        row = vertex.space.configs[self.decoded.choice[v]].tolist()
        return self.decoded.splits.of(vertex.index, vertex.space, row)


@dataclass
class Asker:
    """Solves settings, each once, until its time is over."""

    setting: Setting
    seconds: float
    clock: Callable[[], float] = time.monotonic
    known: dict[tuple[str, float], Winner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.end = self.clock() + self.seconds

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.end - self.clock()

    def ask(self, what: str, scale: Callable[[float], Setting], factor: float) -> Winner:
        """The winner of one setting."""
        key = (what, factor)
        if key not in self.known:
            self.known[key] = scale(factor).winner(max(1.0, self.left))
        return self.known[key]


@dataclass(frozen=True)
class Knob:
    """Something that can be scaled, and the factors at which it is looked at."""

    what: str
    scale: Callable[[float], Setting]
    factors: tuple[float, ...]  # away from 1, nearest first
    is_continuous: bool = True


def knobs(setting: Setting, binds: bool, scaled: Scaled | None) -> list[Knob]:
    """Links of each level faster and slower, more memory where it binds, other batches."""
    found: list[Knob] = []
    used = {axis.level for axis in setting.plan.mesh}
    for number, level in enumerate(setting.cluster.levels):
        if level.name in used:
            for end in (FURTHEST, 1 / FURTHEST):
                scale = _linked(setting, number)
                found.append(Knob(f"{level.name} links", scale, (end,)))
    if binds:
        found.append(Knob("memory", setting.memory, (FURTHEST,)))
    if scaled is not None:
        for factors in (BATCHES, tuple(1 / f for f in BATCHES)):
            found.append(Knob("batch", lambda f: setting.batch(scaled, f), factors, False))
    return found


def _linked(setting: Setting, level: int) -> Callable[[float], Setting]:
    return lambda factor: setting.links(level, factor)


def turning(asker: Asker, found: Sequence[Knob], v: int, chosen: Key) -> Turning | None:
    """What would turn operator vertex v; None if it is not what wins as things are."""
    if _key(asker.ask("", lambda _: asker.setting, 1.0).split(v)) != chosen:
        return None
    turns: list[Turn] = []
    steady: list[Turn] = []
    skipped: list[Skipped] = []
    for knob in found:
        if asker.left <= 0:
            skipped.append(Skipped(knob.what, NO_TIME))
            continue
        try:
            turn = _turn(asker, knob, v, chosen)
        except ShardfoldError as error:  # such a batch cannot be captured, or nothing fits
            skipped.append(Skipped(knob.what, str(error)))
            continue
        if turn is not None:
            (turns if _key(turn.split) != chosen else steady).append(turn)
    return Turning(tuple(turns), tuple(steady), tuple(dict.fromkeys(skipped)))


def _turn(asker: Asker, knob: Knob, v: int, chosen: Key) -> Turn | None:
    """The first factor that turns v, near to the last that does not; or how far v holds."""
    holds = 1.0
    for factor in knob.factors:
        if asker.left <= 0:
            break
        winner = asker.ask(knob.what, knob.scale, factor)
        split = winner.split(v)
        if _key(split) == chosen:
            holds = factor
            continue
        turn = Turn(knob.what, factor, holds, split, winner.additive_seconds)
        return _nearer(asker, knob, v, chosen, turn) if knob.is_continuous else turn
    return None if holds == 1.0 else Turn(knob.what, holds, holds, dict(chosen), 0.0)


def _nearer(asker: Asker, knob: Knob, v: int, chosen: Key, turn: Turn) -> Turn:
    """Halve the logarithm of the range until its ends are close, or time is over."""
    while asker.left > 0 and abs(math.log(turn.factor / turn.holds)) > math.log(FINEST):
        middle = math.sqrt(turn.factor * turn.holds)
        winner = asker.ask(knob.what, knob.scale, middle)
        split = winner.split(v)
        if _key(split) == chosen:
            turn = Turn(turn.what, turn.factor, middle, turn.split, turn.additive_seconds)
        else:
            turn = Turn(turn.what, middle, turn.holds, split, winner.additive_seconds)
    return turn


def _key(split: dict[str, int]) -> Key:
    return frozenset(split.items())
