"""Folded against not: the same cost for every model of the zoo, and how much less work it is.

Each model is planned twice in a process of its own, after a warm-up: as always, and with every
block traced and tabulated by itself (--no-fold). The memory limit is lifted, so that both answers
are proven to be the best; the costs on every mesh must agree to 1e-9. The page in docs/results is
written from the stored rows.

    python benchmarks/folding.py                   # every model: some minutes
    python benchmarks/folding.py gpt3-175b t5-large
    python benchmarks/folding.py --page            # the page alone
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from environment import environment

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "folding.json"
PAGE = ROOT / "docs" / "results" / "folding.md"
CLUSTER = "8xh100"
UNLIMITED = 1e18  # bytes
TOLERANCE = 1e-9
SHOWN = ("gpt3-175b", "t5-large", "mixtral-8x7b", "vit-large", "resnet101", "inceptionv3")


def measure(name: str, cluster: str) -> dict[str, Any]:
    """Plan one model both ways; runs in a process of its own."""
    import torch

    import shardfold as sf
    from shardfold import zoo

    torch.set_num_threads(1)
    sf.plan(*zoo.build("transformer-tiny"), cluster="2xh100")
    model, args, kwargs = zoo.build(name)
    seconds, costs, operators = [], [], 0
    for fold in (True, False):
        started = time.process_time()
        plan = sf.plan(
            model, args, kwargs, cluster=cluster, dtype="bf16", memory_limit=UNLIMITED, fold=fold
        )
        seconds.append(time.process_time() - started)
        costs.append({mesh.mesh: mesh.additive_seconds for mesh in plan.meshes})
        operators = plan.provenance.operators
    return {
        "model": name,
        "cluster": cluster,
        "operators": operators,
        **unique_operators(model, args, kwargs, cluster),
        "folded_seconds": seconds[0],
        "unfolded_seconds": seconds[1],
        "folded_costs": costs[0],
        "unfolded_costs": costs[1],
        "difference": max(abs(cost / costs[1][mesh] - 1) for mesh, cost in costs[0].items()),
    }


def unique_operators(model: Any, args: Any, kwargs: Any, cluster: str) -> dict[str, int]:
    """Operators that are traced, and those among them that have a table of their own."""
    from shardfold.capture import capture_short
    from shardfold.cluster import parse
    from shardfold.costs import optimizer_named, pricing_named, tabulate
    from shardfold.operators import rules_of
    from shardfold.sharding import find_subdims

    graph = capture_short(model, args, kwargs, dtype="bf16")
    target, pricing = parse(cluster), pricing_named("roofline")
    mesh = target.meshes()[0]
    subdims = find_subdims(graph, rules_of(graph, pricing.rules))
    tables = tabulate(graph, subdims, mesh, pricing.model(target, mesh), optimizer_named("adamw"))
    own = {
        id(cost)
        for vertex, cost in zip(tables.vertices, tables.problem.costs, strict=True)
        if vertex.what == "op"
    }
    return {"traced": len(graph.ops), "unique": len(own)}


def in_subprocess(name: str, cluster: str) -> dict[str, Any]:
    """Run `measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--child", name, "--cluster", cluster]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{name} on {cluster}: {done.stderr.strip()[-400:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def page(results: Mapping[str, Any]) -> str:
    """The rows as a page."""
    rows = {row["model"]: row for row in results["rows"]}
    made = results["environment"]
    worst = max(row["difference"] for row in rows.values())
    lines = [
        "# Folded against not",
        "",
        "Written by `python benchmarks/folding.py --page` from `benchmarks/results/folding.json`.",
        f"{made['processor']}, one thread, {made['date']}; cluster `{results['cluster']}`, memory "
        "limit lifted. Times are processor seconds of one `plan()` each, from the `nn.Module` "
        "on.",
        "",
        f"`--no-fold` gives the same cost on every mesh for all {len(rows)} models of the zoo that "
        f"are listed here: the largest relative difference is {worst:.1e}.",
        "",
        "*Unique* are operators with a cost table of their own; *traced* are those that stand for "
        "all others in the graph that is searched.",
        "",
        "| model | operators | traced | unique | folded | not folded | |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(_line(rows[name]) for name in SHOWN if name in rows),
        "",
        "The others:",
        "",
        "| model | operators | traced | unique | folded | not folded | |",
        "|---|--:|--:|--:|--:|--:|--:|",
        *(_line(row) for name, row in rows.items() if name not in SHOWN),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    folded, full = row["folded_seconds"], row["unfolded_seconds"]
    return (
        f"| {row['model']} | {row['operators']:,} | {row['traced']:,} | {row['unique']:,} "
        f"| {folded:.1f} s | {full:.1f} s | {full / folded:.1f}x |"
    )


def _stored(rows: Sequence[Mapping[str, Any]], cluster: str) -> dict[str, Any]:
    """The new rows in place of those of the same models, the others kept."""
    known: dict[str, Any] = {}
    if RESULTS.exists():
        before = json.loads(RESULTS.read_text())
        if before["cluster"] == cluster:
            known = {row["model"]: row for row in before["rows"]}
    known.update({row["model"]: row for row in rows})
    return {"environment": environment(), "cluster": cluster, "rows": list(known.values())}


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--cluster", default=CLUSTER, show_default=True)
@click.option("--page", "write", is_flag=True, help="Write the page from the stored rows.")
@click.option("--child", is_flag=True, hidden=True)
def main(names: tuple[str, ...], cluster: str, write: bool, child: bool) -> None:
    """Measure the models `names`, or every one, and store their rows."""
    if child:
        print(json.dumps(measure(names[0], cluster)))
        return
    from shardfold import zoo

    rows = []
    for name in () if write else names or zoo.names():
        row = in_subprocess(name, cluster)
        rows.append(row)
        print(f"{_line(row)} {row['difference']:.1e}", flush=True)
        RESULTS.write_text(json.dumps(_stored(rows, cluster), indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
    wrong = [row["model"] for row in rows if row["difference"] > TOLERANCE]
    if wrong:
        raise click.ClickException(f"Folded and not folded differ: {', '.join(wrong)}.")


if __name__ == "__main__":
    main()
