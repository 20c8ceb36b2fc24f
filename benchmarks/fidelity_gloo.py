"""Predicted against measured on gloo processes of one machine: whether the order of plans agrees.

The machine is calibrated with as many processes side by side as the plans are for; then many plans
of one model are run and timed, good ones and bad ones: the best, data parallel and fully sharded,
with some of their decisions drawn at random, and of many such those that the datasheet's prices
spread evenly (plans that take the same have no order). What must agree is the order: Kendall's rank
correlation, and the predicted best beside the measured best.

    python benchmarks/fidelity_gloo.py --processes 4 --folder /tmp/gloo4
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from torch import Tensor, nn

import shardfold as sf
from environment import environment
from shardfold.calibrate.calibrate import calibrate
from shardfold.calibrate.processes import together
from shardfold.capture import capture
from shardfold.cluster import Cluster, Mesh, mesh_from_text, parse
from shardfold.costs import CostModel, Measured, Profile, Roofline, optimizer_named, tabulate
from shardfold.costs.profile import load
from shardfold.graph import Graph
from shardfold.plans import Assembly, Plan
from shardfold.plans.baselines import batch_factors, data_parallel, fully_sharded
from shardfold.plans.batch import inputs_of
from shardfold.plans.recall import recalled, restated
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


def plans(processes: int, wanted: int) -> list[Plan]:
    """Different plans of the model, spread evenly between the fastest and the slowest."""
    cluster = parse(f"{processes}xcpu")
    meshes = [str(processes)] + (["2x2"] if processes == 4 else [])
    found: dict[str, tuple[float, Plan]] = {}
    for mesh in meshes:
        for price, plan in _altered(cluster, mesh_from_text(mesh, cluster), TRIES * wanted):
            key = repr([o.config for o in plan.operators] + [p.layout for p in plan.parameters])
            found.setdefault(mesh + key, (price, plan))
    prices, every = zip(*found.values(), strict=True)
    return spread(list(every), list(prices), wanted)


def _altered(cluster: Cluster, mesh: Mesh, count: int) -> Iterator[tuple[float, Plan]]:
    """The best plan, data parallel and fully sharded, and all three with some decisions drawn."""
    graph, atoms = _graph()
    model, args = example()
    best = sf.plan(model, args, cluster=cluster, mesh=mesh)
    prices, updates = Roofline(cluster, mesh), optimizer_named("adamw")
    tables = tabulate(graph, atoms, mesh, prices, updates)
    blank = Assembly(graph, atoms, tables, (0,) * len(tables.vertices), prices, updates)
    batch = batch_factors(graph, atoms)
    origins = [recalled(best, blank), data_parallel(tables, batch), fully_sharded(tables, batch)]
    draw = random.Random(0)
    for number in range(count):
        share = 0.0 if number < len(origins) else draw.random()
        choice = tuple(
            draw.randrange(len(costs)) if draw.random() < share else chosen
            for chosen, costs in zip(
                origins[number % len(origins)], tables.problem.costs, strict=True
            )
        )
        assembly = replace(blank, choice=choice)
        yield (
            sum(assembly.totals().values()),
            msgspec.structs.replace(
                best,
                operators=assembly.operators(),
                tensors=assembly.tensors(),
                parameters=assembly.parameters(),
                inputs=inputs_of(assembly),
            ),
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
