"""Small steps worked out by hand, and equal blocks counted against equal blocks walked through."""

import cProfile

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold.simulate import Again, Operator, Schedule, Segment, Task, simulate, timeline
from shardfold.simulate.simulate import passes

NVLINK, IB = 1, 0


def work(seconds, **memory):
    return Task("forward", seconds, **memory)


def back(seconds, **memory):
    return Task("backward", seconds, **memory)


def sent(kind, mode, seconds, *levels, **memory):
    return Task(kind, seconds, mode, levels or (NVLINK,), **memory)


def schedule(*segments, resident=None, **limits):
    return Schedule(("node", "gpu"), segments, resident or {}, 1.0, **limits)


def layer(forward=(), backward=(), update=(), count=1, **more):
    return Segment("layer", (Operator("op", forward, backward, update, flops=1.0),), count, **more)


def test_work_goes_one_after_the_other():
    found = simulate(schedule(layer((work(1),), (back(2),), (Task("update", 3),), count=4)))
    assert found.step_seconds == pytest.approx(24)
    assert found.utilisation["compute"] == pytest.approx(1)
    assert found.mfu == pytest.approx(4 / 24)


def test_a_collective_of_activations_stops_work():
    found = simulate(schedule(layer((work(1), sent("all_reduce", "wait", 5), work(1)))))
    assert found.step_seconds == pytest.approx(7)
    assert found.exposed_seconds == pytest.approx(5)


def test_a_gradient_is_reduced_while_backward_goes_on():
    # Backward of 3 blocks takes 2 each; each reduction 1.5: only the last one is seen.
    step = schedule(layer((), (back(2), sent("reduce_scatter", "behind", 1.5)), count=3))
    found = simulate(step)
    assert found.step_seconds == pytest.approx(6 + 1.5)
    assert found.exposed_seconds == pytest.approx(1.5)
    assert found.communication_seconds == pytest.approx(4.5)


def test_reductions_that_take_longer_than_backward_set_the_pace():
    step = schedule(layer((), (back(1), sent("all_reduce", "behind", 2)), count=50))
    assert simulate(step).step_seconds == pytest.approx(1 + 100)


def test_a_gather_is_hidden_by_the_work_before_it():
    # Only the first gather is seen: the others are shorter than the work before them.
    step = schedule(layer((sent("all_gather", "ahead", 1), work(2)), count=10))
    found = simulate(step)
    assert found.step_seconds == pytest.approx(1 + 20)
    assert found.exposed_seconds == pytest.approx(1)


def test_gathers_that_take_longer_than_work_set_the_pace():
    step = schedule(layer((sent("all_gather", "ahead", 3), work(2)), count=10))
    assert simulate(step).step_seconds == pytest.approx(30 + 2)


def test_levels_are_streams_of_their_own():
    both = (sent("all_gather", "ahead", 1, IB), sent("all_gather", "ahead", 1, NVLINK), work(1))
    assert simulate(schedule(layer(both))).step_seconds == pytest.approx(2)
    across = (sent("all_gather", "ahead", 1, IB, NVLINK), *both)
    assert simulate(schedule(layer(across))).step_seconds == pytest.approx(3)


def test_what_work_waits_for_goes_before_what_is_queued():
    step = schedule(
        layer(
            (),
            (
                sent("all_reduce", "behind", 10),
                sent("all_reduce", "behind", 10),
                back(1),
                sent("all_to_all", "wait", 1),
                back(1),
            ),
        )
    )
    # The first reduction runs from 0 to 10, the all-to-all from 10 to 11, the second then.
    _, found = timeline(step)
    assert [(s.kind, s.start_seconds) for s in found.spans if s.stream == "gpu"] == [
        ("all_reduce", 0.0),
        ("all_to_all", 10.0),
        ("all_reduce", 11.0),
    ]


@pytest.mark.parametrize(("hop", "piece"), [(1.0, 2.0), (2.0, 2.0), (5.0, 2.0), (1.0, 0.0)])
def test_what_goes_round_is_hidden_by_all_pieces_but_the_last(hop, piece):
    # Four pieces: each of three hops runs beside the piece before it.
    tasks = (sent("ring", "beside", 3 * hop), work(3 * piece), work(piece))
    found = simulate(schedule(layer(tasks, count=10)))
    assert found.step_seconds == pytest.approx(10 * (3 * max(hop, piece) + piece))
    assert found.exposed_seconds == pytest.approx(10 * 3 * max(0.0, hop - piece))


def test_the_update_waits_for_every_reduction():
    step = schedule(
        layer((), (back(1), sent("all_reduce", "behind", 4)), (Task("update", 1),), count=2)
    )
    assert simulate(step).step_seconds == pytest.approx(1 + 8 + 2)


def test_gathers_ahead_hold_no_more_memory_than_allowed():
    gather = sent("all_gather", "ahead", 0.1, takes={"buffers": 1.0})
    step = schedule(layer((gather, work(1, gives={"buffers": 1.0})), count=20), ahead=3)
    assert simulate(step).peak_bytes == pytest.approx(4)  # the one in use, and three more


def test_copies_of_the_optimizer_are_there_while_it_updates():
    """Beside all gradients, of which each goes with its own update."""
    update = (Task("update", 1, gives={"gradients": 2}),)
    step = schedule(layer((), (back(1, takes={"gradients": 2}),), update, count=3), updating=5)
    found = simulate(step)
    assert found.peak_bytes == pytest.approx(3 * 2 + 5)
    assert found.peak_at == "optimizer update"
    assert simulate(msgspec.structs.replace(step, updating=0)).peak_bytes == pytest.approx(3 * 2)


def test_only_the_pass_that_updates_has_copies():
    step = schedule(layer((work(1, takes={"activations": 9}, gives={"activations": 9}),)))
    accumulated = msgspec.structs.replace(step, updating=5, passes=3)
    assert simulate(accumulated).peak_bytes == pytest.approx(9)


def test_the_peak_is_the_peak_over_time():
    forward = (work(1, takes={"activations": 5.0, "buffers": 2.0}, gives={"buffers": 2.0}),)
    backward = (back(1, takes={"gradients": 1.0}, gives={"activations": 5.0}),)
    step = schedule(
        layer(forward, backward, (Task("update", 1, gives={"gradients": 1.0}),), count=4),
        resident={"parameters": 10.0},
    )
    found, over_time = timeline(step)
    assert found.peak_bytes == pytest.approx(10 + 20 + 2)  # as forward ends
    assert found.peak_by_class == pytest.approx({"parameters": 10, "activations": 20, "buffers": 2})
    assert over_time.memory[-1].total == pytest.approx(10)
    assert max(sample.total for sample in over_time.memory) == pytest.approx(31, abs=1)


def test_recomputing_a_block_saves_its_inner_memory_and_costs_its_forward():
    def block(keeps):
        forward = (work(1, takes={"activations": 5.0}, gives={"activations": 5.0 - keeps}),)
        again = (Again("op", (work(1, takes={"activations": 5.0 - keeps}),)),) if keeps < 5 else ()
        backward = (back(2, gives={"activations": 5.0}),)
        return Segment("layer", (Operator("op", forward, backward, again=again),), 10)

    plain, again = simulate(schedule(block(5.0))), simulate(schedule(block(1.0)))
    assert again.step_seconds == pytest.approx(plain.step_seconds + 10)
    assert plain.peak_bytes == pytest.approx(50)
    assert again.peak_bytes == pytest.approx(10 + 4)  # one block in full while it runs again


seconds = st.floats(0.0, 4.0)
hosts = st.sampled_from([0.0, 0.1, 1.0, 3.0])
tasks = st.one_of(
    st.builds(work, seconds, takes=st.just({"activations": 3.0})),
    st.builds(work, seconds, gives=st.just({"buffers": 1.0}), host_seconds=hosts),
    st.builds(
        sent,
        st.sampled_from(["all_gather", "all_reduce"]),
        st.sampled_from(["wait", "ahead", "behind"]),
        seconds,
        st.sampled_from([NVLINK, IB]),
        takes=st.just({"buffers": 1.0}),
        gives=st.sampled_from([{}, {"buffers": 3.0}]),
    ),
)
some = st.lists(tasks, min_size=1, max_size=4).map(tuple)
updates = st.lists(st.builds(Task, st.just("update"), seconds), max_size=2).map(tuple)
operators = st.lists(
    st.builds(Operator, st.just("op"), some, some, updates), min_size=1, max_size=3
).map(tuple)


def _all_tasks(op):
    return (*op.forward, *op.backward, *op.update)


def test_the_device_waits_for_a_host_that_is_slower():
    asked = (work(1, host_seconds=3),)
    assert simulate(schedule(layer(asked, count=4))).step_seconds == pytest.approx(4 * 3 + 1)


def test_a_host_that_is_faster_delays_the_first_kernel_only():
    asked = (work(3, host_seconds=1),)
    assert simulate(schedule(layer(asked, count=50))).step_seconds == pytest.approx(50 * 3 + 1)


def test_the_host_uses_up_its_lead_before_the_device_waits():
    step = schedule(
        layer((work(10, host_seconds=1),), count=20), layer((work(1, host_seconds=3),), count=500)
    )
    assert simulate(step).step_seconds == pytest.approx(20 * 1 + 500 * 3 + 1)


def test_what_the_host_asks_for_is_told_by_pass():
    asked = work(10, host_seconds=1), Task("update", 1, host_seconds=2)
    both = layer(asked[:1], (back(1, host_seconds=4),), asked[1:], count=500)
    (one,) = passes(schedule(both))
    assert one.host_seconds == pytest.approx(500 * (1 + 4 + 2))
    several = passes(schedule(both, passes=4))
    total = sum(each.count * each.host_seconds for each in several)
    assert total == pytest.approx(500 * (4 * (1 + 4) + 2))


@given(st.lists(st.tuples(operators, st.integers(1, 60)), min_size=1, max_size=3), st.booleans())
def test_blocks_counted_are_blocks_walked_through(segments, stand_alone):
    if stand_alone:  # the first and the last block of a run are segments of their own
        segments = [each for ops, count in segments for each in ((ops, 1), (ops, count), (ops, 1))]
    step = schedule(
        *(Segment(str(k), ops, count) for k, (ops, count) in enumerate(segments)), ahead=2, behind=3
    )
    counted, (walked, _) = simulate(step), timeline(step)
    assert counted.step_seconds == pytest.approx(walked.step_seconds, rel=1e-6)
    assert counted.exposed_seconds == pytest.approx(walked.exposed_seconds, rel=1e-6, abs=1e-9)
    assert counted.peak_bytes == pytest.approx(walked.peak_bytes, rel=1e-6)
    assert counted.utilisation == pytest.approx(walked.utilisation, rel=1e-6)


def test_memory_of_the_layers_before_is_not_counted_with_every_block():
    # The first layer is as the others are, and its reductions are under way as they begin.
    gradient, buffer = {"buffers": 7.0}, {"buffers": 1.0}
    forward = (work(1, takes=buffer, gives=buffer),)
    backward = (back(1, takes=gradient), sent("reduce_scatter", "behind", 3, gives=gradient))
    ops = (Operator("op", forward, backward),) * 4
    step = schedule(Segment("many", ops, 60), Segment("last", ops, 1), ahead=2, behind=3)
    counted, (walked, _) = simulate(step), timeline(step)
    assert walked.peak_bytes == pytest.approx(4 * 7)  # three are under way, one is being made
    assert counted.peak_bytes == pytest.approx(walked.peak_bytes)


@given(st.lists(st.tuples(operators, st.integers(1, 9)), min_size=1, max_size=3))
def test_nothing_is_exposed_for_longer_than_it_lasts(segments):
    step = schedule(
        *(Segment(str(k), ops, count) for k, (ops, count) in enumerate(segments)), ahead=2, behind=3
    )
    found, over_time = timeline(step)
    for each in (*found.collectives, *simulate(step).collectives):
        assert each.exposed_seconds <= each.seconds * (1 + 1e-9) + 1e-9
    for span in over_time.spans:
        assert span.exposed_seconds <= span.end_seconds - span.start_seconds + 1e-9
    waited = found.step_seconds - found.compute_seconds
    if not any(t.host_seconds for ops, _ in segments for op in ops for t in _all_tasks(op)):
        assert found.exposed_seconds == pytest.approx(waited, abs=1e-9 * (1 + found.step_seconds))
    assert found.exposed_seconds <= waited + 1e-9 * (1 + found.step_seconds)
    assert found.exposed_seconds <= found.communication_seconds * (1 + 1e-9) + 1e-9


def test_a_thousand_layers_cost_what_ten_cost():
    ops = tuple(
        Operator(
            f"op{k}",
            (sent("all_gather", "ahead", 0.5), work(1.0)),
            (back(2.0), sent("reduce_scatter", "behind", 1.0 + k % 3)),
        )
        for k in range(40)
    )
    calls = {}
    for count in (20, 1000):
        with cProfile.Profile() as profile:
            found = simulate(schedule(Segment("layers", ops, count)))
        calls[count] = sum(entry.callcount for entry in profile.getstats())
        assert found.step_seconds > 120 * count
    assert calls[1000] < 5 * calls[20]


def test_what_holds_a_collective_up_has_its_part_of_the_wait():
    # Work waits for its all-to-all of 1 second; before, for what is left of a reduction of 3.
    behind, then = sent("all_reduce", "behind", 3), sent("all_to_all", "wait", 1)
    found, over_time = timeline(schedule(layer((), (back(1), behind, back(0.5), then))))
    exposed = {each.kind: (each.seconds, each.exposed_seconds) for each in found.collectives}
    assert exposed == {"all_reduce": (3.0, 2.5), "all_to_all": (1.0, 1.0)}
    spans = {span.kind: span.exposed_seconds for span in over_time.spans}
    assert spans == {"backward": 0.0, "all_reduce": 2.5, "all_to_all": 1.0}
