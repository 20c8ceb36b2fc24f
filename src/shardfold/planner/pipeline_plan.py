"""A choice of splits with the stages that run it: how it is cut, what it takes, whether it fits.

Setup           a model in so many micro-batches, on a cluster that is cut into parts
PipelinePlan    a choice for it, or one for each part: its stages, its step and its peak
with_layers     a choice with so many layers in each stage
cut_best        with the fastest slowest stage                      cuts.py
with_own_choices    each part under the best for it of several choices    cuts.py
alike           a choice that stores a tied parameter alike in every stage
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np

from shardfold.cluster import Cluster, Mesh
from shardfold.costs.activations import Regions
from shardfold.costs.parameters import Storage
from shardfold.errors import InputError
from shardfold.graph import Graph
from shardfold.pipeline import Pipeline
from shardfold.pipeline.cut import Layers, StageLinks, Untied, cut_cluster, equal, untie
from shardfold.pipeline.simulator import in_flight
from shardfold.planner.case import Candidate, Cases, ResolvedRequest, Source
from shardfold.planner.cuts import LayerFigures, cut_layers
from shardfold.planner.select import hint_by_class
from shardfold.planner.staged import Staged, StagePasses
from shardfold.planner.stated_run import ChosenRun
from shardfold.search import unproven
from shardfold.simulate import Simulation
from shardfold.simulate.parts import Part

MOST_CHUNKS = 8
COARSE = 2  # axes of a stage's mesh at first: the stages are an axis, too

Known = dict[tuple[Part, bool], StagePasses]  # what parts of the model do under one choice


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """A choice of splits with the stages that run it."""

    setup: Setup
    candidate: Candidate  # on the mesh of a stage, every stage with its own tied parameters
    staged: Staged
    limit_bytes: float
    followed: tuple[PipelinePlan, ...] = ()  # by part, where parts follow choices of their own

    @property
    def seconds(self) -> float:
        """The simulated step."""
        return self.staged.step_seconds

    @property
    def mesh(self) -> str:
        """The parts of the cluster, and the mesh of each."""
        meshes = dict.fromkeys(each.candidate.mesh for each in self.followed or (self,))
        return f"{self.staged.pipeline.devices} of {' and '.join(meshes)}"

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.staged.pipeline.micro_batches

    @cached_property
    def as_candidate(self) -> Candidate:
        """The choice for the model as it is, with every tied parameter once."""
        found = _on_one_graph(self.setup, self.candidate)
        assert found is not None, "a tied parameter is stored as no plan can say"
        return found

    @cached_property
    def peak_bytes(self) -> float:
        """Of the fullest part of the cluster."""
        return max(sum(each.values()) for each in self.staged.peaks)

    @property
    def fits(self) -> bool:
        """Whether the fullest part fits."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def hint(self) -> str:
        """What to change first so that the fullest part fits."""
        peaks = [sum(each.values()) for each in self.staged.peaks]
        fullest = peaks.index(max(peaks))
        devices = self.setup.request.cluster.size
        found = hint_by_class(self.staged.peaks[fullest], self.limit_bytes, devices)
        return f"Part {fullest + 1} of {len(peaks)} is the fullest. {found}"

    @property
    def hoped_seconds(self) -> float:
        """The step in as many chunks as there may be: all busy but for the first to arrive."""
        pipeline, busy = self.setup.pipeline, self.staged.simulation.busy_seconds
        waiting = (pipeline.devices - 1) / (pipeline.micro_batches * self.setup.most_chunks)
        return sum(busy) / len(busy) * (1 + waiting)

    @cached_property
    def simulation(self) -> Simulation:
        """The step of all stages: work and waits of the mean device, peak of the fullest."""
        staged = self.staged
        totals = [sum(each.values()) for each in staged.peaks]
        fullest = totals.index(max(totals))
        inside = [(each, share) for each, share in staged.collectives]
        step = staged.step_seconds
        return Simulation(
            step_seconds=step,
            compute_seconds=staged.compute_seconds,
            communication_seconds=sum(e.seconds * share for e, share in inside)
            + staged.send_seconds,
            exposed_seconds=sum(e.exposed_seconds * share for e, share in inside)
            + staged.exposed_send_seconds,
            peak_bytes=totals[fullest],
            peak_by_class=dict(staged.peaks[fullest]),
            peak_at=f"part {fullest + 1} of {len(totals)}",
            mfu=staged.flops / (step * staged.peak_flops),
            utilisation={"work": 1 - staged.bubble},
        )

    @property
    def order(self) -> tuple[bool, float]:
        """What fits comes first, then the faster."""
        return not self.fits, self.seconds


@dataclass(frozen=True, eq=False)
class Setup:
    """A model in micro-batches on a cluster in parts."""

    request: ResolvedRequest  # of the whole cluster
    links: StageLinks
    graph: Graph
    layers: Layers
    pipeline: Pipeline
    untied: Untied
    asked: ResolvedRequest  # of one part
    cases: Cases

    @classmethod
    def of(
        cls,
        graphs: Callable[[int], Graph],
        request: ResolvedRequest,
        stages: int,
        micro_batches: int,
        *,
        finely: bool = False,
    ) -> Setup:
        """The model on the coarse meshes of one part, or on the others; refused where it cannot be.

        `graphs` has the graph of a micro-batch, by their number.
        """
        links = cut_cluster(request.cluster, stages)
        meshes = _finer(links.stage) if finely else links.stage.meshes(COARSE)
        return cls.on_part(graphs, request, links, 0, micro_batches, meshes)

    @classmethod
    def on_part(
        cls,
        graphs: Callable[[int], Graph],
        request: ResolvedRequest,
        links: StageLinks,
        part: int,
        micro_batches: int,
        meshes: Sequence[Mesh],
    ) -> Setup:
        """The model on one part of a cluster that is cut."""
        stages, own = len(links.clusters), links.clusters[part]
        check_number_of_stages(stages, Layers.of(graphs(1)), request.cluster)
        graph = graphs(micro_batches)
        layers = Layers.of(graph)
        pipeline = Pipeline("1f1b", stages, micro_batches)
        untied = untie(graph, layers.parts(equal(len(layers), stages)))
        asked = replace(request, cluster=own, meshes=meshes, micro_batches=micro_batches)
        cases = Cases(untied.graph, asked)
        return cls(request, links, graph, layers, pipeline, untied, asked, cases)

    @property
    def most_chunks(self) -> int:
        """Of the model on one part."""
        return max(1, min(MOST_CHUNKS, len(self.layers) // self.pipeline.devices))

    def regions(self) -> Iterator[Regions]:
        """What may be recomputed."""
        stated = self.cases.recomputed_by(self.request.recompute)
        yield stated
        if self.request.recompute == "auto" and self.cases.blocks:
            yield self.cases.blocks


def stage_numbers(cluster: Cluster) -> list[int]:
    """How many equal parts a cluster can be cut into, along its outermost links first."""
    found, outside = set[int](), 1
    for level in cluster.levels:
        found |= {outside * n for n in range(2, level.size + 1) if level.size % n == 0}
        outside *= level.size
    return sorted(found)


def check_number_of_stages(stages: int, layers: Layers, cluster: Cluster) -> None:
    """Refuse more stages than layers, with the most that model and cluster allow."""
    count = len(layers)
    if stages <= count:
        return
    most = max((n for n in stage_numbers(cluster) if n <= count), default=None)
    way_out = "Leave pipeline out." if most is None else f"Try pipeline={most}."
    if count < 2:
        raise InputError(f"pipeline={stages}: the model has no list of layers to cut. {way_out}")
    ends = f"{layers.paths[0]} to {layers.paths[-1]}"
    raise InputError(
        f"pipeline={stages}: the model has {count} layers ({ends}), and a stage has one at least. "
        f"{way_out}"
    )


def _finer(cluster: Cluster) -> list[Mesh]:
    """The meshes of a part that are left out at first."""
    known = set(map(str, cluster.meshes(COARSE)))
    return [mesh for mesh in cluster.meshes() if str(mesh) not in known]


def with_layers(
    setup: Setup,
    chosen: Candidate,
    run: ChosenRun,
    pipeline: Pipeline,
    counts: Sequence[int],
    known: Known,
) -> PipelinePlan:
    """A choice with so many layers in each stage."""
    parts = setup.layers.parts(counts)
    untied = untie(setup.graph, parts) if setup.untied.tied else setup.untied
    staged = Staged(
        run, setup.request, pipeline, setup.links, setup.layers, counts, parts, untied, known
    )
    return PipelinePlan(setup, chosen, staged, setup.request.limit)


def cut_best(
    setup: Setup, chosen: Candidate, run: ChosenRun, pipeline: Pipeline, known: Known
) -> PipelinePlan:
    """A choice with the fastest slowest stage."""
    counts = equal(len(setup.layers), pipeline.stages)
    first = with_layers(setup, chosen, run, pipeline, counts, known)
    best = cut_evenly(first.staged, setup.request.limit)
    return with_layers(setup, chosen, run, pipeline, best, known)


def with_own_choices(
    setup: Setup, met: Sequence[Sequence[PipelinePlan]], limit: float
) -> PipelinePlan | None:
    """The best cut of the model where each part follows any of the choices that it is given.

    None where nothing fits.
    """
    known = {plan: layer_figures(plan.staged) for plan in dict.fromkeys(chain(*met))}
    figures = [[known[plan] for plan in few] for few in met]
    flying, count = in_flight(setup.pipeline), setup.pipeline.micro_batches
    found = cut_layers(figures, flying, limit, count)
    if found is None:
        return None
    followed = tuple(few[number] for few, number in zip(met, found.choices, strict=True))
    first, parts = followed[0], setup.layers.parts(found.counts)
    untied = untie(setup.graph, parts) if setup.untied.tied else setup.untied
    staged = replace(
        first.staged,
        counts=found.counts,
        parts=parts,
        untied=untied,
        followed=tuple(each.staged for each in followed),
    )
    return PipelinePlan(setup, first.candidate, staged, setup.request.limit, followed)


def cut_evenly(staged: Staged, limit: float) -> list[int]:
    """Layers for each stage such that the slowest is as fast as can be, and all fit if they can."""
    pipeline = staged.pipeline
    figures = [[layer_figures(staged)]] * pipeline.stages
    flying, count = in_flight(pipeline), pipeline.micro_batches
    for room in (limit / pipeline.chunks, math.inf):
        found = cut_layers(figures, flying, room, count)
        if found is not None:
            return found.counts
    return list(staged.counts)


def layer_figures(staged: Staged) -> LayerFigures:
    """Times and bytes of single layers, as they are in the middle of the model.

    The first and the last come with what stands before and after them.
    """
    figures = [staged.passes_of(part) for part in _single_layers(staged.layers)]
    seconds = [f.usual.forward_seconds + f.usual.backward_seconds for f in figures]
    resident = [sum(f.schedule.resident.values()) for f in figures]
    kept = [sum(f.usual.kept.values()) for f in figures]
    passing = [sum(f.usual.simulation.peak_by_class.values()) for f in figures]
    passing = [p - r - k for p, r, k in zip(passing, resident, kept, strict=True)]
    return LayerFigures(seconds, resident, kept, max(passing))


def _single_layers(layers: Layers) -> list[Part]:
    """A part for every layer; those of a run of equal ones are the same part."""
    count, found, known = len(layers), list[Part](), dict[int, Part]()
    for layer in range(count):
        start = layers.starts[layer]
        is_end = layer in (0, count - 1)
        if is_end or start not in known:
            before = [layer] if layer else []
            after = [count - layer - 1] if layer < count - 1 else []
            part = layers.parts([*before, 1, *after])[len(before)]
            if is_end:
                found.append(part)
                continue
            known[start] = part
        found.append(known[start])
    return found


def alike(candidate: Candidate, untied: Untied) -> Candidate:
    """The choice with all periods of a run alike, and all copies of a tied parameter."""
    case, own = candidate.case, list(candidate.own_choice)
    stored = case.tables.wiring.storage_vertex
    for copies in untied.tied:
        first, *others = (stored[tensor] for tensor in copies if tensor in stored)
        for other in others:
            here, there = (case.tables.vertices[v].storage for v in (first, other))
            same = _same_storage(here, own[first], there)
            own[other] = own[other] if same is None else same
    whole = case.unrolled.extended(tuple(own))
    if tuple(whole) == tuple(candidate.choice):
        return candidate
    bound = candidate.solution.lower_bound
    found = unproven(case.unrolled.problem, whole, candidate.source.value, bound)
    return replace(candidate, solution=found)


def _same_storage(here: Storage | None, choice: int, there: Storage | None) -> int | None:
    """The number that a parameter's storage has among those of another vertex."""
    assert here is not None
    assert there is not None
    is_same = (there.layouts == here.layouts[choice]).all(axis=1)
    found = np.flatnonzero(is_same & (there.regathers == here.regathers[choice]))
    return int(found[0]) if len(found) else None


def _on_one_graph(setup: Setup, candidate: Candidate) -> Candidate | None:
    """The choice for the model as it is, with every tied parameter once."""
    case = candidate.case
    if not setup.untied.tied:
        return candidate
    cases = Cases(setup.graph, setup.asked)
    mesh = list(map(str, setup.asked.meshes)).index(str(case.mesh))
    target = cases.on(mesh, case.recomputed, setup.asked)
    known = {(v.what, v.index): k for k, v in enumerate(case.tables.vertices)}
    own = candidate.own_choice
    found = []
    for vertex in target.tables.vertices:
        source = known[vertex.what, vertex.index]
        if vertex.storage is None:
            found.append(own[source])
            continue
        same = _same_storage(case.tables.vertices[source].storage, own[source], vertex.storage)
        if same is None:
            return None
        found.append(same)
    whole = target.unrolled.extended(tuple(found))
    solution = unproven(target.unrolled.problem, whole, Source.SEARCH.value, 0.0)
    return Candidate(target, solution, candidate.source, candidate.label)
