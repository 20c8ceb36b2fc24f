"""The best configuration of a stack: every one is bounded, and those that may win are priced.

A configuration is bounded by runs without stages, an ever closer one as long as it may win:

    1. data and expert parallel with the largest micro-batch: tp and cp are no less work
    2. its own tensor, context and expert degrees, with the largest micro-batch
    3. its own micro-batch, too

Many configurations share a run; a batch of fewer samples than devices is run on fewer. Smaller
micro-batches do the same work in smaller kernels, and a pipeline divides it and adds a bubble, so

    step  >=  samples of a device x work of the busiest stage  +  stages - 1 parts of a micro-batch
    peak  >=  state of a stage  +  its gradients  +  activations of a micro-batch

where the last stage has the head, which no schedule divides; the parts are forward and backward of
a chunk (zero bubble: forward alone); and the first stage keeps a micro-batch for each stage (all of
them, of GPipe). Configurations are priced in the order of their bounds on the step, until no bound
is below the best step that fits. A little is taken off the bounds (`SLACK`), since kernels of some
sizes are more efficient than of others; hardly any where the sizes are the same (`ALIKE`). The
work: a run for each kind of configuration, and a price for each that may win.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from shardfold.costs.tables import EdgePrices
from shardfold.errors import InputError
from shardfold.export.targets import RECOMPUTE, Target, divisors, lies_along, samples_per_pass
from shardfold.graph import Graph
from shardfold.pipeline.cut import Layers, cut_cluster, equal
from shardfold.planner.as_run import FLOAT32
from shardfold.planner.case import ResolvedRequest
from shardfold.planner.estimate import estimate
from shardfold.planner.estimated import Estimated
from shardfold.planner.stated_run import StatedRun, run_stated, scheduler_of
from shardfold.sharding import Subdims
from shardfold.simulate.schedule import Schedule
from shardfold.simulate.simulate import passes
from shardfold.simulate.tasks import Scheduler
from shardfold.strategies.stacks import Stack
from shardfold.strategies.stated import Stated

SLACK, ALIKE = 0.95, 0.99
BEYOND = 8  # looks at what cannot be faster: the runners-up
MOST_TOO_LARGE = 24  # that are priced where nothing fits
MOST_RUNS = 16  # that are kept: the tables of one take up to 100 MiB
T = TypeVar("T")
Progress = Callable[[int, int], None]
Graphs = Callable[[Stated], Graph]


@dataclass(frozen=True, slots=True)
class Priced:
    """A configuration and its figures."""

    stated: Stated
    estimated: Estimated

    @property
    def rank(self) -> tuple[bool, float, float]:
        """What is better comes first: what fits, then the shorter step, then the smaller peak."""
        found = self.estimated
        over = not found.fits
        return (over, found.peak_bytes if over else found.step_seconds, found.peak_bytes)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found: the best first, of `possible` configurations `len(priced)` priced."""

    priced: tuple[Priced, ...]
    possible: int
    refused: tuple[str, ...] = ()  # why some could not be priced


class Recent(Generic[T]):
    """What was made last, by its key."""

    def __init__(self) -> None:
        self._known: dict[object, T] = {}

    def of(self, key: object, make: Callable[[], T]) -> T:
        """Known, or made now."""
        found = self._known.pop(key) if key in self._known else make()
        self._known[key] = found  # behind all others: the first is the one not used for longest
        if len(self._known) > MOST_RUNS:
            del self._known[next(iter(self._known))]
        return found


class Prices:
    """Prices configurations of one model on one cluster; what they share is made once."""

    def __init__(
        self,
        graphs: Graphs,
        request: ResolvedRequest,
        target: Target,
        *,
        reduces_half: bool = False,  # gradients are sent in 16 bits
    ) -> None:
        self.graphs, self.request, self.target = graphs, request, target
        self.reduces_half = reduces_half
        self._runs, self._edges = Recent[StatedRun](), Recent[EdgePrices]()
        self._subdims: dict[int, tuple[Graph, Subdims]] = {}
        self._schedulers: dict[object, Scheduler] = {}
        self._unfit: dict[int, InputError] = {}  # numbers of micro-batches that the model refuses

    def graph(self, stated: Stated) -> Graph:
        """Of a micro-batch; what cannot be captured is tried once."""
        passes = stated.micro_batches
        if passes in self._unfit:
            raise self._unfit[passes]
        try:
            return self.graphs(stated)
        except InputError as error:
            self._unfit[passes] = error
            raise

    def estimate(self, stated: Stated) -> Estimated:
        """The figures of a configuration, as its stack runs it."""
        stack = self.stack(stated)
        return estimate(self.graph(stated), self.request, stated, stack, self.run)

    def stack(self, stated: Stated) -> Stack:
        """The habits of the stack under a strategy."""
        found = self.target.stack(stated)
        return found.reducing_half() if self.reduces_half else found

    def run(
        self, graph: Graph, request: ResolvedRequest, stated: Stated, stack: Stack
    ) -> StatedRun:
        """As `run_stated`: ZeRO-1, ZeRO-2 and all schedules have the splits of data parallel."""
        split = replace(stated, schedule="1f1b", chunks=1, zero=3 if stated.zero == 3 else 0)
        if id(graph) not in self._subdims:
            self._subdims[id(graph)] = (graph, request.subdims_of(graph))
        subdims = self._subdims[id(graph)][1]
        key = (id(graph), request.cluster, stack)
        if key not in self._schedulers:
            self._schedulers[key] = scheduler_of(graph, request, stack, subdims)
        scheduler = self._schedulers[key]
        found = self._runs.of(
            (*key, split),
            lambda: run_stated(graph, request, split, stack, scheduler, self._edges.of),
        )
        return replace(found, stated=stated)


@dataclass(frozen=True, slots=True)
class Anchor:
    """What bounds all configurations of one tensor degree, context, experts and recomputation."""

    tensor: int
    slack: float
    seconds: float  # of a sample's forward and backward on the devices of a tensor group
    forward_seconds: float
    head_seconds: float  # of these, after the last layer
    layers: int
    is_equal: bool  # whether stages have equal numbers of layers
    kept_bytes: float  # of a sample, between forward and backward
    parameter_bytes: float
    gradient_bytes: float  # in the type in which they are summed
    optimizer_bytes: float

    def step_seconds(self, stated: Stated, samples: int) -> float:
        """No step is shorter."""
        local, stages = samples / stated.data * self.tensor / stated.tensor, stated.stages
        if stages == 1:
            return self.slack * self.seconds * local
        is_zero_bubble = stated.schedule == "zbv"
        part = self.forward_seconds if is_zero_bubble else self.seconds - self.head_seconds
        part *= local / stated.micro_batches / (stages * stated.chunks)
        return self.slack * (self._busiest(stated) * local + part * (stages - 1))

    def _busiest(self, stated: Stated) -> float:
        """A sample's work on the device that has the head, or on the mean device."""
        mean = self.seconds / stated.stages
        if not self.is_equal:
            return mean
        counts = equal(self.layers, stated.stages * stated.chunks)
        own = counts[-1:] if stated.schedule != "interleaved" else counts[:: -stated.stages]
        if stated.schedule == "zbv":
            own = [counts[0], counts[-1]]
        each = (self.seconds - self.head_seconds) / self.layers
        return max(mean, sum(own) * each + self.head_seconds)

    def peak_bytes(self, stated: Stated, samples: int) -> float:
        """No peak is lower."""
        shards = stated.shards
        state = self.parameter_bytes / (shards if stated.zero == 3 else 1)
        state += self.optimizer_bytes / (shards if stated.zero else 1)
        gradients = self.gradient_bytes / (shards if stated.zero > 1 else 1)
        flying = stated.micro_batches if stated.schedule == "gpipe" else stated.stages
        kept = self.kept_bytes * samples_per_pass(stated, samples) / stated.context * flying
        beside = kept + gradients if stated.micro_batches > 1 else max(kept, gradients)
        return SLACK * (state + beside) / stated.stages


def search(prices: Prices, choices: Sequence[Stated], samples: int, watch: Progress) -> Found:
    """The best of the configurations, with proof that no other is better (see above).

    Where none fits, those that come nearest to it.
    """
    anchors, limit = Anchors(prices, samples), prices.request.limit
    refused: dict[str, None] = {}
    priced: list[Priced] = []
    large: list[tuple[float, int]] = []  # by the least that they hold
    heap = [(0.0, 0, place) for place in range(len(choices))]
    best = math.inf
    beyond = 0
    while heap and (heap[0][0] < best or beyond < BEYOND):
        bound, known, place = heapq.heappop(heap)
        beyond += bound >= best
        stated = choices[place]
        watch(len(choices) - len(heap), len(choices))
        try:
            if known < 3:  # by the anchor of data parallel, its own, and that of its micro-batch
                like = stated if known else replace(stated, tensor=1, context=1)
                anchor = anchors.of(like, samples_per_pass(stated, samples) if known > 1 else None)
                bound = anchor.step_seconds(stated, samples)
                if known and (least := anchor.peak_bytes(stated, samples)) > limit:
                    large.append((least, place))
                else:
                    heapq.heappush(heap, (bound, known + 1, place))
            elif not _is_hopeless(stated, priced, samples):
                priced.append(Priced(stated, prices.estimate(stated)))
                if priced[-1].estimated.fits:
                    best = min(best, priced[-1].estimated.step_seconds)
        except InputError as error:
            refused[str(error)] = None
    if best == math.inf:
        peak = min((each.estimated.peak_bytes for each in priced), default=math.inf)
        priced.extend(_least(prices, choices, sorted(large), samples, peak))
    priced.sort(key=lambda each: each.rank)
    return Found(tuple(priced), len(choices), tuple(refused))


def _least(
    prices: Prices,
    choices: Sequence[Stated],
    large: Sequence[tuple[float, int]],
    samples: int,
    peak: float,
) -> Iterator[Priced]:
    """Where nothing fits: of each kind the one that holds least, until no bound is below a peak."""
    smallest: dict[Stated, tuple[float, Stated]] = {}
    for least, place in large:
        stated = choices[place]
        kind = replace(stated, micro_batches=1, recompute="none")
        if kind not in smallest or _holds_less(stated, smallest[kind][1], samples):
            smallest[kind] = (min(least, smallest.get(kind, (least,))[0]), stated)
    for least, stated in sorted(smallest.values(), key=lambda each: each[0])[:MOST_TOO_LARGE]:
        if least >= peak:
            return
        found = Priced(stated, prices.estimate(stated))
        peak = min(peak, found.estimated.peak_bytes)
        yield found


def _is_hopeless(stated: Stated, priced: Sequence[Priced], samples: int) -> bool:
    """Whether one that holds less did not fit: smaller micro-batches, more recomputed."""
    return any(
        _holds_less(each.stated, stated, samples) for each in priced if not each.estimated.fits
    )


def _holds_less(first: Stated, second: Stated, samples: int) -> bool:
    same = replace(second, micro_batches=first.micro_batches, recompute=first.recompute)
    return (
        first == same
        and first.schedule != "gpipe"
        and samples_per_pass(first, samples) <= samples_per_pass(second, samples)
        and RECOMPUTE.index(first.recompute) >= RECOMPUTE.index(second.recompute)
    )


class Anchors:
    """The anchor of each kind of configuration, made when it is first needed."""

    def __init__(self, prices: Prices, samples: int) -> None:
        self.prices, self.samples = prices, samples
        self._known: dict[object, Anchor | InputError] = {}

    def of(self, stated: Stated, size: int | None = None) -> Anchor:
        """The anchor of a configuration, with so many samples in a micro-batch, or the most."""
        sequence = stated.sequence and stated.tensor > 1
        attention = stated.attention if stated.context > 1 else ""
        degrees = (stated.tensor, stated.context, stated.experts)
        key = (*degrees, sequence, attention, stated.recompute, size)
        if key not in self._known:
            try:
                self._known[key] = self._made(replace(stated, sequence=sequence), size)
            except InputError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, InputError):
            raise found
        return found

    def _made(self, like: Stated, size: int | None) -> Anchor:
        flat, request = self._flat(like, size)
        run = self.prices.run(self.prices.graph(flat), request, flat, self.prices.stack(flat))
        schedule = run.case.scheduler.schedule(run.whole)
        found, whole = passes(schedule)[0], schedule.resident.get("parameters", 0.0)
        each, layers = self.samples / (flat.data * flat.micro_batches), Layers.of(run.graph)
        after = {op.name for op in run.graph.ops[layers.end :]}
        return Anchor(
            tensor=like.tensor,
            slack=ALIKE if size else SLACK,
            seconds=sum(seconds for _, seconds in _busy(schedule)) / each,
            forward_seconds=found.forward_seconds / each,
            head_seconds=sum(seconds for name, seconds in _busy(schedule) if name in after) / each,
            layers=max(1, len(layers)),
            is_equal=not run.stack.balances_stages,
            kept_bytes=found.kept.get("activations", 0.0) / each,
            parameter_bytes=whole,
            gradient_bytes=whole * (FLOAT32 / run.item_bytes if run.stack.float32_gradients else 1),
            optimizer_bytes=schedule.resident.get("optimizer", 0.0),
        )

    def _flat(self, like: Stated, size: int | None) -> tuple[Stated, ResolvedRequest]:
        """Data parallel of the same kind, on the most devices over which the batch divides."""
        request = self.prices.request
        whole = request.cluster
        for parts in divisors(whole.size // like.tensor):
            data = whole.size // (like.tensor * parts)
            flat = Stated(data, 1, like.tensor, 0, like.sequence, like.recompute)
            flat = replace(flat, context=like.context, attention=like.attention)
            flat = replace(flat, experts=like.experts)
            at_once = flat.batch_parts * (size or 1)
            if data % like.context or data % like.experts or self.samples % at_once:
                continue
            if size is not None:
                flat = replace(flat, micro_batches=self.samples // at_once)
            if lies_along(replace(flat, stages=parts), whole):
                return flat, replace(request, cluster=cut_cluster(whole, parts).stage)
        raise InputError(f"The batch of {self.samples} cannot be split over {whole.name}.")


def _busy(schedule: Schedule) -> Iterator[tuple[str, float]]:
    """What a device does one after the other: work, and collectives that work waits for."""
    for segment in schedule.segments:
        for op in segment.operators:
            again = (task for each in op.again for task in each.tasks)
            for task in (*op.forward, *again, *op.backward):
                if task.mode in ("work", "wait") and task.turn == "every":
                    yield op.name, task.seconds * segment.count
