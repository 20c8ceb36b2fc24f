"""Predicted against measured on gloo processes of one machine: whether the order of plans agrees.

The machine is calibrated with as many processes side by side as the plans are for; then many plans
of one model are run and timed, good ones and bad ones: each is the best under prices that are wrong
at random, and of many such those are taken that the datasheet's prices spread evenly (plans that
take the same have no order). What must agree is the order: Kendall's rank correlation, and the
predicted best beside the measured best.

    python benchmarks/fidelity_gloo.py --processes 4 --folder /tmp/gloo4
"""

from __future__ import annotations

import json
import math
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

from environment import environment
from shardfold.calibrate.calibrate import calibrate
from shardfold.calibrate.processes import together
from shardfold.capture import capture
from shardfold.cluster import Cluster, Mesh, mesh_from_text, parse
from shardfold.costs import CostModel, Measured, Pricing, Profile, Roofline, optimizer_named
from shardfold.costs.profile import load
from shardfold.costs.steps import Collective, Compute, Values
from shardfold.graph import Graph
from shardfold.plans import Plan
from shardfold.plans.decide import decide
from shardfold.plans.describe import describe
from shardfold.plans.recall import restated
from shardfold.plans.settle import Request
from shardfold.run.launch import launch
from shardfold.run.parallelize import parallelize
from shardfold.spaces import Atoms, atomise, rules_of

FAMILIES = (
    "matmul",
    "vector",
    "cast",
    "strided",
    "fill",
    "sum_",
    "loss",
    "softmax",
    "update.adamw",
)
BATCH, WIDTH, DEPTH, CLASSES = 128, 768, 3, 1000
WARM, STEPS, PASSES = 2, 5, 3
TRIES = 4  # plans looked at for one that is run


class Net(nn.Module):
    """Feed-forward blocks and a classifier: wide enough that the splits differ."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(DEPTH))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return nn.functional.cross_entropy(self.head(x), labels)


def example() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch, the same on every process."""
    torch.manual_seed(0)
    return Net(), (torch.randn(BATCH, WIDTH), torch.randint(CLASSES, (BATCH,)))


@dataclass(frozen=True)
class Wrong:
    """Prices that are off by a random factor for each kind of step."""

    model: CostModel
    seed: int

    def compute_seconds(self, step: Compute) -> Values:
        """Work, off by a factor."""
        return self.model.compute_seconds(step) * self._factor("compute", step.engine, step.phase)

    def collective_seconds(self, step: Collective) -> Values:
        """A collective, off by a factor."""
        return self.model.collective_seconds(step) * self._factor(step.kind, step.phase, step.axes)

    def _factor(self, *key: object) -> float:
        seed = zlib.crc32(repr((self.seed, *key)).encode())
        return float(np.exp(2.5 * np.random.default_rng(seed).standard_normal()))


def plans(processes: int, wanted: int) -> list[Plan]:
    """Different plans of the model, spread evenly between the fastest and the slowest."""
    model, args = example()
    graph = capture(model, args)
    cluster = parse(f"{processes}xcpu")
    meshes = [str(processes)] + (["2x2"] if processes == 4 else [])
    found: dict[str, Plan] = {}
    for seed in range(TRIES * wanted):
        mesh = mesh_from_text(meshes[seed % len(meshes)], cluster)
        plan = _best_under(Wrong, graph, cluster, mesh, seed)
        key = repr([(o.config) for o in plan.operators] + [p.layout for p in plan.parameters])
        found.setdefault(str(mesh) + key, plan)
    return spread(
        list(found.values()), [_priced(plan, Roofline) for plan in found.values()], wanted
    )


def _best_under(prices: Any, graph: Graph, cluster: Cluster, mesh: Mesh, seed: int) -> Plan:
    def priced(c: Cluster, m: Mesh) -> CostModel:
        return prices(Roofline(c, m), seed)

    updates = optimizer_named("adamw")
    pricing = Pricing(priced, overlaps=False)
    request = Request(cluster, (mesh,), pricing, updates, None, (), "never", {})
    settled = decide(graph, request, lambda done, total: None)
    return describe(
        settled.graph,
        settled.atoms,
        cluster,
        settled.chosen,
        updates,
        cost="roofline",
        dtype=None,
        capture_seconds=0.0,
        search_seconds=0.0,
        verdict=settled.verdict,
    )


def spread(found: list[Plan], prices: list[float], wanted: int) -> list[Plan]:
    """So many of the plans, at prices that are as evenly spread as can be in their logarithm."""
    left = sorted(range(len(found)), key=prices.__getitem__)
    low, high = math.log(prices[left[0]]), math.log(prices[left[-1]])
    taken = []
    for number in range(min(wanted, len(left))):
        aim = low + (high - low) * number / max(1, wanted - 1)
        nearest = min(left, key=lambda k: abs(math.log(prices[k]) - aim))
        left.remove(nearest)
        taken.append(nearest)
    return [found[k] for k in sorted(taken, key=prices.__getitem__)]


def predicted(plan: Plan, profile: Profile) -> float:
    """Seconds of a step: the sum of its steps by the profile."""
    return _priced(plan, lambda cluster, mesh: Measured(cluster, mesh, profile))


def _priced(plan: Plan, prices: Callable[[Cluster, Mesh], CostModel]) -> float:
    graph, atoms = _graph()
    cluster = parse(plan.cluster)
    mesh = mesh_from_text("x".join(str(axis.size) for axis in plan.mesh), cluster)
    assembly = restated(plan, graph, atoms, mesh, prices(cluster, mesh), optimizer_named("adamw"))
    return sum(assembly.totals().values())


@cache
def _graph() -> tuple[Graph, Atoms]:
    model, args = example()
    graph = capture(model, args)
    return graph, atomise(graph, rules_of(graph))


def calibrated(rank: int) -> Profile:
    """The machine's profile, with all processes busy."""
    torch.set_num_threads(1)
    return together(calibrate("cpu", families=FAMILIES))


def timed(rank: int, files: list[str]) -> list[float]:
    """The seconds of a step under each plan: the best of a few passes, the median in each."""
    torch.set_num_threads(1)
    passes = [[_median_step(file) for file in files] for _ in range(PASSES)]
    return [min(times) for times in zip(*passes, strict=True)]


def _median_step(file: str) -> float:
    model, args = example()
    module = parallelize(model, Plan.load(file), args)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    times = []
    for _ in range(WARM + STEPS):
        torch.distributed.barrier()
        began = time.perf_counter()
        module(*args).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.distributed.barrier()
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM:])


def kendall(a: list[float], b: list[float]) -> float:
    """Kendall's rank correlation."""
    from scipy.stats import kendalltau

    return float(kendalltau(a, b).statistic)


@click.command()
@click.option("--processes", default=4)
@click.option("--wanted", default=32)
@click.option("--profile", type=click.Path(dir_okay=False), help="Instead of calibrating first.")
@click.option("--folder", required=True, type=click.Path(file_okay=False))
@click.option("--stage", default="all", type=click.Choice(["all", "plan", "calibrate", "time"]))
@click.option("--out", type=click.Path(dir_okay=False))
def main(
    processes: int, wanted: int, profile: str | None, folder: str, stage: str, out: str | None
) -> None:
    """Calibrate, plan, run, and compare the orders."""
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    if stage in ("all", "plan"):
        for number, plan in enumerate(plans(processes, wanted)):
            plan.save(home / f"{number:02d}.json")
    files = sorted(str(file) for file in home.glob("[0-9][0-9].json"))
    click.echo(f"{len(files)} plans")
    made = Path(profile) if profile else home / "profile.json"
    if stage in ("all", "calibrate") and not profile:
        launch(calibrated, processes)[0].save(made)
    if stage in ("plan", "calibrate"):
        return
    everyone = launch(timed, processes, files)
    measured = [max(times) for times in zip(*everyone, strict=True)]
    known = load(made)
    guesses = [predicted(Plan.load(file), known) for file in files]
    best = measured[min(range(len(files)), key=guesses.__getitem__)]
    figures: dict[str, Any] = {
        "environment": environment(),
        "processes": processes,
        "plans": len(files),
        "kendall": round(kendall(guesses, measured), 3),
        "predicted_best_over_measured_best": round(best / min(measured), 3),
        "median_error": round(
            statistics.median(abs(g / m - 1) for g, m in zip(guesses, measured, strict=True)), 3
        ),
        "cases": [
            {"predicted_seconds": g, "measured_seconds": m}
            for g, m in zip(guesses, measured, strict=True)
        ],
    }
    click.echo(json.dumps({k: v for k, v in figures.items() if k != "cases"}, indent=1))
    for g, m in sorted(zip(guesses, measured, strict=True)):
        click.echo(f"  predicted {g * 1e3:8.1f} ms, measured {m * 1e3:8.1f} ms")
    if out:
        Path(out).write_text(json.dumps(figures, indent=1) + "\n")
    assert not math.isnan(figures["kendall"])


if __name__ == "__main__":
    main()
