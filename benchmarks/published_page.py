"""The page of published runs, from what `published.py` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from published_setups import named
from published_summary import Priced, by_source, errors
from shardfold.strategies.stacks import STACKS

INTRODUCTION = """# Predictions beside published runs

Rows that others published: a model, devices, a configuration, and what was measured. Each model is
built from its dims and its stated configuration priced on its stated hardware with the default
cost model, as the stack that ran it keeps and sends things (below). Nothing is fitted to a row. An
error is of the step (predicted over measured, less one): below 0 the prediction is too fast. A row
is left out where its configuration cannot be stated yet, with the reason.

`benchmarks/published.py RUNS.csv --page` writes this page; every row with all its columns is in
`benchmarks/results/published.json`."""


SETTLED = """## What was settled after rows had been seen

No figure is fitted, but some habits were looked up because a source's rows were off; rows that
nobody here has seen are the fairer test of them.

- FlashAttention's first generation at half the speed of the second (`fsdp1`, `internevo`): after
  long sequences came out 30 to 60% too fast. The factor is that of the second's paper.
- nanotron without `tp_recompute_allgather`: its code has it on by default, the runs do not state
  it. Peaks of the 1B, 3B and 8B models are those of inputs that are kept, those of the 80B model of
  inputs that are gathered again; one setting is used for all.
- DeepSpeed's flat gradients and buckets: after peaks came out 25 to 45% too small.
- A B200's products and attention as SimuMax measured them alone (its hardware file): after its
  steps came out 26% too fast with our estimates. FlashAttention-2 on an H100 (`nanotron`): after
  steps came out 20 to 30% too fast. Its rate in a cycle is that of its paper on an A100.
- Of pipelines: that a tensor of which every device has a copy crosses a cut in parts, after one
  row came out 19% too slow; that a head larger than a stage's share is followed by stages without
  layers (`nanotron`), after such rows were refused. The second is its code's, the first is from
  memory.
- Alpa's `auto (ILP)` as ZeRO-2, whose gradients stay whole until backward ends: its search's choice
  is not published; at equal meshes its peaks are those of its ZeRO-2.
- Recomputation of Megatron-LM's rows of 2020: not stated, but their TFLOP/s count it.
- BLOOM's nodes with four NVLinks between GPUs, a third of what an HGX board of eight has: its
  authors say so of their machine. Before, tensor parallelism came out 15 to 25% too fast, the more
  the wider it was.
- nanotron's layers with the copies that its code makes (keys put beside values and turned, gate and
  up projection in one product): before, its runs without stages came out 15 to 25% too fast.
- Rings: that gathers and scatters take a hop from every device to the next, sums one of rings and
  trees, as NCCL does (src/graph/tuning.cc); that a stack's gradients share buckets; and the
  Playbook's network by its own measurements: after tensor parallelism across nodes came out 60 to
  70% too fast. Half of the rows (by a hash) were looked at, and later a few of the others.

Of the sources in the table, those of nanotron, InternEvo, llm-foundry, BigScience and Alpa were
read; the files of Composer, Megatron-LM and DeepSpeed are named from memory."""

UNEXPLAINED = """## What is not explained

Most of the rows that are far off are nanotron's (the Ultra-Scale Playbook), in two classes.

- Stages on several nodes. At equal splits some took what is predicted and others 3 to 80 times as
  long: with tp=8, 16 and 32 a micro-batch took about 15, 45 and 100 ms a layer more than predicted,
  whether a layer has 2,048 or 8,192 features and a micro-batch one sequence or eight, and on 512
  devices about a second whatever it was. What a network or a device does would grow with the bytes.
  PyTorch's TORCH_DISTRIBUTED_DEBUG=DETAIL would look like this (before every collective, all its
  processes meet over gloo, one after the other), and nanotron's slurm_launcher.py has that line;
  the script that these runs were started with, run_multinode.sh, has not, at the commit that was
  read. Their memory says that the slow ones are runs of another kind: of the pipelines where it
  can tell (half of all rows were looked at), 15 of 22 slow ones have the peak of inputs that are
  gathered again for backward, and both fast ones that of inputs that are kept, as 6 of 7 runs
  without stages. So a version or a setting (tp_recompute_allgather) differs that no column states;
  why it would be slow its code does not say. The script that made the runs
  (scripts/scaling_benchmarks.py) runs pipelines again whose jobs are older than a certain one, and
  no other runs; which of them were published is not known. No row is left out for it, and nothing
  is fitted to it.
- A figure is that of one step, the third (nanotron, trainer.py, NANOTRON_BENCHMARK): one that was
  disturbed stands as it was.
- Rings over many nodes: the Playbook's own measurements of all-gathers, by which its network is
  priced, are means of a busy cluster, and what was best there had a quarter of that time from node
  to node. Runs with tensor parallelism across nodes took what is predicted or more; runs that
  reduce gradients over 64 nodes took half or less of it.

Of the order within groups: of two runs of a group, the slower one is predicted to be slower in 80%
of the pairs, in 83% where they are at least 5% apart. Equal configurations of BLOOM that were run
again are up to 8% apart. Two classes are priced too low there: tensor parallel over all eight
devices of a node with one or two sequences in a micro-batch (BLOOM: 3 to 17%, more the smaller the
micro-batch), and over two of eight V100s (two rows, 35 to 37%).

What is known and not modelled: nanotron's products in three pieces beside each gather, and its loss
in several passes (with tp=4 and one sequence in a micro-batch the host is the limit, and takes 1.6
times what is predicted); the in-switch sums of NVLink SHARP; gathers of FSDP by block, where ours
are by parameter."""


def page(whole: Mapping[str, Any]) -> str:
    """The whole page."""
    at = whole["environment"]
    made = (
        f"Cost model: `{whole['cost']}`. Made on {at['date']}, {at['processor']}, "
        f"Python {at['python']}, in "
        f"{whole['seconds'] / 60:.0f} minutes."
    )
    parts = [
        INTRODUCTION,
        made,
        _summary(whole["sources"]),
        _kinds(whole["rows"]),
        _left_out(whole["sources"]),
        _stacks(),
        SETTLED,
        UNEXPLAINED,
    ]
    parts.append("## Every row")
    for name, rows in by_source(whole["rows"], named).items():
        parts.append("\n".join(_rows(name, rows)))
    return "\n\n".join(parts) + "\n"


def _summary(sources: Mapping[str, Any]) -> str:
    lines = [
        "## By source",
        "",
        "| source | rows | priced | step: median | 90th | within 20% | bias | memory: median "
        "| 90th | ran: fit | failed: foretold | groups | Kendall | regret |",
        "|---|" + "--:|" * 13,
    ]
    for name, found in sources.items():
        step, memory = found["step"], found["memory"]
        cells = [
            name,
            found["rows"],
            found["priced"],
            *(_percent(step, key) for key in ("median", "percentile90", "within20")),
            "" if step is None else f"{step['bias']:+.1%}",
            *(_percent(memory, key) for key in ("median", "percentile90")),
            f"{found['ran_and_fit']} of {found['ran']}",
            f"{found['foretold']} of {found['failed']}" if found["failed"] else "",
            found["groups"] or "",
            "" if found["kendall"] is None else f"{found['kendall']:.2f}",
            "" if found["regret"] is None else f"{found['regret']:.1%}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "A run is predicted to fit if its peak and a context of 1,113 MiB are within the device's "
        "memory. Medians and percentiles are of |error|. Kendall's rank agreement and the regret "
        "of the predicted best (how much longer it took than the fastest that was measured) are "
        "of the median group of at least three runs, alike in model, sequence, devices and global "
        "batch.",
    ]
    return "\n".join(lines)


def _kinds(rows: list[Priced]) -> str:
    """The errors of steps by what is split, nanotron's apart."""
    lines = [
        "## By kind",
        "",
        "| | rows | median | 90th | within 20% | bias | nanotron's | median | within 20% | bias |",
        "|---|" + "--:|" * 9,
    ]
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if "error" in row:
            for kind in kinds_of(row):
                found.setdefault(kind, ([], []))[row["stack"] == "nanotron"].append(row["error"])
    for kind in KINDS:
        others, own = map(errors, found.get(kind, ((), ())))
        cells: list[object] = [kind]
        for each, keys in (
            (others, ("median", "percentile90", "within20")),
            (own, ("median", "within20")),
        ):
            if each is None:
                cells += [0, *[""] * (len(keys) + 1)]
                continue
            plain = asdict(each)
            cells += [each.rows, *(_percent(plain, key) for key in keys), f"{each.bias:+.1%}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


KINDS = (
    "no stages, tensor parallel within a node",
    "stages, tensor parallel within a node",
    "tensor parallel across nodes",
    "micro-batches of one sequence",
    "experts",
    "a split sequence (cp)",
)


def kinds_of(row: Priced) -> Iterator[str]:
    """What is special about a row's configuration; it may be several things."""
    within = int(row["gpus_per_node"] or 8)
    if int(row["tp"] or 1) > within:
        yield "tensor parallel across nodes"
    else:
        staged = int(row["pp"] or 1) > 1
        yield f"{'stages' if staged else 'no stages'}, tensor parallel within a node"
    if row["micro_batch"] == "1":
        yield "micro-batches of one sequence"
    if int(row["ep"] or 1) > 1:
        yield "experts"
    if int(row["cp"] or 1) > 1:
        yield "a split sequence (cp)"


def _percent(errors: Mapping[str, float] | None, key: str) -> str:
    return "" if errors is None else f"{errors[key]:.1%}"


def _left_out(sources: Mapping[str, Any]) -> str:
    lines = ["## Left out", "", "| source | rows | reason |", "|---|--:|---|"]
    for name, found in sources.items():
        for reason, count in found["left_out"].items():
            lines.append(f"| {name} | {count} | {reason} |")
    return "\n".join(lines)


def _stacks() -> str:
    lines = [
        "## Stacks",
        "",
        "What a strategy leaves open is a habit of the stack that runs it.",
        "",
        "| stack | float32 | gradients | recomputation | gathered inputs | attention | stages "
        "| source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stack in STACKS.values():
        kept = [
            *(["master weights and state"] if stack.master_weights else ()),
            *(["stored parts and state"] if stack.float32_parts else ()),
            *(["gradients"] if stack.float32_gradients else ()),
            *(["their reduction"] if stack.float32_reduction else ()),
            *(["the updated part's gradients"] if stack.float32_part_gradients else ()),
        ]
        reduced = "beside backward" if stack.reduces_beside else "after backward"
        reduced += ", in a buffer that stays" if stack.keeps_gradients else ""
        reduced += f", {stack.gradient_copies} copy" if stack.gradient_copies else ""
        again = "the whole block" if stack.runs_whole_block_again else "what backward needs"
        inputs = "kept in parts" if stack.regathers_activations else "kept"
        slower = f"FlashAttention-{stack.flash_attention}" if stack.flash_attention else ""
        stages = "of equal work" if stack.balances_stages else "of equal layers"
        stages += ", wait for their sends" if stack.waits_for_sends else ""
        source = stack.source or "shardfold's runner"
        cells = [stack.name, ", ".join(kept), reduced, again, inputs, slower, stages, source]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


HEADER = (
    "| row | model | seq | devices | batch | micro-batch | strategy | metric | published "
    "| predicted | error | GiB | predicted | error | |"
)


def _rows(name: str, rows: list[Priced]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield HEADER
    yield "|" + "--:|--|--:|--|--:|--:|--|--|" + "--:|" * 6 + "--|"
    for row in rows:
        yield "| " + " | ".join(map(str, _cells(row))) + " |"


def _cells(row: Priced) -> Iterator[object]:
    yield from (row["row"], row["model"], row["seq"], f"{row['gpus']} x {row['gpu']}")
    yield from (row["global_batch"], row["micro_batch"], row.get("strategy", ""))
    yield from (row["metric"], row["value"], _figure(row.get("predicted")))
    yield _signed(row.get("error"))
    yield from (row["memory_gib"], _figure(row.get("predicted_memory_gib")))
    yield _signed(row.get("memory_error"))
    yield row.get("reason") or ("" if row["fits"] else "does not fit")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"
