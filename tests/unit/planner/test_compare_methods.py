"""No sum beats the exact search's, no strategy's step the plan's; what cannot run says why."""

from __future__ import annotations

import re

import pytest

import shardfold as sf
from shardfold import zoo
from shardfold.errors import InputError
from shardfold.planner.compare_methods import METHODS, SEARCHES, Comparison, Effort
from shardfold.planner.equal_layers import SCHEDULES
from shardfold.strategies.baselines import RENAMED, STRATEGIES

CLUSTERS = ("8xa100", "4x8x1080ti", "2x8xh100")
MODELS = ("alexnet-tiny", "rnnlm-tiny", "transformer-tiny", "gpt2-tiny")
QUICK = Effort(moves=5_000, ilp_seconds=10.0, ilp_variables=4_000)


def compared(name: str, cluster: str, **options: object) -> Comparison:
    if zoo.entry(name).source.startswith("Hugging"):
        pytest.importorskip("transformers")
    module, args, kwargs = zoo.build(name)
    given = {"effort": QUICK, "prefer": "speed", **options}
    return sf.compare(module, args, kwargs, cluster=cluster, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", MODELS)
def test_exact_is_never_slower(name: str, cluster: str) -> None:
    found = compared(name, cluster)
    assert tuple(r.method for r in found.results) == METHODS
    plan, exact = found.results[:2]
    assert exact.proven
    for result in found.results:
        if result.step_seconds is None:
            assert result.note
            assert result.method in (*STRATEGIES, *SCHEDULES, "ilp")
            continue
        if result.method in SCHEDULES:
            continue
        assert exact.additive_seconds <= result.additive_seconds * (1 + 1e-9)
        if result.method in (*STRATEGIES, "additive-optimum"):
            assert plan.step_seconds <= result.step_seconds * (1 + 1e-9)
    assert all(r.fits for r in found.results if r.fits is not None)  # nothing was passed over


def test_the_plan_and_the_strategies_are_what_plan_says() -> None:
    module, args, kwargs = zoo.build("alexnet-tiny")
    plan = sf.plan(module, args, kwargs, cluster="2x4xh100", mesh="2x4", prefer="speed")
    found = compared("alexnet-tiny", "2x4xh100", mesh="2x4")
    by_name = {r.method: r for r in found.results}
    e = plan.estimate
    assert by_name["selected"].additive_seconds == e.additive_seconds
    assert by_name["selected"].step_seconds == e.step_seconds == plan.simulation.step_seconds
    assert by_name["data-parallel"].step_seconds == e.data_parallel_seconds
    assert by_name["fsdp"].step_seconds == e.fully_sharded_seconds
    known = {entry.name: entry for entry in plan.finalists}
    assert by_name["data-parallel"].additive_seconds == known["data-parallel"].additive_seconds
    ratio = known["data-parallel"].step_seconds / plan.simulation.step_seconds
    assert found.speedups["selected"] == pytest.approx(ratio)
    assert by_name["data-parallel"].peak_bytes == e.data_parallel_bytes
    assert found.baseline == "data-parallel"


def test_data_parallel_sends_every_gradient_once() -> None:
    """A ring all-reduce over n sends 2(n - 1)/n of the gradients' bytes from each device."""
    found = compared("rnnlm-tiny", "8xa100", methods=("additive-optimum", "data-parallel"))
    module, _, _ = zoo.build("rnnlm-tiny")
    gradients = 4 * sum(p.numel() for p in module.parameters())
    sent = found.results[1].communication_bytes
    assert sent == pytest.approx(2 * 7 / 8 * gradients, rel=1e-3)


def test_an_integer_program_ties_and_says_so() -> None:
    found = compared("rnnlm-tiny", "2x2xh100", methods=("additive-optimum", "ilp"), mesh="2x2")
    exact, program = found.results
    assert program.additive_seconds == pytest.approx(exact.additive_seconds, rel=1e-9)
    assert program.note == "has the least additive cost"
    assert program.proven


def test_a_large_integer_program_is_skipped_with_its_size() -> None:
    effort = Effort(moves=10, ilp_variables=10)
    found = compared("alexnet-tiny", "2xh100", methods=("ilp",), effort=effort)
    assert found.results[0].step_seconds is None
    assert "variables, more than 10" in found.results[0].note


def test_what_does_not_fit_is_told_apart() -> None:
    """A limit that data parallelism exceeds: it may be faster, but it does not fit."""
    free = compared("alexnet-tiny", "2x4xh100")
    by_name = {r.method: r for r in free.results}
    limit = by_name["fsdp"].peak_bytes * 1.02
    bound = compared("alexnet-tiny", "2x4xh100", memory_limit=limit)
    plan = bound.results[0]
    assert plan.fits
    assert plan.step_seconds >= by_name["selected"].step_seconds * (1 - 1e-9)
    assert not {r.method: r for r in bound.results}["data-parallel"].fits
    fitting = {r.method: r.step_seconds for r in bound.results if r.method in STRATEGIES and r.fits}
    assert bound.baseline == min(fitting, key=lambda name: fitting[name])
    assert bound.speedups["selected"] == pytest.approx(fitting[bound.baseline] / plan.step_seconds)
    assert bound.speedups["selected"] >= 1 - 1e-9
    for result in bound.results:
        if result.fits and result.method in (*STRATEGIES, "additive-optimum"):
            assert plan.step_seconds <= result.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("cluster", ["8xa100", "4x8x1080ti"])
def test_random_moves_start_from_the_best_strategy_by_hand(cluster: str) -> None:
    found = compared("gpt2-tiny", cluster)
    by_name = {r.method: r for r in found.results if r.step_seconds}
    hands = [by_name[s] for s in STRATEGIES if s in by_name]
    best = min(hands, key=lambda r: r.step_seconds)
    assert by_name["mcmc"].additive_seconds <= best.additive_seconds * (1 + 1e-9)


def test_plain_values_hold_everything() -> None:
    found = compared("rnnlm-tiny", "8xa100", methods=("data-parallel", "greedy"))
    plain = found.as_plain()
    assert [r["method"] for r in plain["results"]] == ["data-parallel", "greedy"]
    assert plain["results"][0]["speedup"] == 1.0
    assert set(SEARCHES) < set(METHODS)


def test_an_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"Unknown method 'mcmcm'. Did you mean mcmc\?"):
        compared("rnnlm-tiny", "8xa100", methods=("mcmcm",))


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_of_a_method_names_the_new_one(old: str, new: str) -> None:
    assert new in METHODS
    with pytest.raises(InputError, match=re.escape(f"'{old}' is now called '{new}'.")):
        compared("rnnlm-tiny", "8xa100", methods=(old,))
