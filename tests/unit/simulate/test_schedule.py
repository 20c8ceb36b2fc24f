"""Steps of several passes, worked out by hand."""

import pytest

from shardfold.simulate import Operator, Schedule, Segment, Task, simulate, timeline
from shardfold.simulate.schedule import parted

KEPT = {"activations": 8.0}
FRESH = {"buffers": 3.0}


def step(passes, count=1):
    backward = (
        Task("backward", 2, takes=FRESH, gives=KEPT),
        Task("backward", 0.5, gives=FRESH, turn="later"),
        Task("backward", 0, gives={}),
        Task("all_reduce", 4, "behind", (0,), turn="last"),
    )
    forward = (Task("forward", 1, takes=KEPT),)
    op = Operator("op", forward, backward, (Task("update", 10),), flops=6.0)
    return Schedule(
        ("gpu",), (Segment("layer", (op,), count),), {"gradients": 5.0}, 1.0, passes=passes
    )


@pytest.mark.parametrize(("passes", "kinds"), [(1, 1), (2, 2), (3, 3), (8, 3)])
def test_there_are_three_kinds_of_pass_at_most(passes, kinds):
    found = parted(step(passes))
    assert len(found) == kinds
    assert sum(count for _, count in found) == passes


@pytest.mark.parametrize("passes", [2, 3, 5])
def test_all_passes_work_and_the_last_one_reduces_and_updates(passes):
    found = simulate(step(passes))
    work = 3 * passes + 0.5 * (passes - 1) + 10
    assert found.step_seconds == pytest.approx(work + 4)
    assert found.compute_seconds == pytest.approx(work)
    assert found.communication_seconds == found.exposed_seconds == pytest.approx(4)
    assert [(c.kind, c.count) for c in found.collectives] == [("all_reduce", 1)]
    assert found.mfu == pytest.approx(6 * passes / (work + 4))
    assert found.utilisation["gpu"] == pytest.approx(4 / (work + 4))


def test_the_peak_is_that_of_one_pass_beside_all_gradients():
    assert simulate(step(4)).peak_bytes == 5 + 8 + 3
    assert simulate(step(4)).peak_by_class["gradients"] == 5


def test_what_is_reduced_in_every_pass_is_counted_in_every_pass():
    scatter = Task("reduce_scatter", 1, "behind", (0,))
    op = Operator("op", (Task("forward", 1),), (Task("backward", 2), scatter))
    found = simulate(Schedule(("gpu",), (Segment("layer", (op,)),), {}, 1.0, passes=3))
    assert [(c.kind, c.count, c.seconds) for c in found.collectives] == [("reduce_scatter", 3, 3)]
    assert found.step_seconds == pytest.approx(3 * (1 + 2 + 1))


@pytest.mark.parametrize("passes", [2, 5])
def test_the_timeline_shows_every_pass(passes):
    figures, line = timeline(step(passes, count=2))
    assert figures.step_seconds == pytest.approx(simulate(step(passes, count=2)).step_seconds)
    assert sum(span.phase == "forward" for span in line.spans) == 2 * passes
    assert sum(span.kind == "all_reduce" for span in line.spans) == 2
    assert max(span.end_seconds for span in line.spans) == pytest.approx(figures.step_seconds)
    starts = [span.start_seconds for span in line.spans if span.stream == "compute"]
    assert starts == sorted(starts)
