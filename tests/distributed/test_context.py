"""Attention over a split sequence: the numbers of one device, the plan's collectives.

Every plan splits attention's positions, over one axis or over all of them, beside whatever else it
draws: queries alone, or queries and keys together, which then go round.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardfold.plans import Plan
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize

from .choices import Chooser, chooser
from .jobs import Case, build, collectives, numbers
from .ranks import Launch

ATTENTION = "aten.scaled_dot_product_attention"
MODELS = ("causal", "cross", "full", "shared", "uneven", "window")


def split_sequences(choices: Chooser, count: int) -> dict[str, Plan]:
    """Random plans whose attention splits positions, by another configuration each time."""
    found = choices.splitting(count, ATTENTION, lambda number: "qc" if number % 4 == 3 else "c")
    assert len(found) == count
    return found


def cases(models: dict[str, int], cluster: str, mesh: str) -> list[Case]:
    found = []
    for model, count in models.items():
        choices = chooser(model, cluster, mesh)
        plans = split_sequences(choices, count)
        found += [(model, f"{label} on {mesh}", dumps(p).encode()) for label, p in plans.items()]
    return found


@pytest.mark.parametrize(
    ("count", "cluster", "mesh"), [(2, "2xcpu", "2"), (2, "4xcpu", "4"), (8, "4xcpu", "2x2")]
)
def test_a_split_sequence_gives_the_numbers_of_one_device(
    count: int, cluster: str, mesh: str, on_ranks: Launch
) -> None:
    given = cases({f"attention_{name}": count for name in MODELS}, cluster, mesh)
    found = on_ranks(numbers, int(cluster.partition("x")[0]), given)
    assert len(found[0]) == len(given)
    for told in found:
        assert [line for line in told if line] == []


@pytest.mark.parametrize(("cluster", "mesh"), [("2xcpu", "2"), ("4xcpu", "2x2")])
def test_a_step_sends_what_the_plan_says(cluster: str, mesh: str, on_ranks: Launch) -> None:
    models = {"attention_shared": 6, "attention_full": 3, "attention_window": 2}
    models |= {"attention_uneven": 4, "attention_cross": 2, "attention_uneven_full": 2}
    given = cases(models, cluster, mesh)
    found = on_ranks(collectives, int(cluster.partition("x")[0]), given)[0]
    assert len(found) == len(given)
    assert "\n".join(line for line in found if line) == ""


def evaluated(rank: int, given: list[Case]) -> list[str]:
    """What differs from the model itself in eval mode, and on a batch of other shapes."""
    found = []
    for name, label, data in given:
        model, batch, _ = build(name)
        module = parallelize(model, loads(data), batch, float64=True)
        for cut in (slice(None), slice(0, -3)):  # of the positions
            part = [each[:, cut].double() for each in batch]
            with torch.no_grad():
                expected = model.double().eval()(*part)
                apart = float((module.eval()(*part) - expected).abs())
            apart += float((module.train()(*part) - expected).detach().abs())
            found += [f"{name} {label}: {apart}"] if apart > 1e-9 else []
            model.float()
    return found


def test_a_split_sequence_in_eval_mode_and_in_other_lengths(on_ranks: Launch) -> None:
    given = cases({"attention_uneven": 4, "attention_full": 4}, "2xcpu", "2")
    for told in on_ranks(evaluated, 2, given):
        assert told == []


class Pixels(nn.Module):
    """Attention over rows and columns, which a plan may split apart."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.packed(x).unflatten(-1, (3, 2, 2)) * x.mean(2)[:, :, None, None, None, :2]
        q, k, v = rows.flatten(1, 2).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v).square().mean()


def test_what_goes_round_is_a_range() -> None:
    choices = Chooser(Pixels(), (torch.randn(2, 4, 4, 4),), {}, "4xcpu", "2x2")
    (space,) = [
        vertex.space
        for vertex in choices.tables.vertices
        if vertex.space is not None and choices.graph.ops[vertex.index].kind == ATTENTION
    ]
    names = [space.rule.factors[f] for config in space.configs for f in config if f >= 0]
    assert {"c.0", "q.0", "q.1"} <= set(names)
    for config in space.configs:
        used = {space.rule.factors[f] for f in config if f >= 0}
        assert not {"c.0", "q.1"} <= used
