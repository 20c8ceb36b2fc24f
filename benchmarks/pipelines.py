"""Whether the plan with stages is ever slower than one without, or than a pipeline of equal layers.

Plans each model on each cluster without stages and with `--pipeline auto`, at `--prefer speed`,
finds the best pipelines of equal layers of every schedule, prints a row, and stores it at once, in
place of an older row of the same case. A step has the zoo's batch, or one sample for two devices
where that is more. Exits with 1 if anything that fits is faster than the plan.

    python benchmarks/pipelines.py                          # seven models on six clusters
    python benchmarks/pipelines.py llama3-70b --cluster benchmarks/ethernet.toml
    python benchmarks/pipelines.py --page                   # the page again
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from environment import environment

MODELS = (
    "llama3-70b",
    "llama3-405b",
    "gpt3-175b",
    "t5-large",
    "bert-large",
    "mixtral-8x7b",
    "resnet50-wide",
)
FOLDER = Path(__file__).resolve().parent
ETHERNET = str(FOLDER / "ethernet.toml")
CLUSTERS = ("8x8xa100", "32x8xh100", "64x8xh100", "512x8xh100", "4x8x1080ti", ETHERNET)
RESULTS = FOLDER / "results" / "pipelines.json"
PAGE = FOLDER.parent / "docs" / "results" / "pipelines.md"
SCHEDULES = ("gpipe", "1f1b", "interleaved")
ROUNDING = 1e-9
Row = Mapping[str, Any]
Found = dict[str, Any]


def measure(name: str, cluster: str) -> Found:
    """Plan one model on one cluster both ways, and find the baselines."""
    from shardfold import zoo
    from shardfold.api import Planner
    from shardfold.cluster import parse

    target = parse(cluster)
    batch = max(zoo.entry(name).batch, target.size // 2)
    module, args, kwargs = zoo.build(name, batch=batch)
    dtype = None if cluster.endswith("1080ti") else "bf16"
    options: Any = {"cluster": target, "dtype": dtype, "prefer": "speed"}

    def planned(pipeline: str) -> tuple[Any, float]:
        # Captured anew, so that both ways pay for what they ask for.
        planner = Planner(module, args, kwargs, **options)
        return _timed(lambda: planner.plan(pipeline=pipeline))

    off, off_seconds = planned("off")
    auto, auto_seconds = planned("auto")
    planner = Planner(module, args, kwargs, **options)
    equal = planner.compare(methods=SCHEDULES, pipeline="off")
    entry = auto.pipeline
    return {
        "model": name,
        "batch": batch,
        "cluster": target.name,
        "step_seconds": auto.estimate.step_seconds,
        "fits": auto.fits,
        "mesh": "x".join(str(axis.size) for axis in auto.mesh),
        "micro_batches": auto.micro_batches,
        "stages": 1 if entry is None else entry.parts,
        "schedule": None if entry is None else entry.schedule,
        "chunks": 1 if entry is None else entry.chunks,
        "bubble": 0.0 if entry is None else entry.bubble,
        "mfu": auto.simulation.mfu,
        "peak_bytes": auto.estimate.peak_bytes,
        "bound_seconds": auto.estimate.pipeline_lower_bound_seconds,
        "without_seconds": off.estimate.step_seconds,
        "without_fits": off.fits,
        "without_micro_batches": off.micro_batches,
        "equal": {
            each.method: {
                "step_seconds": each.step_seconds,
                "fits": each.fits,
                "stage": each.mesh,
                "note": each.note,
            }
            for each in equal.results
        },
        "off_cpu_seconds": off_seconds,
        "auto_cpu_seconds": auto_seconds,
    }


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.process_time()
    found = work()
    return found, time.process_time() - begin


def rivals(row: Row) -> Iterator[tuple[str, float]]:
    """What fits beside the plan, or, where the plan does not, whatever there is."""
    if row["without_fits"] >= row["fits"]:
        yield "without stages", row["without_seconds"]
    for schedule, each in row["equal"].items():
        if each["step_seconds"] is not None and each["fits"] >= row["fits"]:
            yield schedule, each["step_seconds"]


def faster(row: Row) -> list[str]:
    """What is faster than the plan: there may be nothing."""
    return [n for n, step in rivals(row) if step < row["step_seconds"] * (1 - ROUNDING)]


def store(path: Path, row: Row) -> None:
    """Put a row in place of one of the same case."""
    before = json.loads(path.read_text()) if path.exists() else {}
    rows = {(r["model"], r["cluster"]): r for r in before.get("rows", ())}
    rows[row["model"], row["cluster"]] = row
    ordered = [rows[case] for case in sorted(rows)]
    path.write_text(json.dumps({"environment": environment(), "rows": ordered}, indent=1) + "\n")


def page(whole: Mapping[str, Any]) -> str:
    """All cases, what won, and by how much."""
    rows, at = whole["rows"], whole["environment"]
    won = [row for row in rows if row["stages"] > 1]
    slower = [row for row in rows if faster(row)]
    ratios = sorted(row["auto_cpu_seconds"] / row["off_cpu_seconds"] for row in rows)
    lines = [
        "# Plans with pipeline stages beside plans without, and beside equal layers",
        f"Written by `python benchmarks/pipelines.py` on {at['date']}; Python {at['python']}. Each "
        "model is planned without stages and with `--pipeline auto`, at `--prefer speed`; bf16, "
        "and fp32 on 1080 Ti. The batch is the zoo's, or one sample for two devices where that is "
        "more. *Equal layers* are the pipelines that `compare` knows: every number of stages and "
        "micro-batches with the splits of every baseline; the fastest that fits is shown, and all "
        "figures are [simulated](../explanation/pipeline.md). `8x8xa100-ethernet` has 25 Gbit/s "
        "between its nodes (`benchmarks/ethernet.toml`).",
        f"{len(rows)} cases, all that were measured of {len(MODELS)} models on {len(CLUSTERS)} "
        f"clusters: in {len(won)} the plan has stages; in {len(slower)} something that fits is "
        f"faster than the plan. `--pipeline auto` takes {ratios[0]:.1f} to {ratios[-1]:.1f} times "
        f"the processor time of planning without (median {ratios[len(ratios) // 2]:.1f}), capture "
        "included.",
        *([whole["note"]] if "note" in whole else []),
        "*Over without*, *over equal*: the step of the best plan without stages, and of the best "
        "pipeline of equal layers, as multiples of the plan's. *At most*: no other pipeline that "
        "is searched can be faster than the plan by more. *Search*: processor time without stages, "
        "and what looking for them adds.",
        "\n".join(_table(rows)),
    ]
    return "\n\n".join(lines) + "\n"


HEAD = (
    "model",
    "batch",
    "cluster",
    "plan",
    "step",
    "bubble",
    "MFU",
    "fullest",
    "over without",
    "over equal",
    "at most",
    "search",
)


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {' | '.join(HEAD)} |"
    yield f"|---|---:|---|---|{'---:|' * (len(HEAD) - 4)}"
    for row in rows:
        cells = (
            row["model"],
            row["batch"],
            row["cluster"],
            _plan(row),
            f"{row['step_seconds'] * 1e3:,.1f} ms",
            f"{row['bubble']:.1%}" if row["stages"] > 1 else "",
            f"{row['mfu']:.1%}",
            f"{row['peak_bytes'] / 2**30:.1f} GiB" + ("" if row["fits"] else ", does not fit"),
            _over_without(row),
            _over_equal(row),
            _at_most(row),
            f"{row['off_cpu_seconds']:.1f} + "
            f"{row['auto_cpu_seconds'] - row['off_cpu_seconds']:.1f} s",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def _plan(row: Row) -> str:
    passes = f", {row['micro_batches']} micro-batches" if row["micro_batches"] > 1 else ""
    if row["stages"] == 1:
        return f"{row['mesh']}, no stages{passes}"
    chunks = f" x {row['chunks']}" if row["chunks"] > 1 else ""
    return f"{row['stages']} stages of {row['mesh'] or 1}, {row['schedule']}{chunks}{passes}"


def _over_without(row: Row) -> str:
    if row["fits"] and not row["without_fits"]:
        return "does not fit"
    return f"{row['without_seconds'] / row['step_seconds']:.3f}"


def _over_equal(row: Row) -> str:
    equal = {n: each for n, each in row["equal"].items() if each["step_seconds"] is not None}
    if not equal:
        return "no layers"
    fitting = {n: each for n, each in equal.items() if each["fits"]}
    if not fitting and row["fits"]:
        return "none fits"
    best = min((fitting or equal).items(), key=lambda each: each[1]["step_seconds"])
    return f"{best[1]['step_seconds'] / row['step_seconds']:.3f} ({best[0]})"


def _at_most(row: Row) -> str:
    if row["bound_seconds"] is None:
        return ""
    return f"{max(0.0, 1 - row['bound_seconds'] / row['step_seconds']):.1%}"


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--cluster", "clusters", multiple=True, default=CLUSTERS, show_default=True)
@click.option("--page", "only_page", is_flag=True, help="Write the page from the stored rows.")
def main(names: Sequence[str], clusters: Sequence[str], only_page: bool) -> None:
    """Measure the models `names`, or all of the page."""
    import torch

    torch.set_num_threads(1)
    cases = [(n, c) for n in names or MODELS for c in clusters] if not only_page else []
    for name, cluster in cases:
        row = measure(name, cluster)
        store(RESULTS, row)
        print(list(_table([row]))[-1], flush=True)
    whole = json.loads(RESULTS.read_text())
    PAGE.write_text(page(whole))
    for row in whole["rows"]:
        for each in faster(row):
            print(f"{row['model']} on {row['cluster']}: {each} is faster than the plan.")
    raise SystemExit(any(faster(row) for row in whole["rows"]))


if __name__ == "__main__":
    main()
