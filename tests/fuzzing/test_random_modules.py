"""Random modules of real idioms are right, captured and under random plans, or refused by name.

The oracle is the module itself in plain PyTorch, float64: the loss, gradients, parameters and
buffers after each of two steps on different batches. Ranks are threads of this process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, event, given, note
from hypothesis import strategies as st

from draws import draws
from fuzzing.comparing import CLUSTERS, State, captured, eager, on_ranks, one_device, random_plans
from fuzzing.drawing import Draw, draw
from shardfold.errors import ShardfoldError
from shardfold.runtime.reference import UnlikeError

FIXED = 7
PLANS = 1


@pytest.fixture(autouse=True, scope="module")
def _in_float64() -> Iterator[None]:
    """Numbers that forward makes are as precise as its weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def check(drawn: Draw, expected: list[State], rng: random.Random) -> None:
    program, subdims = captured(drawn)
    assert one_device(drawn, program, subdims, expected) == [], str(drawn)
    for plan in random_plans(program, subdims, rng.choice(list(CLUSTERS)), rng, PLANS):
        assert on_ranks(drawn, program, subdims, plan) == "", str(drawn)


@pytest.mark.parametrize("seed", range(FIXED))
def test_a_random_module_is_right(seed: int) -> None:
    rng = random.Random(seed)
    drawn = draw(rng, rare=0.0)
    expected = eager(drawn)
    assert expected is not None
    check(drawn, expected, rng)


@given(st.randoms(use_true_random=False))
@draws(3)
def test_a_random_module_is_right_or_refused(rng: random.Random) -> None:
    drawn = draw(rng)
    note(str(drawn))
    expected = eager(drawn)
    assume(expected is not None)
    assert expected is not None
    try:
        check(drawn, expected, rng)
    except (ShardfoldError, UnlikeError) as refusal:
        event(type(refusal).__name__)
