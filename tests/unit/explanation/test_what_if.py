"""What if: the new optimum, and the old choice priced in the new setting."""

from __future__ import annotations

import pytest
import torch

import shardfold as sf
from shardfold import zoo
from shardfold.explanation.explanation import WhatIf
from virtual.models import Language, tokens


@pytest.fixture(scope="module")
def plan() -> sf.Plan:
    asked = {"cluster": "2x2xa100", "optimizer": "sgd"}
    # By kernels, the host of so small a model would decide.
    return sf.plan(Language(), (tokens(),), {"labels": tokens()}, cost="roofline", **asked)


def asked(plan: sf.Plan, **changes: object) -> WhatIf:
    return sf.what_if(Language(), (tokens(),), {"labels": tokens()}, plan=plan, **changes)  # type: ignore[arg-type]


def test_nothing_changed_is_the_same_plan(plan: sf.Plan) -> None:
    found = asked(plan)
    assert found.after.operators == plan.operators
    assert found.after.provenance.request.optimizer == "sgd"
    assert found.kept.step_seconds == pytest.approx(plan.estimate.step_seconds, rel=1e-12)
    assert found.kept.peak_bytes == pytest.approx(plan.estimate.peak_bytes, rel=1e-12)


def test_on_another_cluster_the_old_splits_are_no_better_than_the_best(plan: sf.Plan) -> None:
    found = asked(plan, cluster="2x2x1080ti")
    assert found.after.cluster == "2x2x1080ti"
    assert found.kept.step_seconds >= found.after.estimate.step_seconds * (1 - 1e-9)
    assert "The old splits would take" in str(found)
    assert max(map(len, str(found).splitlines())) <= 80


def test_where_the_mesh_does_not_exist_the_reason_is_given(plan: sf.Plan) -> None:
    found = asked(plan, cluster="8xa100")
    assert found.kept.step_seconds is None
    assert "The old splits are not possible there: " in str(found)


def test_a_limit_that_was_asked_for_stays(plan: sf.Plan) -> None:
    limit = 2 * plan.estimate.peak_bytes  # far below what a device has
    small = sf.plan(
        *(Language(), (tokens(),), {"labels": tokens()}),
        cluster="2x2xa100",
        optimizer="sgd",
        memory_limit=limit,
    )
    assert asked(small).after.estimate.limit_bytes == limit


def test_another_batch_is_planned_and_the_old_splits_are_priced_for_it(plan: sf.Plan) -> None:
    twice = torch.cat([tokens(), tokens()])
    found = sf.what_if(Language(), (twice,), {"labels": twice}, plan=plan)
    assert found.kept.step_seconds is not None
    assert found.kept.step_seconds >= found.after.estimate.step_seconds * (1 - 1e-9)
    assert found.kept.step_seconds > plan.estimate.step_seconds


def test_another_model_has_no_old_splits(plan: sf.Plan) -> None:
    module, args, kwargs = zoo.build("rnnlm-tiny", device="meta")
    found = sf.what_if(module, args, kwargs, plan=plan)
    assert found.kept.step_seconds is None
    assert "The plan decides on" in found.kept.reason


def test_one_device_has_no_alternatives() -> None:
    module, args, kwargs = zoo.build("rnnlm-tiny", device="meta")
    alone = sf.plan(module, args, kwargs, cluster="1xa100")
    found = sf.explain(module, args, kwargs, plan=alone, op="projection")
    assert "No other split is possible." in str(found)
    assert sf.what_if(module, args, kwargs, plan=alone).kept.step_seconds == pytest.approx(
        alone.estimate.step_seconds
    )
