"""Whether anything is ever faster than the plan, or its sum below the exact search's.

Compares all methods on each model and cluster, prints a row each, and stores it at once, in place
of an older row of the same case. Exits with 1 if any method, baseline or search, that fits in
memory has a shorter simulated step than the plan (where the plan does not fit: any method at all),
or if another search or strategy that fits has a lower sum than the exact search. (The plan itself
may: the exact search keeps a sum of bytes within the limit, the plan its simulated peak.)

    python benchmarks/compare.py                        # all models on all clusters
    python benchmarks/compare.py alexnet gpt2 --cluster 4x8x1080ti
    python benchmarks/compare.py --page                 # the page again, without measuring
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import compare_page
from environment import environment

CLUSTERS = ("8xa100", "4x8x1080ti", "4x8x2080ti", "8x8xh100", "32x8xh100")
OLD = ("1080ti", "2080ti")  # planned in the models' own fp32, as in the PaSE paper; others in bf16
LEAST = 1e-9  # relative: what rounding can explain
RESULTS = Path(__file__).parent / "results" / "compare.json"
Row = Mapping[str, Any]


def measure(name: str, cluster: str, moves: int, ilp_seconds: float) -> dict[str, Any]:
    """Compare all methods on one model and cluster."""
    import shardfold as sf
    from shardfold import zoo
    from shardfold.planner.compare_methods import Effort

    module, args, kwargs = zoo.build(name)
    dtype = None if cluster.endswith(OLD) else "bf16"
    effort = Effort(moves=moves, ilp_seconds=ilp_seconds)
    begin = time.perf_counter()
    asked = {
        "cluster": cluster,
        "dtype": dtype,
        "cost": "roofline",
        "micro_batches": 1,
        "prefer": "speed",
    }
    found = sf.compare(module, args, kwargs, effort=effort, **asked)
    seconds = time.perf_counter() - begin
    return {"model": name, **found.as_plain(), "cluster": cluster, "whole_seconds": seconds}


def better(row: Row) -> Iterator[str]:
    """Methods with a step shorter than the plan's, and sums below exact: there may be none."""
    by_name = {r["method"]: r for r in row["results"]}
    plan, exact = by_name["selected"], by_name["additive-optimum"]
    for name, result in by_name.items():
        if result["step_seconds"] is None:
            continue
        step = result["step_seconds"]
        if result["fits"] >= plan["fits"] and step < plan["step_seconds"] * (1 - LEAST):
            yield name
        total = result["additive_seconds"]  # pipelines have none
        is_below = total is not None and total < exact["additive_seconds"] * (1 - LEAST)
        if name != "selected" and result["fits"] and exact["fits"] and is_below:
            yield f"{name} (sum)"


def line(row: Row) -> str:
    """Simulated steps as multiples of the plan's; in brackets what does not fit in memory."""
    plan = row["results"][0]["step_seconds"]
    cells = []
    for result in row["results"][1:]:
        step = result["step_seconds"]
        ratio = "-" if step is None else f"{step / plan:.3f}"
        cells.append(f"{f'({ratio})' if result['fits'] is False else ratio:>9}")
    return f"{row['model']:16}{row['cluster']:12}{plan * 1e3:10.2f}" + "".join(cells)


def heading(row: Row) -> str:
    """The names of the columns, cut to their width."""
    names = "".join(f"{r['method'][:8]:>9}" for r in row["results"][1:])
    return f"{'model':16}{'cluster':12}{'plan ms':>10}{names}"


def store(path: Path, row: Row, effort: Mapping[str, float]) -> None:
    """Put a row in place of one of the same case, the others kept in the order of the zoo."""
    from shardfold import zoo

    before = json.loads(path.read_text()) if path.exists() else {}
    rows = {(r["model"], r["cluster"]): r for r in before.get("rows", ())}
    rows[row["model"], row["cluster"]] = row
    order, clusters = list(zoo.names()), [*CLUSTERS, *(cluster for _, cluster in rows)]
    ordered = sorted(rows, key=lambda case: (order.index(case[0]), clusters.index(case[1])))
    whole = {
        "environment": environment(),
        "prices": "simulated steps as step_seconds; costs without overlap as additive_seconds",
        "effort": effort,
        "rows": [rows[case] for case in ordered],
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--cluster", "clusters", multiple=True, default=CLUSTERS, show_default=True)
@click.option("--moves", default=250_000, show_default=True, help="Of mcmc.")
@click.option("--ilp-seconds", default=20.0, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS)
@click.option("--page", "only_page", is_flag=True, help="Write the page from the stored rows.")
def main(
    names: Sequence[str],
    clusters: Sequence[str],
    moves: int,
    ilp_seconds: float,
    out: Path,
    only_page: bool,
) -> None:
    """Compare on the models `names`, or on all full-size ones."""
    import torch

    from shardfold import zoo

    torch.set_num_threads(1)
    chosen = list(names) or [name for name in zoo.names() if not zoo.entry(name).is_tiny]
    effort = {"mcmc_moves": moves, "ilp_seconds": ilp_seconds}
    rows: list[dict[str, Any]] = []
    for name in () if only_page else chosen:
        for cluster in clusters:
            row = measure(name, cluster, moves, ilp_seconds)
            if not rows:
                print(heading(row))
            rows.append(row)
            store(out, row, effort)
            print(line(row), *better(row), flush=True)
    if out == RESULTS:
        compare_page.write(json.loads(out.read_text()))
    rows = json.loads(out.read_text())["rows"]
    wrong = [(r["model"], r["cluster"], *better(r)) for r in rows]
    wrong = [each for each in wrong if len(each) > 2]
    print(f"{len(rows)} comparisons, {len(wrong)} in which something is better {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
