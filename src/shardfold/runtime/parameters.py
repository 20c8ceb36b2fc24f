"""Parameters as DTensors, and weights for those on the meta device.

A parameter has the model's own shape, whatever pieces of its dims are split: who groups parameters
by their dims, or reads a gradient, sees what the model has. A split of a whole dim, or of the
leading piece of one, is what DTensor calls `Shard`. A split of an inner piece (the heads of a
packed q-k-v projection, of which every device has some rows of each third) is a `_StridedShard`:

    3 x 8 heads x 16 features over 2 devices: _StridedShard(0, split_factor=3)

What neither can say (5 heads x 16 features over 2: 3 heads and 2) is never planned: see `storable`.

Weights are made a module at a time. A module's own initialisation is run on that module alone, from
a seed of its own, so that every rank draws the same numbers and never holds more than one module's
weights whole.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardfold.errors import RunError
from shardfold.runtime.lower import Stored
from shardfold.sharding.layouts import pieces_product


@dataclass(frozen=True, slots=True)
class Keeping:
    """How one parameter is kept: its part of the whole, and a placement on every mesh axis."""

    stored: Stored
    placements: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole, which is the model's own."""
        return self.stored.extent.whole

    def part(self, whole: Tensor) -> Tensor:
        """Take this device's part of a whole tensor."""
        extent = self.stored.extent
        local = whole.reshape(extent.subdims)
        for atom, (low, high) in enumerate(extent.bounds):
            local = local.narrow(atom, low, high - low)
        return local.reshape(extent.shape).clone(memory_format=torch.contiguous_format)

    def parameter(self, local: Tensor, mesh: Any, requires_grad: bool) -> nn.Parameter:
        """The parameter itself; without a mesh (one device) a plain one."""
        return nn.Parameter(self.wrapped(local, mesh), requires_grad=requires_grad)

    def wrapped(self, local: Tensor, mesh: Any) -> Tensor:
        """The local part as a part of the whole."""
        if mesh is None:
            return local
        strides = [math.prod(self.shape[k + 1 :]) for k in range(len(self.shape))]
        found: Tensor = DTensor.from_local(
            local,
            mesh,
            list(self.placements),
            run_check=False,
            shape=torch.Size(self.shape),
            stride=tuple(strides),
        )
        return found

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole tensor, on every device."""
        found: Tensor = whole_of(tensor)
        return found


def whole_of(value: Any) -> Any:
    """The whole of a tensor in parts, on every device; of anything else, that."""
    if not isinstance(value, DTensor):
        return value
    try:
        return value.full_tensor()
    except ValueError as error:
        if not any(isinstance(each, _StridedShard) for each in value.placements):
            raise
        raise RunError(
            f"PyTorch {torch.__version__} does not put together a tensor of shape "
            f"{tuple(value.shape)} that is packed (a q-k-v projection?) and split: "
            f"{str(error).splitlines()[0]} Use PyTorch 2.12 or later, save by shardfold.save, "
            "which writes the parts, or pin the parameter's operator to a split that cuts no piece."
        ) from error


def keeping(stored: Stored) -> Keeping:
    """The placements of a parameter's storage."""
    extent = stored.extent
    found: list[Any] = []
    lengths = list(extent.subdims)
    for axis, state in enumerate(stored.row):
        if state < 0:
            found.append(Replicate())
            continue
        dim = extent.dims[state]
        factor = pieces_product(lengths[:state], extent.dims, dim)
        found.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
        lengths[state] = -(-lengths[state] // stored.mesh[axis])
    return Keeping(stored, tuple(found))


def tensors_of(model: nn.Module, device: torch.device, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by its first name, with data, a module's at a time."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        own = [
            (name, t)
            for name, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None and id(t) not in seen
        ]
        seen.update(id(t) for _, t in own)
        made = _initialised(model, path, module, device, seed) if _on_meta(own) else module
        for name, _ in own:
            tensor = made._parameters.get(name)
            found = tensor if tensor is not None else made._buffers[name]
            assert found is not None
            yield f"{path}.{name}" if path else name, found.detach()


def _on_meta(own: list[tuple[str, Tensor]]) -> bool:
    return any(t.is_meta for _, t in own)


def _initialised(
    root: nn.Module, path: str, module: nn.Module, device: torch.device, seed: int
) -> nn.Module:
    """A copy of one module (without its children) with weights as it would draw them itself."""
    made = copy.copy(module)
    made._parameters = dict(module._parameters)
    made._buffers = dict(module._buffers)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(zlib.crc32(path.encode()) + seed)
        made.to_empty(device=device, recurse=False)
        _reset(root, path, made)
    return made


def _reset(root: nn.Module, path: str, made: Any) -> None:
    """The module's own `reset_parameters`, or its model's `_init_weights`."""
    for owner in [root.get_submodule(p) for p in _parents(path)]:
        if hasattr(owner, "_init_weights"):
            owner._init_weights(made)
            return
    if hasattr(made, "reset_parameters"):
        made.reset_parameters()
        return
    raise RunError(
        f"The module {path or '(model)'} ({type(made).__name__}) is on the meta device and has no "
        "reset_parameters() to draw its weights with. Add one, or build the model with real "
        "weights."
    )


def _parents(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:k]) for k in range(len(parts), -1, -1)]
