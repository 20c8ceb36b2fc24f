"""Process groups by mesh axes, and the collectives on them.

Parameters are gathered, and their gradients reduced, in the background of a step, on groups of
their own: what is awaited at once must not queue behind them, and the order of the two kinds need
not be the same on all devices. For a compiler, the same collectives are functions of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.runtime.shards import Place, Row

Axes = tuple[int, ...]

# Torch renames these; the old names warn where the new ones exist.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


@dataclass(slots=True)
class _Shared:
    """What was made for a default group, which it outlasts no more than the group does."""

    world: Any = None
    found: dict[tuple[Any, ...], Any] = field(default_factory=dict)


_SHARED = _Shared()


def shared(key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What all modules of a process use in common: groups have threads, sockets and memory."""
    if _SHARED.world is not dist.group.WORLD:
        _SHARED.world, _SHARED.found = dist.group.WORLD, {}
    if key not in _SHARED.found:
        _SHARED.found[key] = make()
    return _SHARED.found[key]


Ranks = list[list[int]]  # of every group along some axes of a mesh


def _made(ranks: Ranks, use: str) -> Any:
    """The one of these groups that this process is in; all processes make them together."""
    return shared((use, str(ranks)), lambda: dist.new_subgroups_by_enumeration(ranks)[0])


@dataclass(slots=True)
class Groups:
    """The group of this device for each set of axes; made by all processes together.

    The processes are `parts` meshes in a row: the stages of a pipeline. Where these differ, `first`
    is the rank with which this device's own begins, and all processes tell one another what they
    want.
    """

    place: Place
    by_axes: dict[Axes, Any] = field(default_factory=dict)
    in_background: dict[Axes, Any] = field(default_factory=dict)
    parts: int = 1
    first: int | None = None

    def make(self, wanted: Iterable[Axes]) -> None:
        """Make the groups for these sets of axes, in an order that all processes share."""
        self._make(set(wanted) - set(self.by_axes), self.by_axes, "")

    def make_background(self, wanted: Iterable[Axes]) -> None:
        """Make the groups of what runs in the background, for these sets of axes."""
        self._make(set(wanted) - set(self.in_background), self.in_background, "background")

    def _make(self, wanted: set[Axes], known: dict[Axes, Any], use: str) -> None:
        rows = {axes: self._rows(axes) for axes in sorted(wanted)}
        if self.first is not None:
            told: list[list[Ranks]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(told, list(rows.values()))
            for ranks in (each for listed in told for each in listed):
                _made(ranks, use)
        for axes, ranks in rows.items():
            whole = len(axes) == len(self.place.shape) and self.parts == 1 and not use
            known[axes] = dist.group.WORLD if whole else _made(ranks, use)

    def _rows(self, axes: Axes) -> Ranks:
        """The ranks of every group along some axes."""
        rest = [
            range(n) if axis not in axes else range(1) for axis, n in enumerate(self.place.shape)
        ]
        size = math.prod(self.place.shape)
        firsts = [self.first] if self.first is not None else [k * size for k in range(self.parts)]
        return [
            [first + self.place.rank(at) for at in members]
            for first in firsts
            for start in product(*rest)
            if (members := Place(self.place.shape, start).members(axes))
        ]

    def rank_of(self, member: Row) -> int:
        """The rank of a device of this one's own mesh."""
        size, rank = math.prod(self.place.shape), int(dist.get_rank())
        first = rank // size * size if self.first is None else self.first
        return first + self.place.rank(member)

    def background(self) -> Groups:
        """The same collectives, on the groups of what runs in the background."""
        return Groups(self.place, self.in_background, parts=self.parts, first=self.first)

    def functional(self) -> Groups:
        """The same collectives, as functions that a compiler can record."""
        return Functional(self.place, self.by_axes, parts=self.parts, first=self.first)

    def all_reduce(self, tensor: Tensor, axes: Axes, *, most: bool = False) -> Tensor:
        """The sum (or the maximum) over the group; the tensor itself is written to."""
        op = dist.ReduceOp.MAX if most else dist.ReduceOp.SUM
        dist.all_reduce(tensor, op=op, group=self.by_axes[axes])
        return tensor

    def all_gather(self, tensor: Tensor, axes: Axes, members: int) -> Tensor:
        """Everyone's tensor, stacked along a new first dim."""
        found, _ = self.start_gather(tensor, axes, members, at_once=True)
        return found

    def reduce_scatter(self, stacked: Tensor, axes: Axes) -> Tensor:
        """The sum of everyone's row that is this device's."""
        found, _ = self.start_scatter(stacked, axes, at_once=True)
        return found

    def all_to_all(self, sent: list[Tensor], counts: list[int], axes: Axes) -> list[Tensor]:
        """Send the k-th tensor to the k-th member; `counts` elements come from each."""
        flat = torch.cat([piece.reshape(-1) for piece in sent])
        found = flat.new_empty(sum(counts))
        dist.all_to_all_single(
            found, flat, counts, [piece.numel() for piece in sent], group=self.by_axes[axes]
        )
        return list(found.split(counts))

    def all_to_all_rows(self, rows: Tensor, sent: list[int], came: list[int], axes: Axes) -> Tensor:
        """Send so many rows to each member, and take so many from each."""
        found = rows.new_empty(sum(came), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), came, sent, group=self.by_axes[axes])
        return found

    def start_hop(
        self, tensor: Tensor, shape: Sequence[int], to: int, of: int, axes: Axes
    ) -> Callable[[], Tensor]:
        """Start sending a tensor to one member, and taking one of that shape from another.

        What is returned waits for it. The tensor that is sent must be there until then.
        """
        group, found = self.by_axes[axes], tensor.new_empty(shape)
        sent, came = ([0] * dist.get_world_size(group) for _ in range(2))
        sent[to], came[of] = tensor.numel(), found.numel()
        work = dist.all_to_all_single(
            _flat(found), _flat(tensor), came, sent, group=group, async_op=True
        )

        def wait() -> Tensor:
            work.wait()
            return found

        return wait

    def start_reduce(self, tensor: Tensor, axes: Axes) -> Any:
        """Start adding up; the tensor holds the sum once the returned work is waited for."""
        return dist.all_reduce(tensor, group=self.by_axes[axes], async_op=True)

    def start_gather(
        self, tensor: Tensor, axes: Axes, members: int, *, at_once: bool = False
    ) -> tuple[Tensor, Any]:
        """As `all_gather`, with the work to wait for."""
        found = tensor.new_empty((members, *tensor.shape))
        flat = _flat(tensor.contiguous())
        gather = getattr(dist, GATHER)
        return found, gather(_flat(found), flat, group=self.by_axes[axes], async_op=not at_once)

    def start_scatter(
        self, stacked: Tensor, axes: Axes, *, at_once: bool = False
    ) -> tuple[Tensor, Any]:
        """As `reduce_scatter`, with the work to wait for."""
        found = stacked.new_empty(stacked.shape[1:])
        flat = _flat(stacked.contiguous())
        scatter = getattr(dist, SCATTER)
        return found, scatter(_flat(found), flat, group=self.by_axes[axes], async_op=not at_once)


def _flat(tensor: Tensor) -> Tensor:
    """All elements in a row; of complex numbers both parts, as not every backend knows them."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.view(-1)


class Functional(Groups):
    """Collectives whose results are new tensors, by the names of the groups."""

    def all_reduce(self, tensor: Tensor, axes: Axes, *, most: bool = False) -> Tensor:
        """The sum (or the maximum) over the group."""
        op = "max" if most else "sum"
        return self._awaited(_ops().all_reduce(tensor.contiguous(), op, self._name(axes)))

    def all_gather(self, tensor: Tensor, axes: Axes, members: int) -> Tensor:
        """Everyone's tensor, stacked along a new first dim."""
        flat = tensor.contiguous().view(-1)
        found = _ops().all_gather_into_tensor(flat, members, self._name(axes))
        return self._awaited(found).view((members, *tensor.shape))

    def reduce_scatter(self, stacked: Tensor, axes: Axes) -> Tensor:
        """The sum of everyone's row that is this device's."""
        flat = stacked.contiguous().view(-1)
        found = _ops().reduce_scatter_tensor(flat, "sum", stacked.shape[0], self._name(axes))
        return self._awaited(found).view(stacked.shape[1:])

    def all_to_all(self, sent: list[Tensor], counts: list[int], axes: Axes) -> list[Tensor]:
        """Send the k-th tensor to the k-th member; `counts` elements come from each."""
        flat = torch.cat([piece.reshape(-1) for piece in sent])
        lengths = [piece.numel() for piece in sent]
        found = _ops().all_to_all_single(flat, counts, lengths, self._name(axes))
        return list(self._awaited(found).split(counts))

    def start_hop(
        self, tensor: Tensor, shape: Sequence[int], to: int, of: int, axes: Axes
    ) -> Callable[[], Tensor]:
        """Start sending a tensor to one member, and taking one of that shape from another."""
        sent, came = ([0] * dist.get_world_size(self.by_axes[axes]) for _ in range(2))
        sent[to], came[of] = tensor.numel(), math.prod(shape)
        found = _ops().all_to_all_single(tensor.reshape(-1), came, sent, self._name(axes))
        return lambda: self._awaited(found).view(*shape)

    def _name(self, axes: Axes) -> str:
        name: str = self.by_axes[axes].group_name
        return name

    def _awaited(self, tensor: Tensor) -> Tensor:
        found: Tensor = _ops().wait_tensor(tensor)
        return found


def _ops() -> Any:
    return torch.ops._c10d_functional
