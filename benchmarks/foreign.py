"""Predictions for models that nobody tuned for: the cases, their steps on a GPU, and how far off.

The cases were written down before the first of them was measured. Each is a transformers class
with a loss in a size of its own, plain and eager in bfloat16 with AdamW, and is predicted by its
estimate on one device: with `--cost kernels`, and with a profile of the device's kernels.

    python benchmarks/foreign.py measure --out benchmarks/results/foreign-h200.json
    python benchmarks/foreign.py measure --set second \
        --out benchmarks/results/foreign-h200-second.json
    python benchmarks/foreign.py predict benchmarks/results/foreign-h200.json \
        --profile benchmarks/profiles/h200.json
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from environment import environment

WARM, STEPS = 4, 15
PAGE = Path("docs/results/foreign.md")
RESULTS = {
    name: Path(f"benchmarks/results/foreign-h200{suffix}.json")
    for name, suffix in (("first", ""), ("second", "-second"))
}
CLUSTER = "1xh200"


@dataclass(frozen=True, slots=True)
class Case:
    """A transformers configuration and class, and the sizes of a batch."""

    config: str
    kind: str
    batch: int
    seq: int | None = None
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The class and the batch."""
        shape = f"{self.batch} x {self.seq:,}" if self.seq else f"{self.batch}"
        return f"{self.kind}, {shape}"


def _text(layers: int, hidden: int, heads: int, wide: int, vocabulary: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": wide,
        "vocab_size": vocabulary,
    }


CASES = (
    Case(
        "OPTConfig",
        "OPTForCausalLM",
        4,
        2048,
        {
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "ffn_dim": 8192,
            "word_embed_proj_dim": 2048,
            "layerdrop": 0.0,
        },
    ),
    Case("OPTConfig", "OPTForCausalLM", 16, 512, {"layerdrop": 0.0}),
    Case(
        "BloomConfig",
        "BloomForCausalLM",
        4,
        1024,
        {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
    ),
    Case("GPTJConfig", "GPTJForCausalLM", 4, 1024, {"n_embd": 2048, "n_layer": 12, "n_head": 16}),
    Case(
        "FalconConfig",
        "FalconForCausalLM",
        4,
        2048,
        {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "alibi": False},
    ),
    Case("StableLmConfig", "StableLmForCausalLM", 4, 2048, _text(16, 2048, 32, 5632, 50304)),
    Case("StableLmConfig", "StableLmForCausalLM", 1, 4096, _text(16, 2048, 32, 5632, 50304)),
    Case("Olmo2Config", "Olmo2ForCausalLM", 4, 2048, _text(12, 2048, 16, 8192, 100352)),
    Case(
        "MistralConfig",
        "MistralForCausalLM",
        2,
        4096,
        {**_text(8, 4096, 32, 14336, 32000), "sliding_window": None},
    ),
    Case(
        "MistralConfig",
        "MistralForCausalLM",
        1,
        8192,
        {**_text(8, 4096, 32, 14336, 32000), "sliding_window": None},
    ),
    Case("GraniteConfig", "GraniteForCausalLM", 4, 2048, _text(24, 1536, 24, 4096, 49152)),
    Case(
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        4,
        2048,
        {"n_positions": 2048, "n_embd": 2048, "n_layer": 16, "n_head": 16},
    ),
    Case("CohereConfig", "CohereForCausalLM", 2, 2048, _text(8, 4096, 32, 11008, 64000)),
    Case(
        "NemotronConfig",
        "NemotronForCausalLM",
        4,
        2048,
        {**_text(12, 3072, 24, 12288, 64000), "num_key_value_heads": 8},
    ),
    Case(
        "RobertaConfig",
        "RobertaForMaskedLM",
        32,
        512,
        {**_text(24, 1024, 16, 4096, 50265), "max_position_embeddings": 514},
    ),
    Case(
        "RobertaConfig",
        "RobertaForSequenceClassification",
        64,
        128,
        {**_text(12, 768, 12, 3072, 50265), "max_position_embeddings": 514},
    ),
    Case("DebertaV2Config", "DebertaV2ForMaskedLM", 16, 512, _text(12, 768, 12, 3072, 128100)),
    Case("ElectraConfig", "ElectraForMaskedLM", 64, 512, _text(12, 768, 12, 3072, 30522)),
    Case("DistilBertConfig", "DistilBertForMaskedLM", 64, 512),
    Case("ModernBertConfig", "ModernBertForMaskedLM", 16, 1024),
    Case("BartConfig", "BartForConditionalGeneration", 8, 1024),
    Case("PegasusConfig", "PegasusForConditionalGeneration", 8, 512),
    Case("BeitConfig", "BeitForImageClassification", 64, None, {"num_labels": 1000}),
    Case("DeiTConfig", "DeiTForImageClassification", 128, None, {"num_labels": 1000}),
    Case(
        "Dinov2Config",
        "Dinov2ForImageClassification",
        32,
        None,
        {
            "num_labels": 1000,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
    ),
    Case("SegformerConfig", "SegformerForImageClassification", 64, None, {"num_labels": 1000}),
    Case("RegNetConfig", "RegNetForImageClassification", 128, None, {"num_labels": 1000}),
    Case("MobileNetV2Config", "MobileNetV2ForImageClassification", 256, None, {"num_labels": 1000}),
    Case("PoolFormerConfig", "PoolFormerForImageClassification", 64, None, {"num_labels": 1000}),
    Case("ConvNextV2Config", "ConvNextV2ForImageClassification", 128, None, {"num_labels": 1000}),
    Case(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        16,
        448,
        {
            "encoder_layers": 12,
            "decoder_layers": 12,
            "d_model": 768,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
    ),
    Case("ASTConfig", "ASTForAudioClassification", 16, None, {"num_labels": 527}),
    Case("CLIPConfig", "CLIPModel", 64, 77),
    Case("MambaConfig", "MambaForCausalLM", 2, 512, {"hidden_size": 768, "num_hidden_layers": 4}),
)


# Chosen after all mends that the first set led to, and before any of these was measured.
SECOND = (
    Case(
        "GemmaConfig",
        "GemmaForCausalLM",
        4,
        1024,
        {**_text(12, 2048, 8, 16384, 256000), "num_key_value_heads": 1, "head_dim": 256},
    ),
    Case("PhiConfig", "PhiForCausalLM", 4, 2048, _text(24, 2048, 32, 8192, 51200)),
    Case(
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        2,
        4096,
        {**_text(12, 3072, 24, 12288, 49152), "num_key_value_heads": 2, "sliding_window": None},
    ),
    Case(
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        4,
        2048,
        {
            "hidden_size": 2048,
            "num_layers": 12,
            "num_heads": 16,
            "attention_types": [[["global", "local"], 6]],
        },
    ),
    Case("CodeGenConfig", "CodeGenForCausalLM", 8, 1024, {"n_embd": 1024, "n_layer": 20}),
    Case("OlmoConfig", "OlmoForCausalLM", 2, 4096, _text(12, 2048, 16, 8192, 50304)),
    Case(
        "GlmConfig",
        "GlmForCausalLM",
        4,
        2048,
        {**_text(12, 2048, 16, 6912, 151552), "num_key_value_heads": 2, "head_dim": 128},
    ),
    Case(
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        2,
        2048,
        {**_text(18, 2048, 16, 11008, 128256), "num_key_value_heads": 4},
    ),
    Case("MptConfig", "MptForCausalLM", 4, 2048, {"d_model": 2048, "n_heads": 16, "n_layers": 12}),
    Case("XGLMConfig", "XGLMForCausalLM", 4, 1024, {"num_layers": 24, "layerdrop": 0.0}),
    Case("BioGptConfig", "BioGptForCausalLM", 4, 1024, {"layerdrop": 0.0}),
    Case("AlbertConfig", "AlbertForMaskedLM", 32, 512, _text(12, 1024, 16, 4096, 30000)),
    Case("MPNetConfig", "MPNetForMaskedLM", 32, 512, {"max_position_embeddings": 514}),
    Case(
        "XLMRobertaConfig",
        "XLMRobertaForMaskedLM",
        16,
        512,
        {**_text(12, 768, 12, 3072, 250002), "max_position_embeddings": 514},
    ),
    Case("MobileBertConfig", "MobileBertForMaskedLM", 32, 128),
    Case("MBartConfig", "MBartForConditionalGeneration", 8, 512),
    Case("MarianConfig", "MarianMTModel", 16, 256),
    Case("ViTMSNConfig", "ViTMSNForImageClassification", 64, None, {"num_labels": 1000}),
    Case(
        "EfficientNetConfig",
        "EfficientNetForImageClassification",
        64,
        None,
        {
            "num_labels": 1000,
            "image_size": 224,
            "width_coefficient": 1.0,
            "depth_coefficient": 1.0,
            "hidden_dim": 1280,
        },
    ),
    Case("MobileViTConfig", "MobileViTForImageClassification", 64, None, {"num_labels": 1000}),
    Case("CvtConfig", "CvtForImageClassification", 64, None, {"num_labels": 1000}),
    Case("FocalNetConfig", "FocalNetForImageClassification", 64, None, {"num_labels": 1000}),
    Case("HieraConfig", "HieraForImageClassification", 64, None, {"num_labels": 1000}),
    Case("Data2VecVisionConfig", "Data2VecVisionForImageClassification", 32, None),
    Case("LevitConfig", "LevitForImageClassification", 128, None, {"num_labels": 1000}),
    Case("Swinv2Config", "Swinv2ForImageClassification", 64, None, {"num_labels": 1000}),
    Case("SiglipConfig", "SiglipModel", 32, 64),
)
SETS = {"first": CASES, "second": SECOND}


def built(case: Case, device: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The module with its batch on a device."""
    import transformers

    from shardfold.cli.model import load_model

    config = getattr(transformers, case.config)(**case.sizes)
    plain = {**config.to_dict(), "architectures": [case.kind]}
    sizes = {"batch": case.batch, "seq": case.seq, "layers": None, "hidden": None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(plain, default=str))
        example = load_model(f"hf:{path}", sizes, device)
    return example.module, example.args, example.kwargs


def measured(case: Case) -> dict[str, Any]:
    """The median of some steps, and the most memory, of the plain module."""
    import torch

    def half(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16) if is_real else value

    gc.collect()
    torch.cuda.empty_cache()
    module, args, kwargs = built(case, "cuda")
    module = module.to("cuda", torch.bfloat16).train()
    args, kwargs = tuple(map(half, args)), {name: half(v) for name, v in kwargs.items()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)

    def step() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        module(*args, **kwargs).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(WARM):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = [step() for _ in range(STEPS)]
    return {
        "step_seconds": statistics.median(times),
        "all_seconds": [round(t, 6) for t in times],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "parameters": sum(p.numel() for p in module.parameters()),
    }


def predicted(case: Case, profile: str | None) -> dict[str, Any]:
    """The estimates of one device's step, by the datasheet and with a profile."""
    from shardfold.api import Planner

    module, args, kwargs = built(case, "meta")
    found: dict[str, Any] = {}
    for name, given in (("default", {"cost": "kernels"}), ("profile", {"profile": profile})):
        if name == "profile" and profile is None:
            continue
        planner = Planner(module, args, kwargs, cluster=CLUSTER, dtype="bf16", **given)
        one = planner.estimate("dp=1", beside_plan=False)
        found[f"{name}_seconds"] = one.step_seconds
        found["predicted_bytes"] = one.peak_bytes
    return found


@click.group(help=__doc__)
def main() -> None:
    """Cases outside the zoo."""


@main.command("measure")
@click.option("--out", required=True, help="The JSON to write, after each case anew.")
@click.option("--set", "chosen", type=click.Choice(list(SETS)), default="first")
def measure(out: str, chosen: str) -> None:
    """Measure every case on this machine's GPU; those that the file has are left alone.

    A GPU that was left in error by a case is left: begin again, and the others are measured.
    """
    rows: list[dict[str, Any]] = []
    if Path(out).exists():
        rows = json.loads(Path(out).read_text())["rows"]
    known = {row["name"] for row in rows}
    for case in SETS[chosen]:
        if case.name in known:
            continue
        try:
            row = measured(case)
            click.echo(f"{case.name:50s} {row['step_seconds'] * 1e3:8.1f} ms")
        except Exception as error:  # the others go on, and this one is told
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            click.echo(f"{case.name:50s} {row['error']}")
        rows.append({"name": case.name, **row})
        Path(out).write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
        if "Accelerator" in row.get("error", ""):
            raise SystemExit(3)


@main.command("predict")
@click.argument("file")
@click.option("--profile", help="A profile of the device, to be held beside its datasheet.")
@click.option("--only", help="Cases whose name contains this.")
@click.option("--page", is_flag=True, help="Write docs/results/foreign.md.")
def predict(file: str, profile: str | None, only: str | None, page: bool) -> None:
    """Hold predictions beside what was measured."""
    document = json.loads(Path(file).read_text())
    known = {row["name"]: row for row in document["rows"]}
    rows = []
    for case in (*CASES, *SECOND):
        row = known.get(case.name)
        if row is None or (only and only not in case.name):
            continue
        if "error" not in row:
            try:
                row.update(predicted(case, profile))
            except Exception as error:
                row["refused"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
        click.echo(_line(row))
    click.echo(_summary(rows))
    if page:
        Path(file).write_text(json.dumps(document, indent=1) + "\n")
        PAGE.write_text(page_of(*(json.loads(each.read_text()) for each in RESULTS.values())))


COLUMNS = (
    ("default_seconds", "step_seconds"),
    ("profile_seconds", "step_seconds"),
    ("predicted_bytes", "peak_bytes"),
)


def _errors(row: dict[str, Any]) -> list[float | None]:
    return [row[a] / row[b] - 1 if a in row and b in row else None for a, b in COLUMNS]


def _line(row: dict[str, Any]) -> str:
    if "error" in row or "refused" in row:
        return f"| {row['name']} | {row.get('error') or row.get('refused')} | | | | |"
    cells = [f"{e:+.1%}" if e is not None else "-" for e in _errors(row)]
    step, peak = row["step_seconds"] * 1e3, row["peak_bytes"] / 2**30
    return (
        f"| {row['name']} | {step:.1f} ms | {cells[0]} | {cells[1]} | {peak:.1f} GiB | {cells[2]} |"
    )


def _summary(rows: list[dict[str, Any]]) -> str:
    lines = []
    for k, (what, bars) in enumerate(
        (("kernels step", (0.1, 0.2)), ("profile step", (0.1, 0.2)), ("peak", (0.03, 0.06)))
    ):
        found = [abs(e) for e in (_errors(row)[k] for row in rows) if e is not None]
        if found:
            within = ", ".join(f"{sum(e <= bar for e in found)} within {bar:.0%}" for bar in bars)
            middle = statistics.median(found)
            lines.append(f"- {what}: {len(found)} cases, median {middle:.1%}, {within}")
    return "\n".join(lines)


HEAD = """# Models that nobody tuned for

Plain eager steps (bfloat16, AdamW) of transformers models outside the zoo, on one H200, beside the
estimate of one device's step: with the default cost model, which knows the device's datasheet only,
and with a profile of its kernels. The cases of each set were chosen and written down before the
first of them was measured (`benchmarks/foreign.py`). The host is another in every set: models of
many short operators take its time, and it was twice as fast in one run as in another.
"""
SEEN = """Some classes were mended after this set had been seen, and for them it is fresh no more:
attention that broadcasts the heads of its keys (Falcon), batch norm of few channels (MobileNetV2),
depthwise convolutions and where channels lie (ConvNeXt V2), what a batched product is added to
(Bloom), the pace of the host, and the workspace of products.
"""
FRESH = """Chosen after all of that, and predicted with nothing changed since it was measured.
"""
TABLE = "| case | measured | kernels | profile | peak | predicted |\n|---|--:|--:|--:|--:|--:|\n"


def page_of(first: dict[str, Any], second: dict[str, Any]) -> str:
    """The page of both sets."""
    parts = [HEAD]
    for title, said, each in (("The first set", SEEN, first), ("The second set", FRESH, second)):
        place = "".join(f"- {k}: {v}\n" for k, v in each["environment"].items())
        body = "\n".join(_line(row) for row in each["rows"])
        found = _summary(each["rows"])
        parts.append(f"## {title}\n\n{said}\n{found}\n\n{TABLE}{body}\n\nMeasured on:\n\n{place}")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
