"""Plans of every zoo model: how fast, and in how much memory.

Plans each full-size model on each cluster in a process of its own and prints one row: seconds to
capture and to search, peak memory of the process, step time against the baselines, and the most
that any unsplit operator costs.

    python benchmarks/zoo.py --out benchmarks/results/zoo.json
    python benchmarks/zoo.py llama3-405b --cluster 8x8xh100
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from environment import environment

CLUSTERS = ("8xa100", "8x8xh100")


def measure(name: str, cluster: str) -> dict[str, Any]:
    """Plan one model; runs in a process of its own so that its peak memory is its own."""
    import torch

    import shardfold as sf
    from shardfold import zoo

    torch.set_num_threads(1)
    model, args, kwargs = zoo.build(name)
    plan = sf.plan(model, args, kwargs, cluster=cluster, dtype="bf16")
    estimate, made = plan.estimate, plan.provenance
    return {
        "model": name,
        "cluster": cluster,
        "operators": made.operators,
        "parameters": made.parameters,
        "capture_seconds": made.capture_seconds,
        "search_seconds": made.search_seconds,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "mesh": "x".join(str(axis.size) for axis in plan.mesh),
        "optimal": estimate.optimal,
        "step_seconds": estimate.step_seconds,
        "additive_seconds": estimate.additive_seconds,
        "data_parallel_seconds": estimate.data_parallel_seconds,
        "fully_sharded_seconds": estimate.fully_sharded_seconds,
        "peak_bytes": estimate.peak_bytes,
        "fits": plan.fits,
        "largest_unsplit_share": max((u.share for u in plan.unsplit), default=0.0),
        "without_rule": sorted({u.kind for u in plan.unsplit if u.reason == "no rule"}),
    }


def in_subprocess(name: str, cluster: str) -> dict[str, Any]:
    """Run `measure` in a fresh interpreter."""
    command = [sys.executable, __file__, "--child", name, "--cluster", cluster]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{name} on {cluster}: {done.stderr.strip()[-400:]}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def as_line(row: dict[str, Any]) -> str:
    """One row of the table."""
    step = row["step_seconds"]
    return (
        f"{row['model']:14} {row['cluster']:9} {row['capture_seconds']:6.1f}s "
        f"{row['search_seconds']:6.1f}s {row['process_bytes'] / 2**30:5.2f} {step * 1e3:8.2f} "
        f"{row['data_parallel_seconds'] / step:6.2f}x {row['fully_sharded_seconds'] / step:6.2f}x "
        f"{row['largest_unsplit_share']:7.2%}{'' if row['fits'] else '  does not fit'}"
    )


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--cluster", "clusters", multiple=True, default=CLUSTERS, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False), help="Write the rows as JSON.")
@click.option("--child", is_flag=True, hidden=True)
def main(names: tuple[str, ...], clusters: tuple[str, ...], out: str | None, child: bool) -> None:
    """Measure the models `names`, or all full-size ones."""
    if child:
        print(json.dumps(measure(names[0], clusters[0])))
        return
    from shardfold import zoo

    chosen = names or [name for name in zoo.names() if not zoo.entry(name).is_tiny]
    rows = []
    print(f"{'model':14} {'cluster':9} capture  search   GiB  step ms   vs DP  vs FSDP  unsplit")
    for name in chosen:
        for cluster in clusters:
            row = in_subprocess(name, cluster)
            rows.append(row)
            print(as_line(row), flush=True)
    if out:
        found = {"environment": environment(), "rows": rows}
        Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
