"""Captures of a model by the number of micro-batches, each made when it is first needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardfold.graph import Graph
from shardfold.planner.batch_slices import first_part
from shardfold.planner.separability import Samples, check_alike, samples_in
from shardfold.sharding import Subdims

if TYPE_CHECKING:
    from torch import nn

    from shardfold.capture import Program


class Captures:
    """The programs of one model, by the number of parts in which a step takes its batch."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        subdims_of: Callable[[Graph], Subdims],
        watch: Callable[[], None],
        **options: Any,
    ) -> None:
        from shardfold.capture import capture_program, places_of

        self.capture, self.places = capture_program, places_of
        self.model, self.args, self.kwargs = model, args, dict(kwargs or {})
        self.subdims_of, self.watch, self.options = subdims_of, watch, options
        self.seconds = 0.0  # that capturing has taken
        self.known: dict[int, Program] = {}

    def graph(self, count: int) -> Graph:
        """The graph of one of so many micro-batches."""
        return self._program(count).graph

    def _program(self, passes: int) -> Program:
        if passes not in self.known:
            cuts = dict(self.cuts(passes).values())
            started = time.perf_counter()
            self.watch()
            part = first_part(self.args, self.kwargs, cuts, passes)
            found = self.capture(self.model, *part, **self.options)
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
