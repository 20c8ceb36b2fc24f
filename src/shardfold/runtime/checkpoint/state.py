"""The state of the random generators, as plain values and tensors.

All ranks of a plan are given the same batches, so they must draw alike: rank 0's state is saved,
and every rank takes it up.

A model and an optimizer as named parts and plain values, and back.

Tensors are named `model/<name>` and `optimizer/<parameter>/<key>`, by the first name of a tied
parameter. What of an optimizer is not a tensor is plain values in the index.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardfold.errors import CheckpointError
from shardfold.runtime.checkpoint.index import Group, Index, OptimizerEntry, Stored, decode, encode
from shardfold.runtime.checkpoint.storage import Part, dtype_name, part_of
from shardfold.runtime.module import Parallel
from shardfold.runtime.parameters import Keeping
from shardfold.runtime.whole_optimizers import OF_A_STEP, sees_whole

PREFIX = "random/"


def generator_tensors() -> dict[str, Tensor]:
    """The states of torch's generators."""
    found = {f"{PREFIX}cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found[f"{PREFIX}cuda"] = torch.cuda.get_rng_state()
    return found


def restore_tensors(found: dict[str, Tensor]) -> None:
    """Set torch's generators."""
    torch.set_rng_state(found[f"{PREFIX}cpu"])
    if f"{PREFIX}cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found[f"{PREFIX}cuda"])


def generator_values() -> dict[str, Any]:
    """The states of Python's and NumPy's generators."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), int(place), int(has_gauss), float(cached)],
    }


def restore_values(found: dict[str, Any]) -> None:
    """Set Python's and NumPy's generators."""
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words), gauss))
    keys, place, has_gauss, cached = found["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), place, has_gauss, cached))


MODEL = "model/"
OPTIMIZER = "optimizer/"
SHOWN = 5


def bare(model: nn.Module) -> nn.Module:
    """The module itself, without what wraps it under other names."""
    if isinstance(model, DistributedDataParallel):
        return bare(model.module)
    return bare(model._orig_mod) if hasattr(model, "_orig_mod") else model


def model_parts(model: nn.Module) -> dict[str, Part]:
    """The parameters and persistent buffers of a model, by their first names."""
    keepings = _keepings(model)
    firsts = _firsts(model)
    return {
        MODEL + name: part_of(tensor, keepings.get(name))
        for name, tensor in _persistent(model)
        if firsts[name] == name
    }


def aliases(model: nn.Module) -> dict[str, str]:
    """Further names of tied tensors; of the stages of a pipeline, all together."""
    own = {name: first for name, first in _firsts(model).items() if name != first}
    if not elsewhere(model):
        return own
    told: list[dict[str, str]] = [own] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return {name: first for each in told for name, first in each.items()}


def elsewhere(model: nn.Module) -> frozenset[str]:
    """Names of parameters that only other stages of a pipeline have."""
    return model._run.elsewhere if isinstance(model, Parallel) else frozenset()


def is_written_elsewhere(model: nn.Module, part: str) -> bool:
    """Whether it is of a tied parameter that an earlier part of the cluster has, and writes.

    The parts may store it in different ways.
    """
    if not isinstance(model, Parallel) or model._run.stages is None:
        return False
    run, stages = model._run, model._run.stages
    here, tensors = stages.links.device, run.program.graph.tensors
    tied = (t for t, each in stages.tied.items() if each.devices[0] != here)
    names = {run.name(name) for tensor in tied for name in tensors[tensor].names}
    own = part.removeprefix(MODEL)
    if part.startswith(OPTIMIZER):
        own, _, _ = part.removeprefix(OPTIMIZER).rpartition("/")
    return own in names


def optimizer_parts(model: nn.Module, optimizer: Any) -> dict[str, Part]:
    """The tensors of the optimizer's state."""
    keepings = _keepings(model)
    return {
        f"{OPTIMIZER}{name}/{key}": part_of(
            value, keepings.get(name) if _is_alike(value, parameter) else None
        )
        for name, parameter in _trained(model, optimizer)
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def optimizer_entry(model: nn.Module, optimizer: Any) -> OptimizerEntry:
    """What of the optimizer is not a tensor; of the stages of a pipeline, all together."""
    own = _own_entry(model, optimizer)
    if not elsewhere(model):
        return own
    told: list[OptimizerEntry] = [own] * dist.get_world_size()
    dist.all_gather_object(told, own)
    if len({len(each.groups) for each in told}) > 1:
        raise CheckpointError(
            "The optimizers of the stages have different numbers of parameter groups: make the "
            "same groups on all ranks, empty ones, too."
        )
    groups = [
        Group(tuple(dict.fromkeys(name for g in same for name in g.parameters)), same[0].options)
        for same in zip(*(each.groups for each in told), strict=True)
    ]
    values = {name: value for each in told for name, value in each.values.items()}
    return OptimizerEntry(own.kind, tuple(groups), values)


def _own_entry(model: nn.Module, optimizer: Any) -> OptimizerEntry:
    names = {id(parameter): name for name, parameter in _trained(model, optimizer)}
    groups = tuple(
        Group(
            tuple(names[id(p)] for p in group["params"]),
            {
                key: encode(value, f"optimizer.param_groups[...][{key!r}]")
                for key, value in group.items()
                if key not in _NOT_OPTIONS
            },
        )
        for group in optimizer.param_groups
    )
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in _trained(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                found = encode(value, f"optimizer.state[{name}][{key!r}]")
                values.setdefault(name, {})[key] = found
    return OptimizerEntry(type(optimizer).__name__, groups, values)


def check_model(
    parts: Mapping[str, Part], index: Index, where: str, others: frozenset[str] = frozenset()
) -> None:
    """Refuse a checkpoint of another model: the tensors, their shapes and dtypes must agree.

    `others` are names of tensors that the model has on other ranks.
    """
    saved = {name: stored for name, stored in index.tensors.items() if name.startswith(MODEL)}
    wanted = {name: part for name, part in parts.items() if name.startswith(MODEL)}
    filled = {name for name, part in wanted.items() if all(part.shape)}
    _refuse(where, "lacks", filled - set(saved))
    known = {*wanted, *(MODEL + name for name in others)}
    _refuse(where, "has, but the model has not,", set(saved) - known)
    for name in filled:
        _check_alike(where, name, wanted[name], saved[name])


State = dict[Tensor, dict[str, Any]]


def make_state(
    model: nn.Module, optimizer: Any, index: Index, where: str
) -> tuple[State, dict[str, Part]]:
    """A state for the optimizer as the checkpoint has it, and its parts, ready to be filled."""
    entry = index.optimizer
    if entry is None:
        raise CheckpointError(f"Checkpoint {where} was saved without an optimizer: load it so.")
    if entry.kind != type(optimizer).__name__:
        raise CheckpointError(
            f"Checkpoint {where} is of the optimizer {entry.kind}, not {type(optimizer).__name__}."
        )
    keepings = _keepings(model)
    trained = dict(_trained(model, optimizer))
    _refuse(where, "lacks the optimizer's", set(trained) - _members(entry))
    others = elsewhere(model)
    _refuse(where, "has an optimizer that also trains", _members(entry) - set(trained) - others)
    found: dict[str, Part] = {}
    state: State = {}
    for full, stored in index.tensors.items():
        if full.startswith(OPTIMIZER):
            name, _, key = full.removeprefix(OPTIMIZER).rpartition("/")
            if name in others:
                continue
            if name not in trained:
                raise CheckpointError(f"Checkpoint {where} has a state of {name}, not trained.")
            keeping = keepings.get(name)
            on_device = _on_device(optimizer, trained[name])
            in_parts = None if sees_whole(optimizer) else keeping
            is_alike = stored.shape == tuple(trained[name].shape) and key not in OF_A_STEP
            value = _empty(trained[name], stored, in_parts, on_device, is_alike)
            state.setdefault(trained[name], {})[key] = value
            found[full] = part_of(value, keeping if _is_alike(value, trained[name]) else None)
            _check_alike(where, full, found[full], stored)
    for name, values in entry.values.items():
        if name in trained:
            state.setdefault(trained[name], {}).update(_exact(values, index.version))
    return state, found


def check_groups(model: nn.Module, optimizer: Any, entry: OptimizerEntry, where: str) -> None:
    """Refuse other groups of parameters than the optimizer's."""
    names = {id(parameter): name for name, parameter in _trained(model, optimizer)}
    if len(entry.groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"Checkpoint {where} has {len(entry.groups)} groups of parameters, "
            f"the optimizer {len(optimizer.param_groups)}."
        )
    for group, saved in zip(optimizer.param_groups, entry.groups, strict=True):
        wanted = set(saved.parameters) - elsewhere(model)
        if sorted(names[id(p)] for p in group["params"]) != sorted(wanted):
            raise CheckpointError(f"Checkpoint {where} groups the parameters in another way.")


def restore(optimizer: Any, state: State, index: Index) -> None:
    """Take over the state, now that it is filled, and the options of every group."""
    assert index.optimizer is not None
    optimizer.state.clear()
    for parameter, values in state.items():
        optimizer.state[parameter].update(values)
    for group, saved in zip(optimizer.param_groups, index.optimizer.groups, strict=True):
        for key, value in _exact(saved.options, index.version).items():
            group[key] = _like(value, group.get(key))


def _exact(values: dict[str, Any], version: int) -> dict[str, Any]:
    """Options as they were; of version 1, as JSON has them."""
    return values if version == 1 else {key: decode(value) for key, value in values.items()}


_NOT_OPTIONS = ("params", "param_names")


def _keepings(model: nn.Module) -> Mapping[str, Keeping]:
    return model._run.named() if isinstance(model, Parallel) else {}


def _persistent(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, under all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _firsts(model: nn.Module) -> dict[str, str]:
    """The first name of what each name means."""
    seen: dict[int, str] = {}
    return {name: seen.setdefault(id(tensor), name) for name, tensor in _persistent(model)}


def _trained(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's parameters by their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"The optimizer trains a parameter of shape {tuple(parameter.shape)} that the "
                    "model does not have: save the model that the optimizer was made for."
                )
            yield names[id(parameter)], parameter


def _members(entry: OptimizerEntry) -> set[str]:
    return {name for group in entry.groups for name in group.parameters}


def _empty(
    parameter: Tensor, stored: Stored, keeping: Keeping | None, on_device: bool, is_alike: bool
) -> Tensor:
    """A state tensor to be filled: kept like its parameter where it is one for each number."""
    dtype = getattr(torch, stored.dtype)
    if is_alike and (keeping is not None or not isinstance(parameter, DTensor)):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False).detach()
    device = parameter.device if on_device or stored.shape else "cpu"
    return torch.zeros(stored.shape, dtype=dtype, device=device)


def _is_alike(value: Tensor, parameter: Tensor) -> bool:
    """Whether a state is kept as its parameter is."""
    return value.shape == parameter.shape and type(value.data) is type(parameter.data)


def _on_device(optimizer: Any, parameter: Tensor) -> bool:
    """Whether step counters are kept where the parameter is."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    return bool(group.get("fused") or group.get("capturable"))


def _check_alike(where: str, name: str, part: Part, stored: Stored) -> None:
    if part.shape != stored.shape or dtype_name(part.dtype) != stored.dtype:
        raise CheckpointError(
            f"Checkpoint {where} has {name} as {stored.dtype} {stored.shape}, "
            f"the model as {dtype_name(part.dtype)} {part.shape}."
        )


def _refuse(where: str, what: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        raise CheckpointError(f"Checkpoint {where} {what} {shown}: it is of another model.")


def _like(value: Any, current: Any) -> Any:
    """A saved option in the form of the one that it replaces."""
    if isinstance(current, Tensor):
        return torch.full_like(current, float(value))
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return tuple(value) if isinstance(current, tuple) else value
