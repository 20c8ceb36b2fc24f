"""Whatever a checkpoint holds beside tensors comes back as it was, types and all, or is refused."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedules

from shardfold.errors import CheckpointError
from shardfold.runtime.checkpoint import load, save
from shardfold.runtime.checkpoint.index import decode, encode


def same(found: Any, expected: Any) -> bool:
    """Equal, of the same types at every level, NaN and the sign of zero included."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected, equal_nan=True)
    if isinstance(expected, float | np.floating):
        return (math.isnan(found) and math.isnan(expected)) or (
            found == expected and math.copysign(1, found) == math.copysign(1, expected)
        )
    if isinstance(expected, dict):
        return same(list(found.items()), list(expected.items()))
    if isinstance(expected, list | tuple | deque):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def through_json(value: Any) -> Any:
    return decode(msgspec.json.decode(msgspec.json.encode(encode(value, "extra"))))


numbers = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8)
)
scalars = (
    st.floats(width=32).map(np.float32)
    | st.floats().map(np.float64)
    | st.integers(-9, 9).map(np.int64)
    | st.booleans().map(np.bool_)
    | st.lists(st.floats(), max_size=3).map(
        lambda x: torch.tensor(x, dtype=torch.float64).nan_to_num()
    )
    | st.lists(st.integers(-9, 9), max_size=3).map(lambda x: np.array(x, np.int32))
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
plain = st.recursive(
    numbers | scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.lists(inner, max_size=3).map(lambda x: deque(x, maxlen=7))
        | st.sets(st.integers() | st.text(), max_size=3)
        | st.frozensets(keys, max_size=3)
        | st.lists(st.integers(), max_size=3).map(Counter)
        | st.sampled_from([{"$": "tuple", "of": [1]}, torch.Size([2, 3]), torch.bfloat16, 2 + 3j])
    ),
    max_leaves=8,
)


@given(plain)
def test_any_plain_value_comes_back_as_it_was(value: Any) -> None:
    assert same(through_json(value), value)


class Level(IntEnum):
    """A number that is more than a number."""

    HIGH = 3


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, len]},
        defaultdict(list),
        Level.HIGH,
        nn.Linear(2, 2),
        nn.Parameter(torch.ones(2)),
        torch.zeros(100_000),
        np.array([object()]),
        np.longdouble(1),
        object(),
        slice(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_not_is_refused_and_named(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"`extra"):
        encode({"inner": value}, "extra")


def test_a_value_within_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(value, "data")


@pytest.mark.parametrize(
    "found",
    [
        {"$": "os.system", "of": "true"},
        {"$": ["tuple"], "of": []},
        {"$": "int"},
        {"$": "float", "of": []},
        {"$": "array", "of": [1], "dtype": "|O", "shape": [1]},
        {"$": "tensor", "of": [1], "dtype": "ones", "shape": [1]},
        {"$": "tensor", "of": [1], "dtype": "float32", "shape": [2]},
        {"$": "set", "of": [[]]},
    ],
)
def test_hostile_values_are_refused(found: Any) -> None:
    with pytest.raises(CheckpointError, match="The checkpoint has a"):
        decode(found)


def _optimizer(count: int = 2) -> Any:
    torch.manual_seed(0)
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1 * (k + 1)} for k in range(count)]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def _cut(optimizer: Any) -> Any:
    return schedules.ConstantLR(optimizer, total_iters=3)


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda n: 0.9**n),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda n: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": _cut,
    "LinearLR": lambda o: schedules.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.8),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [_cut(o), schedules.MultiStepLR(o, [1, 2])], [3]
    ),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [_cut(o), schedules.MultiStepLR(o, [2, 3])]
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1, threshold=0.0),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 2),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.2, total_steps=12),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


def test_every_scheduler_of_torch_is_here() -> None:
    kinds = {
        name
        for name, kind in vars(schedules).items()
        if isinstance(kind, type)
        and issubclass(kind, schedules.LRScheduler)
        and not name.startswith("_")
    }
    assert kinds - {"LRScheduler"} <= set(SCHEDULES)


def _step(schedule: Any, optimizer: Any, number: int) -> list[float]:
    optimizer.step()
    if isinstance(schedule, schedules.ReduceLROnPlateau):
        schedule.step(1.0)
    else:
        schedule.step()
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.filterwarnings("ignore")
def test_a_schedule_saved_as_extra_goes_on_as_if_it_had_not_stopped(
    name: str, tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    for number in range(3):
        _step(schedule, optimizer, number)
    state = schedule.state_dict()
    save(model, optimizer, tmp_path, step=3, extra=state)
    expected = [_step(schedule, optimizer, number) for number in range(3, 9)]

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    found = load(model, optimizer, tmp_path)
    schedule.load_state_dict(found.extra)
    assert [_step(schedule, optimizer, number) for number in range(3, 9)] == expected
    assert json.dumps(found.extra, default=repr)


def test_options_of_an_optimizer_come_back_as_they_were(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=math.inf)
    optimizer.param_groups[0]["tag"] = {1: (2, math.nan)}
    save(model, optimizer, tmp_path, step=1)
    other = torch.optim.AdamW(model.parameters(), lr=0.2)
    load(model, other, tmp_path)
    group = other.param_groups[0]
    assert (group["lr"], group["eps"], group["betas"]) == (0.1, math.inf, (0.9, 0.999))
    assert same(group["tag"], {1: (2, math.nan)})


def test_a_damaged_chunk_changes_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    folder = save(model, optimizer, tmp_path, step=1)
    file = folder / "part-00000.safetensors"
    data = file.read_bytes()
    for place in range(len(data) - 600, len(data), 150):
        torch.manual_seed(place)
        other = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        its = torch.optim.AdamW(other.parameters(), lr=0.3)
        other(torch.ones(1, 3)).sum().backward()
        its.step()
        before = {k: v.clone() for k, v in other.state_dict().items()}
        told = repr(its.state_dict())
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match="do not have their checksum"):
            load(other, its, tmp_path)
        assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
        assert repr(its.state_dict()) == told
