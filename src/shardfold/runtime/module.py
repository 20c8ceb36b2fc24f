"""The per-rank module: the model's own parameter names, and a forward that runs the plan."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from inspect import Parameter
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.export._tree_utils import reorder_kwargs
from torch.utils import _pytree as pytree

from shardfold.capture import Program
from shardfold.capture.program import key_of
from shardfold.errors import RunError
from shardfold.planner.batch_slices import cut
from shardfold.runtime.codegen import Step, Style, kept, write
from shardfold.runtime.inputs_outputs import Outputs
from shardfold.runtime.lower import Instruction, Lowered
from shardfold.runtime.ops import Context
from shardfold.runtime.ops.local_op import widened
from shardfold.runtime.parameter_uses import Uses, differentiable, uses_of
from shardfold.runtime.parameters import Keeping
from shardfold.runtime.part_operators import complete_dtensors
from shardfold.runtime.parts import SWITCHING, Captured, Original, finish, grow
from shardfold.runtime.ranks import (
    agreed,
    check_alike,
    check_readers_alike,
    digest,
    fingerprint,
    is_same_everywhere,
)
from shardfold.runtime.reshard import perform
from shardfold.runtime.stages import Stages
from shardfold.runtime.whole_optimizers import known

Observer = Callable[[Instruction, list[Tensor]], list[Tensor]]
Batch = tuple[tuple[Any, ...], dict[str, Any]]
Evaluation = Callable[[], tuple[Program, Lowered]]
MOST_SHAPES = 16  # of batches that the plan is kept lowered for, beside its own


class Parallel(Captured):
    """One rank's share of a model under a plan; `forward` takes the batch and gives the loss.

    Parameters are DTensors under the model's own names, so that optimizers, gradient clipping
    and state dicts see global tensors. Every rank is given the whole batch, or its own part of it
    (`plan.local_batch`), and returns the same loss. Under a plan of several micro-batches,
    `forward` takes one of them, and `accumulate` the batch of a step. For a batch of other shapes,
    which every rank is given whole, the model is captured again and run under the same splits.
    """

    def __init__(
        self,
        run: Run,
        tree: Mapping[str, Tensor],
        volatile: frozenset[str],
        originals: Mapping[str, Original],
    ) -> None:
        super().__init__()
        complete_dtensors()
        self._run = run
        grow(self, originals)
        for name, tensor in tree.items():
            path, _, leaf = name.rpartition(".")
            owner = self.get_submodule(path)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=name not in volatile)
        finish(self, originals)
        run.prepare(self)
        self._link()
        self.register_state_dict_pre_hook(lambda module, *_: module.gather_buffers())
        self.register_load_state_dict_pre_hook(_take_parts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        """A module with tensors of its own, under the same plan and on the same groups."""
        found: Parallel = type(self).__new__(type(self))
        memo[id(self)] = found
        memo |= {id(p): _copied(p, memo) for p in self.parameters() if isinstance(p, DTensor)}
        kept = {key: value for key, value in self.__dict__.items() if key != "_run"}
        found.__dict__.update(copy.deepcopy(kept, memo))
        found._run = self._run.anew(found)
        found._link()
        return found

    def _link(self) -> None:
        """Let the parts know whom to ask for statistics of which each rank updates its own."""
        for written in self._run.lowered.written:
            name = self._run.name(self._run.program.sources[written.tensor].name)
            path, _, leaf = name.rpartition(".")
            owner = self.get_submodule(path)
            owner.__dict__.setdefault("_split", set()).add(leaf)
            for part in (self, owner):
                part.__dict__["_root"] = weakref.ref(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Process groups and generated code are of this process."""
        raise RunError(
            "A parallel module cannot be pickled: save it with sf.save, or its state_dict()."
        )

    register_forward_hook = nn.Module.register_forward_hook
    register_forward_pre_hook = nn.Module.register_forward_pre_hook
    register_full_backward_hook = nn.Module.register_full_backward_hook
    register_full_backward_pre_hook = nn.Module.register_full_backward_pre_hook

    def train(self, mode: bool = True) -> Self:
        """Switch all parts."""
        SWITCHING.append(self)
        try:
            return super().train(mode)
        finally:
            SWITCHING.pop()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's own; values are written into the parameters that are there."""
        if assign:
            raise RunError(
                "load_state_dict(assign=True) would put other parameters in the place of those in "
                "parts: leave assign out, and they take the values."
            )
        return super().load_state_dict(state_dict, strict)

    @property
    def seed(self) -> int:
        """Of the dropout masks; all ranks must agree."""
        return self._run.context.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._run.context.seed = value

    def generated_code(self) -> str:
        """The Python function that runs a step of this rank, one line for each call."""
        return self._run.generated_code()

    @torch.no_grad()
    def gather_buffers(self) -> None:
        """Complete the running statistics of which each rank updates a part; on all ranks."""
        run = self._run
        for written in run.lowered.written:
            buffer = self._buffer(written.tensor)
            part = perform(written.there, buffer, run.context.groups)
            # `.data`: a forward may have saved the buffer, whose own part does not change.
            buffer.data.copy_(perform(written.back, part, run.context.groups))
        if run.stages is not None:
            for tensor, device in run.stages.changed.items():
                run.stages.links.from_part(self._buffer(tensor), device)

    def _buffer(self, tensor: int) -> Tensor:
        found = next(held[leaf] for _, t, held, leaf in self._run.owners if t == tensor)
        assert isinstance(found, Tensor)
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch; the same on every rank."""
        args, kwargs = self._as_planned(args, kwargs)
        if torch.compiler.is_compiling() and self.training:
            return self._counted(self._run.traced(self, args, kwargs))
        return self.observed(None, *args, **kwargs)

    def accumulate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a whole step: the mean loss, and gradients to update with.

        Takes the whole batch, or this rank's part of it, and cuts it into the plan's micro-batches.
        What the plan holds back is reduced once, in the last pass. In eval mode, or where no
        gradients are wanted, there is no backward.
        """
        run = self._run
        args, kwargs = self._as_planned(args, kwargs)
        if (run.passes > 1 or run.stages) and self._compiled_call_impl is not None:
            raise RunError(
                f"The plan takes {run.passes} micro-batches, which a compiled module cannot add "
                "up: leave the module as it is, or plan with micro_batches=1."
            )
        if run.stages is not None:
            return self._run_stages((args, kwargs))
        losses = []
        for number, (part, named) in enumerate(cut(args, kwargs, run.cuts, run.passes)):
            with run.in_pass(number):
                loss = self(*part, **named)
                if self.training and torch.is_grad_enabled():
                    (loss / run.passes).backward()
            losses.append(loss.detach())
        return torch.stack(losses).mean() if run.passes > 1 else losses[0]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, over the parameters of all stages of a pipeline.

        The norm that torch's own function finds there is that of the stage alone. Without stages
        the two are the same.
        """
        stages = self._run.stages
        if stages is None:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        with torch.no_grad():
            total = stages.norm(self, norm_type)
            nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    def _as_planned(self, args: Any, kwargs: Any) -> Batch:
        """The arguments by position and by name as the example's were, where that can be told."""
        spec = self._run.program.in_spec
        count, named = spec.child(0).num_children, spec.child(1).context
        if len(args) == count and kwargs.keys() == set(named):
            return args, kwargs
        takes = self._stands_for().takes
        kinds = {p.kind for p in takes.parameters.values()} if takes is not None else set()
        if takes is None or kinds & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
            return args, kwargs
        try:
            given = takes.bind(*args, **kwargs)
        except TypeError:
            return args, kwargs
        is_named = given.arguments.keys() >= set(named)
        given.apply_defaults()
        values = list(given.arguments.items())
        rest = dict(values[count:])
        is_default = (v is takes.parameters[n].default for n, v in rest.items() if n not in named)
        if not is_named or len(values) < count or not all(is_default):
            return args, kwargs
        return tuple(v for _, v in values[:count]), {name: rest[name] for name in named}

    def observed(self, observe: Observer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As `forward`; `observe` sees the local results of every operator."""
        if self._run.stages is not None:
            raise RunError(
                "The stages of a pipeline run forward and backward in turns: call accumulate() "
                "with the batch of a step, which leaves the gradients and returns the loss."
            )
        self._run.compare_call(self, args, kwargs)
        run = self._run.taking(self, args, kwargs)
        observe = run.observer(observe)
        if not self.training:
            return run.in_eval(self).evaluate(self, args, kwargs, observe)
        return self._counted(run.step(self, args, kwargs, observe))

    @contextmanager
    def outputs(self, *names: str) -> Iterator[dict[str, Tensor]]:
        """While it lasts, a call also leaves these results behind, whole on every rank.

        A name is a module's path (its last result), an operator's name as the plan lists it, or a
        key of the dict that the model's forward returns (`logits`), if the loss is made from it:
        `with model.outputs("lm_head") as found: loss = model(**batch)`, then `found["lm_head"]`.
        """
        if self._run.stages is not None:
            raise RunError("Outputs cannot be asked of the stages of a pipeline yet.")
        wanted = Outputs.of(self._run.program, self._run.prefix, names)
        self._run.wanted = wanted
        try:
            yield wanted.found
        finally:
            for run in (self._run, *self._run.others.values()):
                run.wanted = None

    def _run_stages(self, batch: Batch, observe: Observer | None = None) -> Tensor:
        stages = self._run.stages
        assert stages is not None
        if not self.training:
            return stages.in_eval(self).evaluate(self, batch)
        is_plain = torch.is_grad_enabled()
        loss = stages.step(self, batch, observe) if is_plain else stages.evaluate(self, batch)
        for _ in range(self._run.passes):
            self._counted(loss)
        return loss

    def _counted(self, loss: Tensor) -> Tensor:
        run = self._run
        run.context.clock[1].add_(1)
        for name, by in run.program.increments.items():
            # By a view: torch's compilers lose what is written into a single float64.
            self.get_buffer(run.name(name))[None].add_(by)
        return loss


class Run:
    """What a parallel module needs besides its tensors."""

    def __init__(
        self,
        program: Program,
        lowered: Lowered,
        keepings: Mapping[str, Keeping],
        context: Context,
        mesh: Any,
        prefix: str,
    ) -> None:
        self.program, self.lowered, self.context = program, lowered, context
        self.keepings, self.mesh, self.prefix = keepings, mesh, prefix
        self.passes, self.cuts = 1, dict[str, int]()  # of a step: micro-batches, and how it is cut
        self.wanted: Outputs | None = None  # what a call is to leave behind
        self.make_evaluation: Evaluation | None = None
        self.evaluation: Run | None = None
        self.make_other: Callable[[Batch], tuple[Program, Lowered, Evaluation]] | None = None
        self.others: dict[object, Run] = {}  # for batches of other shapes, the latest last
        self.in_parts: dict[bool, bool] = {}  # in training or not: how the first batch came
        self.compared = set[str]()  # ways in which the module was called, on all ranks alike
        self.turn = (0, 1)  # the number of this pass, and how many a step takes
        sources = program.sources.items()
        self.inputs = [(t, source.leaf) for t, source in sources if source.role == "input"]
        self.by_tensor = {k.stored.tensor: k for k in keepings.values()}
        self.placements = {t: list(k.placements) for t, k in self.by_tensor.items()}
        self.uses: Uses | None = None
        if mesh is not None:
            uses = uses_of(lowered, self.by_tensor)
            levels = [axis.level for axis in lowered.mesh.axes]
            self.uses = Uses(uses, self.by_tensor, context.groups, levels)
        self.received: tuple[int, ...] = ()  # of a stage: tensors of the stage before
        self.returns: tuple[int, ...] = (program.graph.loss,)
        self.stages: Stages | None = None  # of a pipeline: what runs in its place
        self.elsewhere = frozenset[str]()  # parameters that only other stages have
        self.constants: dict[int, Tensor] = {}
        self.owners: list[tuple[str, int, Any, str]] = []  # where parameters and buffers are held
        self._eager = cache(self._written)
        ops = program.graph.ops
        self.written = {op.inputs[0] for op in ops if op.kind == "shardfold.write"}
        self._in_graph = torch._dynamo.allow_in_graph(self._recorded)

    def anew(self, module: Parallel) -> Run:
        """The same for another module, with tensors and a count of steps of its own."""
        context = copy.copy(self.context)
        context.clock = context.clock.clone()
        found = Run(self.program, self.lowered, self.keepings, context, self.mesh, self.prefix)
        found.passes, found.cuts = self.passes, dict(self.cuts)
        found.make_evaluation, found.make_other = self.make_evaluation, self.make_other
        found.prepare(module)
        return found

    @contextmanager
    def in_pass(self, number: int) -> Iterator[None]:
        """While it lasts, gradients are those of one of the passes of a step."""
        self.take_turn(number, self.passes)
        try:
            yield
        finally:
            self.take_turn(0, 1)

    def take_turn(self, number: int, passes: int) -> None:
        """Say which of the passes of a step the next one is."""
        self.turn = (number, passes)
        if self.uses is not None:
            self.uses.turn = self.turn

    def compare_call(self, module: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse, on every rank, a first call that is another one on some rank.

        Of a batch, what several ranks read must be the same on them.
        """
        mode = "in training" if module.training else "in eval mode"
        mode += ", with gradients" if torch.is_grad_enabled() else ", without gradients"
        if self.mesh is None or mode in self.compared or torch.compiler.is_compiling():
            return
        self.compared.add(mode)
        facts = agreed(partial(self._facts_of, args, kwargs))
        check_alike(
            {"the call is": mode} | {name: shape for name, (shape, _, _) in facts.items()},
            "Every rank calls the module in the same way, with the whole batch or with its part.",
        )
        check_readers_alike({f"{name} ({part})": value for name, (_, part, value) in facts.items()})

    def _facts_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, tuple[str, str, str]]:
        """The shape of every input, which part of it this rank reads, and what is there."""
        leaves, found = self._leaves(args, kwargs), {}
        for tensor, leaf in self.inputs:
            name, value = self.program.graph.tensors[tensor].name, leaves[leaf]
            if not isinstance(value, Tensor):
                raise RunError(f"The input {name} is a {type(value).__name__}, not a tensor.")
            given, part = self.lowered.inputs.get(tensor), "whole"
            is_part = given is not None and tuple(value.shape) == given.part != given.whole
            shape = "a part" if is_part else f"of shape {tuple(value.shape)}"
            if given is not None and not is_part and tuple(value.shape) == given.whole:
                places = torch.arange(value.numel()).view(given.whole)
                part = f"part {digest(fingerprint(given.taken(places, self.context.groups)))}"
                value = given.taken(value, self.context.groups)
            found[name] = shape, part, "" if is_part else digest(fingerprint(value.detach()))
        return found

    def taking(self, module: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """The same for the shapes of a batch: this one, or made anew for shapes that are new."""
        leaves = self._leaves(args, kwargs)
        is_known = self._takes(leaves) and not self._is_whole_after_all(leaves, module.training)
        if is_known or self.make_other is None or self.turn[1] != self.passes:
            return self
        key = tuple(tuple(leaves[leaf].shape) for _, leaf in self.inputs)
        found = self.others.pop(key, None) or self._other(module, (args, kwargs))
        self.others[key] = found
        if self.wanted is not None:
            found.wanted = replace(self.wanted, graph=found.program.graph)
        found.take_turn(*self.turn)
        return found

    def _takes(self, leaves: list[Any]) -> bool:
        """Whether all tensors of a batch have the plan's shapes, or those of this rank's parts."""
        tensors = self.program.graph.tensors
        for tensor, leaf in self.inputs:
            shape = getattr(leaves[leaf], "shape", None)
            given = self.lowered.inputs.get(tensor)
            known = (tensors[tensor].type.shape,) if given is None else (given.whole, given.part)
            if shape is not None and tuple(shape) not in known:
                return False
        return True

    def _is_whole_after_all(self, leaves: list[Any], training: bool) -> bool:
        """Whether what looks like this rank's part is a smaller batch: all ranks have the same.

        Asked only where batches came whole so far, since all ranks must answer.
        """
        given = [(self.lowered.inputs.get(tensor), leaves[leaf]) for tensor, leaf in self.inputs]
        shapes = [(g, v, getattr(v, "shape", None)) for g, v in given if g is not None]
        parts = [v for g, v, shape in shapes if shape == g.part != g.whole]
        came_in_parts = self.in_parts.setdefault(training, bool(parts))
        if not parts or came_in_parts:
            return False
        return is_same_everywhere(" ".join(map(fingerprint, parts)))

    def _other(self, module: Parallel, batch: Batch) -> Run:
        assert self.make_other is not None
        if len(self.others) == MOST_SHAPES:
            warnings.warn(
                f"Batches came in more than {MOST_SHAPES} shapes beside the plan's; each new one "
                "takes as long as a capture of the model. Pad them to a few lengths.",
                stacklevel=5,
            )
        program, lowered, make_evaluation = self.make_other(batch)
        self.context.groups.make(lowered.axes())
        self.context.groups.make_background(lowered.background_axes())
        found = Run(program, lowered, self.keepings, self.context, self.mesh, self.prefix)
        found.make_evaluation = make_evaluation
        found.prepare(module)
        while len(self.others) >= MOST_SHAPES:
            del self.others[next(iter(self.others))]
        return found

    def prepare(self, module: Parallel) -> None:
        """Find out where the module holds its tensors, and have the constants ready."""
        for stage in self.stages.stages.values() if self.stages is not None else ():
            stage.run.prepare(module)
        for tensor, source in self.program.sources.items():
            path, _, leaf = self.name(source.name).rpartition(".")
            if source.role in ("parameter", "buffer"):
                owner = module.get_submodule(path)
                held = owner._parameters if source.role == "parameter" else owner._buffers
                self.owners.append((source.role, tensor, held, leaf))
                if source.role == "parameter" and self.mesh is not None:
                    known(held[leaf], self.by_tensor[tensor])
            elif source.role == "constant":
                self.constants[tensor] = self._constant(tensor)

    def _written(self, is_observed: bool, is_traced: bool) -> Step:
        style = Style(
            self.context.target,
            (*self.program.sources, *self.received),
            self.returns,
            None if is_traced else self.uses,
            is_observed,
            is_traced,
        )
        return write(self.lowered, style)

    def generated_code(self) -> str:
        """The source of the eager step."""
        return self._eager(False, False).__doc__ or ""

    def step(
        self,
        module: Parallel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        observe: Observer | None,
    ) -> Tensor:
        """The loss, step by step."""
        parameters = wholes = self._parameters(module)
        self._check(wholes)
        leaves: list[Tensor] = []
        if self.uses is not None:
            leaves = self.uses.bind(wholes)
            parameters = {t: p._local_tensor for t, p in wholes.items()}
        given = self.given(module, parameters, args, kwargs)
        context = self.context.now()
        (loss,) = self._eager(observe is not None, False)(context, given, leaves, observe)
        self._leave(context.writes)
        return loss if self.uses is None else differentiable(loss, wholes.values())

    def _check(self, parameters: Mapping[int, Any]) -> None:
        """Refuse what was done to parameters and would be lost."""
        for tensor, parameter in parameters.items():
            if parameter.requires_grad and not self.program.graph.tensors[tensor].requires_grad:
                raise RunError(
                    f"{self.program.graph.tensors[tensor].name} requires a gradient now, but was "
                    "frozen when it was planned: there is no place for it. Plan and parallelize "
                    "again, with requires_grad set before."
                )

    def stage(
        self, module: Parallel, batch: Batch, received: Sequence[Tensor], observe: Observer | None
    ) -> tuple[Tensor, ...]:
        """What a stage of a pipeline makes of a micro-batch and of what the one before sends."""
        wholes = self._parameters(module)
        parameters, leaves = {t: self._local(p, t) for t, p in wholes.items()}, list[Tensor]()
        if self.uses is not None:
            leaves = self.uses.leaves_for(wholes)
            parameters = {t: p._local_tensor for t, p in wholes.items()}
        given = [*self.given(module, parameters, *batch), *received]
        context = self.context.now()
        found = self._eager(observe is not None, False)(context, given, leaves, observe)
        self._leave(context.writes)
        return found

    @torch.no_grad()
    def _leave(self, writes: Mapping[int, Tensor]) -> None:
        """Give buffers, and parameters that are not trained, what forward leaves in them."""
        for _, tensor, held, leaf in self.owners:
            if tensor in writes:
                value, owner = writes[tensor], held[leaf]
                if isinstance(owner, nn.Parameter):
                    value = self.by_tensor[tensor].part(value)
                    owner = owner._local_tensor if isinstance(owner, DTensor) else owner
                owner.copy_(value)

    def traced(self, module: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The loss as a compiler sees it: one function of the tensors, with all collectives in."""
        if self.written:
            names = [self.program.graph.tensors[t].name for t in sorted(self.written)]
            raise RunError(
                f"Forward updates {', '.join(names[:3])}, which a compiled module cannot: leave "
                "the module as it is."
            )
        parameters = {t: self._local(p, t) for t, p in self._parameters(module).items()}
        given = self.given(module, parameters, args, kwargs)
        found: Tensor = self._in_graph(self.context.clock, *given)
        return found

    def _recorded(self, clock: Tensor, *given: Tensor) -> Tensor:
        with kept():  # the clock itself has moved on when backward asks
            clock = clock.clone()
        (loss,) = self._eager(False, True)(self.context.now(clock), given, (), None)
        return loss

    def name(self, source: str) -> str:
        """The model's own name of a parameter or buffer that the program names."""
        return source.removeprefix(self.prefix)

    def named(self) -> dict[str, Keeping]:
        """How each parameter is kept, under every one of its names in the model."""
        tensors = self.program.graph.tensors
        return {
            self.name(name): keeping
            for keeping in self.keepings.values()
            for name in tensors[keeping.stored.tensor].names
        }

    def observer(self, observe: Observer | None) -> Observer | None:
        """The one that was given, or the one that keeps the outputs that were asked for."""
        if observe is not None or self.wanted is None:
            return observe
        return partial(self.wanted.keep, self.context.groups, self.lowered.place)

    def in_eval(self, module: Parallel) -> Run:
        """The same in eval mode; made when it is first asked for."""
        if self.evaluation is None:
            if self.make_evaluation is None:
                raise RunError("This module was made for training only: use parallelize().")
            program, lowered = self.make_evaluation()
            run = Run(program, lowered, self.keepings, self.context, None, self.prefix)
            run.prepare(module)
            self.evaluation = run
        return self.evaluation

    def evaluate(
        self,
        module: Parallel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        observe: Observer | None,
    ) -> Tensor:
        """The loss in eval mode: no gradient is reduced ahead, and no step is counted."""
        parameters = {t: self._local(p, t) for t, p in self._parameters(module).items()}
        given = self.given(module, parameters, args, kwargs)
        context = self.context.now()
        (loss,) = self._eager(observe is not None, True)(context, given, (), observe)
        self._leave(context.writes)
        for name, by in self.program.increments.items():
            module.get_buffer(self.name(name)).add_(by)
        return loss

    def _parameters(self, module: Parallel) -> dict[int, Tensor]:
        return self._named(module, "parameter")

    def _named(self, module: Parallel, role: str) -> dict[int, Tensor]:
        """The parameters, or buffers, as the module has them now."""
        found = {}
        for kind, tensor, held, leaf in self.owners:
            if kind == role:
                if leaf not in held:
                    raise RunError(
                        f"{self.program.graph.tensors[tensor].name} was taken out of the parallel "
                        "module, but the plan reads it. Change the model before it is planned."
                    )
                found[tensor] = held[leaf]
        return found

    def given(
        self,
        module: Parallel,
        parameters: Mapping[int, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[Tensor]:
        """The tensors that no operator makes, in the order of their sources."""
        try:
            return self._given(module, parameters, self._leaves(args, kwargs))
        except RunError as error:
            if self.passes == 1:
                raise
            raise RunError(
                f"{error} The plan takes {self.passes} micro-batches: call accumulate() with the "
                "whole batch."
            ) from error

    def _given(
        self, module: Parallel, parameters: Mapping[int, Tensor], leaves: list[Any]
    ) -> list[Tensor]:
        buffers = self._named(module, "buffer")
        found: list[Tensor] = []
        for tensor, source in self.program.sources.items():
            if source.role == "parameter":
                found.append(parameters[tensor])
            elif source.role == "buffer":
                # Backward may need what forward read, not what it left there.
                value = buffers[tensor]
                found.append(value.clone() if tensor in self.written else value)
            elif source.role == "constant":
                found.append(self.constants[tensor])
            else:
                found.append(self._input(tensor, leaves[source.leaf]))
        return found

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        spec = self.program.in_spec
        try:
            leaves: list[Any] = pytree.tree_leaves((args, reorder_kwargs(kwargs, spec)))
        except (ValueError, KeyError, AssertionError) as error:
            raise self._built_otherwise(args, kwargs) from error
        if len(leaves) != spec.num_leaves:
            raise self._built_otherwise(args, kwargs)
        for number, fixed in self.program.fixed.items():
            self._check_fixed(number, leaves[number], fixed)
        return leaves

    def _check_fixed(self, number: int, given: Any, fixed: Any) -> None:
        """Refuse another value of an argument that is no tensor: the program has the first."""
        if given is fixed or (type(given) is type(fixed) and bool(given == fixed)):
            return
        spec = self.program.in_spec
        tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        path = next(p for p, n in pytree.tree_flatten_with_path(tree)[0] if n == number)
        name = ".".join(str(key_of(key)) for key in path[1:])
        told = (
            f"a {type(v).__name__}" if isinstance(v, Tensor) else repr(v) for v in (given, fixed)
        )
        now, planned = told
        raise RunError(
            f"The argument {name} is {now}, the plan was made with {planned}: values that are no "
            "tensors are fixed when a model is captured. Pass it as a tensor (torch.tensor(...)), "
            "or plan again with the new value."
        )

    def _built_otherwise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RunError:
        """The error for a call with more, fewer or other arguments than the example's."""
        sources = self.program.sources.items()
        names = [self.program.graph.tensors[t].name for t, s in sources if s.role == "input"]
        named = f" and {', '.join(kwargs)} by name" if kwargs else ""
        return RunError(
            f"The call gives {len(args)} arguments by position{named}, which is not how the "
            f"example of the plan was given: its tensors are {', '.join(names) or 'none'}. Call "
            "the module with all of them, labels included, as in the example; for predictions use "
            "`with module.outputs(...)`, or plan the model without its loss."
        )

    def _local(self, parameter: Tensor, tensor: int) -> Tensor:
        if isinstance(parameter, DTensor):
            return parameter.to_local(grad_placements=self.placements[tensor])
        return parameter

    def _constant(self, tensor: int) -> Tensor:
        value = self.program.sources[tensor].value
        if value is not None and value.is_meta and not value.numel():
            value = torch.empty_like(value, device=self.context.device)
        if value is None or value.is_meta:
            raise RunError(
                f"The constant {self.program.graph.tensors[tensor].name} lost its value while the "
                "model was traced: make it a buffer of the module."
            )
        return self._widened(value.to(self.context.device))

    def _input(self, tensor: int, value: Any) -> Tensor:
        wanted = self.program.graph.tensors[tensor]
        if not isinstance(value, Tensor):
            raise RunError(f"The input {wanted.name} is a {type(value).__name__}, not a tensor.")
        if value.requires_grad and torch.is_grad_enabled() and self.lowered.mesh.axes:
            raise RunError(
                f"The input {wanted.name} requires a gradient, which a plan does not reduce over "
                "the devices: give it detached. What is to be trained or differentiated (a prompt, "
                "an image) must be a parameter of the model that is planned."
            )
        given = self.lowered.inputs.get(tensor)
        if given is not None:
            value = given.taken(value, self.context.groups)
        elif tuple(value.shape) != wanted.type.shape:
            raise RunError(
                f"The input {wanted.name} has shape {tuple(value.shape)}, the plan is for "
                f"{wanted.type.shape}. Pad or drop the last batch, or plan again."
            )
        moved = value.to(self.context.device)
        if moved.is_floating_point() and not self.context.double:
            return moved.to(getattr(torch, wanted.type.dtype))
        return self._widened(moved)

    def _widened(self, value: Tensor) -> Tensor:
        return widened(value) if self.context.double else value


def _copied(parameter: Any, memo: dict[int, Any]) -> nn.Parameter:
    """A parameter in parts with memory of its own; torch itself cannot copy its gradient."""
    found = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    if parameter.grad is not None:
        found.grad = parameter.grad.detach().clone()
    vars(found).update(copy.deepcopy(vars(parameter), memo))
    return found


def _take_parts(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Whole tensors of a checkpoint become this rank's parts."""
    run = module._run
    for name, keeping in run.named().items():
        key = prefix + name
        value = state.get(key)
        if value is None or isinstance(value, DTensor):
            continue
        if tuple(value.shape) == keeping.shape:
            local = keeping.part(value.to(run.context.device))
            state[key] = keeping.wrapped(local, run.mesh)
