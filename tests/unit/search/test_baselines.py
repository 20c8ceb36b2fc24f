"""Random moves: when they stop."""

from __future__ import annotations

import numpy as np
import pytest

from shardfold.search import Problem
from shardfold.search.baselines import mcmc
from shardfold.search.solution import Progress

BEST_FROM_THE_START = Problem((np.array([0.0, 1.0]), np.array([0.0, 1.0])))


@pytest.mark.parametrize(("patient", "checks"), [(False, 51), (True, 60)])
def test_half_of_the_time_without_gain_ends_the_search_unless_it_is_patient(
    patient: bool, checks: int
) -> None:
    seen: list[Progress] = []
    found = mcmc(BEST_FROM_THE_START, moves=60_000, patient=patient, watch=seen.append)
    assert len(seen) == checks  # one every 1,000 moves; giving up is allowed from 50,000 on
    assert found.choice.tolist() == [0, 0]
