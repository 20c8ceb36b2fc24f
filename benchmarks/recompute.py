"""Steps against memory limits: recomputation operator by operator, and the ways that people know.

For each model, at limits between the smallest plan and none: the step of the plan with `recompute`
auto, never, always (every block in full), attention (its core, as Megatron-LM does it) and products
(all but attention and every second product, as torchtitan does it).

    python benchmarks/recompute.py [--points 8] [MODEL ...]      into results/recompute.json
    python benchmarks/recompute.py --page                        docs/results/recompute.md
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import shardfold as sf
from shardfold import zoo
from shardfold.errors import InfeasibleError, InputError

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "recompute.json"
PAGE = HERE.parent / "docs" / "results" / "recompute.md"
WAYS = ("auto", "never", "attention", "products", "always")
CASES: dict[str, dict[str, Any]] = {
    "llama3-8b": {"cluster": "8xh100", "dtype": "bf16", "micro_batches": 4},
    "gpt3-175b": {"cluster": "32x8xh100", "dtype": "bf16", "micro_batches": 1},
    "bert-large": {"cluster": "4xa100", "dtype": "bf16", "micro_batches": 1},
    "vit-large": {"cluster": "4xa100", "dtype": "bf16", "micro_batches": 1},
    "t5-large": {"cluster": "4xa100", "dtype": "bf16", "micro_batches": 1},
    "resnet50": {"cluster": "4xa100", "dtype": "bf16", "micro_batches": 1},
    "mixtral-8x7b": {"cluster": "4x8xh100", "dtype": "bf16", "micro_batches": 1},
}
MARGIN = 1.01  # of the smallest plan: at the very edge only one plan fits
TIE = 1.001  # steps so close are equal
GIB = 2.0**30


def measure(name: str, points: int) -> dict[str, Any]:
    """One model, at limits in equal ratios."""
    options = CASES[name]
    module, args, kwargs = zoo.build(name)
    planner = sf.Planner(module, args, kwargs)
    free = planner.plan(**options, memory_limit=1e15).estimate
    smallest, most = smallest_bytes(planner, options) * MARGIN, free.peak_bytes
    rows = []
    for point in range(points):
        limit = smallest * (most / smallest) ** (point / max(points - 1, 1))
        row: dict[str, Any] = {"limit_bytes": limit}
        for way in WAYS:
            begin = time.process_time()
            row[way] = step_seconds(planner, {**options, "recompute": way, "memory_limit": limit})
            row[f"{way}_planning_seconds"] = time.process_time() - begin
        print(name, json.dumps(row), flush=True)
        rows.append(row)
    return {"model": name, **options, "free_seconds": free.step_seconds, "rows": rows}


def smallest_bytes(planner: sf.Planner, options: dict[str, Any]) -> float:
    """What a refusal says is needed."""
    try:
        planner.plan(**options, memory_limit=1.0)
    except InfeasibleError as error:
        return error.needed_bytes
    raise AssertionError("Nothing fits in a byte.")


def step_seconds(planner: sf.Planner, options: dict[str, Any]) -> float | None:
    """The step, if the plan fits."""
    try:
        return float(planner.plan(**options).estimate.step_seconds)
    except (InfeasibleError, InputError):
        return None


def page(found: list[dict[str, Any]]) -> str:
    """The table of every model, in words and figures."""
    lines = [
        "# Steps against memory limits",
        "",
        "The simulated step under each way to recompute, at limits in equal ratios from the",
        "smallest plan (and 1%) to the fastest without a limit; the splits are searched for each.",
        "A dash: nothing fits. Made by `benchmarks/recompute.py`.",
        "See [recomputation](../explanation/recomputation.md).",
        "",
    ]
    for each in found:
        lines += [
            f"## {each['model']} on {each['cluster']}, {each['micro_batches']} micro-batches",
            "",
            "| limit | auto | never | attention | products | always | best other / auto |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in each["rows"]:
            others = [row[way] for way in WAYS[1:] if row[way] is not None]
            ratio = f"{min(others) / row['auto']:.3f}" if others and row["auto"] else "only auto"
            cells = " | ".join("-" if row[w] is None else f"{row[w]:.4g} s" for w in WAYS)
            lines.append(f"| {row['limit_bytes'] / GIB:.1f} GiB | {cells} | {ratio} |")
        lines.append("")
    worse = sum(is_worse(row) for each in found for row in each["rows"])
    count = sum(len(each["rows"]) for each in found)
    lines.append(f"Of {count} limits, another way is more than 0.1% faster than auto at {worse}.")
    return "\n".join(lines) + "\n"


def is_worse(row: dict[str, Any]) -> bool:
    """Whether one of the other ways is faster."""
    others = [row[way] for way in WAYS[1:] if row[way] is not None]
    return bool(others) and (row["auto"] is None or row["auto"] > TIE * min(others))


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(CASES))
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if not asked.page:
        for name in asked.models:
            found = measure(name, asked.points)
            known = [each for each in known if each["model"] != name] + [found]
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    PAGE.write_text(page(known))


if __name__ == "__main__":
    main()
