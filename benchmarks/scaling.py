"""How planning time and memory grow with depth: folded, and for proof unfolded.

Plans Llama-3 (8B dims) with a growing number of layers in one process, after a warm-up, and
prints seconds for capture, search and the whole of plan(), with ratios to two layers. The memory
limit is lifted, so that all depths answer the same question; --limit measures with it as well.

    python benchmarks/scaling.py --out benchmarks/results/scaling.json
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import click

from environment import environment

LAYERS = (2, 32, 126, 1000)
UNLIMITED = 1e18  # bytes


def measure(layers: int, cluster: str, limit: float | None, repeats: int) -> dict[str, float]:
    """The fastest of a few plans of one depth: the machine's other work only ever adds."""
    import shardfold as sf
    from shardfold import zoo

    model, args, kwargs = zoo.build("llama3-8b", layers=layers, batch=8, seq=1024)
    best: dict[str, float] = {}
    for _ in range(repeats):
        started = time.perf_counter()
        plan = sf.plan(model, args, kwargs, cluster=cluster, dtype="bf16", memory_limit=limit)
        seconds = time.perf_counter() - started
        if not best or seconds < best["seconds"]:
            best = {
                "layers": layers,
                "seconds": seconds,
                "capture_seconds": plan.provenance.capture_seconds,
                "search_seconds": plan.provenance.search_seconds,
                "step_seconds": plan.estimate.step_seconds,
                "optimal": plan.estimate.optimal,
                "operators": plan.provenance.operators,
            }
    best["process_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return best


@click.command(help=__doc__)
@click.option("--cluster", default="8x8xh100", show_default=True)
@click.option("--limit", is_flag=True, help="Within the device's memory.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False), help="Write the rows as JSON.")
def main(cluster: str, limit: bool, repeats: int, out: str | None) -> None:
    """Measure every depth, and print one row each."""
    import torch

    torch.set_num_threads(1)
    given = None if limit else UNLIMITED
    measure(2, cluster, given, 1)
    rows = [measure(layers, cluster, given, repeats) for layers in LAYERS]
    first = rows[0]["seconds"]
    print(json.dumps(environment()))
    print("layers  operators  capture   search    plan()   ratio    peak")
    for row in rows:
        print(
            f"{row['layers']:6.0f}  {row['operators']:9.0f}  {row['capture_seconds']:6.2f}s  "
            f"{row['search_seconds']:6.2f}s  {row['seconds']:7.2f}s  "
            f"{row['seconds'] / first:5.2f}x  {row['process_bytes'] / 2**30:.2f} GiB"
        )
    if out:
        found = {"environment": environment(), "cluster": cluster, "limit": limit, "rows": rows}
        Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
