"""The whole way from a module to a plan."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.cluster import mesh_from_text, parse
from shardfold.errors import ClusterError, InfeasibleError, InputError, ModelError
from shardfold.operators.notation import Call, Rule
from shardfold.progress import Stage
from virtual.models import Language, tokens


def planned(cluster: str = "4xa100", **options: object) -> sf.Plan:
    given = {"cost": "roofline", **options}  # by kernels, the host of so small a model would decide
    return sf.plan(Language(), (tokens(),), {"labels": tokens()}, cluster=cluster, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan() -> sf.Plan:
    return planned("8xa100")


def test_the_public_names_are_these() -> None:
    assert sf.__all__ == [
        "Plan",
        "Planner",
        "ShardfoldError",
        "compare",
        "estimate",
        "explain",
        "load",
        "parallelize",
        "plan",
        "plan_for",
        "save",
        "what_if",
    ]
    assert {name for name in dir(sf) if not name.startswith("_")} == set(sf.__all__)


def test_the_parts_sum_to_the_step(plan: sf.Plan) -> None:
    e = plan.estimate
    total = e.compute_seconds + e.communication_seconds + e.update_seconds
    assert total == pytest.approx(e.additive_seconds, rel=1e-9)
    assert math.fsum(o.seconds for o in plan.operators) == pytest.approx(
        e.additive_seconds, rel=1e-9
    )


def test_collectives_sum_to_the_communication(plan: sf.Plan) -> None:
    found = math.fsum(c.seconds for o in plan.operators for c in o.collectives)
    assert found == pytest.approx(plan.estimate.communication_seconds, rel=1e-9)


def test_it_is_optimal_and_says_so(plan: sf.Plan) -> None:
    e = plan.estimate
    assert e.optimal
    assert e.additive_lower_bound_seconds == pytest.approx(e.additive_seconds)
    assert e.step_seconds <= min(e.data_parallel_seconds, e.fully_sharded_seconds) * (1 + 1e-9)


def test_every_mesh_was_tried_and_the_best_won(plan: sf.Plan) -> None:
    assert {entry.mesh for entry in plan.meshes} == {str(m) for m in parse("8xa100").meshes()}
    assert min(m.additive_seconds for m in plan.meshes) == plan.estimate.additive_seconds


def test_a_fixed_mesh_is_the_only_one() -> None:
    found = planned("8xa100", mesh="2x4")
    assert [axis.size for axis in found.mesh] == [2, 4]
    assert [entry.mesh for entry in found.meshes] == ["2x4"]
    given = mesh_from_text("2x4", parse("8xa100"))
    assert planned("8xa100", mesh=given).operators == found.operators


def test_one_device_has_nothing_to_decide() -> None:
    found = planned("1xa100")
    assert found.mesh == ()
    assert found.estimate.communication_seconds == 0.0
    assert found.estimate.step_seconds == pytest.approx(found.estimate.data_parallel_seconds)


def test_provenance_says_what_the_plan_is_for(plan: sf.Plan) -> None:
    made = plan.provenance
    assert made.graph.startswith("sha256:")
    assert made.parameters == sum(p.numel() for p in Language().parameters())
    assert made.operators == len(plan.operators)
    assert made.cluster["name"] == parse("8xa100").name
    assert set(made.versions) == {"python", "shardfold", "torch", "numpy"}


def test_the_same_input_gives_the_same_plan() -> None:
    first, second = planned(), planned()
    assert first.operators == second.operators
    assert first.parameters == second.parameters
    assert first.estimate == second.estimate


def test_every_parameter_is_listed_once_with_all_its_names() -> None:
    model = Language(tied=True)
    found = sf.plan(model, (tokens(),), {"labels": tokens()}, cluster="2xa100")
    names = [name for entry in found.parameters for name in entry.names]
    assert sorted(names) == sorted(model.state_dict())
    assert ("embed.weight", "head.weight") in [entry.names for entry in found.parameters]


def test_costs_and_optimizers_are_chosen_by_name() -> None:
    assert planned(cost="paper").estimate.update_seconds == 0.0
    assert planned(optimizer="sgd").estimate.peak_bytes < planned().estimate.peak_bytes
    with pytest.raises(InputError, match=r"Unknown cost model 'papr'.*paper"):
        planned(cost="papr")
    with pytest.raises(InputError, match=r"Unknown optimizer 'adan'.*adam"):
        planned(optimizer="adan")


def test_a_wrong_cluster_or_mesh_is_refused_before_the_model_is_traced() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("was traced")

    with pytest.raises(ClusterError, match="Unknown cluster"):
        sf.plan(Broken(), (torch.zeros(1),), cluster="8xa1000")
    with pytest.raises(ClusterError, match="mesh"):
        sf.plan(Broken(), (torch.zeros(1),), cluster="8xa100", mesh="3x3")


def test_a_model_without_a_loss_may_be_given_one() -> None:
    model, x = nn.Linear(8, 8), torch.zeros(4, 8)
    with pytest.raises(ModelError, match="returns no loss"):
        sf.plan(model, (x,), cluster="2xa100")
    assert sf.plan(model, (x,), cluster="2xa100", loss=torch.sum).operators


def test_the_watch_sees_every_stage() -> None:
    seen: list[Stage] = []
    planned(watch=seen.append)
    names = [stage.name for stage in seen]
    assert names[0] == "capture"
    assert "search" in names
    assert all(0 <= stage.done <= stage.total for stage in seen)


class Odd(nn.Module):
    """Ends in an operator that shardfold has no rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return (
            torch.special.bessel_j0(self.linear(x).detach() + 0).sum()
            + torch.logit(torch.sigmoid(self.linear(x))).sum()
        )


class Pairs(Odd):
    """Ends in an operator that cannot be split in any way."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.pdist(self.linear(x)).sum()


def test_an_operator_without_a_rule_is_listed_by_name_with_its_cost() -> None:
    found = sf.plan(Pairs(), (torch.zeros(64, 64),), cluster="2xa100")
    (entry,) = [u for u in found.unsplit if u.kind == "aten.pdist"]
    assert entry.reason == "no rule"
    assert entry.count == 1
    assert 0 < entry.share < 1
    assert "pdist" in str(found)


def test_an_operator_that_was_run_in_parts_is_named() -> None:
    found = sf.plan(Odd(), (torch.zeros(64, 64),), cluster="2xa100")
    (entry,) = [e for e in found.experiments if e.kind == "aten.logit"]
    assert (entry.count, entry.splits) == (1, "i0 i1 -> i0 i1")
    assert not [u for u in found.unsplit if u.reason == "no rule"]
    assert "splits found by experiment: logit (1)" in " ".join(str(found).split())
    assert INSIDE not in " ".join(str(found).split())


INSIDE = "Of functions and operators of your own, what they read and write is priced"


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x @ x.T

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return (gradient + gradient.T) @ x


def test_a_plan_says_that_the_inside_of_a_users_function_is_not_priced() -> None:
    class Grams(Odd):
        def forward(self, x: Tensor) -> Tensor:
            return Squares.apply(self.linear(x)).sum()

    found = sf.plan(Grams(), (torch.zeros(64, 64),), cluster="2xa100")
    assert INSIDE in " ".join(str(found).split())


def test_a_users_rule_lets_it_be_split() -> None:
    def logit(call: Call) -> Rule:
        return call.rule({"self": "..."}, "...", flops=4.0, saves=("self",), backward=1.0)

    found = sf.plan(Odd(), (torch.zeros(64, 64),), cluster="2xa100", rules={"aten.logit": logit})
    assert "aten.logit" not in {u.kind for u in found.unsplit}


def test_a_memory_limit_is_kept_or_said_to_be_impossible() -> None:
    free, fixed = planned("2xa100"), parse("2xa100").device.workspace_bytes
    limit = fixed + 0.9 * (free.estimate.peak_bytes - fixed)
    tight = planned("2xa100", memory_limit=limit)
    assert tight.estimate.peak_bytes <= limit
    assert tight.estimate.step_seconds >= free.estimate.step_seconds * (1 - 1e-9)
    with pytest.raises(InfeasibleError, match="No choice fits"):
        planned("2xa100", memory_limit=1000.0, micro_batches=1)


def test_repeated_blocks_are_printed_once(plan: sf.Plan) -> None:
    text = str(plan)
    assert "blocks.0" not in text
    assert "blocks.1" not in text
    assert text.count("blocks.*") >= 1
    assert "3" in next(line for line in text.splitlines() if "blocks.*" in line)
    assert max(map(len, text.splitlines())) <= 120
