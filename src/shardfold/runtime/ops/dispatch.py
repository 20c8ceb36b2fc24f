"""A block of experts on one device: its own rows through its own experts, or rows sent for.

Where an axis splits rows and experts together, every device has some of both. It sorts its rows by
expert, which is also the order of the devices that have the experts, tells each how many rows come
for each of its experts, sends them, and gets the results back into the same places. What was sent
forward comes back backward, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardfold.capture.experts import between_of
from shardfold.errors import RunError
from shardfold.runtime.ops.experts import Block, Grouped, Sorted, combined, run_block
from shardfold.runtime.ops.local_op import Context, Local, Site
from shardfold.runtime.ops.matrix import once
from shardfold.runtime.process_groups import Axes, Groups
from shardfold.sharding.layouts import Bounds

NAMES = ("x", "expert", "share", "up", "down", "up_bias", "down_bias")


def _routed_experts(site: Site) -> Local:
    """By dispatch where rows and experts are split together; rows of experts elsewhere give zeros.

    The bias of the second product is added by one of the devices that split its features.
    """
    positions = {name: site.position(name) for name in NAMES}
    prepared = once(site, "down_bias", "f")
    first, _ = site.part("e")
    axes = site.axes("d")
    members = [site.part("e", at) for at in site.place.members(axes)]
    between = site.argument("between")

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        own = prepared(tensors)
        given = {name: own[at] for name, at in positions.items() if at is not None}
        x, expert, share = (given.pop(name) for name in NAMES[:3])
        if context.traced and axes:
            raise RunError(
                f"{site.op.name} sends rows to experts on other devices, as many as the batch asks "
                "for, which a compiled module cannot: leave the module as it is."
            )
        if context.traced:
            moved = [t if at != positions["expert"] else t - first for at, t in enumerate(own)]
            return site.invoke(moved, context)
        biases = (given.get("up_bias"), given.get("down_bias"))
        block = Block(given["up"], given["down"], *biases, between_of(between))
        if not axes:
            return run_block(x, expert - first if first else expert, share, block)
        return run_dispatched(x, expert, share, block, Route(context.groups, axes, members))

    return call


@dataclass(frozen=True, slots=True)
class Route:
    """The devices that rows are sent to: their group, and the range of experts that each has."""

    groups: Groups
    axes: Axes
    members: Sequence[Bounds]

    def numbered(self, expert: Tensor) -> Tensor:
        """Experts numbered as they lie in the group; those that it lacks come after all of them."""
        offsets = [0, *accumulate(high - low for low, high in self.members)]
        number = torch.full_like(expert, offsets[-1])
        for offset, (low, high) in zip(offsets, self.members, strict=False):
            inside = (expert >= low) & (expert < high)
            number = torch.where(inside, expert - low + offset, number)
        return number

    def told(self, counts: Tensor, here: int) -> Tensor:
        """How many rows come from each member for each of the experts here."""
        sent = counts.split([high - low for low, high in self.members])
        found = self.groups.all_to_all(list(sent), [here] * len(self.members), self.axes)
        return torch.stack(found)


def run_dispatched(x: Tensor, expert: Tensor, share: Tensor, block: Block, route: Route) -> Tensor:
    """Each row through its experts on all members of a group, weighted and added up."""
    sizes = [high - low for low, high in route.members]
    here = block.up.shape[0]
    found = Sorted.of(route.numbered(expert), sum(sizes))
    told = route.told(torch.tensor(found.counts, device=x.device), here)
    starts = [0, *accumulate(sizes)]
    sent = [sum(found.counts[a : a + n]) for a, n in zip(starts, sizes, strict=False)]
    # What came from one member lies in the order of the experts; together they are to lie so, too.
    number = torch.arange(here, device=x.device).repeat(len(sizes))
    order = number.repeat_interleave(told.flatten()).argsort(stable=True)
    by_member: list[list[int]] = told.tolist()
    came = [sum(counts) for counts in by_member]
    rows = x.index_select(0, found.order // expert.shape[1])
    rows = Sent.apply(rows, sent, came, route).index_select(0, order)
    by_expert = [sum(counts) for counts in zip(*by_member, strict=True)]
    y = block(Grouped.apply(rows, block.up, by_expert), by_expert)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    y = Sent.apply(y.index_select(0, back), came, sent, route)
    return combined(y, found, share, x.dtype)


class Sent(torch.autograd.Function):
    """Rows to the members of a group, so many to each; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], came: list[int], route: Route) -> Tensor:
        """Send rows, and take what comes."""
        ctx.way = (sent, came, route)
        return route.groups.all_to_all_rows(rows, sent, came, route.axes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradients of what came, and take those of what was sent."""
        sent, came, route = ctx.way
        back = route.groups.all_to_all_rows(dy, came, sent, route.axes)
        return back, None, None, None


TABLE: Mapping[str, Callable[[Site], Local]] = {"shardfold.routed_experts": _routed_experts}
