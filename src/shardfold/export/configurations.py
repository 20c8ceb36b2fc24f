"""All that a stack can be told about a model on a cluster: one strategy after the other.

Degrees multiply to the devices and lie along the cluster's levels; tensor parallel stays within the
innermost. A device's part of the batch is cut into micro-batches of one, two, four, ... samples; a
pipeline has as many micro-batches as stages, or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shardfold.cluster import Cluster
from shardfold.errors import ClusterError
from shardfold.export.targets import Target
from shardfold.pipeline.links import cut_cluster
from shardfold.strategies.stated import Stated, place


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model bounds its degrees."""

    samples: int  # in the whole batch
    layers: int
    is_cut: bool = True  # whether its batch may be taken in micro-batches
    has_plan: bool = True  # whether it says which of its weights tensor parallel splits


def configurations(
    target: Target, cluster: Cluster, sizes: Sizes, micro_batches: int | None = None
) -> Iterator[Stated]:
    """Every strategy that the stack, the cluster and the sizes allow."""
    for degrees in _degrees(target, cluster, sizes):
        for passes in _passes(degrees, sizes, micro_batches):
            for schedule, chunks in _schedules(target, degrees.stages, passes, sizes.layers):
                for recompute in target.recompute:
                    found = replace(
                        degrees,
                        micro_batches=passes,
                        schedule=schedule,
                        chunks=chunks,
                        recompute=recompute,
                    )
                    if not target.refusal(found):
                        yield found


def lies_along(stated: Stated, cluster: Cluster) -> bool:
    """Whether the degrees lie along the cluster's levels."""
    try:
        place(stated, cut_cluster(cluster, stated.stages).stage)
    except ClusterError:
        return False
    return True


def samples_per_pass(stated: Stated, samples: int) -> int:
    """Of a micro-batch, on one device."""
    return samples // (stated.data * stated.micro_batches)


def _degrees(target: Target, cluster: Cluster, sizes: Sizes) -> Iterator[Stated]:
    inner = cluster.levels[-1].size if cluster.levels else 1
    for tensor in divisors(inner) if sizes.has_plan or not target.needs_plan else (1,):
        for stages in divisors(cluster.size // tensor) if target.schedules else (1,):
            data = cluster.size // (tensor * stages)
            if sizes.samples % data or (stages > 1 and stages > sizes.layers):
                continue
            zero = target.staged_zero if stages > 1 else target.zero
            for replicas, shards in _shards(target, cluster, tensor, data):
                for stage in (z for z in zero if z) if shards > 1 else (0,):
                    found = Stated(
                        replicas,
                        shards,
                        tensor,
                        stage,
                        sequence=target.sequence and tensor > 1,
                        stages=stages,
                    )
                    if lies_along(found, cluster):
                        yield found
                        if target.keeps and found.zero == 3:
                            yield replace(found, reshards=False)


def _shards(target: Target, cluster: Cluster, tensor: int, data: int) -> Iterator[tuple[int, int]]:
    """Replicas and shards: all in one, no shards, or shards within a level of links."""
    yield 1, data
    if data == 1:
        return
    if 0 in target.zero:
        yield data, 1
    within = 1
    for level in reversed(cluster.levels):
        within *= level.size
        shards = within // tensor
        if target.hybrid and 1 < shards < data and data % shards == 0:
            yield data // shards, shards


def _passes(stated: Stated, sizes: Sizes, wish: int | None) -> Iterator[int]:
    local = sizes.samples // stated.data
    found = divisors(local) if sizes.is_cut else [1]
    for passes in found:
        samples = local // passes
        is_usual = samples & (samples - 1) == 0 or passes == 1
        if passes >= stated.stages and (passes == wish if wish else is_usual):
            yield passes


def _schedules(target: Target, stages: int, passes: int, layers: int) -> Iterator[tuple[str, int]]:
    if stages == 1:
        yield "1f1b", 1
        return
    for name in target.schedules:
        if name == "zbv":
            chunks: Sequence[int] = (2,)
        elif name == "interleaved":
            chunks = [2**n for n in range(1, target.most_chunks.bit_length())]
        else:
            chunks = (1,)
        for count in chunks:
            is_even = name != "interleaved" or passes % stages == 0
            if stages * count <= layers and is_even:
                yield name, count


def divisors(number: int) -> list[int]:
    """All of them, in order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
