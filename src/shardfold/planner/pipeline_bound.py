"""How short the step of any pipeline is at least, before a single one is looked at.

Take the work of all operators, each split as well as some mesh of the whole cluster allows, and
spread it evenly over all devices. Take what the host needs to ask for it: once for every
micro-batch, whatever its size. No schedule does better than this with the work of a pass, W:

    a device does its share for every micro-batch      m x W / stages, at the mean
    it waits until the stages before it are done with  a layer for each of them, at least:
    the first micro-batch, forward and backward        (stages - 1) / 2 layers, at the mean
    a micro-batch passes through all stages            W

With one stage on a device (there are too few layers for chunks) those before it are all that it
waits for. Let b be the stages' work: m x b_d + sum of b_j for j < d is within the step T for every
d, and all b make up W. Where that is tight everywhere, b_d = T / m x (1 - 1/m)^d, so that
T >= W / (1 - (1 - 1/m)^stages).

With as many micro-batches as stages, or more, no piece of an operator is larger than what a split
over all devices leaves of the whole batch. Small pieces are no more efficient than large ones, so
then W has every operator in its fastest split on the whole cluster, on every device.

Messages, reductions, updates, what is run again and memory count for nothing, so a pipeline that
this leaves a chance may still lose. It is a bound as long as no operator in a part of the batch
takes less, for each of the devices, than in the best of its splits over the whole cluster, nor a
smaller piece less than its share of that of the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from shardfold.costs.priced import PricedOperator
from shardfold.costs.steps import Compute, Values
from shardfold.pipeline.cut import Layers, leaves_out_layers
from shardfold.planner.case import Case

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one pass, forward and backward: of the whole model, and of its shortest layer."""

    model: float
    layer: float

    @classmethod
    def of(cls, layers: Layers, seconds: Values) -> Work:
        """The sums of what every operator takes."""
        before, inside, after = layers.sums(seconds.tolist())
        return cls(before + sum(inside) + after, min(inside, default=0.0))

    def times(self, factor: float) -> Work:
        """So many times as much."""
        return Work(factor * self.model, factor * self.layer)

    def least_step(self, stages: int, micro_batches: int, layers: float) -> float:
        """No pipeline whose passes take so long has a shorter step.

        >>> Work(8.0, 1.0).least_step(2, 4, layers=8), Work(8.0, 4.0).least_step(2, 1, layers=2)
        (16.5, 8.0)
        """
        if 2 * stages <= layers:
            work = self.model * micro_batches / stages + self.layer * (stages - 1) / 2
        else:
            work = self.model / (1 - (1 - 1 / micro_batches) ** stages)
        return max(work, self.model)


@dataclass(frozen=True, slots=True)
class PipelineBound:
    """What a step asks of all devices together, and of a host for every micro-batch."""

    device: Work  # with every operator in its most efficient split
    pieces: Work  # in its fastest, which leaves a device no more than pipelines do
    host: Work
    layers: float
    devices: int
    micro_batches: int  # of the plan without stages, whose pieces these are

    @classmethod
    def of(cls, cases: Sequence[Case]) -> PipelineBound:
        """From one graph on meshes of the whole cluster."""
        graph, layers = cases[0].graph, Layers.of(cases[0].graph)
        least = np.full((3, len(graph.ops)), inf)
        for case in cases:
            for ops, found in _each_table(case):
                least[:, ops] = np.minimum(least[:, ops], np.array(found)[:, None])
        works = [Work.of(layers, each) for each in least]
        count: float = len(layers)
        if leaves_out_layers(graph):  # what is counted as a layer is several
            works, count = [Work(each.model, 0.0) for each in works], inf
        parts = cases[0].tables.micro_batches
        device, pieces = (each.times(parts) for each in works[:2])
        return cls(device, pieces, works[2], count, cases[0].request.cluster.size, parts)

    def least_step(self, stages: int, micro_batches: int) -> float:
        """No pipeline of so many stages and micro-batches has a shorter step."""
        share = stages / (self.devices * micro_batches)
        is_small = micro_batches >= stages * self.micro_batches
        device = self.pieces if is_small else self.device
        works = (device.times(share), self.host)
        return max(w.least_step(stages, micro_batches, self.layers) for w in works) * (1 - ROUNDING)


def _each_table(case: Case) -> Iterator[tuple[list[int], tuple[float, float, float]]]:
    """Operators that share a table, and the least that any of them takes (see `_least`)."""
    sharing: dict[int, list[int]] = {}
    for op, table in enumerate(case.tables.problem.costs[: len(case.graph.ops)]):
        sharing.setdefault(id(table), []).append(op)
    for ops in sharing.values():
        # Alike operators may meet memory in different ways.
        distinct = {id(p): p for p in (case.tables.vertices[op].priced for op in ops)}.values()
        found = [_least(case, priced) for priced in distinct if priced is not None]
        efficient, fastest, asked = (min(each) for each in zip(*found, strict=True))
        yield ops, (efficient, fastest, asked)


def _least(case: Case, priced: PricedOperator) -> tuple[float, float, float]:
    """Seconds of all devices together for an operator's most efficient and its fastest split.

    The third result is what the host needs for any.
    """
    configs = priced.space.configs
    device, host = np.zeros(len(configs)), np.zeros(len(configs))
    for step in priced.steps.steps:
        if isinstance(step, Compute) and step.phase != "recompute":
            work, asked = priced.split_seconds(step)
            device, host = device + work, host + asked
    parts = np.where(configs >= 0, np.array(case.mesh.shape, dtype=float), 1.0).prod(axis=1)
    fastest = float(device.min()) * case.request.cluster.size
    return float((device * parts).min()), fastest, float(host.min())
