"""A plan's operators as a tree of modules in which equal siblings are folded into one.

Siblings (`layers.3`, `layers.4`) are equal if their operators, in order, have the same kinds,
splits, layouts and moves, and names that differ only in numbers. A fold shows one of them and
counts all; who reads whom is told between children of one parent, with the bytes that change
layouts on the way.
Building it takes time linear in the operators; what it holds grows with what differs, not with
depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardfold.graph.graph import shared_prefix
from shardfold.plans import Plan
from shardfold.plans.drawing_data import expanded, written_by
from shardfold.plans.plan import Move, OperatorEntry
from shardfold.plans.plan import Row as Drawn
from shardfold.report.plan_table import KINDS

LONGEST = 12  # children of a module that may repeat together
Moved = tuple[str, str, tuple[str, ...]]  # phase, kind, axes


@dataclass(eq=False, slots=True)
class Leaf:
    """An operator, and the operators of equal siblings that it stands for."""

    name: str
    places: list[int]  # in execution order


@dataclass(eq=False, slots=True)
class Branch:
    """A visit of a module; equal siblings in a row are one branch that is there `times` times.

    `names` has the name of every visit that it stands for.
    """

    names: list[str]
    children: list[Branch | Leaf] = field(default_factory=list)
    times: int = 1

    @property
    def name(self) -> str:
        """The name, or from the first to the last."""
        first, last = self.names[0], self.names[-1]
        return first if first == last else f"{first}–{last.rpartition('.')[2]}"


@dataclass(slots=True)
class Link:
    """What one child of a branch reads of another; from itself: of the sibling before."""

    source: int
    target: int
    moved: dict[Moved, float] = field(default_factory=dict)  # bytes for one of the branch


@dataclass(frozen=True, slots=True)
class Outline:
    """The folded tree, and the links between the children of each of its branches."""

    root: Branch
    links: dict[int, list[Link]]  # by the id of a branch


def outline(plan: Plan) -> Outline:
    """Fold a plan's operators along the model's modules."""
    drawn = list(expanded(plan.sketch)) if plan.sketch is not None else []
    marks = [_mark(entry, drawn[at] if drawn else None) for at, entry in enumerate(plan.operators)]
    root = _tree(plan.operators)
    _fold(root, _Marks(marks))
    root = _joined(root)
    return Outline(root, _Linker(root, drawn).links())


def _mark(entry: OperatorEntry, drawn: Drawn | None) -> object:
    """What makes operators of equal siblings alike."""
    seen = () if drawn is None else (drawn.face, drawn.moves)
    return (entry.kind, entry.config, tuple(entry.split.items()), *seen)


def _tree(operators: Sequence[OperatorEntry]) -> Branch:
    """The operators under their modules, as they are executed: a module called twice is twice."""
    skip = shared_prefix([entry.module for entry in operators])
    stack = [Branch([""])]
    for at, entry in enumerate(operators):
        path = entry.module.split(".")[skip:] if entry.module else []
        shared = 0
        while shared < min(len(path), len(stack) - 1) and stack[shared + 1].names == [path[shared]]:
            shared += 1
        del stack[shared + 1 :]
        for name in path[shared:]:
            stack.append(Branch([name]))
            stack[-2].children.append(stack[-1])
        stack[-1].children.append(Leaf(_own_name(entry), [at]))
    return stack[0]


def _own_name(entry: OperatorEntry) -> str:
    kind = entry.kind.rpartition(".")[2]
    return KINDS.get(kind, kind)


@dataclass(slots=True)
class _Marks:
    """Marks of operators and of folded branches as small numbers, equal for what is alike."""

    operators: list[object]
    known: dict[object, int] = field(default_factory=dict)

    def number(self, mark: object) -> int:
        return self.known.setdefault(mark, len(self.known))


def _fold(node: Branch | Leaf, marks: _Marks) -> int:
    """Fold equal siblings below `node`; its own mark, in which numbers as names do not count."""
    if isinstance(node, Leaf):
        return marks.number((node.name, marks.operators[node.places[0]]))
    found = [_fold(child, marks) for child in node.children]
    kept: list[Branch | Leaf] = []
    at = 0
    while at < len(found):
        period, times = _repeats(node.children, found, at)
        first = node.children[at : at + period]
        if times > 1:
            only = first[0]
            group = only if period == 1 and isinstance(only, Branch) else Branch([""], first)
            for k in range(1, times):
                for mine, theirs in zip(first, node.children[at + k * period :], strict=False):
                    _absorb(mine, theirs)
            group.times = times
            first = [group]
        kept += first
        at += period * times
    node.children = kept
    name = "" if node.names[0].isdigit() else node.names[0]
    return marks.number((name, tuple(found)))


def _repeats(children: Sequence[Branch | Leaf], marks: Sequence[int], at: int) -> tuple[int, int]:
    """The period at `at` that covers most in a row, and how often; (1, 1) if nothing repeats."""
    best = (1, 1)
    for period in range(1, min(LONGEST, (len(marks) - at) // 2) + 1):
        block = marks[at : at + period]
        if not any(isinstance(child, Branch) for child in children[at : at + period]):
            continue
        times = 1
        while marks[at + times * period : at + (times + 1) * period] == block:
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def _absorb(kept: Branch | Leaf, other: Branch | Leaf) -> None:
    """Let `kept` stand for `other`, too, down to the operators."""
    if isinstance(kept, Leaf) and isinstance(other, Leaf):
        kept.places += other.places
    elif isinstance(kept, Branch) and isinstance(other, Branch):
        kept.names += other.names
        for mine, theirs in zip(kept.children, other.children, strict=True):
            _absorb(mine, theirs)


def _joined(node: Branch) -> Branch:
    """The tree without modules that hold but one thing: `features.0.conv` is one step down."""
    children: list[Branch | Leaf] = []
    for child in node.children:
        if isinstance(child, Leaf):
            children.append(child)
            continue
        inner = _joined(child)
        children.append(_single(inner))
    node.children = children
    return node


def _single(node: Branch) -> Branch | Leaf:
    if len(node.children) != 1 or node.times > 1:
        return node
    (only,) = node.children
    if isinstance(only, Leaf):
        same = node.name.lower() == only.name
        return Leaf(node.name if same else f"{node.name} {only.name}", only.places)
    outer = node.names * (len(only.names) // len(node.names))
    only.names = [".".join(filter(None, pair)) for pair in zip(outer, only.names, strict=True)]
    return only


def leaves(node: Branch | Leaf) -> Iterator[Leaf]:
    """The operators below a node, in order."""
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children:
            yield from leaves(child)


Chain = tuple[tuple[int, int], ...]  # from the root down: (child, which of its equal siblings)


class _Linker:
    """Finds, for each operator and what it reads, the branch in which the two part ways."""

    def __init__(self, root: Branch, drawn: list[Drawn]) -> None:
        self.drawn = drawn
        self.branches: dict[tuple[int, ...], tuple[Branch, int]] = {}
        self.chains: dict[int, Chain] = {}
        self._walk(root, (), 1)
        self.found: dict[int, dict[tuple[int, int], Link]] = {}
        self.seen: set[object] = set()

    def _walk(self, node: Branch, path: tuple[int, ...], copies: int) -> None:
        """Note the chain of every operator; copies of a leaf lie in order, outermost first."""
        self.branches[path] = (node, copies)
        for number, child in enumerate(node.children):
            below = (*path, number)
            if isinstance(child, Branch):
                self._walk(child, below, copies * child.times)
                continue
            sizes = self._sizes(below)
            for which, place in enumerate(child.places):
                self.chains[place] = tuple(zip(below, _digits(which, sizes), strict=True))

    def _sizes(self, path: tuple[int, ...]) -> list[int]:
        """How many equal siblings each step of a path stands for; a leaf is one."""
        inner = [self.branches[path[:depth]][0].times for depth in range(1, len(path))]
        return [*inner, 1]

    def links(self) -> dict[int, list[Link]]:
        """The links of every branch, in order of first reading."""
        for at, row in enumerate(self.drawn):
            for operand, source in enumerate(written_by(row, at)):
                if source is not None:
                    self._add(at, source, operand)
        return {key: list(links.values()) for key, links in self.found.items()}

    def _add(self, at: int, source: int, operand: int) -> None:
        ours, theirs = self.chains[at], self.chains[source]
        depth = 0
        while ours[depth] == theirs[depth]:
            depth += 1
        path = tuple(child for child, _ in ours[:depth])
        branch, copies = self.branches[path]
        pair = (theirs[depth][0], ours[depth][0])
        links = self.found.setdefault(id(branch), {})
        link = links.setdefault(pair, Link(*pair))
        for key, move in self._moves(at, source, operand):
            if (path, pair, key) not in self.seen:  # what is kept for several readers, once
                self.seen.add((path, pair, key))
                kind = (move.phase, move.kind, move.axes)
                link.moved[kind] = link.moved.get(kind, 0.0) + move.bytes / copies

    def _moves(self, at: int, source: int, operand: int) -> Iterator[tuple[object, Move]]:
        for number, move in enumerate(self.drawn[at].moves):
            if move.operand == operand:
                yield (at, number), move
        for number, move in enumerate(self.drawn[source].moves):
            if move.operand < 0:
                yield (source, number), move


def _digits(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """`number` as digits of the given sizes, the first the slowest."""
    found = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        found.append(digit)
    return tuple(reversed(found))
