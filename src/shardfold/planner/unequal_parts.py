"""Pipelines whose stages have different numbers of devices, as they are asked for.

    for micro-batches:
        for parts of one size:  their meshes, activations kept or blocks recomputed
            for choices:        the least additive cost, and the fewest bytes
        cut the model, and give each part one of its choices    cuts.py
        simulate all stages, one after the other (1F1B)

The fastest that fits wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardfold.errors import InputError, ModelError
from shardfold.graph import Graph
from shardfold.pipeline.cut import cut_unequally, equal
from shardfold.planner.case import Candidate, ResolvedRequest, Source
from shardfold.planner.pipelines import (
    COARSE,
    PipelinePlan,
    Setup,
    alike,
    with_layers,
    with_own_choices,
)
from shardfold.planner.stated_run import ChosenRun
from shardfold.progress import Stage, Watch


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
