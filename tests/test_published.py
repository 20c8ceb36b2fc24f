"""Published runs: rows checked, figures converted, configurations priced, ranks compared."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = {
    "source": "mosaicml/llm-foundry README.md",
    "model": "tiny",
    "layers": "4",
    "hidden": "64",
    "ffn": "256",
    "heads": "4",
    "kv_heads": "4",
    "vocab": "512",
    "seq": "32",
    "gpus": "8",
    "gpu": "A100-80GB",
    "gpus_per_node": "8",
    "dtype": "bf16",
    "global_batch": "32",
    "micro_batch": "2",
    **dict.fromkeys(("tp", "pp", "vp", "cp", "ep"), "1"),
    "dp": "8",
    "zero": "3",
    "recompute": "none",
    "sequence_parallel": "0",
    "metric": "step_time_s",
    "value": "0.5",
    "memory_gib": "2",
    "notes": "",
}

SIMUMAX = {"source": "MooreThreads/SimuMax", "zero": "1", "gpu": "B200-SXM"}


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def program(name: str) -> Any:
    return import_module(f"published_{name}")


def rows_of(folder: Path, *changes: dict[str, str], drop: str = "") -> list[Any]:
    lines = [{k: v for k, v in {**BASE, **change}.items() if k != drop} for change in changes]
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    return program("rows").read_rows(path)


def priced(folder: Path, **change: str) -> Any:
    return program("price").price(rows_of(folder, change)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"gpus": "eight"},
            "row 2, column gpus: it must be a whole number, 1 .*'eight'",
        ),
        ({"memory_gib": "50GB"}, "row 2, column memory_gib: .* without a unit, got '50GB'"),
        ({"metric": "tokens_per_hour"}, "row 2, column metric: the unit must be one of tokens_per"),
        ({"value": ""}, "row 2, column value: a run with the metric step_time_s needs one"),
        ({"value": "OOM"}, "row 2, column value: it must be a positive number"),
        ({"ffn": "wide"}, "row 2, column ffn"),
        ({"source": ""}, "row 2, column source: it must be given"),
    ],
)
def test_a_wrong_cell_is_named_by_row_and_column(
    tmp_path: Path, change: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path, {}, change)


def test_missing_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing column micro_batch"):
        rows_of(tmp_path, {}, drop="micro_batch")


def test_every_metric_says_a_step(tmp_path: Path) -> None:
    # 96 x 32 x 4 x 64^2 x (1 + 32/384 + 512/4096) operations of a sequence, 32 of them, 8 devices
    flops = 96 * 32 * 4 * 64**2 * (1 + 32 / 384 + 512 / 4096) * 32 / 8
    figures = {
        "step_time_s": 0.5,
        "tokens_per_s_per_gpu": 32 * 32 / 8 / 0.5,
        "samples_per_s": 64.0,
        "hw_tflops_per_gpu": flops / 0.5 / 1e12,
        "model_tflops_per_gpu": 0.75 * flops / 0.5 / 1e12,
    }
    made = program("rows")
    changes = [{"metric": name, "value": repr(value)} for name, value in figures.items()]
    for row in rows_of(tmp_path, *changes):
        assert made.step_seconds(row) == pytest.approx(0.5)
        assert made.in_metric(row, 0.5) == pytest.approx(row.value)


def test_a_ratio_of_inner_features_is_rounded_as_llama_does(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, {"ffn": "8/3*4096"})
    made = program("price").configuration(row, program("setups").setup_of(row))
    assert made.dims.ffn == 11008


def test_rows_are_chosen_by_number_and_source(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, {}, {"source": "other"}, {}, {})
    choose = program("rows").chosen
    assert [r.number for r in choose(rows, "2:3", "")] == [2, 3]
    assert [r.number for r in choose(rows, "2:", "Mosaic")] == [3, 4]
    with pytest.raises(ValueError, match="write A:B"):
        list(choose(rows, "7", ""))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pp": "3", "dp": "4"}, "degrees do not multiply to the devices"),
        ({"cp": "2", "dp": "4"}, "context parallelism: how keys travel is not published"),
        ({"ep": "8"}, "dims of experts not published"),
        ({"source": "NVIDIA-NeMo/Megatron-Bridge", "recompute": ""}, "recomputation not published"),
        ({"recompute": "selective: moe_act"}, "recomputation of another kind"),
        ({"dtype": "mxfp8"}, "precision: fp8 or fp4"),
        ({"layers": ""}, "dims not published"),
        ({"dp": "4"}, "degrees do not multiply to the devices"),
        ({"micro_batch": "3"}, "the batch is no multiple of its micro-batches"),
        ({"gpu": "TPU"}, "device not in the catalog"),
    ],
)
def test_what_cannot_be_stated_is_left_out_with_its_reason(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    assert priced(tmp_path, **change)["reason"] == reason


@pytest.mark.parametrize(
    "change",
    [
        {"notes": "FSDP mixed_precision PURE"},
        {"source": "NVIDIA/Megatron-LM", "zero": "0", "recompute": "", "tp": "4", "dp": "2"},
        {"source": "calculon-ai/calculon", "zero": "0", "recompute": "selective_attention"},
        {"source": "bigscience-workshop/bigscience", "zero": "1", "gpu": "V100-32GB"},
        {"source": "alpa-projects/alpa", "zero": "auto (ILP)", "gpu": "V100-16GB (p3.16xlarge)"},
        {"source": "InternLM/InternEvo", "zero": "1 (group of 4)", "ffn": "8/3*64"},
        {"source": "MooreThreads/SimuMax", "zero": "1", "tp": "4", "dp": "2", "gpu": "B200-SXM"},
        {"source": "vinjn/nanotron-ultrascale-playbook", "zero": "1", "gpu": "H100-80GB"},
        {"source": "somebody/else", "zero": "0", "ffn": "176", "kv_heads": "2"},
        {"source": "somebody/with AMD", "zero": "1", "gpu": "AMD Instinct MI300X-192GB"},
        {"source": "NVIDIA/Megatron-LM", "zero": "0", "pp": "2", "vp": "2", "dp": "4"},
        {**SIMUMAX, "cp": "2", "dp": "4", "notes": "CP comm a2a"},
        {**SIMUMAX, "model": "deepseekv2 cut to 4 layers", "ep": "8"},
        {"source": "vinjn/nanotron-ultrascale-playbook", "zero": "1", "pp": "2", "dp": "4"},
    ],
    ids=lambda change: "".join(change.get(name, "") for name in ("source", "pp", "cp", "ep")),
)
def test_a_row_of_every_stack_is_priced(tmp_path: Path, change: dict[str, str]) -> None:
    if change.get("gpu", "").startswith("V100"):
        change = {**change, "dtype": "fp16"}
    found = priced(tmp_path, **change)
    assert "reason" not in found
    assert found["predicted"] == pytest.approx(found["predicted_step_seconds"])
    assert found["error"] == pytest.approx(found["predicted"] / 0.5 - 1)
    assert found["memory_error"] == pytest.approx(found["predicted_memory_gib"] / 2 - 1)


def test_the_parameters_are_those_that_the_source_counts() -> None:
    models = program("models")
    mpt = models.Dims(32, 4096, 16384, 32, 32, 50368, 2048)
    assert models.parameters(mpt, models.GPT) == 6658859008


def test_ranks_and_regret() -> None:
    made = program("summary")
    assert made.kendall([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert made.kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert made.kendall([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 6**0.5)
    alike = dict.fromkeys(made.GROUP, "x") | {"metric": "step_time_s", "fits": True}
    steps = [(1.0, 3.0), (2.0, 2.0), (4.0, 5.0)]
    rows = [
        {**alike, "step_seconds": a, "predicted_step_seconds": b, "error": b / a - 1}
        for a, b in steps
    ]
    found = made.summarise([*rows, {**alike, "metric": "oom", "fits": False}, {"reason": "why"}])
    assert found.kendall == pytest.approx(1 / 3)
    assert found.regret == pytest.approx(1.0)
    assert (found.failed, found.foretold, found.left_out) == (1, 1, {"why": 1})
    assert found.step.median == pytest.approx(0.25)
