"""Under any plan, the numbers of one device: loss, every result and every gradient."""

from __future__ import annotations

import pytest

from shardfold.plans.files import dumps

from .choices import chooser
from .jobs import Case, numbers
from .ranks import Launch

NAMED = ("2", "2x2")  # the meshes of the best plan and the baselines: on more they do the same


def cases(models: dict[str, int], cluster: str, mesh: str) -> list[Case]:
    """The best plan, both baselines, and so many random ones of each model."""
    found = []
    for model, count in models.items():
        choices = chooser(model, cluster, mesh)
        named = (choices.best(), *choices.baselines()) if mesh in NAMED else ()
        plans = {
            **dict(zip(("best", "data parallel", "fully sharded"), named, strict=False)),
            **choices.covering(count),
        }
        found += [(model, f"{label} on {mesh}", dumps(p).encode()) for label, p in plans.items()]
    return found


@pytest.mark.parametrize(
    ("models", "cluster", "mesh"),
    [
        (
            {"mlp": 3, "losses": 4, "norms": 5, "planes": 5, "vocabulary": 3, "tied": 5},
            "2xcpu",
            "2",
        ),
        ({"alexnet-tiny": 2, "transformer-tiny": 1, "gpt2-tiny": 2}, "2xcpu", "2"),
        ({"llama3-8b-tiny": 1, "resnet50-tiny": 0, "mixtral-8x7b-tiny": 1}, "2xcpu", "2"),
        ({"mlp": 4, "losses": 3, "norms": 3, "planes": 3, "pixels": 6}, "4xcpu", "2x2"),
        ({"vocabulary": 3, "mlp": 2, "mixtral-8x7b-tiny": 1}, "4xcpu", "4"),
        ({"vocabulary": 3, "tied": 6, "mlp": 3, "norms": 3, "planes": 3}, "8xcpu", "2x2x2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_any_plan_gives_the_numbers_of_one_device(
    models: dict[str, int], cluster: str, mesh: str, on_ranks: Launch
) -> None:
    given = cases(models, cluster, mesh)
    found = on_ranks(numbers, int(cluster.partition("x")[0]), given)
    assert len(found[0]) == len(given)
    for told in found:
        assert [line for line in told if line] == []
