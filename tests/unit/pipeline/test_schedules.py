"""Schedules are those of torch.distributed.pipelining, action by action."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shardfold.errors import InputError
from shardfold.pipeline import Pipeline

SIZES = [(1, 1), (2, 2), (2, 7), (3, 3), (4, 4), (4, 8), (4, 10), (4, 40), (5, 6), (8, 8), (8, 33)]
CHUNKS = {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3), "zbv": (2,)}
CASES = [
    (name, devices, count, chunks)
    for name, each in CHUNKS.items()
    for chunks in each
    for devices, count in SIZES
    if name != "interleaved" or count % max(1, count // devices) == 0
]


def of_torch(name: str, devices: int, count: int, chunks: int) -> list[list[tuple[int, str, int]]]:
    """Orders as torch makes them, without stages or processes."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    classes = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }
    made: Any = classes[name].__new__(classes[name])
    made.pp_group_size, made._n_microbatches = devices, count
    made._num_stages = made.num_stages = devices * chunks
    made.n_local_stages = chunks
    made.microbatches_per_round = count // max(1, count // devices)
    if chunks == 1:
        orders = made._get_pipeline_order()
    else:
        orders = {d: made._calculate_single_rank_operations(d) for d in range(devices)}
    return [
        [
            (a.stage_index, a.computation_type.value, a.microbatch_index)
            for a in orders[d]
            if a is not None and a.computation_type.value in "FBIW"
        ]
        for d in range(devices)
    ]


@pytest.mark.parametrize(("name", "devices", "count", "chunks"), CASES)
def test_the_orders_are_those_of_torch(name: str, devices: int, count: int, chunks: int) -> None:
    found = Pipeline(name, devices, count, chunks)
    theirs = of_torch(name, devices, count, chunks)
    for device, order in enumerate(theirs):
        ours = [tuple(action) for action in found.actions(device)]
        if name == "1f1b":
            # torch numbers the last stage's forwards from 1; and it may state more than there are
            if count < devices:
                continue
            ours = [(s, k, -1 if k == "F" else n) for s, k, n in ours]
            order = [(s, k, -1 if k == "F" else n) for s, k, n in order]
        assert ours == order


@pytest.mark.parametrize(("name", "devices", "count", "chunks"), CASES)
def test_every_micro_batch_is_done_once_in_order(
    name: str, devices: int, count: int, chunks: int
) -> None:
    found = Pipeline(name, devices, count, chunks)
    for device in range(devices):
        seen: Counter[tuple[int, str]] = Counter()
        for stage, kind, number in found.actions(device):
            assert number == seen[stage, kind]
            seen[stage, kind] += 1
        kinds = "FIW" if name == "zbv" else "FB"
        expected = {(s, k): count for s in found.stages_on(device) for k in kinds}
        assert dict(seen) == expected


def test_stages_go_round_or_there_and_back() -> None:
    assert Pipeline("interleaved", 2, 4, 2).stages_on(0) == [0, 2]
    assert Pipeline("zbv", 2, 4, 2).stages_on(0) == [0, 3]
    assert str(Pipeline("1f1b", 2, 4).actions(0)[2]) == "0B0"


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (("1f1b", 4, 8, 2), "Try schedule=interleaved"),
        (("gpipe", 4, 8, 2), "one chunk of the model on a device"),
        (("interleaved", 4, 8, 1), "virtual=2 or more"),
        (("interleaved", 4, 9, 2), "Try micro-batches=8"),
        (("interleaved", 4, 11, 2), "Try micro-batches=12"),
        (("zbv", 4, 8, 3), "two chunks"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(case: tuple[str, int, int, int], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Pipeline(*case)
