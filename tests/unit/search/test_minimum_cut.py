"""The minimum cut against all divisions of small graphs."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from shardfold.search.minimum_cut import minimum_cut


@pytest.mark.parametrize("seed", range(20))
def test_no_division_costs_less(seed: int) -> None:
    draw = random.Random(seed)
    arcs = [
        (u, v, draw.choice([0.0, 1.0, 2.5, 4.0, math.inf if 0 not in (u, v) else 3.0]))
        for u, v in product(range(6), repeat=2)
        if u != v and v != 0 and u != 1 and draw.random() < 0.6
    ]
    arcs = [(u, v, 5.0 if v == 1 and c == math.inf else c) for u, v, c in arcs]

    def cost(done: set[int]) -> float:
        return sum(c for u, v, c in arcs if c and u in done and v not in done)

    every = [{0, *(k + 2 for k in range(4) if sides[k])} for sides in product([0, 1], repeat=4)]
    least, done = minimum_cut(6, arcs)
    assert least == pytest.approx(min(map(cost, every)))
    assert cost(done) == pytest.approx(least)
