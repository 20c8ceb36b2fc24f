"""Every collective of a step, noted where torch.distributed is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardfold.plans import Plan
from shardfold.runtime.gradient_reducer import Launched
from shardfold.runtime.ops import convolution, norms
from shardfold.runtime.process_groups import GATHER, SCATTER, Groups

Kinds = Counter[tuple[str, tuple[str, ...], float]]


def planned(plan: Plan) -> Kinds:
    """The plan's collectives: kind, axes and bytes, and how many of them."""
    found: Kinds = Counter()
    for operator in plan.operators:
        for c in operator.collectives:
            found[c.kind, c.axes, c.bytes] += c.count
    return found


def by_member(
    ran: Kinds, launched: list[Launched], names: tuple[str, ...], *, widened: bool = False
) -> Kinds:
    """What ran, with every collective that stands for several of the plan's replaced by those.

    Each must have been recorded: one of its kind, on its axes, with its bytes.
    """

    def told(kind: str, axes: tuple[int, ...], size: int) -> tuple[str, tuple[str, ...], float]:
        return kind, tuple(names[a] for a in axes), size / 2 if widened else float(size)

    found = ran.copy()
    for bucket in launched:
        whole = told(bucket.kind, bucket.axes, bucket.bytes)
        assert found[whole] > 0, f"{whole} was not recorded"
        found[whole] -= 1
        found.update(told(bucket.kind, *member) for member in bucket.members)
    return +found


@contextmanager
def recorded(groups: Groups, names: tuple[str, ...], *, widened: bool = False) -> Iterator[Kinds]:
    """While it lasts, what is called is noted: the bytes of the larger side on this rank.

    Where a model of float32 is run in float64 (`widened`), as many as it would be in float32. What
    is float64 in the model itself (`sum(dtype=torch.float64)`) then counts half: record such a
    model in its own dtypes.
    """
    found: Kinds = Counter()
    always_double = False

    def item_bytes(tensor: Any) -> int:
        wide = tensor.dtype in (torch.float64, torch.complex128)
        halves = widened and wide and not always_double
        return int(tensor.element_size()) // (2 if halves else 1)

    def note(kind: str, tensor: Any, group: Any) -> None:
        known = (*groups.by_axes.items(), *groups.in_background.items())
        axes = next(a for a, g in known if g is group)
        size = float(tensor.numel() * item_bytes(tensor))
        found[kind, tuple(names[a] for a in axes), size] += 1

    def watched(kind: str, position: int, call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            note(kind, args[position], kwargs["group"])
            return call(*args, **kwargs)

        return run

    kinds = {
        "all_reduce": ("all_reduce", 0),
        GATHER: ("all_gather", 0),
        SCATTER: ("reduce_scatter", 1),
        "all_to_all_single": ("all_to_all", 1),
    }
    swap = convolution._swap

    def halo(up: Any, down: Any, axes: tuple[int, ...], *rest: Any) -> Any:
        """A slab goes to each of two neighbours: half of the rows of both."""
        size = (up.numel() + down.numel()) * item_bytes(up) / 2
        found["halo", tuple(names[a] for a in axes), size] += 1
        return swap(up, down, axes, *rest)

    send_rows = Groups.all_to_all_rows

    def routed(self: Groups, rows: Any, sent: Any, came: Any, axes: tuple[int, ...]) -> Any:
        """Rows that go to their experts: a plan counts the mean of all devices."""
        size = torch.tensor(float(rows.numel() * item_bytes(rows)))
        mesh = self.by_axes.get(tuple(range(len(names))))  # of a stage; None: all processes
        before["all_reduce"](size, group=mesh)
        mean = size.item() / dist.get_world_size(mesh)
        found["all_to_all", tuple(names[a] for a in axes), mean] += 1
        dist.all_to_all_single = before["all_to_all_single"]
        try:
            return send_rows(self, rows, sent, came, axes)
        finally:
            dist.all_to_all_single = watching["all_to_all_single"]

    start_hop = Groups.start_hop

    def hop(self: Groups, tensor: Any, shape: Any, to: int, of: int, axes: tuple[int, ...]) -> Any:
        """A piece that goes to the next device: a plan counts the longest."""
        size = torch.tensor(float(tensor.numel() * item_bytes(tensor)))
        before["all_reduce"](size, dist.ReduceOp.MAX, group=self.by_axes[axes])
        found["ring", tuple(names[a] for a in axes), size.item()] += 1
        dist.all_to_all_single = before["all_to_all_single"]
        try:
            return start_hop(self, tensor, shape, to, of, axes)
        finally:
            dist.all_to_all_single = watching["all_to_all_single"]

    pooled = norms.pooled

    def pool(*args: Any) -> Any:
        """Sums that are in float64 however wide the model is."""
        nonlocal always_double
        always_double = True
        try:
            return pooled(*args)
        finally:
            always_double = False

    before = {name: getattr(dist, name) for name in kinds}
    watching = {name: watched(*kinds[name], before[name]) for name in kinds}
    convolution._swap, norms.pooled, Groups.all_to_all_rows = halo, pool, routed
    Groups.start_hop = hop
    for name, call in watching.items():
        setattr(dist, name, call)
    try:
        yield found
    finally:
        convolution._swap, norms.pooled, Groups.all_to_all_rows = swap, pooled, send_rows
        Groups.start_hop = start_hop
        for name, call in before.items():
            setattr(dist, name, call)
