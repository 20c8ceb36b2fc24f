"""Predicted against measured on gloo processes of one machine: whether the order of plans agrees.

The machine is calibrated with as many processes side by side as the plans are for; then many plans
of one model are run and timed, good ones and bad ones: the best, data parallel and fully sharded,
with some of their decisions drawn at random, and of many such those that the datasheet's prices
spread evenly (plans that take the same have no order). What must agree is the order: Kendall's rank
correlation, and the predicted best beside the measured best. Another --seed draws other plans.

    python benchmarks/fidelity_gloo.py --processes 4 --folder /tmp/gloo4 --stage plan
    python benchmarks/fidelity_gloo.py --processes 4 --folder /tmp/gloo4 --stage measure -o 4.json
    python benchmarks/fidelity_gloo_page.py 2.json 4.json
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
from torch import Tensor, nn

import shardfold as sf
from environment import environment
from shardfold.calibrate.profile import calibrate, together
from shardfold.capture import capture
from shardfold.cluster import Cluster, Mesh, mesh_from_text, parse
from shardfold.costs import Measured, Profile, Roofline, optimizer_named, tabulate
from shardfold.costs.profile import load
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.plans import Plan
from shardfold.plans.batch import inputs_of
from shardfold.plans.entries import operator_entries, parameter_entries, tensor_entries
from shardfold.plans.read import recalled, restated
from shardfold.runtime.parallelize import Settings, assemble, lowered_here, prepared
from shardfold.runtime.ranks import launch
from shardfold.sharding import Subdims, find_subdims
from shardfold.simulate import simulate
from shardfold.simulate.decoded import DecodedChoice
from shardfold.simulate.tasks import Scheduler
from shardfold.strategies.baselines import batch_factors, fully_sharded, replicated

FAMILIES = (
    "matmul",
    "vector",
    "strided",
    "sum_",
    "loss",
    "update.adamw",
)
BATCH, WIDTH, DEPTH, CLASSES = 128, 768, 3, 1000
WARM, STEPS, PASSES = 2, 3, 6
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
class Candidate:
    """A plan, what it was made from, and its price by the datasheet."""

    plan: Plan
    label: str
    price: float


def plans(processes: int, wanted: int, seed: int) -> list[Candidate]:
    """Different plans of the model, spread evenly between the fastest and the slowest."""
    cluster = parse(f"{processes}xcpu")
    meshes = [str(processes)] + (["2x2"] if processes == 4 else [])
    found: dict[str, Candidate] = {}
    for mesh in meshes:
        for each in _altered(cluster, mesh_from_text(mesh, cluster), TRIES * wanted, seed):
            decided = [o.config for o in each.plan.operators]
            key = repr((decided, [p.layout for p in each.plan.parameters]))
            found.setdefault(mesh + key, replace(each, label=f"{mesh}: {each.label}"))
    return spread(list(found.values()), wanted)


def _altered(cluster: Cluster, mesh: Mesh, count: int, seed: int) -> Iterator[Candidate]:
    """The best plan, data parallel and fully sharded, and all three with some decisions drawn."""
    graph, subdims = _graph()
    model, args = example()
    best = sf.plan(model, args, cluster=cluster, mesh=mesh)
    prices, updates = Roofline(cluster, mesh), optimizer_named("adamw")
    tables = tabulate(graph, subdims, mesh, prices, updates)
    blank = DecodedChoice(graph, subdims, tables, (0,) * len(tables.vertices), prices, updates)
    batch = batch_factors(graph, subdims)
    origins = {
        "the best by the datasheet": recalled(best, blank),
        "data parallel": replicated(tables, batch),
        "fully sharded": fully_sharded(tables, batch),
    }
    draw = random.Random(seed)
    for number in range(count):
        share = 0.0 if number < len(origins) else draw.random()
        name, origin = list(origins.items())[number % len(origins)]
        drawn = [draw.random() < share for _ in origin]
        choice = tuple(
            draw.randrange(len(costs)) if is_drawn else chosen
            for chosen, costs, is_drawn in zip(origin, tables.problem.costs, drawn, strict=True)
        )
        decoded = replace(blank, choice=choice)
        plan = msgspec.structs.replace(
            best,
            operators=operator_entries(decoded),
            tensors=tensor_entries(decoded),
            parameters=parameter_entries(decoded),
            inputs=inputs_of(decoded),
        )
        label = name + (f", {sum(drawn)} of {len(drawn)} decisions drawn" if any(drawn) else "")
        yield Candidate(plan, label, sum(decoded.totals().values()))


def spread(found: list[Candidate], wanted: int) -> list[Candidate]:
    """So many of the plans, at prices that are as evenly spread as can be in their logarithm."""
    left = sorted(found, key=lambda each: each.price)
    low, high = math.log(left[0].price), math.log(left[-1].price)
    taken = []
    for number in range(min(wanted, len(left))):
        aim = low + (high - low) * number / max(1, wanted - 1)
        nearest = min(left, key=lambda each: abs(math.log(each.price) - aim))
        left.remove(nearest)
        taken.append(nearest)
    return sorted(taken, key=lambda each: each.price)


def predicted(plan: Plan, profile: Profile) -> float:
    """Seconds of a step by the profile: as `shardfold plan --profile` would say."""
    graph, subdims = _graph()
    cluster = parse(plan.cluster)
    mesh = mesh_from_text("x".join(str(axis.size) for axis in plan.mesh), cluster)
    prices = Measured(cluster, mesh, profile)
    decoded = restated(plan, graph, subdims, mesh, prices, optimizer_named("adamw"))
    return simulate(Scheduler(graph, subdims, cluster).alone(decoded)).step_seconds


@cache
def _graph() -> tuple[Graph, Subdims]:
    model, args = example()
    graph = capture(model, args)
    return graph, find_subdims(graph, rules_of(graph))


def calibrated(rank: int) -> Profile:
    """The machine's profile, with all processes busy."""
    torch.set_num_threads(1)
    return together(calibrate("cpu", families=FAMILIES))


def timed(rank: int, files: list[str], number: int) -> list[float]:
    """The median seconds of a step under each plan, in one of some passes over all plans.

    Every pass takes the plans in another order: a machine that is slow for a while is so for others
    each time.
    """
    torch.set_num_threads(1)
    gc.disable()
    model, args = example()
    plans = [Plan.load(file) for file in files]
    program, subdims = prepared(model, plans[0], args, {}, None, None)
    times = [0.0] * len(plans)
    for at in random.Random(number).sample(range(len(plans)), len(plans)):
        lowered = lowered_here(plans[at], program, subdims, None)
        times[at] = _median_step(assemble(model, program, lowered, Settings()), args)
        gc.collect()
    return times


def _median_step(module: nn.Module, args: tuple[Tensor, ...]) -> float:
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


def judged(labels: list[str], guesses: list[float], passes: list[list[float]]) -> dict[str, Any]:
    """How far order, best and times of the predictions are from the measured ones.

    A plan's time is the median of its passes, each as a share of what that pass took a plan in the
    median; the fastest pass makes seconds of it.
    """
    pace = [statistics.median(times) for times in zip(*passes, strict=True)]
    shares = [[t / p for t, p in zip(times, pace, strict=True)] for times in passes]
    measured = [statistics.median(each) * min(pace) for each in shares]
    best = measured[min(range(len(guesses)), key=guesses.__getitem__)]
    return {
        "plans": len(labels),
        "kendall": round(kendall(guesses, measured), 3),
        "predicted_best_over_measured_best": round(best / min(measured), 3),
        "median_error": round(
            statistics.median(abs(g / m - 1) for g, m in zip(guesses, measured, strict=True)), 3
        ),
        "cases": [
            {"plan": name, "predicted_seconds": g, "measured_seconds": m, "passes": times}
            for name, g, m, times in zip(labels, guesses, measured, passes, strict=True)
        ],
    }


@click.command()
@click.option("--processes", default=4)
@click.option("--wanted", default=32)
@click.option("--seed", default=0, help="Of the decisions that are drawn.")
@click.option("--profile", type=click.Path(dir_okay=False), help="Instead of calibrating first.")
@click.option("--folder", required=True, type=click.Path(file_okay=False))
@click.option(
    "--stage",
    default="all",
    type=click.Choice(["all", "plan", "measure", "judge"]),
    help="measure: calibrate and time the plans of the folder; judge: predict once more.",
)
@click.option("-o", "--out", type=click.Path(dir_okay=False))
def main(
    processes: int,
    wanted: int,
    seed: int,
    profile: str | None,
    folder: str,
    stage: str,
    out: str | None,
) -> None:
    """Plan, calibrate, run, and compare the orders."""
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    if stage in ("all", "plan"):
        found = plans(processes, wanted, seed)
        for number, each in enumerate(found):
            each.plan.save(home / f"{number:02d}.json")
        labels = {"seed": seed, "labels": [each.label for each in found]}
        (home / "labels.json").write_text(json.dumps(labels))
    if stage == "plan":
        return
    known = json.loads((home / "labels.json").read_text())
    files = [str(home / f"{number:02d}.json") for number in range(len(known["labels"]))]
    made = Path(profile) if profile else home / "profile.json"
    began = time.perf_counter()
    if stage != "judge":
        if not profile:
            launch(calibrated, processes)[0].save(made)
        passes = []
        for number in range(PASSES):
            click.echo(f"pass {number + 1} of {PASSES}", err=True)
            ranks = launch(timed, processes, files, number)
            passes.append([max(times) for times in zip(*ranks, strict=True)])
        (home / "passes.json").write_text(json.dumps(list(zip(*passes, strict=True))))
    passes = json.loads((home / "passes.json").read_text())
    prices = load(made)
    figures = {
        "environment": {**environment(), "torch": str(torch.__version__)},
        "processes": processes,
        "seed": known["seed"],
        "seconds": round(time.perf_counter() - began),
        **judged(known["labels"], [predicted(Plan.load(file), prices) for file in files], passes),
    }
    click.echo(json.dumps({k: v for k, v in figures.items() if k != "cases"}, indent=1))
    for case in sorted(figures["cases"], key=lambda case: case["predicted_seconds"]):
        ms = [f"{case[f'{what}_seconds'] * 1e3:8.1f}" for what in ("predicted", "measured")]
        click.echo(f"  predicted {ms[0]} ms, measured {ms[1]} ms: {case['plan']}")
    if out:
        Path(out).write_text(json.dumps(figures, indent=1) + "\n")
    assert not math.isnan(figures["kendall"])


if __name__ == "__main__":
    main()
