"""What each training stack can be told: its degrees, ZeRO stages, recomputation, schedules.

A target is one stack with the versions whose fields were checked. What a stack can do and cannot be
priced here is left out, so that no figure is made up: it is in `unpriced`, which pages and commands
show.

`configurations` goes through all of it. Degrees multiply to the devices and lie along the
cluster's levels; tensor parallel stays within the innermost. Devices that share experts or the
sequence are looked at where the mesh of a stage has three axes at most: the tables of four take
gigabytes. A device's part of the batch is cut into micro-batches of one, two, four, ... samples; a
pipeline has as many as stages, or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardfold.cluster import Cluster
from shardfold.errors import ClusterError, InputError, nearest
from shardfold.pipeline.cut import cut_cluster
from shardfold.strategies.stacks import Stack, stack_named
from shardfold.strategies.stated import Stated, place

MOST_AXES = 3  # of a mesh on which devices share experts or the sequence
# The more is recomputed, the less is kept.
RECOMPUTE = ("none", "selective", "products", "full")


@dataclass(frozen=True, slots=True)
class Target:
    """A stack: what may be stated for it.

    `zero` has the stages without a pipeline, `staged_zero` those with one (none: it has no
    pipelines).
    """

    name: str
    habits: str  # the name of its habits in `strategies/stacks.py`
    versions: Mapping[str, str]  # each with how its fields were checked; the first is the default
    zero: tuple[int, ...]
    staged_zero: tuple[int, ...] = ()
    keeps: bool = False  # FSDP that gathers once for forward and backward
    hybrid: bool = False  # replicas of shards
    needs_shards: bool = False  # bf16 with float32 parts comes from FSDP alone
    transformers_only: bool = False  # it trains models of its own, all of them transformers
    needs_plan: bool = False  # tensor parallel reads the model's base_model_tp_plan
    experts: bool = False  # it has expert parallel
    attention: tuple[str, ...] = ()  # its ways of context parallel
    sequence: bool = False  # tensor parallel is with sequence parallel
    recompute: tuple[str, ...] = ("none", "full")
    schedules: tuple[str, ...] = ()
    most_chunks: int = 1
    reduces_half: bool = False  # it can be told to send gradients in bf16, or always does
    unpriced: tuple[str, ...] = ()  # what it has and is not searched

    def check_model(self, kinds: Iterable[str]) -> None:
        """Refuse operators of a model that the stack cannot have."""
        if self.transformers_only and not any(_is_of_attention(kind) for kind in kinds):
            others = ", ".join(each.name for each in TARGETS.values() if not each.transformers_only)
            raise InputError(
                f"{self.name} trains transformers of its own, and this model has no attention: its "
                f"arguments would be for another one. Stacks that take any module: {others}."
            )

    def check_reduction(self) -> None:
        """Refuse gradients in bf16 where the stack would have them in float32."""
        if not self.reduces_half:
            others = ", ".join(each.name for each in TARGETS.values() if each.reduces_half)
            raise InputError(
                f"{self.name} reduces gradients in float32, as it is priced here: plan with "
                f"--precision bf16-mixed. In bf16 reduce: {others}."
            )

    def stack(self, stated: Stated) -> Stack:
        """Its habits under a strategy.

        FSDP that keeps gathered parameters has them beside the float32 parts, as other stacks have
        parameters beside master weights.
        """
        found = stack_named(self.habits)
        if found.float32_parts and stated.zero in (1, 2):
            return replace(found, float32_parts=False, master_weights=True)
        return found

    def refusal(self, stated: Stated, *, is_half: bool = True) -> str:
        """Why the stack cannot be told this strategy; empty where it can.

        `is_half`: it computes in 16 bits.
        """
        staged, several = stated.stages > 1, stated.data > 1
        if stated.experts > 1 and not self.experts:
            return "expert parallel is not written for it yet"
        if stated.context > 1 and stated.attention not in self.attention:
            return f"context parallel with attention={stated.attention} is not written for it yet"
        if staged and not self.schedules:
            return "it has no pipelines"
        if staged and stated.schedule not in self.schedules:
            return f"it has no schedule {stated.schedule}"
        stages = self.staged_zero if staged else self.zero
        if several and stated.zero not in stages:
            return f"it has no ZeRO stage {stated.zero}{' with a pipeline' if staged else ''}"
        if not several and is_half and self.needs_shards and stated.tensor * stated.stages > 1:
            return "its mixed precision needs two or more FSDP shards"
        if stated.replicas > 1 and stated.shards > 1 and not self.hybrid:
            return "it has no replicas of shards"
        if not stated.reshards and not self.keeps:
            return "its FSDP gathers parameters again in backward"
        if stated.recompute not in self.recompute:
            return f"it has no recompute={stated.recompute} as it is priced here"
        if stated.tensor > 1 and stated.sequence != self.sequence:
            return f"its tensor parallel is {'with' if self.sequence else 'without'} sp"
        if stated.chunks > max(self.most_chunks, 2 if stated.schedule == "zbv" else 1):
            return f"it has at most {self.most_chunks} chunks on a device"
        return ""


TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(
            "torchtitan",
            "torchtitan",
            {
                "0.3.0": "parsed by torchtitan 0.3.0 of PyPI",
                "0.2.2": "read by the JobConfig of torchtitan 0.2.2 of PyPI",
                "head": "names as in its source in November 2026, not parsed",
            },
            transformers_only=True,
            zero=(3,),
            staged_zero=(1,),
            keeps=True,
            hybrid=True,
            needs_shards=True,
            sequence=True,
            recompute=("none", "products", "full"),
            schedules=("1f1b", "gpipe", "interleaved", "zbv"),
            most_chunks=4,
            unpriced=(
                "FSDP that gathers again in every micro-batch of a pipeline",
                "data parallel without shards (autocast)",
                "context and expert parallel",
                "async tensor parallel, float8",
            ),
        ),
        Target(
            "megatron",
            "megatron-bridge",
            {
                "0.16": "degrees and layouts taken by the classes of megatron-core 0.16.1 of PyPI; "
                "names of arguments as in megatron/training/arguments.py",
            },
            transformers_only=True,
            zero=(0, 1),
            staged_zero=(0, 1),
            sequence=True,
            experts=True,
            attention=("ring", "ulysses"),
            recompute=("none", "selective", "full"),
            schedules=("1f1b", "interleaved"),
            most_chunks=8,
            reduces_half=True,
            unpriced=(
                "Megatron-FSDP",
                "context parallel beside expert parallel, by all_gather, or with either on a mesh "
                "of more than three axes",
                "recomputation of some layers or modules",
                "tensor-parallel overlap (--tp-comm-overlap), float8",
            ),
        ),
        Target(
            "hf",
            "hf",
            {"5.22": "read by transformers 5.22's DistributedConfig and TrainingArguments"},
            zero=(3,),
            needs_shards=True,
            needs_plan=True,
            unpriced=(
                "pipelines of DistributedConfig",
                "expert parallel",
                "data parallel without shards (autocast)",
            ),
        ),
        Target(
            "accelerate",
            "accelerate",
            {
                "1.15": "read by accelerate 1.15.0 of PyPI; tensor parallel beside FSDP starts "
                "with transformers 5.0 to 5.14"
            },
            zero=(3,),
            keeps=True,
            hybrid=True,
            needs_shards=True,
            needs_plan=True,
            reduces_half=True,
            unpriced=(
                "context parallel, Ulysses",
                "data parallel without shards (autocast)",
            ),
        ),
        Target(
            "deepspeed",
            "deepspeed",
            {"0.19": "read by DeepSpeedConfig of deepspeed 0.19.8 of PyPI"},
            zero=(0, 1, 2, 3),
            needs_plan=True,
            reduces_half=True,
            unpriced=(
                "pipelines (in code only)",
                "ZeRO++ and offload",
                "Ulysses, expert parallel",
            ),
        ),
        Target(
            "nanotron",
            "nanotron",
            {
                "head": "names as in its source at commit 19f88fb, not parsed",
                "0.4": "names as in its classes of PyPI, not parsed; it has no recomputation",
            },
            transformers_only=True,
            zero=(0, 1),
            staged_zero=(0, 1),
            sequence=True,
            schedules=("1f1b", "gpipe"),
            unpriced=("context and expert parallel",),
        ),
    )
}


def _is_of_attention(kind: str) -> bool:
    return "attention" in kind or kind.rpartition(".")[2] in (
        "softmax",
        "_softmax",
        "_safe_softmax",
    )


def target_named(text: str) -> tuple[Target, str]:
    """The target and version of a text such as `torchtitan` or `torchtitan@0.2.2`."""
    name, _, version = text.partition("@")
    if name not in TARGETS:
        raise InputError(f"Nothing can be exported to {name!r}. {nearest(name, TARGETS)}")
    target = TARGETS[name]
    version = version or next(iter(target.versions))
    if version not in target.versions:
        known = "; ".join(f"{name}@{each}: {how}" for each, how in target.versions.items())
        raise InputError(f"The fields of {name} {version} were not checked. Checked: {known}.")
    if text == "nanotron@0.4":
        target = replace(target, recompute=("none",))
    return target, version


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model bounds its degrees."""

    samples: int  # in the whole batch
    layers: int
    is_cut: bool = True  # whether its batch may be taken in micro-batches
    has_plan: bool = True  # whether it says which of its weights tensor parallel splits
    experts: int = 1  # that rows can be sent to
    has_sequence: bool = True
    is_half: bool = True  # whether it is computed in 16 bits


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
                    if not target.refusal(found, is_half=sizes.is_half):
                        yield found


def lies_along(stated: Stated, cluster: Cluster) -> bool:
    """Whether the degrees lie along the cluster's levels, on a mesh that can be priced."""
    try:
        placed = place(stated, cut_cluster(cluster, stated.stages).stage)
    except ClusterError:
        return False
    return len(placed.mesh.axes) <= MOST_AXES or stated.context * stated.experts == 1


def samples_per_pass(stated: Stated, samples: int) -> int:
    """Of a micro-batch, on one device, or on the devices that share its sequence."""
    return samples // (stated.batch_parts * stated.micro_batches)


def _degrees(target: Target, cluster: Cluster, sizes: Sizes) -> Iterator[Stated]:
    inner = cluster.levels[-1].size if cluster.levels else 1
    for tensor in divisors(inner) if sizes.has_plan or not target.needs_plan else (1,):
        for stages in divisors(cluster.size // tensor) if target.schedules else (1,):
            data = cluster.size // (tensor * stages)
            if stages > 1 and stages > sizes.layers:
                continue
            zero = target.staged_zero if stages > 1 else target.zero
            for replicas, shards in _shards(target, cluster, tensor, data):
                for stage in (z for z in zero if z) if shards > 1 else (0,):
                    sequence = target.sequence and tensor > 1
                    found = Stated(replicas, shards, tensor, stage, sequence, stages=stages)
                    for each in (found, *_shared(found, target, inner, sizes)):
                        if sizes.samples % each.batch_parts == 0 and lies_along(each, cluster):
                            yield each
                            if target.keeps and each.zero == 3:
                                yield replace(each, reshards=False)


def _shared(stated: Stated, target: Target, inner: int, sizes: Sizes) -> Iterator[Stated]:
    """The same where devices share experts, or the sequence."""
    if target.experts:
        for experts in divisors(sizes.experts)[1:]:
            if stated.data % experts == 0:
                yield replace(stated, experts=experts)
    owner = stated.shards if stated.shards > 1 else stated.replicas
    for context in divisors(inner)[1:] if sizes.has_sequence else ():
        for attention in target.attention if owner % context == 0 else ():
            yield replace(stated, context=context, attention=attention)


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
    local = sizes.samples // stated.batch_parts
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
            powers = {2**n for n in range(1, target.most_chunks.bit_length())}
            even = {n for n in divisors(layers // stages) if 1 < n <= target.most_chunks}
            chunks = sorted(powers | even if layers % stages == 0 else powers)
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
