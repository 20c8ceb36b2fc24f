"""The best configuration of each stack, beside one of its own examples or a usual start.

    python benchmarks/stacks.py llama3-8b 8xh100 128

prices both as the stack runs them and adds a row for each stack to `results/stacks.json`; the page
is `docs/results/stacks.md`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from shardfold import zoo
from shardfold.api import Planner
from shardfold.errors import ShardfoldError
from shardfold.export.targets import TARGETS

HERE = Path(__file__).resolve().parent
RUNS = HERE / "results" / "stacks-run.json"
RESULTS, PAGE = HERE / "results" / "stacks.json", HERE.parent / "docs" / "results" / "stacks.md"
# What stands beside it: the words, the samples of a micro-batch on a device, and where it is from.
DOCUMENTED: dict[tuple[str, str], tuple[str, int, str]] = {
    ("torchtitan", "llama3-8b"): (
        "fsdp={data} recompute=full",
        1,
        "torchtitan 0.3.0 models/llama3/config_registry.py llama3_8b: FSDP, one sample on a "
        "device; its selective recomputation is taken as full",
    ),
    ("torchtitan", "llama3-70b"): (
        "fsdp={data} tp=8 sp recompute=full",
        8,
        "torchtitan 0.3.0 models/llama3/config_registry.py llama3_70b: tp=8, full recomputation",
    ),
    ("megatron", "llama3-8b"): (
        "dp={data} tp=1 zero=1",
        1,
        "Megatron-LM 157006d examples/llama/train_llama3_8b_h100_fp8.sh: TP 1, PP 1, micro-batches "
        "of 1, distributed optimizer; its float8 is taken as bf16",
    ),
    ("accelerate", "llama3-8b"): (
        "fsdp={data} recompute=full",
        1,
        "no page was looked up: fully sharded with activation checkpointing, a usual start",
    ),
    ("hf", "llama3-8b"): (
        "fsdp={data} recompute=full",
        1,
        "no page was looked up: fully sharded with activation checkpointing, a usual start",
    ),
    ("deepspeed", "llama3-8b"): (
        "fsdp={data} recompute=full",
        1,
        "no page was looked up: fully sharded with activation checkpointing, a usual start",
    ),
}


def rows(model: str, cluster: str, batch: int) -> list[dict[str, Any]]:
    """A row for each stack."""
    module, args, kwargs = zoo.build(model, batch=batch, device="meta")
    planner = Planner(module, args, kwargs, cluster=cluster, dtype="bf16")
    return [_row(planner, model, cluster, batch, stack) for stack in TARGETS]


def _row(planner: Planner, model: str, cluster: str, batch: int, stack: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "cluster": cluster, "batch": batch, "stack": stack}
    started = time.perf_counter()
    try:
        found = planner.plan_for(stack, beside_plan=False)
    except ShardfoldError as error:
        return {**row, "reason": str(error)}
    e = found.estimated
    row |= {
        "version": found.version,
        "strategy": str(found.strategy),
        "step_seconds": e.step_seconds,
        "rate": e.rate,
        "peak_bytes": e.peak_bytes,
        "possible": found.possible,
        "priced": found.priced,
        "search_seconds": time.perf_counter() - started,
    }
    print(row, flush=True)
    return row | _documented(planner, model, batch, stack)


def _documented(planner: Planner, model: str, batch: int, stack: str) -> dict[str, Any]:
    known = DOCUMENTED.get((stack, model))
    if known is None or planner.cluster is None:
        return {}
    text, samples, _ = known
    data = planner.cluster.size // (8 if "tp=8" in text else 1)
    passes = batch // (data * samples)
    words = text.format(data=data) + (f" micro-batches={passes}" if passes > 1 else "")
    figures = planner.estimate(words, stack=TARGETS[stack].habits, beside_plan=False)
    return {
        "documented": words,
        "documented_seconds": figures.step_seconds,
        "documented_bytes": figures.peak_bytes,
        "documented_fits": figures.fits,
    }


HEAD = """\
# Stacks: the best configuration, beside an example or a usual start

`shardfold plan MODEL --cluster C --for STACK` for each stack, and a configuration of the stack's
own examples; where none was looked up, a usual start (see the sources below). Both are priced as
the stack runs them (bf16 with its float32 state). Nothing here was run on these clusters: all
figures are predictions, and share their errors.

| model | cluster | batch | stack | best | step | peak, GiB | beside it | step | gain | search |
|---|---|---|---|---|---|---|---|---|---|---|
"""
FOOT = """
- *Gain*: how much longer the step beside it is. *Search*: seconds, on one core of a 2-core machine
  that others used, too, with tracing and without the import of torch.
- What does not fit in memory is marked. One that uses what is not priced (selective
  recomputation by operator, float8) is taken as the nearest that is.
- All rows are of before gathers were priced as rings, and of before accelerate was no longer told
  tensor parallel (see below).
- Not in the table yet: Llama-3 405B, Mixtral, 32 nodes, and examples of the stacks without one.

Sources of what is beside it:

"""


RUN = """
## Run, not only written

A Llama of two layers in float32, ten steps of eight samples on gloo processes: by the stack, with
the file that is written for it, and by `sf.parallelize` under a plan of as many processes that
splits layers, too. accelerate has no FSDP on CPUs: it was told that the processes are GPUs whose
device is the CPU. Tensor parallel is not offered for accelerate: beside FSDP, accelerate 1.15 and
transformers 5.22 do not start with it (the row below); transformers by itself has both.

| stack | configuration | processes | first loss, last loss | largest difference from ours |
|---|---|---:|---|---:|
"""


def _run_line(row: dict[str, Any]) -> str:
    head = f"| {row['stack']} | `{row['strategy']}` | {row['processes']} "
    if "said" in row:
        return head + f"| did not run: {row['said']} | |"
    first, last = row["losses"]
    return head + f"| {first:.6f}, {last:.6f} | {row['difference']:.0e} |"


def page(found: list[dict[str, Any]], runs: dict[str, Any]) -> str:
    """The page of results."""
    where = runs["environment"]
    ran = RUN + "\n".join(map(_run_line, runs["rows"])) + "\n\n"
    ran += f"{where['processor']}, {where['date']}. Made by `benchmarks/stacks_run.py`.\n"
    there = {(row["stack"], row["model"]) for row in found}
    sources = [
        f"- {stack}, {model}: {source}."
        for (stack, model), (_, _, source) in DOCUMENTED.items()
        if (stack, model) in there
    ]
    return HEAD + "\n".join(map(_line, found)) + "\n" + FOOT + "\n".join(sources) + "\n" + ran


def _line(row: dict[str, Any]) -> str:
    head = f"| {row['model']} | {row['cluster']} | {row['batch']} | {row['stack']} "
    if "reason" in row:
        return head + f"| {row['reason'].partition('.')[0]} | | | | | | |"
    text = f"| `{row['strategy']}` | {row['step_seconds']:.2f} s | {row['peak_bytes'] / 2**30:.1f} "
    if "documented" in row:
        fits = "" if row["documented_fits"] else " (does not fit)"
        gain = row["documented_seconds"] / row["step_seconds"] - 1
        text += f"| `{row['documented']}`{fits} | {row['documented_seconds']:.2f} s | {gain:+.0%} "
    else:
        text += "| | | "
    return head + text + f"| {row['search_seconds']:.0f} s |"


def main() -> None:
    """Price one model on one cluster, and write the page."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if len(sys.argv) > 1:
        model, cluster, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
        key = (model, cluster, batch)
        known = [r for r in known if (r["model"], r["cluster"], r["batch"]) != key]
        known += rows(model, cluster, batch)
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    PAGE.write_text(page(known, json.loads(RUNS.read_text())))


if __name__ == "__main__":
    main()
