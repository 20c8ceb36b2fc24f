"""Figures of this cluster as its ranks measure them together: a cluster description to plan with.

All ranks compute at the same time, so that cores which they share count as shared. Kernels give
the rates' proportions; the model's own step on one rank gives their scale, as small kernels of a
CPU are far from its peak. A link's latency and bandwidth are those that reproduce the times of
small and large collectives of each kind, by the cost model's own count of rounds and bytes: gloo
scatters a sum as slowly as it gives it to everyone, and a plan should know.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.api import plan
from shardfold.cluster import Cluster, Device, Level
from shardfold.costs import registry
from shardfold.costs.model import ROUNDS, VOLUME, Roofline
from shardfold.costs.steps import Collective, Values
from shardfold.runtime.process_groups import GATHER, SCATTER

REPEATS = 7
MORE_REPEATS = 31  # of what takes no time to speak of, and is soon disturbed
SMALL, LARGE = 1_024, 2**21  # elements: 4 KiB, 8 MiB
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MEASURED = "measured links"
SOURCE = "measured by the ranks of this cluster, all at once"


@dataclass(frozen=True, slots=True)
class Link:
    """Latency and bandwidth of one kind of collective."""

    latency_seconds: float
    bandwidth: float


@dataclass(frozen=True)
class ByKind(Roofline):
    """The default cost model, but each kind of collective has figures of its own."""

    links: Mapping[str, Link] = field(default_factory=dict)

    def collective_seconds(self, step: Collective) -> Values:
        """Rounds and bytes of the kind, by its own figures, where it was measured."""
        if step.kind not in self.links:
            return Roofline.collective_seconds(self, step)
        link = self.links[step.kind]
        size = math.prod(self.mesh.axes[a].size for a in step.axes)
        sent = VOLUME[step.kind](size) * step.bytes
        found: Values = ROUNDS[step.kind](size) * link.latency_seconds + sent / link.bandwidth
        return found


def register(links: Mapping[str, Link]) -> str:
    """Make the measured links a cost model that plans can be made with; its name."""
    models = dict(registry.PRICINGS)
    models[MEASURED] = registry.Pricing(lambda cluster, mesh: ByKind(cluster, mesh, links))
    registry.PRICINGS = models
    return MEASURED


def calibrated(name: str, ranks: int) -> tuple[Cluster, dict[str, Link]]:
    """The cluster as measured, and its links by kind of collective; on every rank."""
    rates = [_matrix_rate(*shape) for shape in ((256, 1024, 1024), (128, 256, 1024))]
    rates.append(_convolution_rate())
    device = Device(
        name="one core",
        memory_bytes=4 * 2**30,
        memory_bandwidth=_memory_rate(),
        peak_flops=(("float32", max(rates)),),
        matmul_efficiency=statistics.fmean(rates) / max(rates),
        memory_efficiency=1.0,
        launch_seconds=_launch_seconds(),
        source=SOURCE,
    )
    links = {kind: _link(kind, ranks) for kind in COLLECTIVES}
    whole = links["all_reduce"]
    level = Level("rank", ranks, whole.bandwidth, whole.latency_seconds, SOURCE)
    return Cluster(name, device, (level,)), links


def scaled(cluster: Cluster, model: Any, args: Any) -> Cluster:
    """The cluster with the rates at which one step of the model takes what it takes on one rank."""

    def work() -> None:
        model(*args).backward()
        model.zero_grad()

    found = _timed(work)
    alone = plan(model, args, cluster=replace(cluster, levels=())).estimate.compute_seconds
    device = cluster.device
    slower = found / alone
    rates = tuple((dtype, rate / slower) for dtype, rate in device.peak_flops)
    bandwidth = device.memory_bandwidth / slower
    return replace(cluster, device=replace(device, peak_flops=rates, memory_bandwidth=bandwidth))


def _timed(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The median seconds of `work` while all ranks do it; the slowest rank's."""
    work()
    taken = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    found = torch.tensor(statistics.median(taken), dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _matrix_rate(rows: int, inner: int, columns: int) -> float:
    """FLOP/s of a product and its two backward products."""
    x = torch.randn(rows, inner, requires_grad=True)
    w = torch.randn(columns, inner, requires_grad=True)
    return (
        3 * 2.0 * rows * inner * columns / _timed(lambda: _step(torch.nn.functional.linear, x, w))
    )


def _convolution_rate() -> float:
    x = torch.randn(4, 64, 24, 24, requires_grad=True)
    w = torch.randn(96, 64, 3, 3, requires_grad=True)
    flops = 3 * 2.0 * 4 * 24 * 24 * 96 * 64 * 9
    return flops / _timed(lambda: _step(lambda x, w: torch.conv2d(x, w, padding=1), x, w))


def _step(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> None:
    y = function(x, w)
    torch.autograd.grad(y, (x, w), torch.ones_like(y))


def _memory_rate() -> float:
    """Bytes/s of an element-wise sum: two tensors read, one written."""
    x, y = torch.randn(2**22), torch.randn(2**22)
    out = torch.empty_like(x)
    return 3 * 4.0 * x.numel() / _timed(lambda: torch.add(x, y, out=out))


def _launch_seconds() -> float:
    """What an operator costs before it does anything: half of a tiny forward and backward."""
    x = torch.randn(8, requires_grad=True)
    count = 200

    def work() -> None:
        y = x
        for _ in range(count):
            y = y.relu()
        y.sum().backward()

    return _timed(work) / count / 2


def _link(kind: str, ranks: int) -> Link:
    """Latency and bandwidth that give the measured times of a kind back."""
    small, large = (_collective_seconds(kind, size, ranks) for size in (SMALL, LARGE))
    rounds, volume = ROUNDS[kind](ranks), 4.0 * VOLUME[kind](ranks)
    bandwidth = volume * (LARGE - SMALL) / max(large - small, 1e-9)
    return Link(max(small - volume * SMALL / bandwidth, 1e-6) / rounds, bandwidth)


def _collective_seconds(kind: str, size: int, ranks: int) -> float:
    """`size` elements on the larger side, as a plan counts them."""
    part, other = torch.randn(size // ranks), torch.empty(size)
    whole = torch.randn(part.numel() * ranks)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: getattr(dist, GATHER)(whole, part),
        "reduce_scatter": lambda: getattr(dist, SCATTER)(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other[: whole.numel()], whole),
    }
    return _timed(calls[kind], MORE_REPEATS if size == SMALL else REPEATS)
