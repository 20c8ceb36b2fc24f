"""Buckets of gradients: how uses are put together, started and delivered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfold.runtime.gradient_reducer import Reducer, Reduction, buckets_of
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.reshard import Moves, Step
from shardfold.runtime.shards import Place

LIMIT = 100


def reduction(number: int, items: int, *, axis: int = 0, steps: int = 1) -> Reduction:
    step = Step("all_reduce", (axis,), 0, (items,), (items,))
    return Reduction(number, Moves((step,) * steps, (items,), (items,)), torch.float32, 4 * items)


class Done:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        self.tensor.mul_(2)  # both devices have the same


class Pair(Groups):
    """Two devices that always hold the same, without processes; notes what is started."""

    def __init__(self) -> None:
        super().__init__(Place((2, 2), (0, 0)))
        self.started: list[tuple[Any, int]] = []

    def start_reduce(self, tensor: Tensor, axes: Any) -> Any:
        self.started.append((axes, tensor.numel()))
        return Done(tensor)

    def all_reduce(self, tensor: Tensor, axes: Any, *, most: bool = False) -> Tensor:
        self.started.append((axes, tensor.numel()))
        return tensor.mul_(2)


def numbers(buckets: Any) -> list[list[int]]:
    return [[member.number for member in bucket.members] for bucket in buckets]


def test_buckets_are_filled_from_the_end_and_by_kind() -> None:
    given = [reduction(0, 10), reduction(1, 10), reduction(2, 10, axis=1), reduction(3, 10)]
    assert numbers(buckets_of(given, LIMIT)) == [[3, 1, 0], [2]]
    assert numbers(buckets_of(given, 60)) == [[3, 1], [2], [0]]


def test_a_large_gradient_and_one_of_several_steps_stay_alone() -> None:
    given = [reduction(0, 10), reduction(1, 25), reduction(2, 10, steps=2), reduction(3, 10)]
    assert numbers(buckets_of(given, LIMIT)) == [[2], [1], [3, 0]]


class Backward:
    """Gradients that arrive within a backward, which calls `finish` at its end."""

    def __init__(self, *given: Reduction) -> None:
        self.groups = Pair()
        self.found: dict[int, list[float]] = {}
        self.settled = 0
        self.reducer = Reducer(given, self.groups, self._deliver, self._settle, LIMIT)
        self.reducer.is_active = True  # no engine runs to call back

    def _deliver(self, number: int, gradient: Tensor) -> None:
        self.found.setdefault(number, []).append(float(gradient.sum()))

    def _settle(self) -> None:
        self.settled += 1


def test_buckets_start_in_order_whatever_comes_first() -> None:
    backward = Backward(reduction(0, 30), reduction(1, 10), reduction(2, 10), reduction(3, 40))
    for number, items in ((0, 30), (1, 10), (3, 40), (2, 10)):
        backward.reducer.arrived(number, torch.ones(items))
    assert [items for _, items in backward.groups.started] == [40, 30, 20]
    backward.reducer.finish()
    assert backward.found == {3: [80.0], 0: [60.0], 1: [20.0], 2: [20.0]}
    assert backward.settled == 1
    assert [[size for _, size in b.members] for b in backward.reducer.launched] == [[40, 40]]


def test_what_never_comes_holds_nothing_up_at_the_end() -> None:
    backward = Backward(reduction(0, 10), reduction(1, 10), reduction(2, 40))
    backward.reducer.arrived(1, torch.ones(10))
    assert backward.groups.started == []
    backward.reducer.finish()
    assert backward.found == {1: [20.0]}


def test_a_second_gradient_of_a_use_is_reduced_too() -> None:
    backward = Backward(reduction(0, 40))
    for value in (1.0, 3.0):
        backward.reducer.arrived(0, torch.full((40,), value))
    backward.reducer.finish()
    assert backward.found == {0: [80.0, 240.0]}


def test_a_gradient_that_others_hold_is_not_written_to() -> None:
    backward = Backward(reduction(0, 40))
    gradient = torch.ones(40)
    alias = gradient.view(-1)
    backward.reducer.arrived(0, gradient)
    backward.reducer.finish()
    assert backward.found == {0: [80.0]}
    assert float(alias.sum()) == 40.0


def taken(backward: Backward, passes: int, *arriving: dict[int, Tensor]) -> None:
    """All passes of a step, in each of which some gradients arrive."""
    for number, gradients in enumerate(arriving):
        backward.reducer.begin(number, passes)
        backward.reducer.is_active = True
        for use, gradient in gradients.items():
            backward.reducer.arrived(use, gradient.clone())
        assert backward.settled == 0
        backward.reducer.finish()


def test_sums_of_passes_are_reduced_in_the_last() -> None:
    unsent = Reduction(1, Moves((), (10,), (10,)), torch.float32, 40)
    backward = Backward(reduction(0, 30), unsent, reduction(2, 40, steps=2))
    came = {0: torch.ones(30), 1: torch.ones(10), 2: torch.ones(40)}
    taken(backward, 3, came, came, came)
    assert sorted(items for _, items in backward.groups.started) == [30, 40, 40]
    assert backward.found == {0: [180.0], 1: [30.0], 2: [480.0]}
    assert backward.settled == 1
    assert not backward.reducer.sums


def test_what_comes_in_an_earlier_pass_alone_is_reduced_too() -> None:
    backward = Backward(reduction(0, 30), reduction(1, 40))
    taken(backward, 2, {0: torch.ones(30), 1: torch.ones(40)}, {1: torch.ones(40)})
    assert backward.found == {0: [60.0], 1: [160.0]}


def test_a_step_that_was_left_is_forgotten() -> None:
    backward = Backward(reduction(0, 30))
    backward.reducer.begin(0, 2)
    backward.reducer.is_active = True
    backward.reducer.arrived(0, torch.ones(30))
    taken(backward, 1, {0: torch.ones(30)})
    assert backward.found == {0: [60.0]}


def test_what_rests_in_a_pass_does_not_hold_up_what_is_scattered() -> None:
    class Scattering(Pair):
        def start_scatter(self, tensor: Tensor, axes: Any) -> Any:
            self.started.append((axes, tensor.numel()))
            mine = tensor[0].clone()
            return mine, Done(mine)

    cut = ((0, 15), (15, 30))
    step = Step("reduce_scatter", (0,), 0, (30,), (15,), joining=0, cut=cut)
    scatter = [Reduction(k, Moves((step,), (30,), (15,)), torch.float32, 120) for k in (0, 2, 3, 4)]
    backward = Backward(scatter[0], reduction(1, 40), *scatter[1:])
    backward.reducer.groups = groups = Scattering()
    came = {k: torch.ones(30) for k in (4, 3, 2)} | {1: torch.ones(40), 0: torch.ones(30)}
    backward.reducer.begin(0, 2)
    backward.reducer.is_active = True
    for use, gradient in came.items():
        backward.reducer.arrived(use, gradient)
    assert [items for _, items in groups.started] == [30] * 4
    assert sorted(backward.found) == [3, 4]  # handed over while others are under way
    backward.reducer.finish()
    assert backward.found == {k: [30.0] for k in (0, 2, 3, 4)}
    assert backward.settled == 0
    taken_last = {use: torch.ones(gradient.shape) for use, gradient in came.items()}
    backward.reducer.begin(1, 2)
    backward.reducer.is_active = True
    for use, gradient in taken_last.items():
        backward.reducer.arrived(use, gradient)
    backward.reducer.finish()
    assert backward.found == {**{k: [30.0, 30.0] for k in (0, 2, 3, 4)}, 1: [160.0]}
    assert backward.settled == 1
