"""Pins: splits that the user fixes, as `layers.*.mlp.up_proj=out/8`, before the search.

A pattern with `*` and `?` names modules by their paths, or operators by their names; with a colon
in front, `:linear_2`, by names alone. In a module the pin holds for every operator that can be
split so, and there must be one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np

from shardfold.costs import Tables
from shardfold.errors import InputError, nearest
from shardfold.graph import Graph
from shardfold.graph.graph import depth, shared_prefix, without
from shardfold.sharding.names import UNSPLIT, Rows, Split, Splits, in_words

REST = "*"  # among the words of a split: and whatever else is best
NAMED = ":"  # before a pattern: of operators' names, not of modules' paths
MOST = 12  # splits that a message lists


@dataclass(frozen=True, slots=True)
class Pin:
    """A pattern for operators, and the split that they must have.

    >>> pin = Pin.parse("layers.*.mlp.up_proj", "batch/4 out")
    >>> pin.allows({"batch": 4, "out": 8}), pin.allows({"batch": 4}), pin.allows({"out": 8})
    (True, False, False)
    """

    pattern: str
    split: str
    wanted: Mapping[str, int | None] = field(compare=False)  # None: any number of parts
    has_rest: bool = field(default=False, compare=False)

    @staticmethod
    def parse(pattern: str, split: str) -> Pin:
        """Read the words of a split: `batch/4 heads/8`, `out`, `unsplit`, `out/8 *`."""
        words = split.split()
        if not pattern or not words:
            raise _unreadable(f"{pattern}={split}")
        wanted: dict[str, int | None] = {}
        for text in words:
            name, slash, parts = text.partition("/")
            is_number = parts.isdecimal() and int(parts) > 1
            if not name or (slash and not is_number) or name in wanted:
                raise _unreadable(f"{pattern}={split}")
            wanted[name] = int(parts) if slash else None
        has_rest = REST in wanted
        wanted.pop(REST, None)
        if UNSPLIT in wanted:
            if len(words) > 1:
                raise _unreadable(f"{pattern}={split}")
            wanted = {}
        return Pin(pattern, " ".join(words), wanted, has_rest)

    def allows(self, split: Split) -> bool:
        """Whether a split is what the pin asks for."""
        if not self.has_rest and split.keys() != self.wanted.keys():
            return False
        return all(
            name in split and parts in (None, split[name]) for name, parts in self.wanted.items()
        )

    def __str__(self) -> str:
        return f"{self.pattern}={self.split}"


def _unreadable(text: str) -> InputError:
    return InputError(
        f"The pin {text!r} cannot be read: write PATTERN=SPLIT, such as "
        "'layers.*.mlp.up_proj=out/8', 'embedding=vocab', 'fc=batch/4 out/2', 'fc=out/2 *' or "
        "'fc=unsplit'."
    )


def parse_pins(pins: Mapping[str, str] | Iterable[str] | None) -> tuple[Pin, ...]:
    """Pins from `{"pattern": "split"}`, or from texts `pattern=split`."""
    if pins is None:
        return ()
    if isinstance(pins, Mapping):
        return tuple(Pin.parse(pattern, split) for pattern, split in pins.items())
    found = []
    for text in pins:
        pattern, equals, split = text.rpartition("=")
        if not equals:
            raise _unreadable(text)
        found.append(Pin.parse(pattern.strip(), split))
    return tuple(found)


def matching(pattern: str, graph: Graph) -> list[list[int]]:
    """The operators that a pattern names: each by its own name, or together by their module.

    A path is written in full, or as it is shown: without the leading names that all paths of the
    model share. Where nothing is called so, more leading names may be left out: `layers.*` is
    `model.layers.*`, too.
    """
    paths = [op.origin.module for op in graph.ops]
    skip = shared_prefix(paths)
    deepest = max(map(depth, paths), default=0)
    for left_out in ({0, skip}, *({names} for names in range(1, deepest + 1))):
        found = _matching(pattern, graph, left_out)
        if found:
            return found
    known = {without(path, skip) for path in paths} | {op.name for op in graph.ops}
    raise InputError(f"No operator matches {pattern!r}. {_some(pattern, known - {''})}")


def _matching(pattern: str, graph: Graph, left_out: set[int]) -> list[list[int]]:
    """The operators that a pattern names where so many leading names are left out."""
    by_name = pattern.startswith(NAMED)
    alone: list[list[int]] = []
    modules: dict[str, list[int]] = {}
    for index, op in enumerate(graph.ops):
        path = op.origin.module
        shown = {without(path, names) for names in left_out if names <= depth(path)}
        if not by_name and path and any(fnmatchcase(name, pattern) for name in shown):
            modules.setdefault(path, []).append(index)
        elif fnmatchcase(op.name, pattern.removeprefix(NAMED)):
            alone.append([index])
    return [*modules.values(), *alone]


def _some(pattern: str, known: set[str]) -> str:
    """The known names that end as a pattern does, those nearest to it, or a few of them."""
    ending = sorted(name for name in known if fnmatchcase(name, f"*{pattern}"))
    if ending:
        return f"Did you mean {' or '.join(ending[:3])}?"
    clause = nearest(pattern, known)
    if clause.startswith("Did") or len(known) <= MOST:
        return clause
    few = ", ".join(sorted(known)[:MOST])
    return f"Among the {len(known)} modules and operators are {few}."


@dataclass(frozen=True, slots=True)
class Refusal:
    """A pin that some operators cannot follow, and what they could do instead."""

    pin: Pin
    operators: tuple[int, ...]
    possible: tuple[str, ...]


def held(
    pins: Sequence[Pin], splits: Splits, tables: Tables
) -> tuple[dict[int, Rows], Refusal | None]:
    """Per vertex the choices that all pins leave it, or the first pin that cannot be followed."""
    kept: dict[int, Rows] = {}
    for pin in pins:
        for group in matching(pin.pattern, splits.graph):
            able = _held(pin, group, splits, tables, kept)
            if not able:
                return {}, Refusal(pin, tuple(group), _possible(group, splits, tables, kept))
            kept.update(able)
    return kept, None


def _held(
    pin: Pin,
    vertices: Sequence[int],
    splits: Splits,
    tables: Tables,
    kept: Mapping[int, Rows],
) -> dict[int, Rows]:
    """The choices that a pin leaves to those of some operators that can follow it."""
    found: dict[int, list[int]] = {}
    for v in vertices:
        before = set(kept[v].tolist()) if v in kept else None
        for split, rows in splits.offered(v, tables.wiring.sides.spaces[v]).values():
            if pin.allows(split):
                left = [r for r in rows.tolist() if before is None or r in before]
                found.setdefault(v, []).extend(left)
    return {v: np.array(sorted(rows)) for v, rows in found.items() if rows}


def _possible(
    vertices: Sequence[int], splits: Splits, tables: Tables, kept: Mapping[int, Rows]
) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for v in vertices:
        for split, rows in splits.offered(v, tables.wiring.sides.spaces[v]).values():
            if v not in kept or set(rows.tolist()) & set(kept[v].tolist()):
                found[in_words(split)] = None
    return tuple(found)


def refused(refusals: Mapping[str, Refusal], graph: Graph) -> InputError:
    """Why no mesh allows the pins: what is possible at the operators that stand in the way."""
    lines = []
    skip = shared_prefix([op.origin.module for op in graph.ops])
    distinct: dict[tuple[Pin, tuple[int, ...]], list[tuple[str, Refusal]]] = {}
    for mesh, refusal in refusals.items():
        distinct.setdefault((refusal.pin, refusal.operators), []).append((mesh, refusal))
    for (pin, operators), found in distinct.items():
        splits = list(dict.fromkeys(text for _, r in found for text in r.possible))
        splits.sort(key=lambda text: not any(f"{word}/" in text for word in pin.wanted))
        more = f" and {len(splits) - MOST} more" if len(splits) > MOST else ""
        op = graph.ops[operators[0]]
        name = op.name if len(operators) == 1 else ""
        where = " ".join(filter(None, (without(op.origin.module, skip), name)))
        kinds = ", ".join(dict.fromkeys(graph.ops[i].kind for i in operators))
        meshes = ", ".join(mesh for mesh, _ in found)
        lines.append(
            f"The pin '{pin}' cannot be followed: {where} ({kinds}) has no such split on mesh "
            f"{meshes}. Possible there: {', '.join(splits[:MOST])}{more}."
        )
    return InputError("\n".join(lines))
