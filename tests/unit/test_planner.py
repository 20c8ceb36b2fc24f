"""One planner: captures once, answers everything, and keeps every option when it plans anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardfold as sf
from shardfold.cluster import parse
from shardfold.errors import InputError, ProfileError
from shardfold.planner.options import Options
from shardfold.plans.files import dumps, loads
from shardfold.progress import Stage
from virtual.models import Language, tokens

H200 = Path(__file__).parents[2] / "benchmarks" / "profiles" / "h200.json"
ASKED: Options = {
    "pins": {"head": "batch/2"},
    "memory_limit": "1GiB",
    "recompute": "never",
    "micro_batches": 2,
    "optimizer": "sgd",
    "fold": False,
}


def planner(cluster: str | None = "2xa100", **options: Any) -> sf.Planner:
    return sf.Planner(Language(), (tokens(),), {"labels": tokens()}, cluster=cluster, **options)


@pytest.fixture(scope="module")
def asked() -> sf.Plan:
    return planner(**ASKED).plan()


def test_every_option_is_kept_in_the_file(asked: sf.Plan) -> None:
    request = loads(dumps(asked).encode()).provenance.request
    assert request == asked.provenance.request
    assert request.pins == ("head=batch/2",)
    assert (request.memory_limit, request.recompute) == (2**30, "never")
    assert (request.micro_batches, request.optimizer, request.fold) == (2, "sgd", False)
    assert asked.micro_batches == 2


def test_planning_anew_keeps_every_option(asked: sf.Plan) -> None:
    found = planner(None).replan(asked, devices=4, within=2)
    assert found.provenance.request == asked.provenance.request
    assert sum(axis.size > 1 for axis in found.mesh) >= 1
    assert (found.micro_batches, found.estimate.limit_bytes) == (2, 2**30)
    assert found.pinned is not None
    head = next(e for e in found.operators if e.module == "head" and e.kind == "aten.linear")
    assert head.split == {"batch": 2}
    changed = planner(None).replan(asked, cluster="4xa100", recompute="auto", pins=None)
    assert changed.provenance.request.recompute == "auto"
    assert changed.pinned is None
    assert changed.micro_batches == 2


def test_a_mesh_stays_where_it_is_possible() -> None:
    plan = planner("4xa100", mesh="2x2").plan()
    assert [a.size for a in planner().replan(plan, devices=4).mesh] == [2, 2]
    alone = planner().replan(plan, devices=2)
    assert [a.size for a in alone.mesh] == [2]
    assert "The mesh 2x2, asked for before, is not possible here." in alone.provenance.notes


def test_either_a_cluster_or_devices(asked: sf.Plan) -> None:
    with pytest.raises(InputError, match="either a cluster or a number of devices"):
        planner().replan(asked)
    with pytest.raises(InputError, match='Say which devices to plan for, such as cluster="8xa100"'):
        planner(None).plan()


def test_a_measured_plan_is_planned_anew_by_its_profile(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(H200.read_bytes())
    plan = planner("2xh200", profile=file, dtype="bf16").plan()
    assert plan.provenance.request.cost == "measured"
    found = planner(None).replan(plan, devices=4)
    assert found.provenance.request == plan.provenance.request
    file.unlink()
    with pytest.raises(ProfileError, match=r"machine\.json .*is not there: give it as profile="):
        planner(None).replan(plan, devices=4)
    again = planner(None).replan(plan, devices=4, profile=H200)
    assert again.operators == found.operators
    assert planner(None, profile=H200).replan(plan, devices=4).operators == found.operators


def test_the_model_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    mine = planner("2x2xa100", watch=lambda stage: seen.append(stage.name))
    plan = mine.plan()
    mine.plan(optimizer="sgd")
    mine.plan(cluster="8xa100", memory_limit="1GiB")
    mine.what_if(plan, cluster="2x2x1080ti")
    mine.explain(plan, op="head")
    mine.compare(methods=("selected", "data-parallel"))
    assert seen.count("capture") == 2  # a few blocks of the run for plans, all for questions


def test_the_planner_and_the_functions_agree() -> None:
    example = (Language(), (tokens(),), {"labels": tokens()})
    mine = sf.Planner(*example, cluster="4xa100", optimizer="sgd")
    plan = mine.plan()
    assert sf.plan(*example, cluster="4xa100", optimizer="sgd").operators == plan.operators
    assert sf.explain(*example, plan=plan, op="head") == mine.explain(plan, op="head")
    one, other = sf.what_if(*example, plan=plan, dtype="bf16"), mine.what_if(plan, dtype="bf16")
    assert (one.kept, one.after.operators) == (other.kept, other.after.operators)


def test_compare_takes_every_option_of_plan() -> None:
    found = planner().compare(methods=("selected", "additive-optimum"), **ASKED)
    best = {result.method: result for result in found.results}
    assert found.limit_bytes == 2**30
    assert best["selected"].step_seconds == pytest.approx(
        planner(**ASKED).plan().estimate.step_seconds, rel=1e-9
    )


def test_a_wrong_option_is_refused_before_anything_is_captured() -> None:
    def never(stage: Stage) -> None:
        raise AssertionError(stage)

    for wrong in ({"memorylimit": 1}, {"double": True}, {"recompute": "yes"}):
        with pytest.raises(InputError):
            planner(watch=never, **wrong)
    with pytest.raises(InputError, match="Unknown cluster"):
        planner("8xa1000", watch=never)


@pytest.mark.parametrize(("name", "new"), [("cuts", "micro_batch_dims"), ("noted", "with_notes")])
def test_old_names_of_a_plan_say_the_new_ones(asked: sf.Plan, name: str, new: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}': it is called {new} now"):
        getattr(asked, name)


def test_parallelize_names_the_new_word(asked: sf.Plan) -> None:
    call: Callable[..., Any] = sf.parallelize
    with pytest.raises(InputError, match=r"no option 'double'\. It is called float64 now"):
        call(Language(), asked, (tokens(),), {"labels": tokens()}, double=True)


def test_a_plan_needs_no_cluster_twice() -> None:
    assert planner(None).plan(cluster=parse("2xa100")).cluster == parse("2xa100").name
