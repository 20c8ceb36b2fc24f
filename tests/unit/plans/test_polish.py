"""Small steps from the simulated winner: what other searches find by chance is not missed."""

from __future__ import annotations

import shardfold as sf
from shardfold import zoo


def test_the_plan_is_no_slower_than_an_equal_sum_of_another_search() -> None:
    module, args, kwargs = zoo.build("alexnet")
    found = sf.compare(
        module, args, kwargs, cluster="8x8xh100", dtype="bf16", methods=["plan", "exact", "ilp"]
    )
    steps = {r.method: r.simulated_seconds for r in found.results}
    assert steps["plan"] is not None
    assert all(step is not None and step >= steps["plan"] for step in steps.values())
