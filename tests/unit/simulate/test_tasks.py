"""What choices share: an operator's tasks, made once, are those of every choice that agrees."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from draws import covering, draws
from shardfold.capture import capture, capture_short
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import optimizer_named, pricing_named
from shardfold.costs.activations import KEEP_ALL
from shardfold.graph import Graph
from shardfold.planner.case import Case, Cases, ResolvedRequest
from shardfold.simulate.parts import Part
from shardfold.simulate.tasks import Surroundings
from virtual.drawing import graphs

CLUSTER = parse("2x2xh100")


def cases_of(graph: Graph, passes: int) -> tuple[Cases, ResolvedRequest]:
    mesh, prices = mesh_from_text("2x2", CLUSTER), pricing_named("kernels")
    request = ResolvedRequest(
        CLUSTER, (mesh,), prices, optimizer_named("adamw"), micro_batches=passes
    )
    return Cases(graph, request), request


def check_shared(case: Case, numbers: range) -> None:
    """Schedules that share what is alike, and each made with nothing known, are the same."""
    sizes = case.unrolled.problem.sizes.tolist()
    choices = [covering(sizes, number) for number in numbers]
    choices += [choices[0][:at] + choices[1][at:] for at in range(0, len(sizes), 7)]
    together = [case.scheduler.schedule(case.decode(choice)) for choice in choices]
    for choice, schedule in zip(choices, together, strict=True):
        case.forget()
        with patch.object(Surroundings, "_kind", lambda self, op, subdims: op):  # nothing is alike
            assert case.scheduler.schedule(case.decode(choice)) == schedule


@given(graphs(max_ops=8, sizes=(64, 512)), st.sampled_from([1, 2, 3]))
@draws(20)
def test_choices_share_the_operators_on_which_they_agree(graph: Graph, passes: int) -> None:
    cases, request = cases_of(graph, passes)
    check_shared(cases.on(0, KEEP_ALL, request), range(4))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.parametrize("passes", [1, 2])
def test_layers_share_what_is_alike_in_them(passes: int) -> None:
    cases, request = cases_of(capture(Layers(), (torch.zeros(64, 64),), {}), passes)
    case = cases.on(0, KEEP_ALL, request)
    kinds = Surroundings(case.decoded, Part.whole(case.graph)).kind
    assert len(set(kinds)) < len(kinds) / 2
    check_shared(case, range(3))


@pytest.mark.parametrize("passes", [1, 2])
def test_so_do_operators_that_run_again(passes: int) -> None:
    cases, request = cases_of(capture_short(Layers(), (torch.zeros(64, 64),), {}), passes)
    assert cases.blocks
    check_shared(cases.on(0, cases.blocks, request), range(3))
