"""`parallelize`: from a model, a plan and a process group to this rank's module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves

from shardfold.capture import Program, capture_program
from shardfold.capture.export import torch_dtype
from shardfold.costs import pricing_named
from shardfold.errors import RunError, ShardfoldError, renaming
from shardfold.graph import Graph
from shardfold.graph.precision import precision_named
from shardfold.operators import Rules, rules_of
from shardfold.plans import Plan
from shardfold.plans.batch import example_for
from shardfold.plans.files import check, same_everywhere
from shardfold.plans.parts import (
    choice_number,
    firsts_of_parts,
    is_laid_out_alike,
    on_part,
    seat,
    sizes_of_parts,
)
from shardfold.plans.read import decisions_of
from shardfold.runtime.evaluate import Original, evaluating
from shardfold.runtime.inputs_outputs import with_parts
from shardfold.runtime.lower import Lowered, lower, part_of
from shardfold.runtime.module import Batch, Evaluation, Parallel, Run
from shardfold.runtime.ops import Context
from shardfold.runtime.ops.local_op import widened
from shardfold.runtime.parameters import Keeping, keeping, tensors_of
from shardfold.runtime.parts import originals_of
from shardfold.runtime.process_groups import Groups, shared
from shardfold.runtime.ranks import (
    agreed,
    check_alike,
    check_tensors_alike,
    digest,
    fingerprint,
    join_torchrun,
    versions,
)
from shardfold.runtime.shards import Place
from shardfold.runtime.stage_links import Boundaries, Links
from shardfold.runtime.stages import (
    Stage,
    Stages,
    changed_buffers,
    cuts_of,
    own_program,
    pipeline_of,
    tied_parameters,
)
from shardfold.sharding import Subdims, find_subdims

LOSS_PREFIX = "model."  # what capture puts before the names of a model that is given a loss


@renaming(double="float64")
def parallelize(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], Any] | None = None,
    rules: Rules | None = None,
    seed: int = 0,
    float64: bool = False,
) -> Parallel:
    """Make this rank's share of `model` under `plan`, ready for any training loop.

    Call it on every process that torchrun started, with the example batch, loss and rules that the
    plan was made with. If the script has not initialised a process group, NCCL is set up on GPUs,
    each process on its own, or gloo on CPUs; one process needs none. Weights of a real model are
    sliced; those of a meta-device model are drawn module by module from `seed`, which also seeds
    dropout. `float64` runs everything in float64, whatever the plan's dtype: for checking numbers.
    Under a plan of several micro-batches, the example is still the whole batch. Under a plan with
    pipeline stages, `module.accumulate(*batch)` runs forward and backward.
    """

    def lowering() -> tuple[Program, Subdims, Lowered]:
        _check_world(plan)
        program, subdims = prepared(model, plan, args, kwargs, loss, rules)
        return program, subdims, lowered_here(plan, program, subdims, rules)

    join_torchrun()
    program, subdims, lowered = agreed(lowering)
    check_alike(
        {
            "plan": digest(same_everywhere(plan)),
            "seed": str(seed),
            "float64": str(float64),
            "model": digest(repr([(op.name, op.kind) for op in program.graph.ops])),
            **versions(),
        },
        "Give every rank the same plan file, arguments and code.",
    )
    prefix = "" if loss is None else LOSS_PREFIX
    dtype, dims = plan.provenance.request.numbers, plan.micro_batch_dims
    settings = Settings(dtype, seed, float64, prefix, plan.micro_batches, dims)
    original = Original.of(model, *example_for(plan, args, kwargs), dtype, loss)
    again = Again(plan, rules, original, program, lowered)
    if pipeline_of(plan) is not None:
        lower = partial(lowered_parts, plan, subdims=subdims, rules=rules)
        evaluation = partial(evaluating, program, original)
        return assemble_stages(model, program, lower, settings, plan, evaluation)
    module = assemble(model, program, lowered, settings)
    module._run.make_evaluation = partial(again.evaluation, program, subdims, original)
    module._run.make_other = again.for_batch
    if plan.provenance.request.compile:
        module.compile(dynamic=False)
    return module


@dataclass(frozen=True, slots=True)
class Again:
    """What lowers a plan again: in eval mode, or for a batch of other shapes."""

    plan: Plan
    rules: Rules | None
    original: Original
    program: Program
    lowered: Lowered

    def evaluation(
        self, program: Program, subdims: Subdims, original: Original
    ) -> tuple[Program, Lowered]:
        """The instructions of eval mode."""
        evaluated = evaluating(program, original)
        return evaluated, lowered_here(self.plan, evaluated, subdims, self.rules, of_any_size=True)

    def for_batch(self, batch: Batch) -> tuple[Program, Lowered, Evaluation]:
        """The instructions for a batch of other shapes, which all ranks are given whole."""
        original = self.original.taking(batch)

        def lowering() -> tuple[Program, Subdims, Lowered]:
            try:
                program = original.like(self.program)
                subdims = subdims_for(self.plan, program.graph, self.rules)
                found = lowered_here(self.plan, program, subdims, self.rules, of_any_size=True)
                if found.parameters != self.lowered.parameters:
                    raise RunError("its parameters would be in other parts.")
            except ShardfoldError as error:
                raise RunError(
                    f"A batch of {_shapes(batch)} does not run under the plan for "
                    f"{_shapes(self.original.example)}: {error} Pad the batch to the plan's "
                    "shapes, or plan for this one."
                ) from error
            return program, subdims, found

        program, subdims, found = agreed(lowering)
        check_alike(
            {
                f"the batch's tensor {k}": fingerprint(leaf)
                for k, leaf in enumerate(tree_leaves(batch))
                if isinstance(leaf, Tensor)
            },
            f"A batch that is not of the plan's shapes, {_shapes(self.original.example)}, or the "
            "parts of one, is taken as the whole batch: give all ranks the same.",
        )
        return program, found, partial(self.evaluation, program, subdims, original)


def _shapes(batch: Batch) -> str:
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return " and ".join("x".join(map(str, leaf.shape)) or "a number" for leaf in leaves)


def prepared(
    model: nn.Module,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss: Callable[[Any], Any] | None,
    rules: Rules | None,
) -> tuple[Program, Subdims]:
    """The model captured as it was for the plan, which must be for it."""
    numbers = plan.provenance.request.numbers
    if precision_named(numbers).is_float8:
        raise RunError(
            f"The plan's linear layers multiply in float8 ({numbers}), which is priced and not "
            f"run: plan with precision={str(numbers).replace('fp8', 'bf16')!r} to train."
        )
    example = example_for(plan, args, kwargs)
    program = capture_program(model, *example, dtype=numbers, loss=loss)
    check(plan, program.graph)
    return program, subdims_for(plan, program.graph, rules)


def subdims_for(plan: Plan, graph: Graph, rules: Rules | None) -> Subdims:
    """The sub-dims of a graph under the rules that the plan was made with."""
    makers = {**pricing_named(plan.provenance.request.cost).rules, **(rules or {})}
    return find_subdims(graph, rules_of(graph, makers))


def lowered_here(
    plan: Plan,
    program: Program,
    subdims: Subdims,
    rules: Rules | None,
    *,
    of_any_size: bool = False,
) -> Lowered:
    """The instructions of this process."""
    _check_world(plan)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return _lowered_at(plan, seat(plan, rank), program, subdims, rules, of_any_size=of_any_size)


def lowered_parts(
    plan: Plan,
    program: Program,
    subdims: Subdims,
    rules: Rules | None,
    *,
    of_any_size: bool = False,
) -> list[Lowered]:
    """The instructions of every part of a pipeline: this process's own, of others the first's."""
    _check_world(plan)
    own, place = seat(plan, dist.get_rank())
    known = {choice_number(plan, own): (own, place)}
    found: dict[int, Lowered] = {}
    for part in range(len(plan.meshes_of_parts)):
        number = choice_number(plan, part)
        if number not in found:
            at = known.get(number, (part, 0))
            found[number] = _lowered_at(plan, at, program, subdims, rules, of_any_size=of_any_size)
    return [found[choice_number(plan, part)] for part in range(len(plan.meshes_of_parts))]


def _lowered_at(
    plan: Plan,
    at: tuple[int, int],
    program: Program,
    subdims: Subdims,
    rules: Rules | None,
    *,
    of_any_size: bool,
) -> Lowered:
    """The instructions of a device: of which part of the cluster, and its number there."""
    part, number = at
    plan = on_part(plan, part)
    decisions = decisions_of(plan, program.graph, subdims, of_any_size=of_any_size)
    place = Place.of_rank(number, decisions.mesh.shape)
    lowered = lower(program, subdims, decisions, place)
    ahead = lowered.ahead if plan.schedule is None else plan.schedule.ahead
    return replace(with_parts(lowered, program, subdims, plan), ahead=ahead)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a module is made from what was lowered."""

    dtype: str | None = None
    seed: int = 0
    float64: bool = False
    prefix: str = ""
    passes: int = 1
    cuts: Mapping[str, int] = field(default_factory=dict)


def assemble(model: nn.Module, program: Program, lowered: Lowered, settings: Settings) -> Parallel:
    """The module of one rank, with its part of the weights; all ranks together."""
    context, mesh = _start(model, lowered, settings)
    run = Run(program, lowered, _keepings(program, lowered), context, mesh, settings.prefix)
    return _filled(model, run, settings)


def assemble_stages(
    model: nn.Module,
    program: Program,
    lower: Callable[..., list[Lowered]],
    settings: Settings,
    plan: Plan,
    evaluated: Callable[[], Program] | None = None,
) -> Parallel:
    """The module of one rank of a pipeline, with the parameters that its stages read.

    `lower` gives the instructions of a program for every part of the cluster.
    """
    pipeline = pipeline_of(plan)
    assert pipeline is not None
    links = Links.make(plan, dist.get_rank())
    every = lower(program=program)
    lowered = every[links.device]
    context, mesh = _start(model, lowered, settings, plan)

    def stages(program: Program, every: list[Lowered], mesh: Any) -> Stages:
        cuts, lowered = cuts_of(plan, program), every[links.device]
        given = (plan, pipeline, program, every, dist.get_rank(), settings.float64)
        across = Boundaries(*given)
        sent = [across.after(number, cut.sent) for number, cut in enumerate(cuts[:-1])]
        tied = across.tied(tied_parameters(program, lowered, cuts, pipeline))
        axes = {axes for each in sent for crossing in each for axes in crossing.axes}
        context.groups.make(axes.union(*(each.axes for each in tied.values())))
        found = {}
        for number in pipeline.stages_on(links.device):
            cut = cuts[number]
            part = part_of(lowered, cut.part.ops, cut.part.makes_again(program.graph), tied)
            keepings = _keepings(program, part)
            run = Run(own_program(program, part), part, keepings, context, mesh, settings.prefix)
            run.received, run.returns = cut.received, cut.sent or (program.graph.loss,)
            before, after = ((), *sent)[number], (*sent, ())[number]
            found[number] = Stage(number, run, before, after)
        own = {t: each for t, each in tied.items() if links.device in each.devices}
        changed = changed_buffers(program, lowered, cuts, pipeline)
        return Stages(pipeline, found, links, own, changed)

    def in_eval() -> Stages:
        assert evaluated is not None
        again = evaluated()
        lowereds = lower(program=again, of_any_size=True)
        context.groups.make(lowereds[links.device].axes())
        return stages(again, lowereds, None)

    here = stages(program, every, mesh)
    here.make_evaluation = None if evaluated is None else in_eval
    graph = program.graph
    read = {t for stage in here.stages.values() for t in stage.run.program.sources}
    held = read | ({*graph.parameters()} - graph.readers().keys())
    kept = tuple(stored for stored in lowered.parameters if stored.tensor in held)
    sources = {t: s for t, s in program.sources.items() if s.role != "parameter" or t in held}
    run = Run(
        replace(program, sources=sources),
        replace(lowered, parameters=kept),
        _keepings(program, replace(lowered, parameters=kept)),
        context,
        mesh,
        settings.prefix,
    )
    run.stages = here
    names = (graph.tensors[t].names for t in graph.parameters() if t not in held)
    run.elsewhere = frozenset(run.name(name) for each in names for name in each)
    return _filled(model, run, settings)


def _start(
    model: nn.Module, lowered: Lowered, settings: Settings, plan: Plan | None = None
) -> tuple[Context, Any]:
    """What a run needs of the processes: groups, a device, a mesh; of a pipeline, of each part."""
    device = _device(model)
    meshes = () if plan is None else plan.meshes_of_parts
    mesh, parts = None, max(len(meshes), 1)
    if plan is not None and not is_laid_out_alike(plan):
        mesh = _device_meshes(device.type, plan)
        part, _ = seat(plan, dist.get_rank())
        groups = Groups(lowered.place, parts=parts, first=firsts_of_parts(plan)[part])
    else:
        groups = Groups(lowered.place, parts=parts)
        if lowered.mesh.axes:
            shape, names = lowered.mesh.shape, lowered.mesh.names
            mesh = shared(
                ("mesh", device.type, parts, shape, names),
                lambda: _device_mesh(device.type, parts, shape, names),
            )
    groups.make(lowered.axes())
    groups.make_background(lowered.background_axes())
    seed, double = settings.seed, settings.float64
    return Context(groups, device, seed=seed, double=double, ahead=lowered.ahead), mesh


def _device_mesh(device: str, parts: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """The mesh of this process's part, where all parts have such."""
    if parts == 1:
        return init_device_mesh(device, shape, mesh_dim_names=names)
    whole = init_device_mesh(device, (parts, *shape), mesh_dim_names=("stage", *names))
    return whole[names]


def _device_meshes(device: str, plan: Plan) -> Any:
    """The mesh of this process's part; all processes make those of all parts together."""
    own, _ = seat(plan, dist.get_rank())
    found = None
    firsts, sizes = firsts_of_parts(plan), sizes_of_parts(plan)
    for part, (axes, first, size) in enumerate(
        zip(plan.meshes_of_parts, firsts, sizes, strict=True)
    ):
        if axes:
            shape, names = tuple(a.size for a in axes), tuple(a.name for a in axes)
            ranks = torch.arange(first, first + size).view(shape)
            mesh = shared(
                ("mesh", device, first, shape, names),
                partial(DeviceMesh, device, ranks, mesh_dim_names=names),
            )
            found = mesh if part == own else found
    return found


def _keepings(program: Program, lowered: Lowered) -> dict[str, Keeping]:
    tensors = program.graph.tensors
    return {tensors[s.tensor].name: keeping(s) for s in lowered.parameters}


def _filled(model: nn.Module, run: Run, settings: Settings) -> Parallel:
    """The module, with its part of the weights."""
    run.passes, run.cuts = settings.passes, dict(settings.cuts)
    precision = run.program.graph.precision
    if precision.is_tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    dtype = torch.float64 if settings.float64 else torch_dtype(settings.dtype)
    kept = getattr(torch, precision.master) if precision.master and not settings.float64 else dtype
    tree = _tree(model, run, dtype, kept)
    module = Parallel(run, tree, _volatile(model), originals_of(model))
    module.train()
    return module


def _check_world(plan: Plan) -> None:
    size = plan.processes
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world != size:
        shapes = [
            " x ".join(f"{axis.name}={axis.size}" for axis in mesh) or "one device"
            for mesh in plan.meshes_of_parts
        ]
        shape = shapes[0]
        if plan.pipeline is not None:
            each = f"each {shape}" if len(set(shapes)) == 1 else " and ".join(shapes)
            shape = f"{plan.pipeline.parts} parts in a pipeline, {each}"
        started = (
            f"{world} processes run"
            if world > 1 or dist.is_initialized()
            else "no process group is initialised"
        )
        raise RunError(
            f"The plan is for {size} processes ({shape}), but {started}. Start it with "
            f"torchrun --nproc-per-node {size}, or plan for another cluster."
        )


def _device(model: nn.Module) -> torch.device:
    """Where the model is, or the CPU for one without data; this process's GPU if NCCL runs."""
    tensors = (*model.parameters(), *model.buffers())
    here = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    if here.type == "cpu" and dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return here


def _tree(
    model: nn.Module, run: Run, dtype: torch.dtype | None, kept_dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Every parameter, this rank's part of it, and every buffer, under all its names."""
    names = _names(model)
    keepings = run.named()
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    found: dict[str, Tensor] = {}
    prints: dict[str, str] = {}
    is_split = run.mesh is not None or run.context.groups.first is not None  # on some rank
    for first, tensor in tensors_of(model, run.context.device, run.context.seed):
        value = tensor.to(run.context.device)
        wanted = kept_dtype if first in trained else dtype
        if run.context.double:
            value = widened(value)
        elif wanted is not None and value.is_floating_point():
            value = value.to(wanted)
        if is_split:
            prints[first] = fingerprint(value)
        if first in trained:
            if first not in keepings:
                continue  # of another stage
            kept = keepings[first]
            value = kept.parameter(kept.part(value), run.mesh, trained[first])
        elif value is tensor:
            value = value.clone()
        found |= dict.fromkeys(names[first], value)
    for source in run.program.sources.values() if is_split else ():
        if source.role == "constant" and source.value is not None and not source.value.is_meta:
            prints[f"the constant {source.name}"] = fingerprint(source.value)
    check_tensors_alike(prints)
    return {name: found[name] for name in _order(model) if name in found}


def _names(model: nn.Module) -> dict[str, list[str]]:
    """All names of every tensor, by the first one."""
    firsts: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, tensor in _all_tensors(model):
        found.setdefault(firsts.setdefault(id(tensor), name), []).append(name)
    return found


def _order(model: nn.Module) -> list[str]:
    return [name for name, _ in _all_tensors(model)]


def _all_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _volatile(model: nn.Module) -> frozenset[str]:
    """Buffers that a state dict leaves out."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    )
