"""A deep model cut to a few periods of each run of blocks, with proof that the rest repeats.

The full model is run on meta tensors, blocks answered by stubs (`folding`), and its events are
noted (`events`). A run is a stretch of blocks with a repeating pattern of behaviours. Its period
is a block or a few, and what the model does before them; every period but the first must do the
same as the one before, on what that one left and on what was there before the run. Then all but
the first three and the last two periods are taken out of the model, and what the short model does
must be what the full one did without them. A depth of 1,000 so costs a thousand stub calls, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from shardfold.capture.call_log import Event, Log, Ref

HEAD, TAIL = 3, 2  # periods of a run that are kept at its beginning and at its end
KEPT = HEAD + TAIL
LONGEST_PERIOD = 4
FEWEST_PERIODS = 7


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of `count` periods of `period` blocks, from the `first`-th block call on."""

    first: int
    period: int
    count: int
    paths: tuple[tuple[str, ...], ...]  # per period, the paths of its blocks

    @property
    def removed(self) -> tuple[str, ...]:
        """The blocks to take out."""
        return tuple(path for paths in self.paths[HEAD : self.count - TAIL] for path in paths)


def find_runs(log: Log) -> list[Run]:
    """The runs of a full model whose periods are proven alike."""
    runs = []
    at = 0
    while at < len(log.blocks):
        run = _longest(log, at)
        if run is None:
            at += 1
        else:
            at = run.first + run.period * run.count
            if _is_periodic(log, run):
                runs.append(run)
    return runs


def _longest(log: Log, first: int) -> Run | None:
    """The run from block `first` on that covers most blocks, the shortest period preferred."""
    kinds = [behaviour for _, behaviour, _ in log.blocks[first:]]
    best: Run | None = None
    for period in range(1, LONGEST_PERIOD + 1):
        length = period
        while length < len(kinds) and kinds[length] == kinds[length - period]:
            length += 1
        count = length // period
        if count >= FEWEST_PERIODS and (best is None or count * period > best.count * best.period):
            paths = [path for _, _, path in log.blocks[first : first + count * period]]
            grouped = (tuple(paths[k * period : (k + 1) * period]) for k in range(count))
            best = Run(first, period, count, tuple(grouped))
    return best


def _ends(log: Log, run: Run) -> list[int]:
    """The event index just after each period."""
    last = [run.first + (k + 1) * run.period - 1 for k in range(run.count)]
    return [log.blocks[block][0] + 1 for block in last]


def _is_periodic(log: Log, run: Run) -> bool:
    """Whether every period from the second on does the same as the one before it."""
    start = log.blocks[run.first][0]
    bounds = [start, *_ends(log, run)]
    encoded = [
        _relative(log.events, bounds[k], bounds[k + 1], bounds[k - 1], start)
        for k in range(1, run.count)
    ]
    return encoded[0] is not None and all(each == encoded[0] for each in encoded)


def _relative(
    events: Sequence[Event], low: int, high: int, before: int, start: int
) -> list[Event] | None:
    """The events of a period, tensors counted from its beginning; None if it reaches elsewhere.

    It may read its own tensors, those of the period before, and those from before the run.
    """
    found = []
    for event in events[low:high]:
        arguments = []
        for argument in event.arguments:
            if isinstance(argument, Ref) and argument.index >= start:
                if argument.index < before:
                    return None
                argument = ("near", argument.index - low, argument.output)
            arguments.append(argument)
        found.append(replace(event, arguments=tuple(arguments)))
    return found


def shortened(log: Log, runs: Sequence[Run]) -> list[Event] | None:
    """The events that remain without the removed periods; None if one of them is read later."""
    gone: dict[int, int | None] = {}  # removed event -> the kept one that stands for it
    for run in runs:
        ends = _ends(log, run)
        low, high = ends[HEAD - 1], ends[run.count - TAIL - 1]
        last = ends[run.count - TAIL - 2]
        for index in range(low, high):
            gone[index] = index - last + ends[HEAD - 2] if index >= last else None
    number: dict[int, int] = {}
    kept: list[Event] = []
    for index, event in enumerate(log.events):
        if index in gone:
            continue
        arguments = []
        for argument in event.arguments:
            if isinstance(argument, Ref):
                source = gone.get(argument.index, argument.index)
                if source is None:
                    return None
                argument = Ref(number[source], argument.output)
            arguments.append(argument)
        number[index] = len(kept)
        kept.append(replace(event, arguments=tuple(arguments)))
    return kept


@contextmanager
def without_removed(model: nn.Module, removed: Iterable[str]) -> Iterator[None]:
    """The model without the blocks at the given paths; its containers are restored afterwards."""
    names: dict[str, list[str]] = {}
    for path in removed:
        parent, _, name = path.rpartition(".")
        names.setdefault(parent, []).append(name)
    containers = {parent: model.get_submodule(parent)._modules for parent in names}
    before = {parent: dict(modules) for parent, modules in containers.items()}
    for parent, modules in containers.items():
        for name in names[parent]:
            del modules[name]
    try:
        yield
    finally:
        for parent, modules in containers.items():
            modules.clear()
            modules.update(before[parent])
