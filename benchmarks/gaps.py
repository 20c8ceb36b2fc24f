"""How near the plan's step is to the proven bound on every plan's step.

Plans each model of the zoo on each cluster, at `--prefer speed`, prints a row each, and stores it
at once, in place of an older row of the same case. `NAME@BATCH` plans with another batch.

    python benchmarks/gaps.py                                   # the 90 cases of compare.py
    python benchmarks/gaps.py llama3-70b@256 --cluster 32x8xh100 --cost kernels
    python benchmarks/gaps.py --page                            # the page again
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click

from environment import environment

CLUSTERS = ("8xa100", "4x8x1080ti", "4x8x2080ti", "8x8xh100", "32x8xh100")
OLD = ("1080ti", "2080ti")  # planned in the models' own fp32; others in bf16
FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "gaps.json"
PAGE = FOLDER.parent / "docs" / "results" / "gaps.md"
WIDE = 0.15
Row = Mapping[str, Any]


def measure(name: str, cluster: str, cost: str) -> dict[str, Any]:
    """Plan one model on one cluster."""
    import shardfold as sf
    from shardfold import zoo

    model, _, batch = name.partition("@")
    built = zoo.build(model, batch=int(batch) if batch else None)
    dtype = None if cluster.endswith(OLD) else "bf16"
    begin = time.process_time()
    asked = {"dtype": dtype, "cost": cost, "micro_batches": 1, "pipeline": "off", "prefer": "speed"}
    plan = sf.plan(*built, cluster=cluster, **asked)
    found = plan.estimate
    return {
        "model": name,
        "cluster": cluster,
        "cost": cost,
        "step_seconds": found.step_seconds,
        "bound_seconds": found.step_lower_bound_seconds,
        "fits": plan.fits,
        "recomputes": bool(plan.recompute),
        "peak_share": found.peak_bytes / found.limit_bytes,
        "cpu_seconds": time.process_time() - begin,
    }


def gap(row: Row) -> float:
    """How much shorter than the plan's step another could be at most."""
    return 1.0 - float(row["bound_seconds"]) / float(row["step_seconds"])


def store(path: Path, row: Row) -> None:
    """Put a row in place of one of the same case."""
    before = json.loads(path.read_text()) if path.exists() else {}
    rows = {(r["model"], r["cluster"], r["cost"]): r for r in before.get("rows", ())}
    rows[row["model"], row["cluster"], row["cost"]] = row
    ordered = [rows[case] for case in sorted(rows)]
    path.write_text(json.dumps({"environment": environment(), "rows": ordered}, indent=1) + "\n")


def page(whole: Mapping[str, Any]) -> str:
    """All cases, and how wide the gaps are."""
    rows, at = whole["rows"], whole["environment"]
    fitting = [gap(row) for row in rows if row["fits"]]
    third = quantiles(fitting, n=4)[2] if len(fitting) > 1 else fitting[0]
    lines = [
        "# How near plans are to the proven bound",
        f"Written by `python benchmarks/gaps.py` on {at['date']}; Python {at['python']}. "
        "The *gap* is how much shorter than the plan's simulated step any other plan's can be, at "
        "most: see [the proof](../explanation/proof.md). Models of the zoo in their full size (or "
        "with the batch after `@`), one micro-batch, no stages, `--prefer speed`; bf16, and fp32 "
        "on 1080 Ti and 2080 Ti.",
        f"{len(rows)} cases, of which {len(fitting)} fit in memory: median gap "
        f"{median(fitting):.1%}, three quarters at most {third:.1%}, widest {max(fitting):.1%}; "
        f"{sum(each > WIDE for each in fitting)} above {WIDE:.0%}.",
        "The widest gaps are where links are slow beside little work (2080 Ti). Which of the two, "
        "plan or bound, is how far from the best is not known there.",
        "\n".join(_table(rows)),
    ]
    return "\n\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    head = "| model | cluster | prices | step | gap | memory | |"
    found = [head, "|---|---|---|---:|---:|---:|---|"]
    for row in rows:
        how = "recomputes" if row["recomputes"] else ""
        found.append(
            f"| {row['model']} | {row['cluster']} | {row['cost']} | "
            f"{row['step_seconds'] * 1e3:,.1f} ms | {gap(row):.1%} | "
            f"{row['peak_share']:.0%} | {how if row['fits'] else 'does not fit'} |"
        )
    return found


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--cluster", "clusters", multiple=True, default=CLUSTERS, show_default=True)
@click.option("--cost", default="roofline", show_default=True)
@click.option("--page", "only_page", is_flag=True, help="Write the page from the stored rows.")
def main(names: Sequence[str], clusters: Sequence[str], cost: str, only_page: bool) -> None:
    """Measure the models `names`, or all full-size ones."""
    import torch

    from shardfold import zoo

    torch.set_num_threads(1)
    chosen = list(names) or [name for name in zoo.names() if not zoo.entry(name).is_tiny]
    for name in () if only_page else chosen:
        for cluster in clusters:
            row = measure(name, cluster, cost)
            store(RESULTS, row)
            print(f"{name:18}{cluster:12}{row['step_seconds'] * 1e3:12.2f} ms{gap(row):8.2%}")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
