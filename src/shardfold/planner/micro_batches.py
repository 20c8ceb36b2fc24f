"""How many micro-batches a step takes: one, or as many as the memory limit asks for.

Micro-batches cost time and save the memory of activations, so more than one is tried only where
the limit binds: `auto` where nothing fits otherwise, and then takes the faster of the first number
that does and the next; `search` wherever something faster does not fit, and takes the fastest.
Numbers are powers of two that divide the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardfold.errors import InfeasibleError, InputError, ModelError
from shardfold.planner.options import MicroBatches
from shardfold.planner.select import HINT, Selection
from shardfold.planner.separability import Samples

LITTLE = 0.995  # of what half as many need: more micro-batches will hardly need less

Select = Callable[[int], Selection]
Tried = Selection | InfeasibleError


def choose_micro_batches(
    wish: MicroBatches, select: Select, samples: Callable[[], Samples]
) -> Selection:
    """The best selection over the numbers of micro-batches that are wished for."""
    if isinstance(wish, int):
        if wish > 1:
            _check_number(wish, samples())
        return select(wish)
    whole = next(_try_each(select, [1]))
    if isinstance(whole, Selection) and (whole.fits if wish == "auto" else not whole.is_bound):
        return whole
    tries = _try_each(select, samples().divisors())
    return _take_first(whole, tries) if wish == "auto" else _take_fastest(whole, tries)


def _check_number(count: int, samples: Samples) -> None:
    if samples.reason:
        raise InputError(
            f"The batch cannot be taken in {count} micro-batches: the loss would be another one. "
            f"{samples.reason} Leave micro_batches out, or set it to 1."
        )
    if samples.count % count:
        raise InputError(
            f"The batch has {samples.count} samples, which cannot be cut into {count} equal "
            f"micro-batches. Try a number that divides {samples.count}."
        )


def _try_each(select: Select, numbers: Sequence[int]) -> Iterator[Tried]:
    """One number after the other, as long as the model takes such parts of its batch."""
    for number in numbers:
        found: Tried
        try:
            found = select(number)
        except InfeasibleError as error:
            found = error
        except ModelError:
            if number == 1:
                raise
            return  # a model for the whole batch alone: it is not cut
        yield found


def _seconds(tried: Tried) -> float:
    """The step, where it fits."""
    return tried.winner.seconds if isinstance(tried, Selection) and tried.fits else math.inf


def _take_first(whole: Tried, tries: Iterator[Tried]) -> Selection:
    """The faster of the first number of micro-batches that fits and the next one."""
    tried = [whole]
    for found in tries:
        tried.append(found)
        if isinstance(found, Selection) and found.fits:
            return _fastest([found, next(tries, found)])
        if len(tried) > 2 and found.needed_bytes > LITTLE * tried[-2].needed_bytes:
            break
    return _fastest(tried)


def _take_fastest(whole: Tried, tries: Iterator[Tried]) -> Selection:
    """The fastest that fits; more micro-batches that fit and gain nothing end it."""
    tried = [whole]
    for found in tries:
        is_slower = _seconds(found) >= min(map(_seconds, tried))
        tried.append(found)
        if is_slower and _seconds(found) < math.inf:
            break
    return _fastest(tried)


def _fastest(tried: Sequence[Tried]) -> Selection:
    """The fastest that fits. Where none does, the whole batch at once, or its refusal.

    Both say what is needed at least: the fewest bytes of all that was tried.
    """
    best, whole = min(tried, key=_seconds), tried[0]
    if isinstance(best, Selection) and best.fits:
        return best
    needed = min(each.needed_bytes for each in tried)
    if isinstance(whole, InfeasibleError):
        raise InfeasibleError(needed_bytes=needed, limit_bytes=whole.limit_bytes, hint=HINT)
    return replace(whole, smallest_bytes=needed)
