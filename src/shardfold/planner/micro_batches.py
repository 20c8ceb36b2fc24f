"""How many micro-batches a step takes: one, or as many as the memory limit asks for.

Micro-batches cost time and save the memory of activations, so more than one is tried only where
the limit binds: `auto` where nothing fits otherwise, and then takes the faster of the first number
that does and the next; `search` wherever something faster does not fit, and takes the fastest.
Numbers are powers of two that divide the batch. Where none fits, the one that needs least is
searched once more, for the smallest plan there is.

`Captures` has the model captured for each number of micro-batches, when it is first needed. Where
many numbers are compared, two captures do: every size that differs between the graph of the whole
batch and that of a part grows evenly with the samples, so all other graphs can be read off these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from shardfold.errors import InfeasibleError, InputError, ModelError
from shardfold.graph import Graph
from shardfold.planner.batch_slices import Samples, check_alike, first_part, samples_in
from shardfold.planner.options import MicroBatches
from shardfold.planner.select import Selection
from shardfold.sharding import Subdims

if TYPE_CHECKING:
    from torch import nn

    from shardfold.capture import Program


LITTLE = 0.995  # of what half as many need: more micro-batches will hardly need less

Select = Callable[[int, bool], Selection]  # of a number; whether no other is tried after it
Tried = Selection | InfeasibleError


def choose_micro_batches(
    wish: MicroBatches, select: Select, samples: Callable[[], Samples]
) -> Selection:
    """The best selection over the numbers of micro-batches that are wished for."""
    if isinstance(wish, int):
        if wish > 1:
            check_number(wish, samples())
        return select(wish, True)
    whole = next(_try_each(select, [1]))
    if isinstance(whole, Selection) and (whole.fits if wish == "auto" else not whole.is_bound):
        return whole
    numbers = samples().divisors()
    take = _take_first if wish == "auto" else _take_fastest
    tried = take(whole, _try_each(select, numbers))
    best = min(tried, key=_seconds)
    if isinstance(best, Selection) and best.fits:
        return best
    needed = [each.needed_bytes for each in tried]
    least = needed.index(min(needed))
    if isinstance(whole, InfeasibleError):
        return select((1, *numbers)[least], True)
    return replace(whole, smallest_bytes=needed[least])


def check_number(count: int, samples: Samples) -> None:
    """Refuse a number of micro-batches that the batch cannot be cut into; one takes any batch."""
    if count > 1 and samples.reason:
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
            found = select(number, False)
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


def _take_first(whole: Tried, tries: Iterator[Tried]) -> list[Tried]:
    """Up to the number of micro-batches after the first that fits."""
    tried = [whole]
    for found in tries:
        tried.append(found)
        if isinstance(found, Selection) and found.fits:
            return [*tried, *islice(tries, 1)]
        if len(tried) > 2 and found.needed_bytes > LITTLE * tried[-2].needed_bytes:
            break
    return tried


def _take_fastest(whole: Tried, tries: Iterator[Tried]) -> list[Tried]:
    """Up to the number of micro-batches that fits and gains nothing."""
    tried = [whole]
    for found in tries:
        is_slower = _seconds(found) >= min(map(_seconds, tried))
        tried.append(found)
        if is_slower and _seconds(found) < math.inf:
            break
    return tried


class Captures:
    """The programs of one model, by the number of parts in which a step takes its batch."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        subdims_of: Callable[[Graph], Subdims],
        watch: Callable[[], None],
        *,
        is_compiled: bool = False,
        **options: Any,
    ) -> None:
        from shardfold.capture import capture_program, places_of

        self.capture, self.places = capture_program, places_of
        self.model, self.args, self.kwargs = model, args, dict(kwargs or {})
        self.subdims_of, self.watch, self.options = subdims_of, watch, options
        self.is_compiled = is_compiled
        self.seconds = 0.0  # that capturing has taken
        self.known: dict[int, Program] = {}
        self.read: dict[int, Graph] | None = {}  # off two captures; None: what was read was wrong

    def graph(self, count: int) -> Graph:
        """The graph of one of so many micro-batches."""
        return self._program(count).graph

    def likely_graph(self, count: int) -> Graph:
        """As `graph`, read off two others where that is possible: `confirm` says if it is right."""
        if self.read is None or count in self.known:
            return self.graph(count)
        if count not in self.read:
            part = next((k for k in self.known if k > 1), None)
            read = None if part is None else read_off(self.graph(1), self.graph(part), part, count)
            if read is None:
                return self.graph(count)
            self.read[count] = read
        return self.read[count]

    def confirm(self, count: int) -> bool:
        """Whether the model's own graph is the one that was read off; if not, none is again."""
        if self.read is None or count not in self.read:
            return True
        try:
            is_right = self.read[count].digest() == self.graph(count).digest()
        except ModelError:  # the model does not take so small a part
            is_right = False
        if not is_right:
            self.read = None
        return is_right

    def _program(self, passes: int) -> Program:
        if passes not in self.known:
            cuts = dict(self.cuts(passes).values())
            started = time.perf_counter()
            self.watch()
            part = first_part(self.args, self.kwargs, cuts, passes)
            found = self.capture(self.model, *part, **self.options)
            found = replace(found, graph=replace(found.graph, is_compiled=self.is_compiled))
            self.seconds += time.perf_counter() - started
            if passes > 1:
                check_alike(self.graph(1), found.graph, passes)
            self.known[passes] = found
        return self.known[passes]

    @cached_property
    def samples(self) -> Samples:
        """Along which dims the batch may be cut."""
        return samples_in(self.graph(1), self.subdims_of(self.graph(1)))

    def cuts(self, passes: int) -> dict[str, tuple[str, int]]:
        """The inputs that are cut into so many parts, by name: their places, and the dims."""
        if passes == 1:
            return {}
        whole = self._program(1)
        places, tensors = self.places(whole, self.args, self.kwargs), whole.graph.tensors
        return {tensors[t].name: (places[t], dim) for t, dim in self.samples.dims}


class _UnevenError(Exception):
    """Something differs between two graphs, and is no size that grows evenly."""


def read_off(whole: Graph, part: Graph, parts: int, count: int) -> Graph | None:
    """The graph of one of `count` micro-batches, read off those of the batch and one of `parts`.

    None where anything but whole numbers differs between the two, or comes out as no whole number.
    """
    way = Fraction((count - 1) * parts, count * (parts - 1))  # from the batch to that part
    try:
        found: Graph = _between(replace(whole, notes=part.notes), part, way)
    except _UnevenError:
        return None
    return found


def _between(a: Any, b: Any, way: Fraction) -> Any:
    """What lies so far on the way from `a` to `b`, with all that is the same as it is."""
    if a is b:
        return a
    if type(a) is not type(b):
        raise _UnevenError
    if type(a) is int and a != b:
        found = a + (b - a) * way
        if found.denominator > 1 or (min(a, b) > 0 and found < 1):
            raise _UnevenError
        return int(found)
    if isinstance(a, tuple | list) and len(a) == len(b):
        return type(a)(_between(x, y, way) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and a.keys() == b.keys():
        return {key: _between(a[key], b[key], way) for key in a}
    if is_dataclass(a) and not isinstance(a, type):
        names = [each.name for each in fields(a) if each.init]
        return replace(a, **{n: _between(getattr(a, n), getattr(b, n), way) for n in names})
    if not isinstance(a, int | float | str | bytes | frozenset) or a != b:
        raise _UnevenError
    return a
