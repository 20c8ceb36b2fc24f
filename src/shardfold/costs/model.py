"""Cost models that need no measurements: the interface, the roofline, and PaSE's equation.

By the roofline a kernel takes the longer of its arithmetic and its memory traffic, at
the fractions of peak that the device reaches, and the time to launch it. A collective takes the
latency and bandwidth of the links it crosses, level by level.

PaSE's equation 1 (Elango, IPDPS 2021) is arithmetic at peak rate and bytes at one bandwidth. No
latency, no memory traffic, no levels of links, no optimizer. Two operators are counted as the
paper's code counts them, which decides some of its Table II. An embedding is a product with a
one-hot matrix, so splitting its features all-reduces a gradient of that matrix. A convolution is
a product with the unrolled input, so splitting its out channels all-reduces a gradient with an
entry for every tap.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np

from shardfold.cluster import Cluster, Level, Mesh
from shardfold.costs.steps import Collective, Compute, Steps, Values, times
from shardfold.operators import REGISTRY, Operator
from shardfold.operators.notation import Call, Exchange, Rule


class CostModel(Protocol):
    """Turns steps into seconds. Must be pure: the same step always costs the same."""

    def compute_seconds(self, step: Compute) -> Values:
        """Seconds of local work, for each case."""
        ...

    def collective_seconds(self, step: Collective) -> Values:
        """Seconds of one collective, for each of its rows."""
        ...


def sums_gradients(model: CostModel) -> bool:
    """Whether gradients of a parameter from several readers may be summed up before they are sent.

    They may, unless a model says of itself that it counts every reader for itself.
    """
    return bool(getattr(model, "sums_gradients", True))


def is_beside(model: CostModel, step: Collective) -> bool:
    """Whether a collective that nobody waits for yet runs beside the device's own work.

    It does, unless a model says that it takes the same processor.
    """
    takes: Callable[[Collective], bool] | None = getattr(model, "takes_processor", None)
    return takes is None or not takes(step)


def split_seconds(model: CostModel, step: Compute) -> tuple[Values, Values]:
    """Seconds of work on the device, and of the host that asks for it ahead, for each case.

    A model that does not tell them apart has no host.
    """
    if not getattr(model, "runs_ahead", False):
        return model.compute_seconds(step), np.zeros(len(step.flops))
    device: Callable[[Compute], Values] = model.device_seconds  # type: ignore[attr-defined]
    host: Callable[[Compute], Values] = model.host_seconds  # type: ignore[attr-defined]
    return device(step), host(step)


Worked = Callable[[Compute], Values]  # the seconds of local work, where they are known


def price(
    steps: Steps, model: CostModel, micro_batches: int = 1, worked: Worked | None = None
) -> Values:
    """Seconds of each case: the sum over its steps, each as often as so many passes do it.

    Of what runs beside an operator's work, only what is longer than that counts.
    """
    worked = model.compute_seconds if worked is None else worked
    total = uncovered(steps, model, micro_batches, worked)
    for step in steps.steps:
        often = times(step, micro_batches)
        if isinstance(step, Compute):
            total += worked(step) * often
        elif step.kind != "slice" and not runs_beside(model, step):
            total[step.rows] += model.collective_seconds(step) * (step.repeats * often)
    return total


def runs_beside(model: CostModel, step: Collective) -> bool:
    """Whether a collective runs beside its operator's work."""
    return step.pieces > 1 and is_beside(model, step)


def uncovered(
    steps: Steps, model: CostModel, micro_batches: int = 1, worked: Worked | None = None
) -> Values:
    """Seconds of each case for which what runs beside an operator's work is longer than that."""
    worked = model.compute_seconds if worked is None else worked
    sent = [s for s in steps.steps if isinstance(s, Collective) and runs_beside(model, s)]
    total = np.zeros(steps.cases)
    for phase in {step.phase for step in sent}:
        seconds, covered = np.zeros(steps.cases), np.zeros(steps.cases)
        for step in (s for s in sent if s.phase == phase):
            own = model.collective_seconds(step) * step.repeats
            seconds[step.rows] += own * times(step, micro_batches)
            covered[step.rows] = (step.pieces - 1) / step.pieces
        for work in (s for s in steps.steps if isinstance(s, Compute) and s.phase == phase):
            seconds -= covered * worked(work) * times(work, micro_batches)
        total += np.maximum(0.0, seconds)
    return total


# What one device sends in a collective over n, as a multiple of the step's bytes; and how many
# messages follow one another: gathers and scatters go round a ring.
VOLUME: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2.0 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "halo": lambda n: 1.0,
    "ring": lambda n: 1.0,
}
ROUNDS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2.0 * (n - 1),
    "all_gather": lambda n: n - 1.0,
    "reduce_scatter": lambda n: n - 1.0,
    "all_to_all": lambda n: n - 1.0,
    "halo": lambda n: 1.0,
    "ring": lambda n: 1.0,
}
TREE = 0.92  # of a ring's bandwidth (NCCL, src/graph/tuning.cc)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Peak rates with efficiencies, memory traffic, latency and bandwidth per link level."""

    cluster: Cluster
    mesh: Mesh

    def compute_seconds(self, step: Compute) -> Values:
        """The longer of arithmetic and memory traffic, and the launch of each kernel."""
        device = self.cluster.device
        if step.engine == "matrix":
            rate = device.peak(step.dtype) * device.matmul_efficiency
        else:
            rate = max(flops for name, flops in device.peak_flops if name in ("float32", "float64"))
        moved = device.memory_bandwidth * device.memory_efficiency
        return (
            np.maximum(step.flops / rate, step.bytes / moved) + device.launch_seconds * step.kernels
        )

    def collective_seconds(self, step: Collective) -> Values:
        """Latency and bandwidth of the links that a collective crosses.

        A ring goes once round all devices, through every group of a level before it leaves it. Each
        of a group's devices has a ring of its own to leave by: what is sent passes at the rate of
        the slowest level, whose members share it out. A sum may go by a tree instead, which has
        fewer hops where groups are many. A hop of a ring, or of a halo, is as long as that over the
        slowest link.
        """
        crossed = self._crossed(step.axes)
        if step.kind in ("ring", "halo"):
            hops = [link.latency_seconds + step.bytes / link.bandwidth for link, _ in crossed]
            slowest: Values = np.max(hops, axis=0)
            return slowest
        if step.kind == "all_to_all":
            return _all_to_all(crossed, step.bytes)
        return _around(crossed, step.kind, step.bytes)

    def _crossed(self, axes: Sequence[int]) -> list[tuple[Level, int]]:
        """The levels of some axes, the outermost first, and how many members each has of them."""
        sizes: dict[int, int] = defaultdict(lambda: 1)
        for axis in sorted(axes):
            sizes[self.mesh.axes[axis].level] *= self.mesh.axes[axis].size
        return [(self.cluster.levels[level], sizes[level]) for level in sorted(sizes)]


def _around(crossed: Sequence[tuple[Level, int]], kind: str, size: Values) -> Values:
    """Seconds of a ring through all levels; of a sum, of a tree where that is sooner."""
    members = [n for _, n in crossed]
    devices = math.prod(members)
    # Devices of the group within one member of each level share its links.
    inside = [math.prod(members[at + 1 :]) for at in range(len(members))]
    rate = min(link.bandwidth * within for (link, _), within in zip(crossed, inside, strict=True))
    hops = latency = 0.0
    for (link, n), within in zip(crossed, inside, strict=True):
        latency += (n - 1) * (devices // (n * within)) * link.latency_seconds
        hops += math.ceil(math.log2(n)) * link.latency_seconds
    often = ROUNDS[kind](devices) / (devices - 1)
    ring = often * latency + VOLUME[kind](devices) * size / rate
    if kind != "all_reduce":
        return ring
    return np.minimum(ring, 2.0 * hops + 2.0 * size / (TREE * rate))


def _all_to_all(crossed: Sequence[tuple[Level, int]], size: Values) -> Values:
    """Seconds level by level.

    What has another group as its destination crosses the outer level whole; the rest stays inside.
    """
    total, divided = np.zeros_like(size), 1
    for link, n in crossed:
        total += ROUNDS["all_to_all"](n) * link.latency_seconds
        total += VOLUME["all_to_all"](n) * size / divided / link.bandwidth
        divided *= n
    return total


@dataclass(frozen=True, slots=True)
class Paper:
    """Seconds by equation 1: FLOP over the peak rate, bytes over the rate of a device's own link.

    The paper knows no reduce-scatter. A pending sum is all-reduced inside the layer, at
    2(n - 1)/n of its bytes; then the edge is charged what the other side lacks, forward and
    backward alike, at (n - 1)/n where a forward gather undid the split.
    """

    cluster: Cluster
    mesh: Mesh
    sums_gradients: ClassVar[bool] = False  # every layer's weights are its own, tied or not

    def compute_seconds(self, step: Compute) -> Values:
        """FLOP over the float32 rate; memory traffic, launches and updates are free."""
        if step.phase == "update":
            return np.zeros_like(step.flops)
        return step.flops / self.cluster.device.peak("float32")

    def collective_seconds(self, step: Collective) -> Values:
        """Bytes sent over one bandwidth, whatever the axes."""
        size = math.prod(self.mesh.axes[a].size for a in step.axes)
        volume = VOLUME[step.kind](size)
        if step.kind == "reduce_scatter":
            edge = VOLUME["all_gather"](size) if step.phase == "backward" else 0.0
            volume = VOLUME["all_reduce"](size) + edge
        link = self.cluster.levels[-1]
        return volume * step.bytes / (link.rated_bandwidth or link.bandwidth)


def _one_hot(call: Call) -> Rule:
    """A look-up as a product: every row of the table counts for every token."""
    rule = replace(
        _plain(call),
        engine="matrix",
        flops=2.0,
        over=None,
        sparse=(),
        backward=2.0,
    )
    return _with_input_gradient(rule, "d", call)


def _unrolled(call: Call) -> Rule:
    """A convolution whose input gradient has an entry for every tap."""
    return _with_input_gradient(_plain(call), "n", call)


def _with_input_gradient(rule: Rule, out: str, call: Call) -> Rule:
    """Charge an all-reduce of the product's left operand where its out factor is split."""
    over = tuple(f for f in rule.factors if f != out)
    item_bytes = call.inputs[0].item_bytes
    gradient = Exchange("all_reduce", out, over, item_bytes=item_bytes, phase="backward")
    return replace(rule, exchanges=(*rule.exchanges, gradient))


def _plain(call: Call) -> Rule:
    """The rule that everyone else uses."""
    rule = REGISTRY[call.op.kind].rule
    assert rule is not None
    return rule(call)


PAPER_RULES: Mapping[str, Operator] = {
    "aten.embedding": replace(REGISTRY["aten.embedding"], rule=_one_hot),
    **{
        kind: replace(REGISTRY[kind], rule=_unrolled)
        for kind in (f"aten.conv{n}d" for n in (1, 2, 3))
    },
}
