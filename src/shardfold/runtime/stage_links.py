"""Messages between the ranks of different stages, and what crosses between which two of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.capture import Program
from shardfold.cluster import Mesh, from_plain
from shardfold.pipeline import Pipeline
from shardfold.pipeline.boundary import copies, route
from shardfold.pipeline.cut import StageLinks, cut_unequally
from shardfold.plans import Plan
from shardfold.plans.parts import (
    firsts_of_parts,
    is_laid_out_alike,
    on_part,
    seat,
    sizes_of_parts,
)
from shardfold.plans.read import mesh_on
from shardfold.runtime.crossings import (
    SIDES,
    Crossing,
    Incoming,
    Lying,
    Outgoing,
    crossing,
    moved,
)
from shardfold.runtime.lower import Lowered, Stored
from shardfold.runtime.ops import Context
from shardfold.runtime.ops.local_op import WIDER
from shardfold.runtime.process_groups import Axes, shared
from shardfold.runtime.reshard import Moves


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that several parts of the cluster have: which, and how its gradient goes on.

    Where the parts store it in different ways, each brings its own gradient to where it stores it,
    and `ways` are from this rank to every other part, and from there.
    """

    devices: tuple[int, ...]
    onward: Moves | None  # from the sum of all to where it is stored
    ways: Mapping[int, tuple[Outgoing, Incoming]] | None = None

    @property
    def axes(self) -> set[Axes]:
        """On which it needs process groups."""
        ways = () if self.ways is None else self.ways.values()
        return {back.gathered for _, back in ways} - {()}


@dataclass(slots=True)
class Links:
    """Messages between a rank and those of other parts of the cluster.

    Each direction of each side has a group of its own: messages of one never wait for another's,
    and within one they are in order. Where all parts are laid out alike, a group has the ranks with
    one place in the meshes of all parts; else it has all ranks.
    """

    device: int  # this rank's part of the cluster
    firsts: Sequence[int]  # the rank with which each part begins
    ranks: Sequence[int]  # of every part, one with which all of its ranks agree
    speaks: bool  # whether this rank is one of those
    groups: Mapping[tuple[str, bool], Any]
    under_way: deque[tuple[Any, Tensor]] = field(default_factory=deque)

    @classmethod
    def make(cls, plan: Plan, rank: int) -> Links:
        """Make the groups, on all ranks."""
        firsts, (part, place) = firsts_of_parts(plan), seat(plan, rank)
        is_alike = is_laid_out_alike(plan)
        size = plan.processes // len(firsts)
        rows = (
            [[first + place for first in firsts] for place in range(size)]
            if is_alike
            else [list(range(plan.processes))]
        )
        groups = {
            (side, upwards): shared(
                ("stages", side, upwards, str(rows)),
                lambda: dist.new_subgroups_by_enumeration(rows)[0],
            )
            for side in SIDES
            for upwards in (True, False)
        }
        own = rows[place] if is_alike else firsts
        return cls(part, firsts, own, is_alike or not place, groups)

    def send(self, pieces: Iterable[tuple[int, Tensor]], device: int, side: str) -> None:
        """Begin to send to ranks of another part of the cluster."""
        while self.under_way and self.under_way[0][0].is_completed():
            self.under_way.popleft()
        group = self.groups[side, device > self.device]
        for rank, own in pieces:
            self.under_way.append((dist.isend(own, rank, group=group), own))

    def receive(self, pieces: Iterable[tuple[int, Tensor]], device: int, side: str) -> list[Any]:
        """Begin to receive from ranks of another part of the cluster; what to wait for."""
        group = self.groups[side, device < self.device]
        return [dist.irecv(tensor, rank, group=group) for rank, tensor in pieces]

    def finish(self) -> None:
        """Wait for all that was sent."""
        while self.under_way:
            self.under_way.popleft()[0].wait()

    def from_part(self, value: Tensor, device: int) -> Tensor:
        """The value that another part of the cluster has."""
        dist.broadcast(value, self.ranks[device], group=self.groups["F", True])
        return value

    def norm_over(self, own: Tensor, kind: float) -> Tensor:
        """The norm over all parts of the cluster, of which each has its own."""
        group = self.groups["F", True]
        own = own if self.speaks else torch.zeros_like(own)
        if math.isinf(kind):
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
            return own
        power = own**kind if self.speaks else own
        dist.all_reduce(power, group=group)
        return power ** (1 / kind)

    def sum_over(self, tied: Tied, value: Tensor, context: Context) -> Tensor:
        """The sum over some parts of the cluster, all of which call this."""
        group, own = self.groups["F", True], value.contiguous()
        others = [device for device in tied.devices if device != self.device]
        out = [each for device in others for each in self._pieces_to(tied, device, own, context)]
        back = {device: self._pieces_from(tied, device, own, context) for device in others}
        both = [
            *(dist.P2POp(dist.isend, tensor, rank, group) for rank, tensor in out),
            *(
                dist.P2POp(dist.irecv, tensor, rank, group)
                for each in back.values()
                for rank, tensor in each
            ),
        ]
        for work in dist.batch_isend_irecv(both) if both else ():
            work.wait()
        # In the order of the parts, so that all have the same sum to the last digit.
        every = {self.device: own}
        for device, pieces in back.items():
            found = [tensor for _, tensor in pieces]
            whole = found[0] if tied.ways is None else tied.ways[device][1].joined(found, context)
            every[device] = whole.view(own.shape)
        total = every[tied.devices[0]].clone()
        for device in tied.devices[1:]:
            total += every[device]
        return total

    def _pieces_to(
        self, tied: Tied, device: int, own: Tensor, context: Context
    ) -> list[tuple[int, Tensor]]:
        if tied.ways is None:
            return [(self.ranks[device], own)]
        return list(tied.ways[device][0].cut(own, context))

    def _pieces_from(
        self, tied: Tied, device: int, own: Tensor, context: Context
    ) -> list[tuple[int, Tensor]]:
        if tied.ways is None:
            return [(self.ranks[device], torch.empty_like(own))]
        return tied.ways[device][1].buffers(context)


@dataclass(frozen=True)
class Boundaries:
    """What crosses between the stages, as this rank has it."""

    plan: Plan
    pipeline: Pipeline
    program: Program
    lowered: Sequence[Lowered]  # as every part of the cluster follows the plan
    rank: int
    double: bool

    @cached_property
    def links(self) -> StageLinks:
        """The links between the parts, as they were priced."""
        cluster = from_plain(self.plan.provenance.cluster)
        return cut_unequally(cluster, sizes_of_parts(self.plan))

    @cached_property
    def meshes(self) -> list[Mesh]:
        """The mesh of every part, on the levels that it has."""
        parts = enumerate(self.links.clusters)
        return [mesh_on(on_part(self.plan, number), cluster) for number, cluster in parts]

    def after(self, stage: int, tensors: Sequence[int]) -> tuple[Crossing, ...]:
        """Of tensors that go from one stage to the next."""
        ends = self.pipeline.device_of(stage), self.pipeline.device_of(stage + 1)
        if ends[0] == ends[1]:
            return tuple(self._handed_over(tensor) for tensor in tensors)
        return tuple(self._crossing(tensor, *ends) for tensor in tensors)

    def _handed_over(self, tensor: int) -> Crossing:
        return Crossing(self.program.graph.tensors[tensor].requires_grad, (None, None))

    def _crossing(self, tensor: int, first: int, second: int) -> Crossing:
        about = self.program.graph.tensors[tensor]
        op, result = self.program.graph.writers()[tensor]
        shares = (partial(self._shares, first, second), partial(self._shares, second, first))
        whole = self.lowered[first].instructions[op].site.results[result]
        ends = (self._lying(tensor, first), self._lying(tensor, second))
        return crossing(whole, self._dtype(tensor), ends, shares, self.rank, about.requires_grad)

    def _lying(self, tensor: int, part: int) -> Lying:
        op, result = self.program.graph.writers()[tensor]
        own = self.lowered[part]
        row = own.instructions[op].layout(result)
        return Lying(firsts_of_parts(self.plan)[part], own.mesh.shape, row)

    def _dtype(self, tensor: int) -> torch.dtype:
        return self._as_run(self.program.graph.tensors[tensor].type.dtype)

    def _as_run(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, name)
        return WIDER.get(dtype, dtype) if self.double else dtype

    def _shares(self, source: int, target: int, axes: Axes) -> Axes:
        """The axes along which receivers take a part each of what all of them have."""
        own = [self.meshes[target].axes[axis] for axis in axes]
        sends = self.links.sends_parts(self.links.hop(source, target), own, target)
        return axes if sends else ()

    def tied(self, found: Mapping[int, Tied]) -> dict[int, Tied]:
        """The same parameters, with how gradients go where parts store them in different ways."""
        if is_laid_out_alike(self.plan):
            return dict(found)
        return {tensor: self._tied(tensor, each) for tensor, each in found.items()}

    def _tied(self, tensor: int, tied: Tied) -> Tied:
        here, _ = seat(self.plan, self.rank)
        if here not in tied.devices:
            return tied
        ways = {}
        for other in tied.devices:
            if other != here:
                there, back = (
                    self._gradient_way(tensor, *ends) for ends in ((here, other), (other, here))
                )
                assert isinstance(there, Outgoing)
                assert isinstance(back, Incoming)
                ways[other] = there, back
        return replace(tied, ways=ways)

    def _gradient_way(self, tensor: int, first: int, second: int) -> Outgoing | Incoming | None:
        """Of a parameter's gradient, from where one part stores it to where another does."""
        firsts, stored = firsts_of_parts(self.plan), self._stored(tensor, first)
        places = []
        for part in (first, second):
            own = self._stored(tensor, part)
            places.append(Lying(firsts[part], own.mesh, own.row))
        ends = (places[0].end("F"), places[1].end("F"))
        found = route(stored.extent.subdims, *ends, self._shares(first, second, copies(ends[1])))
        given = (places[0], places[1])
        return moved(stored.extent, self._kept(tensor), given, ends, found, self.rank)

    def _stored(self, tensor: int, part: int) -> Stored:
        return next(s for s in self.lowered[part].parameters if s.tensor == tensor)

    def _kept(self, tensor: int) -> torch.dtype:
        return self._as_run(self.program.graph.kept_type(tensor).dtype)
