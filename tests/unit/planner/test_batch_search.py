"""The largest batch that fits is the largest: one more does not; the best has the best rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold import zoo
from shardfold.api import Planner
from shardfold.errors import InputError
from shardfold.planner.batch_search import MOST, Tried, best, largest


@given(st.integers(1, 64), st.integers(0, 10_000), st.sampled_from([0.5, 1.0, 2.0]))
def test_one_more_does_not_fit(unit: int, limit: int, power: float) -> None:
    """However memory grows."""

    def try_batch(samples: int) -> Tried:
        return Tried(samples, float(samples), float(samples) ** power, samples <= limit)

    if limit < unit:
        with pytest.raises(InputError, match=f"Not even a batch of {unit} samples fits"):
            largest(try_batch, unit, limit**power)
        return
    found, tried = largest(try_batch, unit, limit**power)
    assert found.samples == limit // unit * unit
    assert len(tried) <= (6 if power == 1 else 6 * limit.bit_length() + 6)
    assert best(try_batch, unit, limit**power) == found


def test_what_always_fits_ends_somewhere() -> None:
    found, _ = largest(lambda n: Tried(n, 1.0, 0.0, True), 8, 1.0)
    assert MOST // 2 < found.samples <= MOST


def test_the_best_rate_need_not_be_the_largest() -> None:
    found = best(lambda n: Tried(n, -abs(n - 30.0), float(n), n <= 100), 8, 100.0)
    assert found.samples == 32


def planner(batch: int, **options: object) -> Planner:
    module, args, kwargs = zoo.build("gpt2-tiny", batch=batch)
    return Planner(module, args, kwargs, cluster="2xa100", cost="roofline", **options)  # type: ignore[arg-type]


def test_a_strategy_fits_with_the_largest_batch_and_not_with_more() -> None:
    limit = planner(24).estimate("dp=2", beside_plan=False).peak_bytes
    own, samples = planner(4, memory_limit=limit).with_batch("max", strategy="dp=2")
    assert samples == 24
    assert own.estimate("dp=2", beside_plan=False).peak_bytes == pytest.approx(limit)
    more = planner(26, memory_limit=limit).estimate("dp=2", beside_plan=False)
    assert not more.fits


def test_a_plan_fits_with_the_largest_batch_and_not_with_more() -> None:
    limit = planner(12).plan(micro_batches=1).estimate.peak_bytes * 1.05
    own, samples = planner(4, memory_limit=limit).with_batch("max")
    assert samples >= 12
    assert own.plan(micro_batches=1).fits
    more = planner(samples + 2, memory_limit=limit)
    with pytest.raises(Exception, match="No choice fits"):
        more.plan(micro_batches=1)
    with pytest.raises(InputError, match="write a number, max or best"):
        own.with_batch("most")  # type: ignore[arg-type]
