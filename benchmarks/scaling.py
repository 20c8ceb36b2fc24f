"""How planning time and memory grow with depth, and the time of Llama-3 8B as the zoo has it.

Plans Llama-3 (8B dims) with a growing number of layers in one process, after a warm-up, and
prints seconds for capture, search and the whole of plan(), with ratios to two layers: the fastest
of a few, as the machine's other work only ever adds. The memory limit is lifted, so that all
depths answer the same question. Memory is the peak of a process of its own that imports, builds
the model and plans once (VmHWM), with the ratio to two layers. One more row plans the zoo's
Llama-3 8B, with its own batch and within the memory of the device.

    python benchmarks/scaling.py --out benchmarks/results/scaling.json
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from environment import environment

LAYERS = (2, 32, 126, 1000)
UNLIMITED = 1e18  # bytes
SMALL = {"batch": 8, "seq": 1024}
Row = dict[str, Any]


def measure(
    layers: int | None, cluster: str, limit: float | None, sizes: dict[str, int], repeats: int
) -> Row:
    """The fastest of a few plans of one depth; None: as deep as the zoo has it."""
    import shardfold as sf
    from shardfold import zoo

    depth = {} if layers is None else {"layers": layers}
    model, args, kwargs = zoo.build("llama3-8b", **depth, **sizes)
    best: Row = {}
    for _ in range(repeats):
        started, used = time.perf_counter(), time.process_time()
        plan = sf.plan(model, args, kwargs, cluster=cluster, dtype="bf16", memory_limit=limit)
        seconds, used = time.perf_counter() - started, time.process_time() - used
        if not best or used < best["processor_seconds"]:
            best = {
                "layers": layers or 32,
                "seconds": seconds,
                "processor_seconds": used,
                "capture_seconds": plan.provenance.capture_seconds,
                "search_seconds": plan.provenance.search_seconds,
                "additive_seconds": plan.estimate.additive_seconds,
                "optimal": plan.estimate.optimal,
                "operators": plan.provenance.operators,
                "meshes": [mesh.mesh for mesh in plan.meshes],
            }
    return best


def peak_bytes(layers: int, cluster: str) -> int:
    """The peak memory of a process that plans one depth once."""
    command = [sys.executable, __file__, "--child", str(layers), "--cluster", cluster]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{layers} layers: {done.stderr.strip()[-400:]}")
    return int(done.stdout.splitlines()[-1])


def high_water() -> int:
    """The most memory that this process has had; not that of the one that started it."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def as_line(row: Row, first: Row) -> str:
    """One row of the table."""
    memory, before = row.get("peak_bytes"), first.get("peak_bytes")
    peak = f"  {memory / 2**30:.2f} GiB {memory / before:5.2f}x" if memory and before else ""
    return (
        f"{row['layers']:6.0f}  {row['operators']:9.0f}  {row['capture_seconds']:6.2f}s  "
        f"{row['search_seconds']:6.2f}s  {row['seconds']:7.2f}s  "
        f"{row['seconds'] / first['seconds']:5.2f}x  {row['processor_seconds']:7.2f}s  "
        f"{row['processor_seconds'] / first['processor_seconds']:5.2f}x{peak}"
    )


@click.command(help=__doc__)
@click.option("--cluster", default="8x8xh100", show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False), help="Write the rows as JSON.")
@click.option("--child", type=int, hidden=True)
def main(cluster: str, repeats: int, out: str | None, child: int | None) -> None:
    """Measure every depth, and print one row each."""
    import torch

    torch.set_num_threads(1)
    measure(child or 2, cluster, UNLIMITED, SMALL, 1)
    if child:
        print(high_water())
        return
    made = environment()
    print(json.dumps(made))
    rows = [measure(layers, cluster, UNLIMITED, SMALL, repeats) for layers in LAYERS]
    for row in rows:
        row["peak_bytes"] = peak_bytes(row["layers"], cluster)
    print("layers  operators  capture   search    plan()   ratio  processor  ratio  peak     ratio")
    for row in rows:
        print(as_line(row, rows[0]))
    zoo_row = measure(None, cluster, None, {}, repeats)
    print("Llama-3 8B of the zoo, its own batch, within the device's memory:")
    print(as_line(zoo_row, zoo_row))
    if out:
        found = {"environment": made, "cluster": cluster, "rows": rows, "zoo": zoo_row}
        Path(out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
