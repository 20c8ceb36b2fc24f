"""The per-rank module: the model's own parameter names, and a forward that runs the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.export._tree_utils import reorder_kwargs
from torch.utils import _pytree as pytree

from shardfold.capture import Program
from shardfold.errors import RunError
from shardfold.run.execute import Observer, execute
from shardfold.run.lower import Lowered
from shardfold.run.moves import perform
from shardfold.run.operators import Context
from shardfold.run.parameters import Keeping


class Parallel(nn.Module):
    """One rank's share of a model under a plan; `forward` takes the batch and gives the loss.

    Parameters are DTensors under the model's own names, so that optimizers, gradient clipping
    and state dicts see global tensors. Every rank is given the whole batch and returns the same
    loss.
    """

    def __init__(self, run: Run, tree: Mapping[str, Tensor], volatile: frozenset[str]) -> None:
        super().__init__()
        self._run = run
        for name, tensor in tree.items():
            path, _, leaf = name.rpartition(".")
            owner = _descend(self, path)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=name not in volatile)
        self.register_state_dict_pre_hook(lambda module, *_: module.gather_buffers())
        self.register_state_dict_post_hook(_restore_shapes)
        self.register_load_state_dict_pre_hook(_take_parts)

    @property
    def seed(self) -> int:
        """Of the dropout masks; all ranks must agree."""
        return self._run.context.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self._run.context.seed = value

    @torch.no_grad()
    def gather_buffers(self) -> None:
        """Complete the running statistics of which each rank updates a part; on all ranks."""
        run = self._run
        for written in run.lowered.written:
            source = run.program.sources[written.tensor]
            buffer = self.get_buffer(run.name(source.name))
            part = perform(written.there, buffer, run.context.groups)
            buffer.copy_(perform(written.back, part, run.context.groups))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch; the same on every rank."""
        return self.observed(None, *args, **kwargs)

    def observed(self, observe: Observer | None, *args: Any, **kwargs: Any) -> Tensor:
        """As `forward`; `observe` sees the local results of every operator."""
        if not self.training:
            raise RunError("The plan is for a training step: call train() first, not eval().")
        run = self._run
        found = execute(
            run.lowered, run.given(self, args, kwargs), run.program.graph.loss, run.context, observe
        )
        run.context.step += 1
        for name in run.counters:
            self.get_buffer(name).add_(1)
        return found


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
        self.counters: tuple[str, ...] = ()

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

    def given(
        self, module: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, Tensor]:
        """The tensors that no operator makes."""
        leaves = self._leaves(args, kwargs)
        found: dict[int, Tensor] = {}
        for tensor, source in self.program.sources.items():
            if source.role == "parameter":
                found[tensor] = self._local(module.get_parameter(self.name(source.name)), tensor)
            elif source.role == "buffer":
                found[tensor] = module.get_buffer(self.name(source.name))
            elif source.role == "constant":
                found[tensor] = self._constant(tensor)
            else:
                found[tensor] = self._input(tensor, leaves[source.leaf])
        return found

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        spec = self.program.in_spec
        try:
            flat, found = pytree.tree_flatten((args, reorder_kwargs(kwargs, spec)))
        except (ValueError, KeyError, AssertionError) as error:
            raise RunError(f"The batch is not built like the example: {error}") from error
        leaves: list[Any] = flat
        if len(leaves) != spec.num_leaves:
            raise RunError(
                f"The batch has {len(leaves)} parts, the example of the plan {spec.num_leaves}: "
                f"{found} is not {spec}."
            )
        return leaves

    def _local(self, parameter: Tensor, tensor: int) -> Tensor:
        keeping = self.keepings[self.program.graph.tensors[tensor].name]
        local = parameter
        if isinstance(parameter, DTensor):
            local = parameter.to_local(grad_placements=list(keeping.placements))
        return local.view(keeping.stored.extent.shape) if keeping.in_pieces else local

    def _constant(self, tensor: int) -> Tensor:
        value = self.program.sources[tensor].value
        if value is None or value.is_meta:
            raise RunError(
                f"The constant {self.program.graph.tensors[tensor].name} lost its value while the "
                "model was traced: make it a buffer of the module."
            )
        return self._widened(value.to(self.context.device))

    def _input(self, tensor: int, value: Any) -> Tensor:
        wanted = self.program.graph.tensors[tensor]
        if not isinstance(value, Tensor) or tuple(value.shape) != wanted.type.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise RunError(
                f"The input {wanted.name} has shape {got}, the plan is for {wanted.type.shape}: "
                "every rank is given the whole batch. Pad or drop the last one, or plan again."
            )
        moved = value.to(self.context.device)
        if moved.is_floating_point() and not self.context.double:
            return moved.to(getattr(torch, wanted.type.dtype))
        return self._widened(moved)

    def _widened(self, value: Tensor) -> Tensor:
        return value.double() if self.context.double and value.is_floating_point() else value


def _descend(module: nn.Module, path: str) -> nn.Module:
    for part in path.split(".") if path else ():
        if part not in module._modules:
            module.add_module(part, nn.Module())
        child = module._modules[part]
        assert child is not None
        module = child
    return module


def _restore_shapes(
    module: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Parameters that are kept in pieces leave in the model's own shape, whole."""
    for name, keeping in module._run.named().items():
        key = prefix + name
        if keeping.in_pieces and key in state:
            state[key] = keeping.whole(state[key])


def _take_parts(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Whole tensors of a checkpoint become this rank's parts."""
    run = module._run
    for name, keeping in run.named().items():
        key = prefix + name
        value = state.get(key)
        if value is None or (isinstance(value, DTensor) and not keeping.in_pieces):
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if tuple(whole.shape) == keeping.stored.extent.whole:
            local = keeping.part(whole.to(run.context.device))
            state[key] = keeping.wrapped(local, run.mesh)
