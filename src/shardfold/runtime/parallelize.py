"""`parallelize`: from a model, a plan and a process group to this rank's module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
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
from shardfold.runtime.stages import (
    SIDES,
    Links,
    Stage,
    Stages,
    changed_buffers,
    crossings,
    cuts_of,
    own_program,
    parts_senders,
    pipeline_of,
    position,
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
    pipeline = pipeline_of(plan)
    dtype, dims = plan.provenance.request.numbers, plan.micro_batch_dims
    settings = Settings(dtype, seed, float64, prefix, plan.micro_batches, dims)
    original = Original.of(model, *example_for(plan, args, kwargs), dtype, loss)
    again = Again(plan, rules, original, program, lowered)
    if pipeline is not None:
        evaluation = partial(again.evaluation, program, subdims, original)
        return assemble_stages(model, program, lowered, settings, plan, evaluation)
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
    decisions = decisions_of(plan, program.graph, subdims, of_any_size=of_any_size)
    rank = position(plan, dist.get_rank()) if decisions.mesh.axes else 0
    place = Place.of_rank(rank, decisions.mesh.shape)
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
    lowered: Lowered,
    settings: Settings,
    plan: Plan,
    evaluation: Evaluation | None = None,
) -> Parallel:
    """The module of one rank of a pipeline, with the parameters that its stages read."""
    pipeline = pipeline_of(plan)
    assert pipeline is not None
    context, mesh = _start(model, lowered, settings, pipeline.devices)
    size = plan.processes // pipeline.devices
    links = Links.make(pipeline.devices, size, dist.get_rank())

    def stages(program: Program, lowered: Lowered, mesh: Any) -> Stages:
        cuts, senders = cuts_of(plan, program), parts_senders(plan, pipeline)
        across = [
            crossings(program, lowered, cut.sent, settings.float64, sends)
            for cut, sends in zip(cuts[:-1], senders, strict=True)
        ]
        axes = {each.axes(side) for cut in across for each in cut for side in SIDES} - {()}
        context.groups.make(axes)
        tied = tied_parameters(program, lowered, cuts, pipeline)
        found = {}
        for number in pipeline.stages_on(links.device):
            cut = cuts[number]
            part = part_of(lowered, cut.part.ops, cut.part.makes_again(program.graph), tied)
            keepings = _keepings(program, part)
            run = Run(own_program(program, part), part, keepings, context, mesh, settings.prefix)
            run.received, run.returns = cut.received, cut.sent or (program.graph.loss,)
            before, after = ((), *across)[number], (*across, ())[number]
            found[number] = Stage(number, run, before, after)
        own = {t: each for t, each in tied.items() if links.device in each.devices}
        changed = changed_buffers(program, lowered, cuts, pipeline)
        return Stages(pipeline, found, links, own, changed)

    def in_eval() -> Stages:
        assert evaluation is not None
        evaluated, again = evaluation()
        context.groups.make(again.axes())
        return stages(evaluated, again, None)

    here = stages(program, lowered, mesh)
    here.make_evaluation = None if evaluation is None else in_eval
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
    model: nn.Module, lowered: Lowered, settings: Settings, parts: int = 1
) -> tuple[Context, Any]:
    """What a run needs of the processes: groups, a device, a mesh of each part of them."""
    device = _device(model)
    mesh = None
    if lowered.mesh.axes:
        shape, names = lowered.mesh.shape, lowered.mesh.names
        mesh = shared(
            ("mesh", device.type, parts, shape, names),
            lambda: _device_mesh(device.type, parts, shape, names),
        )
    groups = Groups(lowered.place, parts=parts)
    groups.make(lowered.axes())
    groups.make_background(lowered.background_axes())
    seed, double = settings.seed, settings.float64
    return Context(groups, device, seed=seed, double=double, ahead=lowered.ahead), mesh


def _device_mesh(device: str, parts: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """The mesh of this process's part."""
    if parts == 1:
        return init_device_mesh(device, shape, mesh_dim_names=names)
    whole = init_device_mesh(device, (parts, *shape), mesh_dim_names=("stage", *names))
    return whole[names]


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
        shape = " x ".join(f"{axis.name}={axis.size}" for axis in plan.mesh) or "one device"
        if plan.pipeline is not None:
            shape = f"{plan.pipeline.parts} parts in a pipeline, each {shape}"
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
    for first, tensor in tensors_of(model, run.context.device, run.context.seed):
        value = tensor.to(run.context.device)
        wanted = kept_dtype if first in trained else dtype
        if run.context.double:
            value = widened(value)
        elif wanted is not None and value.is_floating_point():
            value = value.to(wanted)
        if run.mesh is not None:
            prints[first] = fingerprint(value)
        if first in trained:
            if first not in keepings:
                continue  # of another stage
            kept = keepings[first]
            value = kept.parameter(kept.part(value), run.mesh, trained[first])
        elif value is tensor:
            value = value.clone()
        found |= dict.fromkeys(names[first], value)
    for source in run.program.sources.values() if run.mesh is not None else ():
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
