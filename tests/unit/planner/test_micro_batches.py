"""How many micro-batches a step takes: which numbers are tried, what is said where none fits."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import InfeasibleError, InputError, ModelError
from shardfold.graph import Graph
from shardfold.planner.batch_slices import Samples
from shardfold.planner.micro_batches import Captures, choose_micro_batches, read_off
from shardfold.planner.options import Request, check_micro_batches
from shardfold.planner.select import Selection

from .test_staged import planner

LIMIT = 100.0
BATCH = Samples(16, ((0, 0),))


class Selections:
    """Selections with given peaks and steps, and what was asked for."""

    def __init__(self, given: bool = True, **cases: tuple[float, float]) -> None:
        self.cases = {int(key[1:]): value for key, value in cases.items()}
        self.given, self.asked = given, []

    def __call__(self, count: int, is_last: bool) -> Selection:
        if is_last:
            self.last = count
        else:
            self.asked.append(count)
        peak, seconds = self.cases[count]
        if peak > LIMIT and self.given:
            raise InfeasibleError(needed_bytes=peak, limit_bytes=LIMIT)
        faster = SimpleNamespace(seconds=seconds / 2, peak_bytes=1e9)
        winner = SimpleNamespace(seconds=seconds, peak_bytes=peak, micro_batches=count)
        smallest = None if peak <= LIMIT else peak
        return Selection(winner, (), winner, LIMIT, (winner, faster), smallest)


def number(wish, selections, samples) -> int:
    """Of micro-batches that are chosen."""
    return choose_micro_batches(wish, selections, samples).winner.micro_batches


def test_one_micro_batch_is_enough_where_it_fits():
    selections = Selections(_1=(90, 1))
    assert number("auto", selections, lambda: BATCH) == 1
    assert selections.asked == [1]


@pytest.mark.parametrize(("next_seconds", "wins"), [(3.0, 4), (1.5, 8)])
def test_the_first_that_fits_is_held_against_the_next(next_seconds, wins):
    selections = Selections(_1=(400, 1), _2=(200, 1), _4=(90, 2), _8=(50, next_seconds))
    assert number("auto", selections, lambda: BATCH) == wins
    assert selections.asked == [1, 2, 4, 8]


def test_what_is_needed_is_the_least_of_all_that_was_tried():
    selections = Selections(_1=(400, 1), _2=(450, 1), _4=(300, 2), _8=(250, 2), _16=(225, 2))
    with pytest.raises(InfeasibleError) as refused:
        choose_micro_batches("auto", selections, lambda: BATCH)
    assert refused.value.needed_bytes == 225
    assert selections.asked == [1, 2, 4, 8, 16]
    assert selections.last == 16


def test_more_are_not_tried_where_they_hardly_save_memory():
    selections = Selections(_1=(400, 1), _2=(350, 1), _4=(349, 2))
    with pytest.raises(InfeasibleError):
        choose_micro_batches("auto", selections, lambda: BATCH)
    assert selections.asked == [1, 2, 4]


def test_without_a_limit_of_its_own_the_whole_batch_is_planned_that_does_not_fit():
    selections = Selections(given=False, _1=(400, 1), _2=(350, 1), _4=(349, 2))
    found = choose_micro_batches("auto", selections, lambda: BATCH)
    assert found.winner.micro_batches == 1
    assert found.smallest_bytes == 349


def test_a_search_goes_on_until_more_gain_nothing():
    selections = Selections(_1=(90, 4), _2=(90, 3), _4=(90, 2), _8=(90, 2.5), _16=(90, 1))
    assert number("search", selections, lambda: BATCH) == 4
    assert selections.asked == [1, 2, 4, 8]


def test_what_must_not_be_cut_is_not_cut():
    mixed = Samples(reason="Operator norm has statistics over the batch.")
    selections = Selections(_1=(400, 1))
    with pytest.raises(InfeasibleError):
        choose_micro_batches("auto", selections, lambda: mixed)
    assert selections.asked == [1]
    with pytest.raises(InputError, match=r"another one\. Operator norm has statistics"):
        choose_micro_batches(4, selections, lambda: mixed)


@pytest.mark.parametrize(
    ("wish", "said"),
    [("alot", "Did you mean auto"), (0, "1 micro-batch or more"), (True, "1 micro-batch or more")],
)
def test_other_wishes_are_refused(wish, said):
    with pytest.raises(InputError, match=said):
        check_micro_batches(wish)


def test_numbers_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="16 samples, which cannot be cut into 3"):
        choose_micro_batches(3, Selections(), lambda: BATCH)


# With real plans


class Deep(nn.Module):
    """Small layers over many tokens: nearly all memory is that of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


def planned(**options):
    batch = (torch.zeros(8, 512, 16), torch.zeros(8, 512, 16))
    return sf.plan(Deep(), batch, cluster="2xa100", recompute="never", **options)


@pytest.fixture(scope="module")
def needed():
    with pytest.raises(InfeasibleError) as refused:
        planned(memory_limit=1000.0, micro_batches=1)
    return refused.value.needed_bytes


def test_what_fits_only_in_parts_is_planned_in_parts(needed):
    found = planned(memory_limit=needed - 1)
    assert found.micro_batches > 1
    assert found.estimate.peak_bytes < needed
    assert found.simulation.peak_bytes == found.estimate.peak_bytes
    assert found.micro_batch_dims == {"0": 0, "1": 0}
    assert [entry.shape[0] for entry in found.inputs] == [8 // found.micro_batches] * 2
    assert f"in {found.micro_batches} micro-batches" in " ".join(str(found).split())
    assert planned(memory_limit=needed).micro_batches == 1


def test_the_refusal_names_what_is_needed_and_that_is_met():
    with pytest.raises(InfeasibleError) as refused:
        planned(memory_limit=1000.0)
    least = refused.value.needed_bytes
    assert planned(memory_limit=least).estimate.peak_bytes <= least
    with pytest.raises(InfeasibleError) as again:
        planned(memory_limit=least - 1)
    assert again.value.needed_bytes == least


@pytest.mark.parametrize("passes", [2, 4])
def test_the_parts_of_a_step_sum_to_it(passes):
    found = planned(micro_batches=passes)
    e, s = found.estimate, found.simulation
    total = e.compute_seconds + e.communication_seconds + e.update_seconds
    assert total == pytest.approx(e.additive_seconds, rel=1e-9)
    assert sum(o.seconds for o in found.operators) == pytest.approx(e.additive_seconds, rel=1e-9)
    assert s.compute_seconds + s.communication_seconds == pytest.approx(
        e.additive_seconds, rel=1e-9
    )
    assert s.peak_bytes < planned(micro_batches=1).simulation.peak_bytes


def test_a_search_is_never_slower_than_one_micro_batch(needed):
    limit = 1.05 * needed
    one, best = (planned(memory_limit=limit, micro_batches=n) for n in (1, "search"))
    assert best.simulation.step_seconds <= one.simulation.step_seconds
    assert best.estimate.peak_bytes <= limit


def test_folded_and_unfolded_agree():
    short, full = (planned(micro_batches=4, fold=fold) for fold in (True, False))
    assert short.estimate.additive_seconds == pytest.approx(
        full.estimate.additive_seconds, rel=1e-9
    )
    assert short.simulation.step_seconds == pytest.approx(full.simulation.step_seconds, rel=1e-9)
    assert short.simulation.peak_bytes == full.simulation.peak_bytes


class Normed(nn.Module):
    """Layers whose statistics are those of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))
            for _ in range(3)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_batch_norm_is_not_taken_in_parts():
    planner = sf.Planner(Normed(), (torch.zeros(8, 8),), cluster="2xa100")
    with pytest.raises(InputError, match="statistics over the batch"):
        planner.plan(micro_batches=2)
    whole = planner.plan(micro_batches=1, pipeline=2)
    assert whole.pipeline is not None


class Sized(nn.Module):
    """A model that does something else with a smaller batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return (self.layer(x) if len(x) == 8 else torch.tanh(self.layer(x))).square().mean()


def test_a_model_that_does_something_else_with_a_part_is_not_cut():
    x = (torch.zeros(8, 512, 16),)
    with pytest.raises(ModelError, match=r"With 2 micro-batches .* something else from operator"):
        sf.plan(Sized(), x, cluster="2xa100", micro_batches=2)
    with pytest.raises(InfeasibleError):
        sf.plan(Sized(), x, cluster="2xa100", memory_limit=1000.0)


class Copied(nn.Module):
    """A mean over samples, whose copies there are more of the more samples there are."""

    def __init__(self, copies: Callable[[int], int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.copies = copies

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.repeat(1, self.copies(len(x)))[:, :8].square().mean()


def captures_of(found: sf.Planner) -> Captures:
    """As they are used by the search for stages."""
    return found._captured(found._asked(Request(), None, found.options), short=True)


def test_graphs_are_read_off_two_captures() -> None:
    captures = captures_of(planner(layers=6))
    whole, part = captures.graph(1), captures.graph(4)
    for count in (2, 8, 16):
        assert read_off(whole, part, 4, count) == captures.graph(count)
    assert read_off(whole, part, 4, 64) is None  # half a sample


def test_a_graph_that_was_read_off_wrongly_is_found_out() -> None:
    x = torch.zeros(8, 8)
    ways: tuple[tuple[Callable[[int], int], bool], ...] = (
        (lambda samples: 3, True),
        (lambda samples: samples, True),
        (lambda samples: max(4, samples), False),
    )
    for copies, is_right in ways:
        captures = captures_of(sf.Planner(Copied(copies), (x,), cluster="4xa100"))
        captures.graph(2)
        likely: Graph = captures.likely_graph(4)
        assert captures.confirm(4) == is_right
        assert (likely == captures.graph(4)) == is_right
        assert captures.likely_graph(4) == captures.graph(4)


def test_a_number_that_the_model_refuses_is_found_out() -> None:
    def copies(samples: int) -> int:
        if samples < 4:
            raise ValueError("too few samples")
        return 1

    captures = captures_of(sf.Planner(Copied(copies), (torch.zeros(16, 8),), cluster="4xa100"))
    captures.graph(2)
    captures.likely_graph(8)
    assert not captures.confirm(8)
    with pytest.raises(ModelError, match="too few samples"):
        captures.likely_graph(8)
    assert captures.likely_graph(4) == captures.graph(4)
