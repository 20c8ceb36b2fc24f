from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardfold as sf

NEEDED = {
    "step_seconds",
    "data_parallel_seconds",
    "fully_sharded_seconds",
    "additive_seconds",
    "additive_lower_bound_seconds",
    "capture_seconds",
    "search_seconds",
    "mesh",
    "optimal",
    "peak_bytes",
    "unsplit_ops",
    "fits",
    "device_bytes",
    "cluster",
    "model",
    "operators",
    "parameters",
    "meshes",
}


# By kernels, the host of so small a model would decide, and not the sum.
ROOFLINE = ("--cluster", "2x2xh100", "--cost", "roofline")


def test_json_is_one_object_and_the_only_output(run, model_file, tmp_path) -> None:
    saved = tmp_path / "plan.json"
    result = run("plan", f"{model_file}:make", *ROOFLINE, "--json", "--save", saved)
    assert result.exit_code == 0
    figures = json.loads(result.stdout)
    assert figures.keys() >= NEEDED
    assert figures["optimal"] is True
    assert figures["step_seconds"] <= figures["data_parallel_seconds"]
    assert "chatter" not in result.stdout
    plan = sf.Plan.load(saved)
    assert plan.estimate.step_seconds == figures["step_seconds"]
    assert figures["parameters"] == plan.provenance.parameters == 16 * 32 + 32


def test_options_reach_the_planner(run, model_file) -> None:
    result = run(
        *("plan", f"{model_file}:make", "--cluster", "2x2xh100", "--batch", 16, "--mesh", "2x2"),
        *("--dtype", "bf16", "--optimizer", "sgd", "--cost", "paper", "--json"),
    )
    figures = json.loads(result.stdout)
    assert figures["mesh"] == "2x2"
    assert len(figures["meshes"]) == 1
    assert (figures["precision"], figures["optimizer"], figures["cost"]) == ("bf16", "sgd", "paper")


def test_the_table_fits_80_columns_and_says_what_was_found(run, model_file) -> None:
    output = run("plan", f"{model_file}:make", *ROOFLINE).stdout
    assert max(map(len, output.splitlines())) <= 80
    assert "fc linear" in output
    assert "data-parallel " in output
    assert "fsdp " in output
    assert "proven optimal" in output
    assert "Every operator could be split." in output


def test_a_zoo_model_of_transformers_leaves_stderr_quiet(run) -> None:
    pytest.importorskip("transformers")
    result = run("plan", "llama3-8b-tiny", "--cluster", "2xa100", "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert json.loads(result.stdout)["model"] == "llama3-8b-tiny"


def test_unknown_names_suggest_the_nearest(refused) -> None:
    model = refused("plan", "alexnit", "--cluster", "8xa100")
    assert model == "No model is called 'alexnit'. Did you mean alexnet or alexnet-tiny?"
    assert "Did you mean a100" in refused("plan", "alexnet", "--cluster", "8xa1000")
    cost = refused("plan", "alexnet", "--cluster", "8xa100", "--cost", "rofline")
    assert cost == "Unknown cost model 'rofline'. Did you mean roofline?"
    optimizer = refused("plan", "alexnet", "--cluster", "8xa100", "--optimizer", "adm")
    assert "Did you mean adam or adamw?" in optimizer
    assert "bf16" in refused("plan", "alexnet", "--cluster", "8xa100", "--dtype", "bf15")


CLUSTER = """
name = "lab"
device = "h100"
[[levels]]
name = "gpu"
size = 4
bandwidth = {bandwidth}
{latency}
"""


@pytest.mark.parametrize(
    ("bandwidth", "latency", "message"),
    [
        ("1e9", "", "missing required field `latency_seconds`"),
        ("-1e9", "latency_seconds = 1e-6", "must be finite and positive"),
    ],
)
def test_a_cluster_file_with_a_missing_or_negative_figure(
    refused, tmp_path: Path, bandwidth: str, latency: str, message: str
) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(CLUSTER.format(bandwidth=bandwidth, latency=latency))
    assert message in refused("plan", "alexnet", "--cluster", path)


def test_a_device_count_with_no_legal_mesh(refused) -> None:
    message = refused("plan", "alexnet", "--cluster", "8xa100", "--mesh", "3x5")
    assert "which has 8 devices" in message
    assert "Legal meshes: 8, 2x4, 2x2x2." in message


def test_a_model_without_a_loss_says_how_to_give_one(refused, model_file) -> None:
    message = refused("plan", f"{model_file}:no_loss", "--cluster", "2xa100")
    assert "returns no loss: its outputs are float32[8, 32]" in message
    assert "Return the loss from forward" in message


def test_a_data_dependent_branch_is_explained(refused, model_file) -> None:
    message = refused("plan", f"{model_file}:branch", "--cluster", "2xa100")
    assert "depends on the values of a tensor" in message
    assert "torch.where" in message
    assert "def forward" not in message


def test_no_plan_within_an_explicit_limit(refused, model_file) -> None:
    message = refused("plan", f"{model_file}:make", "--cluster", "2xa100", "--memory-limit", "1KiB")
    assert "the limit is 1,024" in message
    assert "is not a size" in refused(
        "plan", "alexnet", "--cluster", "2xa100", "--memory-limit", "much"
    )


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    refused, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("shardfold.cli.model.load_model", lambda *_: pytest.fail("work began"))
    where = tmp_path / "nowhere" / "plan.json"
    assert "does not exist" in refused("plan", "alexnet", "--cluster", "8xa100", "--save", where)
    assert "is a directory" in refused("plan", "alexnet", "--cluster", "8xa100", "--save", tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "no permission" in refused(
        "plan", "alexnet", "--cluster", "8xa100", "--save", tmp_path / "plan.json"
    )


def test_a_failed_run_overwrites_nothing(refused, model_file, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text("precious")
    refused("plan", f"{model_file}:branch", "--cluster", "2xa100", "--save", saved)
    assert saved.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of_mine.py", "plan.json"]


def test_the_saved_problem_has_the_plans_optimum(run, tmp_path) -> None:
    problem = tmp_path / "problem.npz"
    options = ("plan", "gpt2-tiny", *ROOFLINE, "--json", "--save-problem", problem)
    figures = json.loads(run(*options).stdout)
    solved = json.loads(run("solve", problem, "--json").stdout)
    assert solved["cost"] == pytest.approx(figures["additive_seconds"], rel=1e-9)
    assert solved["optimal"] is True


def test_folding_does_not_change_the_cost(run) -> None:
    options = ("plan", "llama3-8b-tiny", "--layers", 4, "--cluster", "2x2xh100", "--json")
    folded, full = (json.loads(run(*options, *flag).stdout) for flag in ((), ("--no-fold",)))
    assert folded["additive_seconds"] == pytest.approx(full["additive_seconds"], rel=1e-9)
    assert folded["step_seconds"] == pytest.approx(full["step_seconds"], rel=1e-9)
    assert folded["operators"] == full["operators"]


def test_micro_batches_are_planned_shown_and_simulated(run, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    options = ("plan", "gpt2-tiny", "--cluster", "2xa100", "--micro-batches", 4, "--save", saved)
    assert json.loads(run(*options, "--json").stdout)["micro_batches"] == 4
    assert "4 micro-batches" in run("show", saved, "--model", "gpt2-tiny").stdout
    assert "4 micro-batches" in run("simulate", saved).stdout
    assert "4 micro-batches" in run("explain", saved, "--model", "gpt2-tiny").stdout


def test_micro_batches_that_cannot_be_are_refused(refused) -> None:
    asked = ("--cluster", "2xa100", "--micro-batches")
    assert "8 samples" in refused("plan", "gpt2-tiny", *asked, 3)
    assert "statistics over the batch" in refused("plan", "resnet50-tiny", *asked, 2)
    assert "auto, search or 4" in refused("plan", "gpt2-tiny", *asked, "many")
