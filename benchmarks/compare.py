"""Whether the plan is ever slower than a strategy by hand, or its search's sum above another's.

Compares all methods on each model and cluster, prints a row each, and exits with 1 if a strategy
by hand that fits in memory has a shorter simulated step than the plan, or if any choice that fits
has a lower sum than the exact search.

    python benchmarks/compare.py --out benchmarks/results/compare.json
    python benchmarks/compare.py alexnet gpt2 --cluster 4x8x1080ti
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from environment import environment

CLUSTERS = ("8xa100", "4x8x1080ti", "4x8x2080ti", "8x8xh100", "32x8xh100")
OLD = ("1080ti", "2080ti")  # planned in the models' own fp32, as in the PaSE paper; others in bf16
LEAST = 1e-9  # relative: what rounding can explain


def measure(name: str, cluster: str, moves: int, ilp_seconds: float) -> dict[str, Any]:
    """Compare all methods on one model and cluster."""
    import shardfold as sf
    from shardfold import zoo
    from shardfold.plans.contest import Effort

    module, args, kwargs = zoo.build(name)
    dtype = None if cluster.endswith(OLD) else "bf16"
    effort = Effort(moves=moves, ilp_seconds=ilp_seconds)
    begin = time.perf_counter()
    found = sf.compare(module, args, kwargs, cluster=cluster, dtype=dtype, effort=effort)
    return {"model": name, **found.as_plain(), "whole_seconds": time.perf_counter() - begin}


def better(row: Mapping[str, Any]) -> Iterator[str]:
    """Strategies that fit with a step shorter than the plan's, sums below exact: none may be."""
    from shardfold.plans.strategies import STRATEGIES

    by_name = {r["method"]: r for r in row["results"]}
    plan, exact = by_name["plan"], by_name["exact"]
    for name, result in by_name.items():
        if not result["fits"]:
            continue
        if exact["fits"] and result["step_seconds"] < exact["step_seconds"] * (1 - LEAST):
            yield f"{name} (sum)"
        step = result["simulated_seconds"]
        if name in (*STRATEGIES, "exact") and step < plan["simulated_seconds"] * (1 - LEAST):
            yield name


def line(row: Mapping[str, Any]) -> str:
    """Simulated steps as multiples of the plan's; in brackets what does not fit in memory."""
    plan = row["results"][0]["simulated_seconds"]
    cells = []
    for result in row["results"][1:]:
        step = result["simulated_seconds"]
        ratio = "-" if step is None else f"{step / plan:.3f}"
        cells.append(f"{f'({ratio})' if result['fits'] is False else ratio:>9}")
    return f"{row['model']:16}{row['cluster']:12}{plan * 1e3:10.2f}" + "".join(cells)


def heading(row: Mapping[str, Any]) -> str:
    """The names of the columns, cut to their width."""
    names = "".join(f"{r['method'][:8]:>9}" for r in row["results"][1:])
    return f"{'model':16}{'cluster':12}{'plan ms':>10}{names}"


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--cluster", "clusters", multiple=True, default=CLUSTERS, show_default=True)
@click.option("--moves", default=50_000, show_default=True, help="Of mcmc.")
@click.option("--ilp-seconds", default=30.0, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False), help="Write the rows as JSON.")
def main(
    names: Sequence[str], clusters: Sequence[str], moves: int, ilp_seconds: float, out: str | None
) -> None:
    """Compare on the models `names`, or on all full-size ones."""
    import torch

    from shardfold import zoo

    torch.set_num_threads(1)
    where = environment()
    chosen = list(names) or [name for name in zoo.names() if not zoo.entry(name).is_tiny]
    rows: list[dict[str, Any]] = []
    for name in chosen:
        for cluster in clusters:
            row = measure(name, cluster, moves, ilp_seconds)
            if not rows:
                print(heading(row))
            rows.append(row)
            print(line(row), flush=True)
    if out:
        whole = {
            "environment": where,
            "models": chosen,
            "clusters": list(clusters),
            "prices": "simulated steps; sums without overlap as step_seconds",
            "effort": {"mcmc_moves": moves, "ilp_seconds": ilp_seconds},
            "rows": rows,
        }
        Path(out).write_text(json.dumps(whole, indent=1) + "\n")
    wrong = [(r["model"], r["cluster"], *better(r)) for r in rows]
    wrong = [each for each in wrong if len(each) > 2]
    print(f"{len(rows)} comparisons, {len(wrong)} in which something is better {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
