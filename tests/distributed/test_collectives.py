"""The collectives of a real step are the plan's: kind, axes, count and bytes."""

from __future__ import annotations

import pytest

from shardfold.plans.files import dumps

from .choices import chooser
from .jobs import Case, collectives
from .ranks import Launch


def cases(models: dict[str, int], cluster: str, mesh: str) -> list[Case]:
    found = []
    for model, count in models.items():
        choices = chooser(model, cluster, mesh)
        plans = {
            "best": choices.best(),
            **dict(zip(("data parallel", "fully sharded"), choices.baselines(), strict=True)),
            **choices.covering(count, first=20),
        }
        found += [(model, f"{label} on {mesh}", dumps(p).encode()) for label, p in plans.items()]
    return found


@pytest.mark.parametrize(
    ("models", "cluster", "mesh"),
    [
        ({"mlp": 3, "norms": 4, "planes": 4, "pixels": 4, "losses": 4, "tied": 5}, "2xcpu", "2"),
        ({"gpt2-tiny": 2, "alexnet-tiny": 2, "rnnlm-tiny": 4}, "2xcpu", "2"),
        (
            {"nearest_code": 4, "cell_in_a_loop": 4, "windows_over_grown_rows": 4},
            "2xcpu",
            "2",
        ),
        ({"weights_in_another_order": 4, "grouped_and_instance_norm": 4}, "2xcpu", "2"),
        (
            {"mlp": 4, "norms": 6, "planes": 6, "pixels": 6, "gpt2-tiny": 2, "tied": 8},
            "4xcpu",
            "2x2",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_a_step_sends_what_the_plan_says(
    models: dict[str, int], cluster: str, mesh: str, on_ranks: Launch
) -> None:
    given = cases(models, cluster, mesh)
    # Rank 0 has the fullest part of everything, which is what a plan counts.
    found = on_ranks(collectives, int(cluster.partition("x")[0]), given)[0]
    assert len(found) == len(given)
    assert "\n".join(line for line in found if line) == ""
