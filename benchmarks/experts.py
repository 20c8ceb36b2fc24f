"""Steps of mixtures of experts on one GPU: the plain module, ours, and what was predicted.

The models are of transformers, unmodified, with random weights, in bfloat16. Both modules train
with fused AdamW on the same batch; the prediction is the default cost model's, made before.

    python benchmarks/experts.py --out benchmarks/results/experts-h200.json   # on the GPU
    python benchmarks/experts.py --report benchmarks/results/experts-h200.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

import shardfold as sf
from environment import environment

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "experts.md"
WARM_UP, STEPS = 3, 10
WORDS = 32_000
COMMON = {"vocab_size": WORDS, "hidden_size": 2048, "num_attention_heads": 16, "use_cache": False}
# The configuration's class, its fields, and the batch.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "Mixtral, 4 layers, 8 experts of 7,168, 2 a token": (
        "MixtralConfig",
        {"intermediate_size": 7168, "num_hidden_layers": 4, "num_local_experts": 8},
        (4, 2048),
    ),
    "Qwen3-MoE, 6 layers, 64 experts of 768, 8 a token": (
        "Qwen3MoeConfig",
        {
            "moe_intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        (4, 2048),
    ),
    "OLMoE, 6 layers, 64 experts of 1,024, 8 a token": (
        "OlmoeConfig",
        {
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        (4, 1024),
    ),
    "Qwen3-MoE, 4 layers, 16 experts of 2,048, 2 a token": (
        "Qwen3MoeConfig",
        {
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 4,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_experts": 16,
            "num_experts_per_tok": 2,
        },
        (8, 1024),
    ),
}


@click.command()
@click.option("--cluster", default="1xh200", show_default=True, help="What is predicted for.")
@click.option("--out", type=Path, help="Write the results to this JSON file.")
@click.option("--report", type=Path, help="Only write docs/results/experts.md from this file.")
def main(cluster: str, out: Path | None, report: Path | None) -> None:
    """Measure every case, and print a line of each."""
    if report is not None:
        PAGE.write_text(page(json.loads(report.read_text())))
        return
    rows = {}
    for name in CASES:
        rows[name] = measured(name, cluster)
        click.echo(f"{name}: {json.dumps(rows[name])}")
    if out is not None:
        found = {"environment": environment(), "cluster": cluster, "cases": rows}
        out.write_text(json.dumps(found, indent=1) + "\n")


def measured(name: str, cluster: str) -> dict[str, Any]:
    """The median step of both modules, the peak of ours, and the predictions."""
    import transformers

    kind, fields, shape = CASES[name]
    config = getattr(transformers, kind)(**COMMON, **fields)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokens = torch.randint(0, WORDS, shape, device="cuda")
    batch = {"input_ids": tokens, "labels": tokens}
    plan = sf.plan(model, (), batch, cluster=cluster)
    ours = sf.parallelize(model, plan, (), batch)
    losses = [float(model(**batch).loss.detach()), float(ours(**batch).detach())]
    plain = _timed(model, lambda: model(**batch).loss)
    model.to("cpu")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = _timed(ours, lambda: ours(**batch))
    return {
        "losses": losses,
        "plain_seconds": plain,
        "seconds": seconds,
        "predicted_seconds": plan.estimate.step_seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "predicted_bytes": plan.estimate.peak_bytes,
    }


def _timed(module: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> float:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
    taken = []
    for _ in range(WARM_UP + STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[WARM_UP:])


def page(found: dict[str, Any]) -> str:
    """The page, from the figures alone."""
    lines = [
        "# Mixtures of experts on one GPU",
        "",
        "Unmodified models of transformers in bfloat16, with random weights and fused AdamW: the",
        "plain module, the same under a plan of one device, and what the default cost model",
        "predicted. Experts are one operator, whose products run as one kernel where PyTorch has",
        "such a kernel. `benchmarks/experts.py` makes this page.",
        "",
        "| model | batch | plain | ours | ratio | predicted | error | peak | predicted | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in found["cases"].items():
        batch = " x ".join(map(str, CASES[name][2]))
        ours, expected = row["seconds"], row["predicted_seconds"]
        peak, size = row["peak_bytes"], row["predicted_bytes"]
        lines.append(
            f"| {name} | {batch} | {row['plain_seconds'] * 1e3:.1f} ms | {ours * 1e3:.1f} ms | "
            f"{ours / row['plain_seconds']:.2f} | {expected * 1e3:.1f} ms | "
            f"{expected / ours - 1:+.1%} | {peak / 2**30:.1f} GiB | {size / 2**30:.1f} GiB | "
            f"{size / peak - 1:+.1%} |"
        )
    made = ", ".join(f"{key} {value}" for key, value in found["environment"].items())
    return "\n".join([*lines, "", f"Measured with: {made}.", ""])


if __name__ == "__main__":
    main()
