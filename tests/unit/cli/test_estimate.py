"""`shardfold estimate` prints a step, memory and the plan; bad words end before any work."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardfold.planner.estimated import Communication, Estimated, EstimatedStage, Pipelined
from shardfold.report.summary_text import estimate_lines

SAMPLE = Estimated(
    strategy="fsdp=8",
    cluster="8xa100",
    devices=8,
    mesh="8",
    step_seconds=0.2,
    compute_seconds=0.19,
    rate=80_000.0,
    unit="tokens",
    mfu=0.4,
    hfu=0.5,
    peak_bytes=3 * 2**30,
    peak_by_class={"optimizer": 2**30, "activations": 2**31},
    limit_bytes=4 * 2**30,
    communication=(
        Communication("all_gather", 0.05, 0.01),
        Communication("reduce_scatter", 0.03, 0.01),
    ),
    plan_seconds=0.1,
    plan_bytes=2**30,
)


def test_the_lines_say_it_all() -> None:
    assert list(estimate_lines(SAMPLE, "gpt2")) == [
        "gpt2 on 8xa100: fsdp=8",
        "",
        "Step: 200 ms, 10,000 tokens/s per device, MFU 40.0%, HFU 50.0% with what is recomputed.",
        "Memory: a peak of 3.0 GiB of 4.0 GiB: it fits.",
        "  activations 2.0 GiB, optimizer 1.0 GiB",
        "Exposed communication (10.0% of the step): all-gather 10.0 ms of 50.0 ms, "
        "reduce-scatter 10.0 ms of 30.0 ms.",
        "The best plan is 2.00 times as fast: 100 ms with a peak of 1.0 GiB.",
    ]


def test_the_stages_of_a_pipeline_are_listed() -> None:
    stage = EstimatedStage("all before, h.0 to 5", 0.01, 0.02, 0.15, 2, 3 * 2**30)
    pipeline = Pipelined("1f1b", 0.25, (stage, replace(stage, layers="h.6 to 11, all after")))
    found = list(estimate_lines(replace(SAMPLE, pipeline=pipeline), "gpt2"))
    assert found[3:7] == [
        "Pipeline: 2 stages, 1f1b, bubble 25.0%.",
        "  1: all before, h.0 to 5: forward 10.0 ms, backward 20.0 ms, 2 in flight, peak 3.0 GiB",
        "  2: h.6 to 11, all after: forward 10.0 ms, backward 20.0 ms, 2 in flight, peak 3.0 GiB",
        "Memory: a peak of 3.0 GiB of 4.0 GiB on the fullest stage: it fits.",
    ]


def test_json_has_every_figure(run) -> None:
    command = ["estimate", "alexnet-tiny", "--cluster", "2xa100", "--strategy", "dp=2", "--json"]
    plain = json.loads(run(*command).stdout)
    assert plain["strategy"] == "dp=2"
    assert plain["plan_seconds"] <= plain["step_seconds"]
    assert plain["unit"] == "samples"
    assert plain["fits"] is True


@pytest.mark.parametrize(
    ("strategy", "says"),
    [("dp=4", "must multiply to the number of devices"), ("tpp=2", "Did you mean tp")],
)
def test_bad_words_are_refused_before_any_work(refused, strategy: str, says: str) -> None:
    command = ("estimate", "alexnet-tiny", "--cluster", "2xa100", "--strategy", strategy)
    assert says in refused(*command)


def test_the_largest_batch_is_said(run) -> None:
    words = ("gpt2-tiny", "--cluster", "2xa100", "--strategy", "dp=2", "--memory-limit", "64MiB")
    result = run("estimate", *words, "--batch", "max", "--no-plan", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fits"]
    assert found["batch"] % 2 == 0
    result = run("estimate", *words, "--batch", str(found["batch"] + 2), "--no-plan", "--json")
    assert not json.loads(result.stdout)["fits"]


def test_a_batch_that_is_no_number_is_refused(run) -> None:
    result = run(
        "estimate", "gpt2-tiny", "--cluster", "2xa100", "--strategy", "dp=2", "--batch", "0"
    )
    assert result.exit_code == 2
    assert "write a whole number, max or best" in result.output
