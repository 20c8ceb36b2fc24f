"""Mixtures of experts and long sequences on 64 to 2,048 GPUs: the plan beside what people run.

Plans each case at `--prefer speed`, prices the baselines of expert and context parallelism on the
same tables, prints a row, and stores it at once, in place of an older row of the same case. Exits
with 1 if a baseline that fits is faster than the plan.

    python benchmarks/at_scale.py                            # every case
    python benchmarks/at_scale.py deepseek-v3 --cluster 32x8xh100
    python benchmarks/at_scale.py --page                     # the page again
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from environment import environment
from shardfold.progress import Stage

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "at-scale.json"
PAGE = FOLDER.parent / "docs" / "results" / "at-scale.md"
CLUSTERS = ("8x8xh100", "32x8xh100", "256x8xh100")
EXPERTS = ("expert-parallel", "fsdp+ep")
CONTEXT = ("cp-ulysses", "cp-gather", "cp-ring")
SEQUENCES = 2  # a device, of a mixture's batch
TOKENS = 16_384  # a device, of long sequences
ROUNDING = 1e-9
Row = Mapping[str, Any]

# The fields of the models' own config.json; what is left out is the default of transformers.
QWEN: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": QWEN
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": QWEN
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model with sequences of some length, and the baselines that people run it with."""

    model: str
    seq: int
    baselines: tuple[str, ...]

    @property
    def name(self) -> str:
        """As it is asked for."""
        return self.model if self.baselines == EXPERTS else f"{self.model}@{self.seq}"

    def batch(self, devices: int) -> int:
        """Sequences of a step."""
        is_mixture = self.baselines == EXPERTS
        return SEQUENCES * devices if is_mixture else TOKENS * devices // self.seq

    def build(self, devices: int) -> Any:
        """The model without weights, and a batch for it."""
        from shardfold import zoo

        batch, fields = self.batch(devices), CONFIGURATIONS.get(self.model)
        if fields is None:
            return zoo.build(self.model, batch=batch, seq=self.seq)
        with tempfile.TemporaryDirectory(prefix="shardfold-") as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(fields | {"max_position_embeddings": self.seq}))
            return zoo.from_config(str(path), batch=batch, seq=self.seq)


CASES = (
    *(Case(name, 4096, EXPERTS) for name in ("mixtral-8x7b", *CONFIGURATIONS)),
    *(
        Case(name, seq, CONTEXT)
        for name in ("llama3-8b", "llama3-70b")
        for seq in (131_072, 1_048_576)
    ),
)


def measure(case: Case, cluster: str) -> dict[str, Any]:
    """Plan one case on one cluster, and price the baselines on the same tables."""
    from shardfold.api import Planner
    from shardfold.cluster import parse
    from shardfold.plans import Plan

    devices, load = parse(cluster).size, os.getloadavg()[0]
    begin, planned = time.process_time(), list[float]()

    def watch(stage: Stage) -> None:
        if stage.name == "comparing":  # what comes before it is the planning
            planned.append(time.process_time() - begin)

    built = case.build(devices)
    planner = Planner(*built, cluster=cluster, dtype="bf16", prefer="speed", watch=watch)
    with tempfile.TemporaryDirectory(prefix="shardfold-") as folder:
        found = planner.compare(methods=("selected", *case.baselines), save_plans=folder)
        plan = Plan.load(Path(folder) / "selected.json")
    figures = {each.method: _figures(each) for each in found.results}
    return {
        "model": case.model,
        "seq": case.seq,
        "batch": case.batch(devices),
        "cluster": cluster,
        **figures.pop("selected"),
        "bound_seconds": plan.estimate.step_lower_bound_seconds,
        "limit_bytes": found.limit_bytes,
        "stages": 1 if plan.pipeline is None else plan.pipeline.parts,
        "micro_batches": plan.micro_batches,
        "recomputes": bool(plan.recompute),
        "experts": _splits(plan, "shardfold.routed_experts"),
        "attention": _splits(plan, "aten.scaled_dot_product_attention"),
        "baselines": figures,
        "cpu_seconds": planned[0],
        "load": load,
    }


def _figures(result: Any) -> dict[str, Any]:
    """What stands in the table of one method."""
    names = ("step_seconds", "mfu", "peak_bytes", "exposed_seconds", "mesh", "fits", "note")
    return {name: getattr(result, name) for name in names}


def _splits(plan: Any, kind: str) -> list[str]:
    """How the operators of a kind are split."""
    found = {
        " ".join(f"{word}/{parts}" for word, parts in op.split.items())
        for op in plan.operators
        if op.kind == kind
    }
    return sorted(found)


def faster(row: Row) -> list[str]:
    """The baselines that fit and are faster than the plan: there may be none."""
    step = row["step_seconds"] * (1 - ROUNDING)
    return [
        n for n, each in row["baselines"].items() if each["fits"] and each["step_seconds"] < step
    ]


def store(path: Path, row: Row) -> None:
    """Put a row in place of one of the same case."""
    before = json.loads(path.read_text()) if path.exists() else {}
    rows = {_key(each): each for each in before.get("rows", ())} | {_key(row): row}
    ordered = [rows[key] for key in sorted(rows)]
    path.write_text(json.dumps({"environment": environment(), "rows": ordered}, indent=1) + "\n")


def _key(row: Row) -> tuple[str, int, int]:
    return (row["model"], row["seq"], CLUSTERS.index(row["cluster"]))


def page(whole: Mapping[str, Any]) -> str:
    """All cases: the plan, what it does, and what people run."""
    rows, at = whole["rows"], whole["environment"]
    slower = [f"{row['model']} on {row['cluster']}" for row in rows if faster(row)]
    fits = sum(row["fits"] for row in rows)
    paragraphs = [
        "# Mixtures of experts and long sequences at scale",
        f"Written by `python benchmarks/at_scale.py` on {at['date']}; Python {at['python']}. Real "
        "dimensions, bf16, AdamW, the default cost model and memory limit, `--prefer speed`; "
        "simulated, not measured. Mixtures have sequences of 4,096 tokens, two a device; long "
        "sequences come to 16,384 tokens a device.",
        f"{len(rows)} cases; the plan fits in {fits}. "
        + (f"A baseline that fits is faster in: {', '.join(slower)}." if slower else "")
        + ("" if slower else "No baseline that fits is faster than the plan."),
        "\n".join(_plans(rows)),
        "*Exposed* is the communication that no work hides, as a share of the step; *gap* how much "
        "shorter any plan without stages can be, at most. *Planned in* is processor time of "
        "capture and search on one core, beside other work on two cores: the load is that of the "
        "minute before.",
        "## Baselines",
        "Steps of expert and context parallelism as people run them, in the degree and on the mesh "
        "that suit each best, with blocks recomputed where nothing fits otherwise.",
        "\n".join(_baselines(rows)),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _plans(rows: Sequence[Row]) -> list[str]:
    head = "| model | tokens | cluster | step | gap | MFU | peak | exposed | splits | planned in |"
    found = [head, "|---|---:|---|---:|---:|---:|---:|---:|---|---:|"]
    for row in rows:
        gap = 1 - row["bound_seconds"] / row["step_seconds"]
        stages = f"{row['stages']} stages of " if row["stages"] > 1 else ""
        splits = [*(f"experts {s}" for s in row["experts"][:1])]
        splits += [f"attention {s}" for s in row["attention"][:1]]
        found.append(
            f"| {row['model']} | {row['batch']:,} x {row['seq']:,} | {row['cluster']} "
            f"| {_step(row)} | {gap:.1%} | {row['mfu']:.1%} | {row['peak_bytes'] / 2**30:.1f} GiB "
            f"| {row['exposed_seconds'] / row['step_seconds']:.1%} "
            f"| {stages}{row['mesh']}: {'; '.join(splits)}{', recomputes' * row['recomputes']} "
            f"| {row['cpu_seconds']:.1f} s at load {row['load']:.0f} |"
        )
    return found


def _baselines(rows: Sequence[Row]) -> list[str]:
    names = (*EXPERTS, *CONTEXT)
    found = [f"| model | tokens | cluster | plan | {' | '.join(names)} |"]
    found.append("|---|---:|---|---:" + "|---:" * len(names) + "|")
    for row in rows:
        cells = [_step(row["baselines"][n]) if n in row["baselines"] else "" for n in names]
        found.append(
            f"| {row['model']} | {row['batch']:,} x {row['seq']:,} | {row['cluster']} "
            f"| {_step(row)} | {' | '.join(cells)} |"
        )
    return found


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--cluster", "clusters", multiple=True, default=CLUSTERS, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
@click.option("--page", "only_page", is_flag=True, help="Write the page from the stored rows.")
def main(names: Sequence[str], clusters: Sequence[str], out: Path, only_page: bool) -> None:
    """Measure the cases `names`, or all; long sequences on the two smaller clusters only."""
    import torch

    torch.set_num_threads(1)
    chosen = [case for case in CASES if not names or case.name in names]
    for case in () if only_page else chosen:
        for cluster in clusters:
            if case.baselines == CONTEXT and cluster == CLUSTERS[-1]:
                continue
            row = measure(case, cluster)
            store(out, row)
            click.echo(_line(row))
    rows = json.loads(out.read_text())["rows"]
    if out == RESULTS:
        PAGE.write_text(page(json.loads(out.read_text())))
    if any(map(faster, rows)):
        raise SystemExit(1)


def _line(row: Row) -> str:
    rivals = ", ".join(
        f"{name} {_step(each)}"
        for name, each in row["baselines"].items()
        if each["step_seconds"] is not None
    )
    slower = "".join(f", SLOWER THAN {name}" for name in faster(row))
    return (
        f"{row['model']}@{row['seq']} x {row['batch']} on {row['cluster']}: {_step(row)}, "
        f"MFU {row['mfu']:.1%}{slower}; {rivals}; planned in {row['cpu_seconds']:.1f} s"
    )


def _step(found: Row) -> str:
    if found["step_seconds"] is None:
        return "does not apply"
    return f"{found['step_seconds']:.3f} s{'' if found['fits'] else ' (does not fit)'}"


if __name__ == "__main__":
    main()
