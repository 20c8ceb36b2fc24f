"""Rows that go to experts on other devices: the numbers of one device, the plan's collectives.

Every plan splits rows and experts together, over one axis or over all of them, beside whatever else
it draws; routing is even, or leaves experts without a row, or sends every row to one of them.
"""

from __future__ import annotations

from collections import Counter

import pytest

from shardfold.api import plan
from shardfold.plans import Plan
from shardfold.plans.files import dumps

from .choices import Chooser, chooser
from .jobs import Case, build, collectives, numbers
from .ranks import Launch

ROUTED = "shardfold.routed_experts"
MODELS = ("experts", "experts_all_to_one", "experts_few_rows")


def dispatching(choices: Chooser, count: int) -> dict[str, Plan]:
    """Random plans whose blocks of experts dispatch, by another configuration each time."""
    found = choices.splitting(count, ROUTED, lambda number: "d")
    assert len(found) == count
    routed = [each for p in found.values() for each in p.operators if each.kind == ROUTED]
    assert all("all_to_all" in {c.kind for c in each.collectives} for each in routed)
    return found


def cases(models: dict[str, int], cluster: str, mesh: str) -> list[Case]:
    found = []
    for model, count in models.items():
        choices = chooser(model, cluster, mesh)
        plans = {"best": choices.best(), **dispatching(choices, count)}
        found += [(model, f"{label} on {mesh}", dumps(p).encode()) for label, p in plans.items()]
    return found


@pytest.mark.parametrize(
    ("models", "cluster", "mesh"),
    [
        (dict.fromkeys(MODELS, 4), "2xcpu", "2"),
        (dict.fromkeys(MODELS, 4), "4xcpu", "4"),
        ({**dict.fromkeys(MODELS, 8), "mixtral-8x7b-tiny": 2}, "4xcpu", "2x2"),
        ({"experts": 6}, "8xcpu", "2x2x2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_dispatch_gives_the_numbers_of_one_device(
    models: dict[str, int], cluster: str, mesh: str, on_ranks: Launch
) -> None:
    given = cases(models, cluster, mesh)
    found = on_ranks(numbers, int(cluster.partition("x")[0]), given)
    assert len(found[0]) == len(given)
    for told in found:
        assert [line for line in told if line] == []


@pytest.mark.parametrize(("cluster", "mesh"), [("2xcpu", "2"), ("4xcpu", "2x2")])
def test_a_step_sends_what_the_plan_says(cluster: str, mesh: str, on_ranks: Launch) -> None:
    given = cases({"experts": 8, "experts_all_to_one": 2}, cluster, mesh)
    found = on_ranks(collectives, int(cluster.partition("x")[0]), given)[0]
    assert len(found) == len(given)
    assert "\n".join(line for line in found if line) == ""


def test_recomputed_blocks_send_their_rows_again(on_ranks: Launch) -> None:
    model, args, kwargs = build("experts_in_layers")
    found = plan(
        model,
        args,
        kwargs,
        cluster="2xcpu",
        mesh="2",
        recompute="always",
        pins={"*routed_experts*": "dispatch/2"},
    )
    routed = [each for each in found.operators if each.kind == ROUTED]
    sent = Counter(
        c.phase for c in routed[0].collectives for _ in range(c.count) if c.kind == "all_to_all"
    )
    assert sent == {"forward": 3, "recompute": 3, "backward": 2}
    given = [("experts_in_layers", "recomputed", dumps(found).encode())]
    for job in (numbers, collectives):
        assert on_ranks(job, 2, given)[0] == [""]
