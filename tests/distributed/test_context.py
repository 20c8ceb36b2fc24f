"""Attention over a split sequence: the numbers of one device, the plan's collectives.

Every plan splits attention's positions, over one axis or over all of them, beside whatever else it
draws: queries alone, or queries and keys together, which then go round.
"""

from __future__ import annotations

import pytest

from shardfold.plans import Plan
from shardfold.plans.files import dumps

from .choices import Chooser, chooser
from .jobs import Case, collectives, numbers
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
    models |= {"attention_uneven": 4, "attention_cross": 2}
    given = cases(models, cluster, mesh)
    found = on_ranks(collectives, int(cluster.partition("x")[0]), given)[0]
    assert len(found) == len(given)
    assert "\n".join(line for line in found if line) == ""
