"""The folded walk is the plain one, and known formulas hold."""

from __future__ import annotations

import random
import time

import pytest

from shardfold.errors import InputError
from shardfold.pipeline import SCHEDULES, Pipeline, StageTimes, simulate


def plain(pipeline: Pipeline, stages: list[StageTimes]) -> float:
    """The step, event by event: nothing is folded."""
    left = [pipeline.actions(device) for device in range(pipeline.devices)]
    clock, links = [0.0] * pipeline.devices, dict[tuple[int, int], float]()
    there, last = dict[tuple[int, bool, int], float](), dict[int, float]()
    while any(left):
        for device, own in enumerate(left):
            while own:
                stage, kind, number = own[0]
                forward, times = kind == "F", stages[stage]
                before = stage - 1 if forward else stage + 1
                reads = kind != "W" and 0 <= before < pipeline.stages
                if reads and (before, forward, number) not in there:
                    break
                own.pop(0)
                start = max(clock[device], there[before, forward, number] if reads else 0.0)
                whole = {"F": times.forward, "B": times.backward, "W": times.weight}
                seconds = whole.get(kind, times.backward - times.weight)
                if kind in "BW":
                    seconds += times.first if number == 0 else 0.0
                    seconds += times.last if 0 < number == pipeline.micro_batches - 1 else 0.0
                clock[device] = end = start + seconds
                if not forward:
                    last[stage] = end
                after = stage + 1 if forward else stage - 1
                if kind != "W" and 0 <= after < pipeline.stages:
                    link = (device, pipeline.device_of(after))
                    if link[0] != link[1]:
                        sends = times.send_forward if forward else times.send_backward
                        end = links[link] = max(end, links.get(link, 0.0)) + sends
                    there[stage, forward, number] = end
    return max(
        max(last[s] + stages[s].reduce for s in own) + sum(stages[s].update for s in own)
        for own in map(pipeline.stages_on, range(pipeline.devices))
    )


def drawn(draw: random.Random) -> StageTimes:
    """A stage whose times are round or not, with fast links or slow ones."""
    forward = draw.choice([1.0, draw.random(), draw.randint(1, 4)])
    backward = draw.choice([2 * forward, 0.1 + 3 * draw.random()])
    return StageTimes(
        forward,
        backward,
        weight=draw.choice([0.5, 0.3]) * backward,
        send_forward=draw.choice([0.0, 0.1, 1.5]),
        send_backward=draw.choice([0.0, 0.1, 2.0]),
        first=draw.choice([0.0, -0.05]),
        last=draw.choice([0.0, 0.4]),
        reduce=draw.random(),
        update=draw.random(),
    )


@pytest.mark.parametrize("seed", range(4))
def test_folding_changes_nothing(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        name = draw.choice(list(SCHEDULES))
        chunks = {"interleaved": draw.randint(2, 3), "zbv": 2}.get(name, 1)
        count = draw.choice([draw.randint(1, 8), draw.randint(9, 70)])
        try:
            pipeline = Pipeline(name, draw.randint(1, 5), count, chunks)
        except InputError:
            continue
        alike = drawn(draw) if draw.random() < 0.4 else None
        stages = [alike or drawn(draw) for _ in range(pipeline.stages)]
        assert simulate(pipeline, stages).step_seconds == pytest.approx(
            plain(pipeline, stages), rel=1e-9
        )


@pytest.mark.parametrize("devices", [2, 4, 7])
@pytest.mark.parametrize("rounds", [1, 3, 40])
def test_the_bubbles_of_equal_stages_are_those_of_the_formulas(devices: int, rounds: int) -> None:
    count = devices * rounds
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
        pipeline = Pipeline(name, devices, count, chunks)
        found = simulate(pipeline, [StageTimes(1.0, 2.0)] * pipeline.stages)
        assert found.bubble == pytest.approx((devices - 1) / (chunks * count + devices - 1))
        assert found.busy_seconds == pytest.approx([3.0 * count * chunks] * devices)
    if count >= 2 * devices - 1:  # F, I and W alike: only the fill is left
        found = simulate(
            Pipeline("zbv", devices, count, 2), [StageTimes(1.0, 2.0, 1.0)] * 2 * devices
        )
        assert found.step_seconds == pytest.approx(6.0 * count + devices - 1)


def test_a_slow_stage_sets_the_pace() -> None:
    # At most all stages once, and the slowest for every further micro-batch (Alpa's formula).
    stages = [StageTimes(1.0, 2.0), StageTimes(2.0, 4.0), StageTimes(1.0, 2.0)]
    for count in (1, 3, 100):
        found = simulate(Pipeline("1f1b", 3, count), stages)
        assert count * 6 + 3 < found.step_seconds <= 3 + 6 + 3 + (count - 1) * 6


def test_a_slow_link_sets_the_pace() -> None:
    stages = [StageTimes(1.0, 2.0, send_forward=10.0), StageTimes(1.0, 2.0)]
    found = simulate(Pipeline("gpipe", 2, 50), stages)
    assert found.step_seconds == pytest.approx(1 + 50 * 10 + 1 + 50 * 2 + 2)


def test_reductions_hide_in_the_drain_of_earlier_stages() -> None:
    plain_stages = [StageTimes(1.0, 2.0)] * 4
    step = simulate(Pipeline("1f1b", 4, 8), plain_stages).step_seconds
    late = [*plain_stages[:3], StageTimes(1.0, 2.0, reduce=5.0, update=1.0)]
    assert simulate(Pipeline("1f1b", 4, 8), late).step_seconds == step  # 3 x 2 to drain
    early = [StageTimes(1.0, 2.0, reduce=5.0, update=1.0), *plain_stages[1:]]
    assert simulate(Pipeline("1f1b", 4, 8), early).step_seconds == step + 6.0
    tied = simulate(Pipeline("1f1b", 4, 8), plain_stages, [((0, 3), 0.5)])
    assert tied.step_seconds == step + 0.5


@pytest.mark.parametrize("count", [2, 4, 9])
def test_micro_batches_in_flight(count: int) -> None:
    def most(name: str, chunks: int = 1) -> tuple[int, ...]:
        pipeline = Pipeline(name, 4, count, chunks)
        return simulate(pipeline, [StageTimes(1.0, 2.0)] * pipeline.stages).in_flight

    assert most("gpipe") == (count,) * 4
    assert most("1f1b") == tuple(min(count, 4 - stage) for stage in range(4))


def test_a_thousand_micro_batches_cost_about_as_much_as_a_hundred() -> None:
    def seconds(count: int) -> float:
        pipeline = Pipeline("1f1b", 16, count)
        stages = [StageTimes(1.0, 2.0, send_forward=0.05, send_backward=0.05)] * 16
        begun = time.process_time()
        simulate(pipeline, stages)
        return time.process_time() - begun

    assert min(seconds(16 * 1024) for _ in range(3)) < 5 * min(seconds(160) for _ in range(3))
