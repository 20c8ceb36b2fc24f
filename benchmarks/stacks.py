"""The best configuration of each stack, beside the one that its documentation recommends.

    python benchmarks/stacks.py llama3-8b 8xh100 128
    python benchmarks/stacks.py llama3-8b 8xh100 128 megatron megatron-half

prices both as the stack runs them and adds a row for each stack, or for those that are named, to
`results/stacks.json`; the page is `docs/results/stacks.md`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfold import zoo
from shardfold.api import Planner
from shardfold.errors import ShardfoldError
from shardfold.export.targets import TARGETS

HERE = Path(__file__).resolve().parent
RUNS = HERE / "results" / "stacks-run.json"
RESULTS, PAGE = HERE / "results" / "stacks.json", HERE.parent / "docs" / "results" / "stacks.md"


@dataclass(frozen=True)
class Stack:
    """What is asked for in a row."""

    target: str
    precision: str = "bf16-mixed"
    more: str = ""

    @property
    def words(self) -> str:
        """In the table."""
        return self.target + self.more


STACKS = {
    "torchtitan": Stack("torchtitan"),
    "megatron": Stack("megatron"),
    "megatron-half": Stack("megatron", "bf16-mixed/bf16", ", gradients in bf16"),
    **{name: Stack(name) for name in ("hf", "accelerate", "deepspeed", "nanotron")},
}
NO_MIXTRAL = ("nanotron", "mixtral-8x7b")
MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b")
CLUSTERS = ("8xh100", "8x8xh100", "32x8xh100")


@dataclass(frozen=True)
class Documented:
    """What a stack's documentation recommends for a model, in our words, and where it says so.

    `data` devices have parts of the batch: all but those that `others` counts.
    """

    words: str
    others: int
    samples: int  # of a micro-batch
    source: str

    def stated(self, devices: int, batch: int) -> str:
        """In words, for so many devices; empty where it is made for more."""
        data = devices // self.others
        passes = batch // (data * self.samples) if data else 0
        if data * self.others != devices or passes * data * self.samples != batch:
            return ""
        words = self.words.format(data=data, nodes=devices // 8)
        return f"{words} micro-batches={passes}" if passes > 1 else words


TITAN = "torchtitan 0.3.0 models/llama3/config_registry.py"
GUIDE = "Megatron-LM docs/user-guide/parallelism-guide.md"
BRIDGE = "virtual stages, micro-batches of 1: Megatron-Bridge recipes/llama/h100"
PERF = "Megatron-Bridge perf_recipes/llama/h100"
PLAYBOOK = "The Ultra-Scale Playbook, finding the best training configuration, step 1"
ND = "Accelerate ND-Parallel (huggingface.co/blog/accelerate-nd-parallel)"
MANY = "transformers docs, perf_train_gpu_many: a model that does not fit on one device, fast links"
ZERO = "transformers docs, deepspeed: the lowest stage of ZeRO that fits is the fastest"
FULL = "checkpointing is a usual addition"
SHARDED = "fsdp={data} recompute=full"
DOCUMENTED: dict[tuple[str, str], Documented] = {
    ("torchtitan", "llama3-8b"): Documented(
        "fsdp={data} recompute=products",
        1,
        1,
        f"{TITAN} llama3_8b: FSDP, selective checkpointing, one sample on a device",
    ),
    ("torchtitan", "llama3-70b"): Documented(
        "fsdp={data} tp=8 sp recompute=full",
        8,
        8,
        f"{TITAN} llama3_70b: TP 8, full checkpointing, 8 samples",
    ),
    ("torchtitan", "llama3-405b"): Documented(
        "fsdp={data} tp=8 sp recompute=full",
        8,
        2,
        f"{TITAN} llama3_405b: TP 8, full checkpointing, 2 samples; its float8, compilation and "
        "async TP are left out",
    ),
    ("megatron", "llama3-8b"): Documented(
        "dp={data} cp=2 zero=1 attention=ring", 2, 1, f"{GUIDE}: TP 1, PP 1, CP 2; {BRIDGE}"
    ),
    ("megatron", "llama3-70b"): Documented(
        "pp=4 dp={data} cp=2 tp=4 zero=1 sp attention=ring virtual=5",
        32,
        1,
        f"{GUIDE}: TP 4, PP 4, CP 2; {BRIDGE}",
    ),
    ("megatron", "llama3-405b"): Documented(
        "pp=8 dp={data} cp=2 tp=8 zero=1 sp attention=ring virtual=8",
        128,
        1,
        f"{GUIDE}: TP 8, PP 8, CP 2; {BRIDGE}",
    ),
    ("megatron", "mixtral-8x7b"): Documented(
        "pp=4 dp={data} zero=1 ep=8", 4, 1, f"{GUIDE}: TP 1, PP 4, EP 8; micro-batches of 1"
    ),
    ("megatron-half", "llama3-8b"): Documented(
        "dp={data} cp=2 zero=1 attention=ring", 2, 1, f"{PERF}: CP 2"
    ),
    ("megatron-half", "llama3-70b"): Documented(
        "pp=4 dp={data} cp=2 tp=4 zero=1 sp attention=ring virtual=5",
        32,
        1,
        f"{PERF}: TP 4, PP 4, CP 2, 5 virtual stages; its overlap of TP is left out",
    ),
    ("megatron-half", "llama3-405b"): Documented(
        "pp=8 dp={data} cp=2 tp=8 zero=1 sp attention=ring virtual=8",
        128,
        1,
        f"{PERF}: TP 8, PP 8, CP 2, 8 virtual stages, on 512 or 1024 devices; its overlap of TP is "
        "left out",
    ),
    ("hf", "llama3-8b"): Documented(SHARDED, 1, 1, f"{MANY}: ZeRO; {FULL}"),
    ("hf", "llama3-70b"): Documented(SHARDED, 1, 1, f"{MANY}: ZeRO; {FULL}"),
    ("hf", "llama3-405b"): Documented(SHARDED, 1, 1, f"{MANY}: ZeRO; {FULL}"),
    ("hf", "mixtral-8x7b"): Documented(SHARDED, 1, 1, f"{MANY}: ZeRO; {FULL}"),
    ("accelerate", "llama3-8b"): Documented(
        "dp={nodes} fsdp=8 recompute=full", 1, 1, f"{ND}: FSDP in a node, replicas across; {FULL}"
    ),
    ("accelerate", "llama3-70b"): Documented(
        SHARDED, 1, 1, f"{ND}: FSDP over all devices, where a node is too small; {FULL}"
    ),
    ("accelerate", "llama3-405b"): Documented(
        SHARDED, 1, 1, f"{ND}: FSDP over all devices, where a node is too small; {FULL}"
    ),
    ("accelerate", "mixtral-8x7b"): Documented(
        SHARDED, 1, 1, f"{ND}: FSDP over all devices, where a node is too small; {FULL}"
    ),
    ("deepspeed", "llama3-8b"): Documented(
        "dp={data} zero=2 recompute=full", 1, 1, f"{ZERO}; {FULL}"
    ),
    ("deepspeed", "llama3-70b"): Documented(SHARDED, 1, 1, f"{ZERO}; {FULL}"),
    ("deepspeed", "llama3-405b"): Documented(SHARDED, 1, 1, f"{ZERO}; {FULL}"),
    ("deepspeed", "mixtral-8x7b"): Documented(SHARDED, 1, 1, f"{ZERO}; {FULL}"),
    ("nanotron", "llama3-8b"): Documented(
        "dp={data} tp=8 zero=1 sp", 8, 1, f"{PLAYBOOK}: tensor parallel on 8 devices"
    ),
    ("nanotron", "llama3-70b"): Documented(
        "pp=8 dp={data} tp=8 zero=1 sp", 64, 1, f"{PLAYBOOK}: TP 8 with pipelines"
    ),
    ("nanotron", "llama3-405b"): Documented(
        "pp=16 dp={data} tp=8 zero=1 sp", 128, 1, f"{PLAYBOOK}: TP 8 with pipelines"
    ),
}


def rows(model: str, cluster: str, batch: int, stacks: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each stack."""
    module, args, kwargs = zoo.build(model, batch=batch, device="meta")
    planner = Planner(module, args, kwargs, cluster=cluster)
    for stack in stacks:
        yield _row(planner, model, cluster, batch, stack)


def _row(planner: Planner, model: str, cluster: str, batch: int, stack: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "cluster": cluster, "batch": batch, "stack": stack}
    row["made"] = time.strftime("%Y-%m-%d")
    started = time.perf_counter()
    try:
        found = planner.plan_for(
            STACKS[stack].target, precision=STACKS[stack].precision, beside_plan=False
        )
    except ShardfoldError as error:
        return {**row, "reason": str(error)} | _documented(planner, model, batch, stack)
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
    words = known.stated(planner.cluster.size, batch)
    if not words:
        return {}
    try:
        figures = planner.estimate(
            words,
            stack=TARGETS[STACKS[stack].target].habits,
            precision=STACKS[stack].precision,
            beside_plan=False,
        )
    except ShardfoldError as error:
        return {"documented": words, "documented_reason": str(error)}
    return {
        "documented": words,
        "documented_seconds": figures.step_seconds,
        "documented_bytes": figures.peak_bytes,
        "documented_fits": figures.fits,
    }


HEAD = """\
# Stacks: the best configuration, beside the one that is recommended

`shardfold plan MODEL --cluster C --for STACK` for each stack, and beside it the configuration that
the stack's documentation or examples recommend for the model, for as many devices (sources below).
Both are priced as the stack runs them (bf16 with its float32 state). Nothing here was run on these
clusters: all figures are predictions, and share their errors.

| model | cluster | batch | stack | best | step | GiB | recommended | step | GiB | gain | searched |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""
FOOT = """
- *GiB*: the peak of memory. *Gain*: how much longer the recommended step is, where it fits.
- *Does not fit*: by the prediction, in 90% of a device's memory. Where the recommended step is
  shorter and does not fit, it cannot be run there: the chosen one is the best of those that can.
- *megatron, gradients in bf16*: `--precision bf16-mixed/bf16`, as Megatron-Bridge's recipes for
  throughput have it; their numbers are others than with Megatron-LM's own float32.
- What a recommended configuration has and is not priced (float8, compilation, overlap of tensor
  parallel) is left out. A micro-batch is one sample, where nothing else is said.
- torchtitan 0.3.0 has no Mixtral: its row is for a model of its shape. Nanotron was not run for it.
- *Searched*: on that day; the other rows a day or two before, when prices differed a little: of ten
  rows but accelerate's that were searched both times the step differs by at most 0.35%, the
  configuration not.
{missing}
Sources of what is recommended:

"""


RUN = """
## Run, not only written

A Llama of two layers in float32, ten steps of eight samples on gloo processes: by the stack, with
the file that is written for it, and by `sf.parallelize` under a plan of as many processes that
splits layers, too. accelerate has no FSDP on CPUs: it was told that the processes are GPUs whose
device is the CPU. Tensor parallel beside accelerate's FSDP starts with transformers 5.0 to 5.14
(5.0.0, 5.3.0, 5.10.4, 5.13.1 and 5.14.1 were tried; 5.15.1, 5.16.1, 5.20.2 and 5.22.2 fail, the
last ones as they make a mesh of their own over all processes).

| stack | configuration | processes | first loss, last loss | largest difference from ours |
|---|---|---:|---|---:|
"""


def _run_line(row: dict[str, Any]) -> str:
    beside = f", transformers {row['transformers']}" if "transformers" in row else ""
    head = f"| {row['stack']}{beside} | `{row['strategy']}` | {row['processes']} "
    if "said" in row:
        return head + f"| did not run: {row['said']} | |"
    first, last = row["losses"]
    return head + f"| {first:.6f}, {last:.6f} | {row['difference']:.0e} |"


def page(found: list[dict[str, Any]], runs: dict[str, Any]) -> str:
    """The page of results."""
    where = runs["environment"]
    ran = RUN + "\n".join(map(_run_line, runs["rows"])) + "\n\n"
    ran += f"{where['processor']}, {where['date']}. Made by `benchmarks/stacks_run.py`.\n"
    sources = [
        f"- {STACKS[stack].words}, {model}: {known.source}."
        for (stack, model), known in DOCUMENTED.items()
    ]
    foot = FOOT.format(missing=_missing({_key(row) for row in found}))
    return HEAD + "\n".join(map(_line, found)) + "\n" + foot + "\n".join(sources) + "\n" + ran


def _line(row: dict[str, Any]) -> str:
    words, made = STACKS[row["stack"]].words, f"{row['made']} " if "made" in row else ""
    head = f"| {row['model']} | {row['cluster']} | {row['batch']} | {words} "
    if "reason" in row:
        return head + f"| {_short(row['reason'])} | | {_recommended(row)}| | {made}|"
    text = f"| `{row['strategy']}` | {row['step_seconds']:.2f} s | {_gib(row['peak_bytes'])} "
    gain = ""
    if row.get("documented_fits"):
        gain = f"{row['documented_seconds'] / row['step_seconds'] - 1:+.1%} "
    return head + text + f"| {_recommended(row)}| {gain}| {made}|"


def _recommended(row: dict[str, Any]) -> str:
    if "documented" not in row:
        return "| | "
    if "documented_reason" in row:
        return f"`{row['documented']}` (not possible on so few devices) | | "
    fits = "" if row["documented_fits"] else " (does not fit)"
    figures = f"{row['documented_seconds']:.2f} s | {_gib(row['documented_bytes'])} "
    return f"`{row['documented']}`{fits} | {figures}"


def _short(reason: str) -> str:
    if "smallest needs" in reason:
        return "nothing fits"
    return reason.partition(". ")[0]


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}"


def _known() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return found


def _missing(there: set[tuple[Any, ...]]) -> str:
    """The cells that were not run, a line a stack."""
    lines = []
    for stack, asked in STACKS.items():
        cells = [
            f"{model} on {cluster}"
            for model in MODELS
            for cluster in CLUSTERS
            if (model, cluster, stack) not in there and (stack, model) != NO_MIXTRAL
        ]
        if cells:
            lines.append(f"- Not run yet for {asked.words}: {', '.join(cells)}.\n")
    return "".join(lines)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "cluster", "stack"))


def _place(row: dict[str, Any]) -> tuple[int, ...]:
    """In the order of the page."""
    places = (MODELS, CLUSTERS, tuple(STACKS))
    return tuple(names.index(name) for names, name in zip(places, _key(row), strict=True))


def main() -> None:
    """Price one model on one cluster, for some stacks or all, and write the page."""
    if len(sys.argv) > 1:
        model, cluster, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
        for row in rows(model, cluster, batch, sys.argv[4:] or tuple(STACKS)):
            known = [each for each in _known() if _key(each) != _key(row)]
            RESULTS.write_text(json.dumps(sorted([*known, row], key=_place), indent=1) + "\n")
    known = _known()
    PAGE.write_text(page(known, json.loads(RUNS.read_text())))


if __name__ == "__main__":
    main()
