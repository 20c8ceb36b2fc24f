"""What a plan asks for that cannot be run is refused before anything runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from shardfold.api import plan as find_plan
from shardfold.capture import capture_program
from shardfold.errors import ModelError, PlanError, RunError
from shardfold.operators import rules_of
from shardfold.plans import Plan
from shardfold.plans.read import decisions_of
from shardfold.runtime import parallelize
from shardfold.runtime.lower import Lowered, lower
from shardfold.runtime.shards import Place
from shardfold.sharding import find_subdims


class Loss(nn.Module):
    def __init__(self, function: Any, *modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(modules)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(*self.inner, x).square().mean()


def with_config(model: nn.Module, x: torch.Tensor, kind: str, config: tuple[str, ...]) -> Plan:
    """A plan in which the operators of one kind have this configuration."""
    plan = find_plan(model, (x,), cluster="2xcpu", mesh="2")
    operators = tuple(
        msgspec.structs.replace(op, config=config) if op.kind == kind else op
        for op in plan.operators
    )
    return msgspec.structs.replace(plan, operators=operators)


def lowered(model: nn.Module, x: torch.Tensor, plan: Plan, rank: int = 0) -> Lowered:
    program = capture_program(model, (x,))
    subdims = find_subdims(program.graph, rules_of(program.graph))
    decisions = decisions_of(plan, program.graph, subdims)
    return lower(program, subdims, decisions, Place.of_rank(rank, (2,)))


def test_hidden_units_of_a_gru_are_refused_by_name() -> None:
    model = Loss(lambda gru, x: gru(x)[0], nn.GRU(8, 8, batch_first=True))
    x = torch.randn(4, 6, 8)
    with pytest.raises(PlanError, match=r"Operator gru \(aten\.gru\) cannot be split as e"):
        lowered(model, x, with_config(model, x, "aten.gru", ("e",)))


def test_other_random_operators_are_refused_before_planning() -> None:
    model = Loss(lambda lin, x: torch.poisson(lin(x).exp()), nn.Linear(8, 8))
    with pytest.raises(ModelError, match=r"poisson .* draws random numbers"):
        find_plan(model, (torch.randn(4, 8),), cluster="cpu")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (("q",), "has no factor 'q'"),
        (("m", "n"), "configured on 2 axes, the plan's mesh has 1"),
        (("n",), "cannot be split as n on the mesh 2"),
    ],
)
def test_a_configuration_that_is_not_offered_is_refused(
    config: tuple[str, ...], message: str
) -> None:
    model, x = Loss(lambda lin, x: lin(x), nn.Linear(8, 3)), torch.randn(4, 8)
    with pytest.raises(PlanError, match=message):
        lowered(model, x, with_config(model, x, "aten.linear", config))


def test_a_plan_for_more_processes_than_run_is_refused() -> None:
    model, x = Loss(lambda lin, x: lin(x), nn.Linear(8, 4)), torch.randn(4, 8)
    plan = find_plan(model, (x,), cluster="2xcpu")
    with pytest.raises(RunError, match=r"The plan is for 2 processes .* no process group"):
        parallelize(model, plan, (x,))


def test_a_model_changed_after_planning_is_refused() -> None:
    x = torch.randn(4, 8)
    plan = find_plan(Loss(lambda lin, x: lin(x), nn.Linear(8, 4)), (x,), cluster="cpu")
    with pytest.raises(PlanError, match="The plan is for another model"):
        parallelize(Loss(lambda lin, x: lin(x), nn.Linear(8, 5)), plan, (x,))
