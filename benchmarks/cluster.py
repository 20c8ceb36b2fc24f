"""Step times on a small cluster with slow links, for real: our plan, DDP, and baselines.

Every rank has a network namespace of its own and one core's thread; `tc` limits the links between
them. The ranks are started by torchrun, one a namespace, as on several machines, calibrate the
cluster, plan for it, and take interleaved steps under every strategy. Needs root and iproute2.

    python benchmarks/cluster.py --ranks 2 --rate 200 --out benchmarks/results/cluster.json
    python benchmarks/cluster.py --report benchmarks/results/cluster.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from environment import environment
from slow_network.models import MODELS
from slow_network.network import (
    INTERFACE,
    MissingError,
    Topology,
    address,
    check,
    inside,
    network,
)
from slow_network.report import write_page

RANK = Path(__file__).parent / "slow_network" / "rank.py"
PORT = 29_500
LIMIT_SECONDS = 1_200


@click.command()
@click.option("--ranks", multiple=True, type=int, default=(2, 4), show_default=True)
@click.option(
    "--rate",
    multiple=True,
    type=float,
    default=(200.0, 1000.0),
    show_default=True,
    help="Of every rank's link, in Mbit/s.",
)
@click.option("--nodes", type=int, default=1, show_default=True, help="Two tiers where more.")
@click.option("--between", type=float, help="Mbit/s between nodes.")
@click.option("--model", "models", multiple=True, type=click.Choice(list(MODELS)))
@click.option("--rounds", type=int, default=9, show_default=True)
@click.option("--out", type=Path, help="Add the results to this JSON file.")
@click.option("--report", type=Path, help="Only write docs/results/cluster.md from this file.")
def main(
    ranks: tuple[int, ...],
    rate: tuple[float, ...],
    nodes: int,
    between: float | None,
    models: tuple[str, ...],
    rounds: int,
    out: Path | None,
    report: Path | None,
) -> None:
    """Measure every combination, one network after another."""
    if report is not None:
        write_page(json.loads(report.read_text()))
        return
    try:
        check()
    except MissingError as reason:
        click.echo(f"Not run: {reason}.", err=True)
        raise SystemExit(77) from None
    between_rate = None if between is None else between * 1e6
    for count in ranks:
        for each in rate:
            topology = Topology(count, each * 1e6, nodes, between_rate)
            found = measure(topology, models or tuple(MODELS), rounds)
            for line in summary(found):
                click.echo(line)
            if out is not None:
                add(out, found)


def measure(topology: Topology, models: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """What the ranks of a fresh network found."""
    with network(topology), tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        job = {"name": str(topology), "models": models, "rounds": rounds, "out": str(result)}
        given = Path(folder) / "job.json"
        given.write_text(json.dumps(job))
        started = [_start(rank, topology.ranks, given) for rank in range(topology.ranks)]
        codes = [process.wait(timeout=LIMIT_SECONDS) for process in started]
        if any(codes):
            raise SystemExit(f"The ranks ended with {codes}.")
        found = json.loads(result.read_text())
    return {
        "ranks": topology.ranks,
        "megabits": topology.rate / 1e6,
        "nodes": topology.nodes,
        "between_megabits": topology.between_rate and topology.between_rate / 1e6,
        "rounds": rounds,
        "environment": environment(),
        **found,
    }


def _start(rank: int, ranks: int, job: Path) -> subprocess.Popen[bytes]:
    """One node of torchrun, in its namespace; the first is where they meet."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"),
        *("--nnodes", str(ranks), "--local-addr", address(rank)),
        *("--rdzv-backend", "c10d", "--rdzv-id", "cluster"),
        *("--rdzv-endpoint", f"{address(0)}:{PORT}", "--rdzv-conf", f"is_host={int(rank == 0)}"),
        *(str(RANK), str(job)),
    ]
    chosen = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(inside(rank, command), env={**os.environ, **chosen})


def add(path: Path, found: dict[str, Any]) -> None:
    """Put results in the file, in place of earlier ones of the same network and models."""
    entries = json.loads(path.read_text()) if path.exists() else []
    key = ("ranks", "megabits", "nodes", "between_megabits")
    same = [e for e in entries if all(e[k] == found[k] for k in key)]
    for entry in same:
        found = {**found, "models": {**entry["models"], **found["models"]}}
    kept = [e for e in entries if e not in same]
    ordered = sorted([*kept, found], key=lambda e: (e["nodes"], e["megabits"], e["ranks"]))
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def summary(found: dict[str, Any]) -> list[str]:
    """A line a model and strategy."""
    lines = []
    for name, model in found["models"].items():
        lines.append(f"{name}, {found['ranks']} ranks, {found['megabits']:g} Mbit/s")
        base = model["median_seconds"]["torch DDP"]
        for method, seconds in model["median_seconds"].items():
            predicted = model["predicted_seconds"].get(method)
            said = "" if predicted is None else f"  predicted {predicted * 1e3:8.0f} ms"
            loss = " ".join(f"{each:.5f}" for each in model["losses"][method])
            lines.append(
                f"  {method:16} {seconds * 1e3:8.0f} ms {base / seconds:6.2f}x{said}  loss {loss}"
            )
    return lines


if __name__ == "__main__":
    main()
