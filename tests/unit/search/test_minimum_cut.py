"""The minimum cut against all divisions of small graphs."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from shardfold.search.minimum_cut import Arc, minimum_cut

VERTICES = 7
DIVISIONS = [
    {0, *(v for v, is_done in enumerate(sides, 2) if is_done)}
    for sides in product([False, True], repeat=VERTICES - 2)
]


def drawn(seed: int) -> list[Arc]:
    """Arcs in both directions, some twice, some that must not be cut; bytes, or seconds."""
    draw = random.Random(seed)
    scale = draw.choice([1.0, 3e-7, 6e9])
    sizes = [0.0, scale, 2.5 * scale, 4 * scale, math.inf]
    pairs = [(u, v) for u, v in product(range(VERTICES), repeat=2) if u != v and v and u != 1]
    return [
        (u, v, draw.choice(sizes[:-1] if v == 1 else sizes))
        for u, v in draw.choices(pairs, k=draw.randrange(4, 30))
    ]


def cost(arcs: list[Arc], done: set[int]) -> float:
    return sum(c for u, v, c in arcs if u in done and v not in done)


@pytest.mark.parametrize("seed", range(200))
def test_no_division_costs_less(seed: int) -> None:
    arcs = drawn(seed)
    best = min(cost(arcs, done) for done in DIVISIONS)
    near = 1e-9 * sum(c for _, _, c in arcs if c < math.inf)
    equal = [done for done in DIVISIONS if cost(arcs, done) <= best + near]
    for side, nearest in (("source", set.intersection(*equal)), ("sink", set.union(*equal))):
        least, done = minimum_cut(VERTICES, arcs, nearest=side)  # type: ignore[arg-type]
        assert least == pytest.approx(best, abs=near)
        assert done == nearest


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        minimum_cut(3, [(0, 2, math.inf), (2, 1, math.inf)])
