"""What is measured: torch's DistributedDataParallel, our plan, and other plans in our runner."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardfold.api import compare, plan
from shardfold.cluster import Cluster
from shardfold.errors import InputError, ModelError
from shardfold.plans import Plan
from shardfold.plans.files import dumps, loads
from shardfold.runtime.module import Parallel
from shardfold.runtime.parallelize import Settings, assemble, lowered_here, parallelize, prepared
from slow_network.calibration import MEASURED
from slow_network.models import build

DDP = "torch DDP"
OURS = "shardfold"
STAGED = "shardfold, stages"
PARTS = 2
BY_HAND = ("data-parallel", "zero-2", "fsdp", "krizhevsky-2014", "megatron", "gpipe")
LR = 1e-4


@dataclass(frozen=True)
class Runner:
    """Takes one step, and says the loss of the whole batch before it."""

    name: str
    step: Callable[[], Tensor]


def plans_for(name: str, cluster: Cluster) -> dict[str, Plan]:
    """Our plan and those of the baselines that apply; made on rank 0, for all."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        model, args = build(name)
        with tempfile.TemporaryDirectory() as folder:
            compare(
                *(model, args), cluster=cluster, cost=MEASURED, methods=BY_HAND, save_plans=folder
            )
            files = sorted(Path(folder).glob("*.json"))
            found = [{file.stem: file.read_bytes() for file in files}]
        found[0][OURS] = dumps(plan(model, args, cluster=cluster, cost=MEASURED)).encode()
        found[0] |= {m: dumps(each).encode() for m, each in _with_stages(model, args, cluster)}
    dist.broadcast_object_list(found, src=0)
    plans = {method: loads(data) for method, data in found[0].items()}
    return {method: plans[method] for method in (OURS, STAGED, *BY_HAND) if method in plans}


def _with_stages(model: Any, args: Any, cluster: Cluster) -> Iterator[tuple[str, Plan]]:
    """The best pipeline; what has no layers in a list, or too few samples, has no stages."""
    try:
        yield STAGED, plan(model, args, cluster=cluster, cost=MEASURED, pipeline=PARTS)
    except (InputError, ModelError):
        return


def predicted(plans: dict[str, Plan]) -> dict[str, float]:
    """Seconds of a step, with overlap where it was simulated; DDP's are data parallel's."""
    found = {method: each.estimate.step_seconds for method, each in plans.items()}
    return {DDP: found["data-parallel"], **found}


def runners(name: str, plans: dict[str, Plan]) -> list[Runner]:
    """One for each plan that is unlike those before it, and DistributedDataParallel."""
    found = [_ddp(name)]
    model, args = build(name)
    captured = prepared(model, plans[OURS], args, {}, None, None)
    for method, each in plans.items():
        if each.pipeline is not None:
            found.append(Runner(method, _stepper(parallelize(model, each, args), args)))
            continue
        module = assemble(model, captured[0], lowered_here(each, *captured, None), Settings())
        found.append(Runner(method, _stepper(module, args)))
    return found


def same_as(plans: dict[str, Plan]) -> dict[str, str]:
    """Methods whose plan is, decision for decision, that of an earlier method."""
    seen: dict[str, str] = {}
    found = {}
    for method, each in plans.items():
        decided = (each.mesh, each.operators, each.tensors, each.parameters, each.pipeline)
        key = repr([msgspec.to_builtins(part) for part in decided])
        if key in seen:
            found[method] = seen[key]
        seen.setdefault(key, method)
    return found


def _stepper(module: Any, args: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)

    def step() -> Tensor:
        if isinstance(module, Parallel):
            loss = module.accumulate(*args)
        else:
            loss = module(*args)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found: Tensor = loss.detach()
        return found

    return step


def _ddp(name: str) -> Runner:
    """Each rank its part of the batch; the mean of their losses is that of the whole."""
    model, args = build(name)
    rank, world = dist.get_rank(), dist.get_world_size()
    part = tuple(value.chunk(world)[rank].contiguous() for value in args)
    return Runner(DDP, _stepper(DistributedDataParallel(model), part))
