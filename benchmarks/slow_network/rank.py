"""What every rank does: calibrate, plan, and take interleaved steps under every strategy."""

from __future__ import annotations

import gc
import json
import logging
import statistics
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as benchmarks/cluster.py is run

from slow_network.calibration import calibrated, register, scaled
from slow_network.models import build
from slow_network.strategies import DDP, Runner, plans_for, predicted, runners, same_as

LOSSES = 3  # steps whose losses are compared; they are also the warm-up


def main(job: dict[str, Any]) -> None:
    """Measure the job's models; rank 0 writes what was found."""
    torch.set_num_threads(1)
    for name in ("torch", "shardfold"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    cluster, links = calibrated(job["name"], dist.get_world_size())
    register(links)
    found: dict[str, Any] = {
        "cluster": cluster.as_plain(),
        "links": {kind: asdict(link) for kind, link in links.items()},
        "models": {},
    }
    for name in job["models"]:
        own = scaled(cluster, *build(name))  # rank 0's is what is planned with
        found["models"][name] = {
            "device": own.as_plain()["device"],
            **_measured(name, own, job["rounds"]),
        }
        gc.collect()
        if dist.get_rank() == 0:
            Path(job["out"]).write_text(json.dumps(found, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def _measured(name: str, cluster: Any, rounds: int) -> dict[str, Any]:
    plans = plans_for(name, cluster)
    made = runners(name, plans)
    losses = {runner.name: [_loss(runner) for _ in range(LOSSES)] for runner in made}
    taken: dict[str, list[float]] = {runner.name: [] for runner in made}
    for number in range(rounds):
        # Another order every round, so that none always follows the same one.
        for runner in made[number % len(made) :] + made[: number % len(made)]:
            taken[runner.name].append(_seconds(runner))
    return {
        "losses": losses,
        "step_seconds": taken,
        "median_seconds": {method: statistics.median(each) for method, each in taken.items()},
        "predicted_seconds": predicted(plans),
        "mesh": {method: [axis.size for axis in plan.mesh] for method, plan in plans.items()},
        "same_as": same_as(plans),
        "parameters": next(iter(plans.values())).provenance.parameters,
    }


def _loss(runner: Runner) -> float:
    """The loss of the whole batch."""
    loss = runner.step().clone()
    if runner.name == DDP:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss)


def _seconds(runner: Runner) -> float:
    """One step from when all ranks are ready until the last is done."""
    dist.barrier()
    begin = time.perf_counter()
    runner.step()
    found = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
