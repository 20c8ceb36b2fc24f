"""`shardfold plan --for` prints a stack's words, or writes them whole; bad words end at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardfold.cli.stacks import write_whole
from shardfold.export.search import Priced
from shardfold.export.stack_plan import StackPlan
from shardfold.export.writers import Written
from shardfold.planner.estimated import Estimated
from shardfold.report.stack_text import stack_plan_lines
from shardfold.strategies.stated import parse_strategy

GIB = 2**30


def figures(strategy: str, step: float, peak: float, plan: float | None = None) -> Estimated:
    return Estimated(
        strategy=strategy,
        cluster="8xa100",
        devices=8,
        mesh="8",
        step_seconds=step,
        compute_seconds=step,
        rate=1000 / step,
        unit="tokens",
        mfu=0.4,
        hfu=0.4,
        peak_bytes=peak,
        peak_by_class={},
        limit_bytes=4 * GIB,
        communication=(),
        plan_seconds=plan,
        plan_bytes=plan,
    )


def found(plan: float | None = None) -> StackPlan:
    other = Priced(parse_strategy("dp=8 zero=2", 8), figures("dp=8 zero=2", 0.25, 5 * GIB))
    return StackPlan(
        "accelerate",
        "1.15",
        "read",
        parse_strategy("fsdp=8", 8),
        figures("fsdp=8", 0.2, 3 * GIB, plan),
        (other,),
        10,
        2,
        Written("yaml", "a: 1\nb: 2\n", ("Do this.",)),
        ("Not searched: that.",),
    )


def test_the_lines_say_it_all() -> None:
    assert list(stack_plan_lines(found(0.1), "gpt2")) == [
        "gpt2 on 8xa100 with accelerate 1.15: fsdp=8",
        "",
        "a: 1",
        "b: 2",
        "",
        "Step: 200 ms, 5,000 tokens/s, MFU 40.0%.",
        "Memory: a peak of 3.0 GiB of 4.0 GiB per device.",
        "shardfold's own plan is 2.00 times as fast: 100 ms.",
        "",
        "Runners-up:",
        "    step  slower                 peak  strategy",
        "  250 ms  +25.0%  5.0 GiB (too large)  dp=8 zero=2",
        "",
        "Of 10 configurations of accelerate, 2 were priced; the others cannot be faster, or do not "
        "fit.",
        "Do this.",
        "Not searched: that.",
        "Fields of accelerate 1.15: read.",
    ]


@pytest.mark.parametrize(("plan", "says"), [(0.2, "as fast"), (0.3, "takes 300 ms: it has no")])
def test_a_plan_that_is_no_faster(plan: float, says: str) -> None:
    assert any(says in line for line in stack_plan_lines(found(plan), "gpt2"))


def test_a_file_is_written_whole_and_printed_as_json(run, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    asked = ("plan", "gpt2-tiny", "--cluster", "2xa100", "--for", "deepspeed", "--no-beside")
    result = run(*asked, "--micro-batches", "1", "--save", str(path), "--json")
    assert result.exit_code == 0, result.output
    plain = json.loads(result.stdout)
    assert path.read_text() == plain["text"]
    assert json.loads(plain["text"])["gradient_accumulation_steps"] == 1
    assert plain["saved"] == str(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--for", "torchtitn"), "Did you mean torchtitan?"),
        (("--for", "megatron@0.1"), "were not checked"),
        (("--for", "megatron", "--mesh", "8"), "--mesh is of shardfold's own plan"),
        (("--for", "megatron", "--pipeline", "2"), "--pipeline is of shardfold's own plan"),
        (("--for", "deepspeed", "--dtype", "fp64"), "does not train in float64"),
        (("--for", "deepspeed", "--save", "nowhere/x.json"), "does not exist"),
    ],
)
def test_bad_words_write_nothing(run, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    result = run("plan", "gpt2-tiny", "--cluster", "8xa100", *words)
    assert result.exit_code == 2
    assert says in result.output
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "x.toml").mkdir()
    with pytest.raises(OSError, match=r"x\.toml"):
        write_whole(tmp_path / "x.toml", "text")
    assert [each.name for each in tmp_path.iterdir()] == ["x.toml"]


def test_a_saved_plan_is_exported(run, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    run("plan", "gpt2-tiny", "--cluster", "2xa100", "--save", plan)
    result = run("export", plan, "--to", "deepspeed", "--model", "gpt2-tiny", "--save", out)
    assert result.exit_code == 0, result.output
    assert "The plan takes" in result.output
    assert "zero_optimization" in out.read_text()
    result = run("export", plan, "--to", "dtensor")
    assert json.loads(result.stdout)["mesh"]["shape"] == [2]
    result = run("export", plan, "--to", "deepspeed")
    assert result.exit_code == 2
    assert "needs its --model" in result.output
    result = run("export", plan, "--to", "dtensors", "--model", "gpt2-tiny")
    assert result.exit_code == 2
    assert "Nothing can be exported to 'dtensors'" in result.output
