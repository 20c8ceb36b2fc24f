"""A row's stated configuration, priced on its stated hardware; or why it is left out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from published_models import Dims, captured
from published_rows import Row, RowError, in_metric, step_seconds
from published_setups import (
    Setup,
    architecture_of,
    cluster_of,
    family_of,
    setup_of,
    stack_of,
)
from shardfold.costs import optimizer_named, pricing_named
from shardfold.errors import ShardfoldError
from shardfold.planner.case import ResolvedRequest
from shardfold.planner.estimate import estimate
from shardfold.planner.estimated import Estimated
from shardfold.planner.options import Request
from shardfold.strategies.stacks import stack_named
from shardfold.strategies.stated import Stated

GIB = 2.0**30
CONTEXT_BYTES = stack_named("megatron-deepspeed").context_bytes  # as measured on a V100
DEFAULT_COST = Request().cost
DTYPES = {"bf16": "bf16", "amp_bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
DIMS = ("layers", "hidden", "heads", "vocab", "seq")


class LeftOutError(Exception):
    """Why a row is not priced."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a row states: a model, a strategy, and the sequences of a micro-batch."""

    dims: Dims
    dtype: str
    stated: Stated
    micro_batch: int


def price(row: Row, cost: str = DEFAULT_COST) -> dict[str, Any]:
    """A row with its prediction by a cost model, or with the reason why it has none."""
    setup = setup_of(row)
    base = {**row.columns, "row": row.number, "stack": stack_of(row, setup).name}
    try:
        return {**base, **_predicted(row, setup, cost)}
    except LeftOutError as reason:
        return {**base, "reason": str(reason)}
    except ShardfoldError as error:
        return {**base, "reason": f"refused: {str(error).splitlines()[0]}"}


def configuration(row: Row, setup: Setup) -> Configuration:
    """The configuration that a row states."""
    recompute = _recompute(row, setup)
    if row.count("cp", 1) != 1 and "CP comm a2a" not in row.notes:
        raise LeftOutError("context parallelism: how keys travel is not published")
    if row.dtype not in DTYPES:
        what = "not published" if not row.dtype else "fp8 or fp4"
        raise LeftOutError(f"precision: {what}")
    if any(row.count(name) is None for name in DIMS) or row.ffn is None:
        raise LeftOutError("dims not published")
    return Configuration(_dims(row, setup), DTYPES[row.dtype], *_strategy(row, recompute))


def _dims(row: Row, setup: Setup) -> Dims:
    sizes = {name: row.count(name) or 0 for name in DIMS}
    kv_heads = row.count("kv_heads") or sizes["heads"]
    ffn = row.ffn or 0.0
    if ffn != int(ffn):  # Llama's: a multiple of 256
        ffn = 256 * math.ceil(ffn / 256)
    if setup.pads_vocabulary:
        multiple = 128 * (row.count("tp") or 1)
        sizes["vocab"] = multiple * math.ceil(sizes["vocab"] / multiple)
    try:
        own = architecture_of(row)
    except KeyError:
        raise LeftOutError("dims of experts not published") from None
    return Dims(**sizes, kv_heads=kv_heads, ffn=int(ffn), **own)


def _strategy(row: Row, recompute: str) -> tuple[Stated, int]:
    gpus, tensor, stages = row.count("gpus") or 1, row.count("tp"), row.count("pp", 1) or 1
    if tensor is None:
        raise LeftOutError("degrees not published")
    context = row.count("cp", 1) or 1
    if gpus % (tensor * context * stages):
        raise LeftOutError("degrees do not multiply to the devices")
    data = row.count("dp") or gpus // (tensor * context * stages)
    if data * tensor * context * stages != gpus:
        raise LeftOutError("degrees do not multiply to the devices")
    micro_batch, batch = row.count("micro_batch"), row.count("global_batch")
    if micro_batch is None:
        raise LeftOutError("micro-batch not published")
    if batch is None:
        micro_batches = row.said("micro_num") or 1
    else:
        micro_batches, rest = divmod(batch, micro_batch * data)
        if rest or not micro_batches:
            raise LeftOutError("the batch is no multiple of its micro-batches")
    data *= context  # they share parameters as replicas do
    stage, group = _zero(row, data)
    sequence = row.sequence_parallel.startswith("1") and tensor > 1
    replicas, shards = (data // group, group) if stage else (data, 1)
    stage = stage if shards > 1 else 0
    stated = Stated(replicas, shards, tensor, stage, sequence, recompute, micro_batches)
    stated = replace(stated, experts=row.count("ep", 1) or 1, context=context)
    return replace(stated, **_pipeline(row, stages)), micro_batch


def _pipeline(row: Row, stages: int) -> dict[str, Any]:
    """The stages and their schedule: with several chunks on a device interleaved, else 1F1B."""
    chunks = row.count("vp", 1) or 1
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return {"stages": stages, "schedule": schedule, "chunks": chunks} if stages > 1 else {}


def _zero(row: Row, data: int) -> tuple[int, int]:
    """The ZeRO stage and over how many devices; `1 (group of 8)` says it."""
    text = row.zero
    if text.startswith("auto (ILP"):  # Alpa's search shards what ZeRO-2 shards
        return 2, data
    found = re.match(r"([0-3])\b", text)
    if text and not found:
        raise LeftOutError("sharding of another kind")
    stage = int(found[1]) if found else 0
    group = re.search(r"group of (\d+)", text)
    size = min(int(group[1]), data) if group else data
    if data % size:
        raise LeftOutError("degrees do not multiply to the devices")
    return stage, size


def _recompute(row: Row, setup: Setup) -> str:
    word, _, what = row.recompute.partition(":")
    word = word.split(" ")[0].split("_")[0]
    if not word:
        if setup.recompute is None:
            raise LeftOutError("recomputation not published")
        return setup.recompute
    if word not in ("none", "full", "selective") or (word == "selective" and what):
        raise LeftOutError("recomputation of another kind")
    return word


def _predicted(row: Row, setup: Setup, cost: str) -> dict[str, Any]:
    asked = configuration(row, setup)
    cluster = cluster_of(row, setup)
    if cluster is None:
        raise LeftOutError("device not in the catalog")
    if cluster.size != row.count("gpus"):
        raise LeftOutError("nodes are not full")
    family, stack = family_of(row, setup), stack_of(row, setup)
    graph = captured(asked.dims, family, asked.dtype, asked.micro_batch * asked.stated.batch_parts)
    limit = cluster.device.memory_bytes - CONTEXT_BYTES  # a run takes all that there is
    request = ResolvedRequest(cluster, (), pricing_named(cost), optimizer_named("adamw"), limit)
    found = estimate(graph, request, asked.stated, stack)
    context = stack.context_bytes if setup.counts_context else 0.0
    return {**_figures(row, found, context), "strategy": found.strategy}


def _figures(row: Row, found: Estimated, context: float) -> dict[str, Any]:
    """The prediction beside what was published; errors are of the step and of the peak."""
    peak = (found.peak_bytes + context) / GIB
    figures: dict[str, Any] = {
        "predicted": None,
        "predicted_step_seconds": found.step_seconds,
        "predicted_memory_gib": peak,
        "fits": found.fits,
        "exposed_seconds": found.exposed_seconds,
        "compute_seconds": found.compute_seconds,
        "bubble": None if found.pipeline is None else found.pipeline.bubble,
        "peak_by_class_gib": {k: v / GIB for k, v in found.peak_by_class.items()},
    }
    try:
        measured = step_seconds(row)
    except RowError as error:
        raise LeftOutError(str(error)) from None
    if measured is not None:
        figures["predicted"] = in_metric(row, found.step_seconds)
        figures["step_seconds"] = measured
        figures["error"] = found.step_seconds / measured - 1
    if row.memory_gib is not None:
        figures["memory_error"] = peak / row.memory_gib - 1
    return figures
