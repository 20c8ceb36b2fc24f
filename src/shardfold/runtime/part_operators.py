"""What users do with parameters and gradients in parts, as PyTorch does it with whole ones.

Parameters and their gradients are DTensors. Element by element DTensor works on each rank's part,
and that is left as it is. What it refuses, draws otherwise or loses is done here on whole tensors,
and the parts are taken of what comes out:

    p.add_(plain), p[mask] = 0       a plain tensor is the whole, the same on every rank
    p.tril_(), p.unique(), ...       gathered -> torch's own operator -> taken in parts again
    p.normal_(), torch.rand_like(p)  every rank draws the whole; all keep the first rank's numbers
    p[3].zero_()                     a view across parts is one of a gathered copy, which remembers
                                     what it is a copy of: what is written into it is put back

A gathered copy does not know of later writes into its original; with those its numbers become NaN.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OutputSharding
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardfold.errors import RunError
from shardfold.runtime.ranks import two_sums

aten = torch.ops.aten
DRAWS = torch.Tag.nondeterministic_seeded
MOVES_DIMS = torch.Tag.inplace_view
REGROUPING = (aten.view.default, aten._unsafe_view.default)
TURNING = (aten.t_.default, aten.transpose_.default)
# What keeps norms of parts to be put together later, as clipping does; not so their sum.
OF_NORMS = (aten.stack.default, aten.cat.default, aten.linalg_vector_norm.default)


@dataclass(slots=True)
class Copy:
    """A gathered copy that somebody has a view of, and whose copy it is."""

    memory: StorageWeakRef
    original: DTensor
    geometry: tuple[int, Any, Any]  # where in its memory it begins, shape and strides

    def tensor(self) -> Tensor | None:
        """The copy, as long as it is alive."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            return None
        return self.original._local_tensor.new_empty(0).set_(storage, *self.geometry)


_COPIES: dict[int, Copy] = {}  # by their memory


class PartDispatcher(OpDispatcher):
    """Torch's own, but for what it refuses or loses; see the module's text."""

    def _propagate_op_sharding_dispatch_slow_path(
        self, op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool
    ) -> Any:
        """How an operator is split, which is kept; or what it gives here, which never is."""
        split = super()._propagate_op_sharding_dispatch_slow_path
        if _are_we_tracing():
            return split(op_call, args, kwargs, op_info, try_cache)
        plain = [t for t in _tensors(args, kwargs) if not isinstance(t, DTensor) and t.numel() != 1]
        if plain:
            return _beside_plain(op_call, args, kwargs, plain, op_info.compute_mesh)
        if _is_otherwise(op_call, args, kwargs):
            return on_wholes(op_call, args, kwargs)
        try:
            found = split(op_call, args, kwargs, op_info, try_cache)
        except RuntimeError:  # where the whole cannot be, torch says why
            return on_wholes(op_call, args, kwargs)
        return on_wholes(op_call, args, kwargs) if _is_lost(op_call, op_info, found) else found

    def _dispatch_fast_path_python_tail(
        self, op_call: Any, args: Any, kwargs: Any, *rest: Any
    ) -> Any:
        """What comes after every operator that writes."""
        if isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
            return args[0]  # a plain tensor was written, with what was gathered for it
        found = super()._dispatch_fast_path_python_tail(op_call, args, kwargs, *rest)
        if _COPIES:
            for tensor in _written(op_call, args, kwargs):
                _has_changed(tensor._local_tensor)
        return found


@cache
def complete_dtensors() -> None:
    """Let DTensors do what their users do with parameters; see the module's text."""
    _check_known()
    dispatcher = DTensor._op_dispatcher
    dispatcher.__class__ = PartDispatcher
    dispatcher._allow_implicit_replication = True  # plain tensors come to `_beside_plain`
    handlers = dispatcher._custom_op_handlers
    for op in (aten.as_strided.default, aten.argmin.default, aten.argmax.default):
        handlers[op] = partial(_or_on_wholes, handlers[op])
    handlers[aten._local_scalar_dense.default] = _number
    for op in TURNING:  # since torch 2.15 a part is turned, and not what says how large it all is
        handlers[op] = on_wholes
    for name in ("tolist", "numpy"):
        setattr(DTensor, name, partialmethod(_of_whole, name))
    memory = Tensor.data
    DTensor.data = property(memory.__get__, _set_data)


def _check_known() -> None:
    """Refuse a torch whose dispatcher is another one: what is mended here would be lost there."""
    own = [name for name in vars(PartDispatcher) if not name.startswith("__")]
    unknown = [name for name in own if not hasattr(OpDispatcher, name)]
    if unknown:
        raise RunError(
            f"torch {torch.__version__} runs operators on DTensors in another way than the "
            f"versions that shardfold knows (there is no {unknown[0]}), so what is written into "
            "parts of parameters could be lost. Use torch 2.11 to 2.15."
        )


def _or_on_wholes(handler: Any, op: Any, args: Any, kwargs: Any) -> Any:
    try:
        return handler(op, args, kwargs)
    except RuntimeError:
        return on_wholes(op, args, kwargs)


def _number(op: Any, args: Any, kwargs: Any) -> Any:
    return op(args[0].full_tensor())


def _set_data(tensor: DTensor, value: Tensor) -> None:
    """Take the memory of another tensor (`p.data = ...`), or of its part if it is a plain one."""
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise RunError(
            f"A tensor in parts of shape {[*tensor.shape]} and {tensor.dtype} cannot be given the "
            f"data of one of shape {[*value.shape]} and {value.dtype}."
        )
    if isinstance(value, DTensor):
        local = value.redistribute(tensor.device_mesh, tensor.placements)._local_tensor
    else:
        local = _part(tensor, value)
    tensor._local_tensor = local.detach().contiguous()


def _of_whole(tensor: DTensor, name: str) -> Any:
    return getattr(tensor.full_tensor(), name)()


def _is_otherwise(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether DTensor gives other numbers than one device.

    It draws for each part, takes the mean of the parts' means as the loss, also where parts are
    unequal, writes a result that is given (`out=`) as if the part were all, reads indices and masks
    as if they were of the part, and makes other views of parts that are unequal, nested or strided.
    It adds up what is still to be put together in another way than by a sum (norms, `any`).
    """
    arguments = op._schema.arguments
    if DRAWS in op.tags or any(each.name == "reduction" or each.is_out for each in arguments):
        return True
    if op in REGROUPING and not _is_even(args[0]):
        return True
    given = [*_tensors(args, kwargs)]
    if op not in OF_NORMS and any(map(_is_no_sum, given)):
        return True
    is_index = any(not (t.is_floating_point() or t.is_complex()) for t in given[1:])
    return is_index and torch.Tag.pointwise not in op.tags


def _is_no_sum(tensor: Any) -> bool:
    """Whether parts are still to be put together, and not by a sum."""
    partial = [p for p in getattr(tensor, "placements", ()) if p.is_partial()]
    is_plain = all(type(p) is Partial and p.reduce_op in ("sum", "avg") for p in partial)
    return bool(partial) and (not is_plain or tensor.dtype == torch.bool)


def _is_even(tensor: DTensor) -> bool:
    """Whether every axis of the mesh splits another dim, and all parts are equal."""
    split = [
        (p.dim, size)
        for p, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if p.is_shard()
    ]
    is_plain = not any(isinstance(p, _StridedShard) for p in tensor.placements)
    is_once = len(dict(split)) == len(split)
    return is_plain and is_once and all(tensor.shape[dim] % size == 0 for dim, size in split)


def _is_lost(op: Any, info: Any, found: Any) -> bool:
    """Whether a view would be one of a copy that nobody knows."""
    if not isinstance(found, OutputSharding) or not found.needs_redistribute:
        return False
    own, seen = info.schema.args_schema[0], found.redistribute_schema
    is_moved = seen is not None and seen.args_schema[0] != own
    return is_moved and bool(op._schema._is_view_op())


def _beside_plain(op: Any, args: Any, kwargs: Any, plain: list[Tensor], mesh: Any) -> Any:
    """An operator on tensors in parts and on plain ones, which are whole."""
    _check_same(op, plain, mesh)
    written = _written(op, args, kwargs)
    if any(each is tensor for each in plain for tensor in written):
        return on_wholes(op, args, kwargs)
    instead = {id(tensor): _replicated(tensor, mesh) for tensor in plain}
    return op(*_mapped(args, instead), **_mapped(kwargs, instead))


@torch.no_grad()
def on_wholes(op: Any, args: Any, kwargs: Any) -> Any:
    """An operator on whole tensors; what it writes is put back, what it gives is on all ranks."""
    given = {id(tensor): tensor for tensor in _tensors(args, kwargs)}
    parts = [tensor for tensor in given.values() if isinstance(tensor, DTensor)]
    wholes = {id(part): part.full_tensor() for part in parts}
    mesh = parts[0].device_mesh
    found = op(*_mapped(args, wholes), **_mapped(kwargs, wholes))
    written = [t for t in _written(op, args, kwargs) if isinstance(t, DTensor)]
    if DRAWS in op.tags:
        for drawn in (*(wholes[id(part)] for part in written), *_tensors(found)):
            _take_firsts(drawn, mesh)
    if written and MOVES_DIMS in op.tags:
        _become(written[0], wholes[id(written[0])])
        return return_and_correct_aliasing(op, args, kwargs, written[0])
    for part in written:
        _put(part, wholes[id(part)])
        _has_changed(part._local_tensor)
    if op._schema._is_view_op():
        _remember(wholes[id(parts[0])], parts[0])
    instead = {id(wholes[id(part)]): part for part in parts}
    made = {id(t): t for t in _tensors(found) if id(t) not in {*given, *instead}}
    return _mapped(found, instead | {key: _replicated(t, mesh) for key, t in made.items()})


def _put(tensor: DTensor, whole: Tensor) -> None:
    """Let a tensor in parts have the values of a whole one."""
    if any(placement.is_partial() for placement in tensor.placements):
        _become(tensor, whole)
        return
    tensor._local_tensor.copy_(_part(tensor, whole.to(tensor.dtype)))


def _part(tensor: DTensor, whole: Tensor) -> Tensor:
    """Of a whole, what this rank has of a tensor."""
    source = _replicated(whole, tensor.device_mesh)._spec
    found: Tensor = redistribute_local_tensor(whole.detach(), source, tensor._spec)
    return found


def _become(tensor: DTensor, whole: Tensor) -> None:
    """Let a tensor be a whole one on every rank, of another shape maybe."""
    tensor._spec = _replicated(whole, tensor.device_mesh)._spec
    tensor._local_tensor = whole


def _replicated(whole: Tensor, mesh: Any) -> DTensor:
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return DTensor(whole.detach(), spec, requires_grad=False)


def _mapped(tree: Any, instead: dict[int, Any]) -> Any:
    """A tree with other tensors in the places of some."""
    return pytree.tree_map(lambda leaf: instead.get(id(leaf), leaf), tree)


def _tensors(*trees: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor))


def _written(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors among an operator's arguments that it writes."""
    found: list[Tensor] = []
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _take_firsts(tensor: Tensor, mesh: Any) -> None:
    """The numbers of the mesh's first rank, on all."""
    own = tensor.contiguous()
    for group in mesh.get_all_groups():
        dist.broadcast(own, group=group, group_src=0)
    if own is not tensor:
        tensor.copy_(own)


@torch.no_grad()
def _check_same(op: Any, given: list[Tensor], mesh: Any) -> None:
    """Refuse plain tensors that ranks have different values of: nobody knows which are meant."""
    sums = torch.stack([two_sums(tensor) for tensor in given]).to(mesh.device_type)
    firsts = sums.clone()
    _take_firsts(firsts, mesh)
    differs = (sums.view(torch.int64) != firsts.view(torch.int64)).any().long()
    for group in mesh.get_all_groups():
        dist.all_reduce(differs, dist.ReduceOp.MAX, group=group)
    if differs:
        shapes = ", ".join(str([*tensor.shape]) for tensor in given)
        raise RunError(
            f"The ranks gave {op._schema.name.removeprefix('aten::')} plain tensors (of shape "
            f"{shapes}) of different values. Beside a parameter or its gradient a plain tensor is "
            "the whole one, the same on every rank: draw it, or load it, alike on all ranks."
        )


def _memory(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def _remember(copy: Tensor, original: DTensor) -> None:
    """Take note that views of a copy are meant to be views of its original."""
    if _memory(copy) != _memory(original._local_tensor):
        kept = DTensor(original._local_tensor, original._spec, requires_grad=False)
        geometry = copy.storage_offset(), copy.shape, copy.stride()
        _COPIES[_memory(copy)] = Copy(StorageWeakRef(copy.untyped_storage()), kept, geometry)


def _has_changed(
    written: Tensor, written_by: Copy | None = None, whole: Tensor | None = None
) -> None:
    """Put back what was written into a copy; other copies of what was written have old values."""
    for memory, copy in list(_COPIES.items()):
        other = copy.tensor()
        if other is None:
            _COPIES.pop(memory, None)
        elif copy is not written_by and _memory(copy.original._local_tensor) == _memory(written):
            is_alike = written_by is not None and copy.original._spec == written_by.original._spec
            _renew(other, whole if is_alike else None)
    own = _COPIES.get(_memory(written))
    new = None if own is None else own.tensor()
    if own is not None and new is not None:
        _put(own.original, new)
        _has_changed(own.original._local_tensor, own, new)


def _renew(copy: Tensor, whole: Tensor | None) -> None:
    """Give a copy its original's new values, or none."""
    if whole is not None:
        copy.copy_(whole)
        return
    warnings.warn(
        "A parameter or gradient in parts was written while there was a view across its parts "
        f"(of shape {[*copy.shape]}). That view is of a copy, which does not know the new values "
        "and has NaN now: take the view again after the write, or clone() it before.",
        stacklevel=2,
    )
    if copy.is_floating_point() or copy.is_complex():
        copy.fill_(torch.nan)
