"""How many passes a step takes over its batch: one, or as many as the memory limit asks for.

Passes cost time and save the memory of activations, so more than one is tried only where the limit
binds: `auto` where nothing fits otherwise, and then takes the faster of the first number that does
and the next; `search` wherever something faster does not fit, and takes the fastest. Numbers are
powers of two that divide the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from shardfold.errors import InfeasibleError, InputError, ModelError, nearest
from shardfold.planner.mesh_search import HINT
from shardfold.planner.planner import Decision
from shardfold.planner.separability import Samples

MicroBatches = int | Literal["auto", "search"]
WORDS: tuple[str, ...] = get_args(get_args(MicroBatches)[1])
LITTLE = 0.995  # of what half as many passes need: more will hardly need less

Attempt = Callable[[int], Decision]


def check_wish(wish: MicroBatches) -> None:
    """Refuse what is no number of passes, and no word for one."""
    if isinstance(wish, str):
        if wish not in WORDS:
            raise InputError(f"Unknown number of micro-batches {wish!r}. {nearest(wish, WORDS)}")
    elif isinstance(wish, bool) or wish < 1:
        raise InputError(f"A step takes 1 micro-batch or more, got {wish!r}.")


def decided(wish: MicroBatches, attempt: Attempt, samples: Callable[[], Samples]) -> Decision:
    """The best decision over the numbers of passes that are wished for."""
    if isinstance(wish, int):
        if wish > 1:
            _check_number(wish, samples())
        return attempt(wish)
    whole = _Tried.of(attempt, 1)
    assert whole is not None
    if whole.fits if wish == "auto" else not whole.is_bound:
        return whole.only
    return (_first if wish == "auto" else _fastest)(whole, attempt, samples().divisors())


def _check_number(passes: int, samples: Samples) -> None:
    if samples.reason:
        raise InputError(
            f"The batch cannot be taken in {passes} micro-batches: the loss would be another one. "
            f"{samples.reason} Leave micro_batches out, or set it to 1."
        )
    if samples.count % passes:
        raise InputError(
            f"The batch has {samples.count} samples, which cannot be cut into {passes} equal "
            f"micro-batches. Try a number that divides {samples.count}."
        )


@dataclass(frozen=True, slots=True)
class _Tried:
    """A decision for some number of passes, or the refusal to make one."""

    decision: Decision | None
    refusal: InfeasibleError | None = None

    @classmethod
    def of(cls, attempt: Attempt, passes: int) -> _Tried | None:
        """Try so many passes; none where the model does not take a part of its batch."""
        try:
            return cls(attempt(passes))
        except InfeasibleError as error:
            return cls(None, error)
        except ModelError:
            if passes == 1:
                raise
            return None  # a model for the whole batch alone: it is not cut

    @property
    def only(self) -> Decision:
        """The decision, where there is one."""
        if self.decision is None:
            assert self.refusal is not None
            raise self.refusal
        return self.decision

    @property
    def fits(self) -> bool:
        return self.decision is not None and self.needed_bytes <= self.decision.chosen.limit_bytes

    @property
    def needed_bytes(self) -> float:
        """Of the decision where it fits, else of the smallest that was found."""
        if self.decision is None:
            assert self.refusal is not None
            return self.refusal.needed_bytes
        chosen, verdict = self.decision.chosen, self.decision.verdict
        if chosen.smallest_bytes is not None:
            return chosen.smallest_bytes
        return (chosen.best.solution.bytes or 0.0) if verdict is None else _peak(self.decision)

    @property
    def seconds(self) -> float:
        """The step, where it fits."""
        if self.decision is None or not self.fits:
            return math.inf
        verdict = self.decision.verdict
        return self.decision.chosen.best.solution.cost if verdict is None else verdict.winner.rank

    @property
    def is_bound(self) -> bool:
        """Whether the limit keeps something faster out."""
        if self.decision is None or not self.fits:
            return True
        chosen, verdict = self.decision.chosen, self.decision.verdict
        if verdict is None:
            return chosen.best.solution.cost > min(c.solution.lower_bound for c in chosen.tried)
        return any(
            judged.rank < self.seconds and judged.simulation.peak_bytes > chosen.limit_bytes
            for judged in verdict.finalists
        )


def _peak(decision: Decision) -> float:
    assert decision.verdict is not None
    return decision.verdict.winner.simulation.peak_bytes


def _tries(attempt: Attempt, numbers: list[int]) -> Iterator[_Tried]:
    """One number of passes after the other, as long as the model takes such parts."""
    for passes in numbers:
        found = _Tried.of(attempt, passes)
        if found is None:
            return
        yield found


def _first(whole: _Tried, attempt: Attempt, numbers: list[int]) -> Decision:
    """The faster of the first number of passes that fits and the next one."""
    tried, tries = [whole], _tries(attempt, numbers)
    for found in tries:
        if found.fits:
            return min((found, next(tries, found)), key=lambda each: each.seconds).only
        tried.append(found)
        if len(tried) > 2 and found.needed_bytes > LITTLE * tried[-2].needed_bytes:
            break
    return _none_fits(tried)


def _fastest(whole: _Tried, attempt: Attempt, numbers: list[int]) -> Decision:
    """The fastest number of passes that fits; more than one that fits and gains nothing end it."""
    tried = [whole]
    for found in _tries(attempt, numbers):
        is_slower = found.seconds >= min(each.seconds for each in tried)
        tried.append(found)
        if found.fits and is_slower:
            break
    best = min(tried, key=lambda each: each.seconds)
    return best.only if best.fits else _none_fits(tried)


def _none_fits(tried: list[_Tried]) -> Decision:
    """The whole batch at once, with the fewest bytes of all that was tried; or the refusal."""
    needed = min(each.needed_bytes for each in tried)
    whole = tried[0]
    if whole.refusal is not None:
        limit = whole.refusal.limit_bytes
        raise InfeasibleError(needed_bytes=needed, limit_bytes=limit, hint=HINT)
    decision = whole.only
    return replace(decision, chosen=replace(decision.chosen, smallest_bytes=needed))
