"""Which nodes of a trace are the same memory, and what a write to one does to the others.

A view is linked to what it is a view of. A write to a tensor gives a new value; every other name
of the same memory that is still to be read gets it, too: names of the very same tensor at once,
what the tensor is a view of by putting the new part back (`slice_scatter` after `slice`), and
other views of that by being taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
Shape = Sequence[int]
Call = tuple[Any, list[Any]]  # a target, and its arguments after the new value of the view


class Memory:
    """The links of a trace, as far as it has been walked."""

    def __init__(self) -> None:
        self.parents: dict[fx.Node, fx.Node] = {}
        self.same: set[fx.Node] = set()  # whose parent is the very same tensor
        self.done: set[fx.Node] = set()  # nodes that were walked

    def link(self, node: fx.Node, parent: fx.Node, *, is_same: bool) -> None:
        """Say that a node is a view of another, or the same tensor."""
        self.parents[node] = parent
        if is_same:
            self.same.add(node)

    def base(self, node: fx.Node) -> fx.Node:
        """What a node is, in the end, a view of."""
        while node in self.parents:
            node = self.parents[node]
        return node

    def tensor(self, node: fx.Node) -> fx.Node:
        """The first name of the very same tensor."""
        while node in self.same:
            node = self.parents[node]
        return node

    def family(self, node: fx.Node) -> list[fx.Node]:
        """All names of a memory, each after what it is a view of."""
        base = self.base(node)
        return [base, *(n for n in self.parents if self.base(n) is base)]

    def is_read_later(self, node: fx.Node) -> bool:
        """Whether something that was not walked yet reads this name."""
        return any(user not in self.done for user in node.users)

    def pending(self, family: list[fx.Node]) -> set[fx.Node]:
        """The tensors of a family that are read later, and what they are views of."""
        found: set[fx.Node] = set()
        for node in family:
            if self.is_read_later(node):
                while node not in found:
                    found.add(node)
                    node = self.parents.get(node, node)
        return {self.tensor(node) for node in found}


def put_back(node: fx.Node, shape: Shape) -> tuple[str, Call] | None:
    """How a view's new value becomes its parent's: `same`, `of the value` or `into the parent`.

    None where it is not known.
    """
    name = str(getattr(getattr(node.target, "_schema", None), "name", "")).removeprefix("aten::")
    if name in ("detach", "alias", "lift_fresh", "lift_fresh_copy"):
        return "same", (None, [])
    found = BACK.get(name)
    return None if found is None else found(list(node.args[1:]), shape)


def _scatter(target: Any) -> Callable[[list[Any], Shape], tuple[str, Call]]:
    return lambda given, shape: ("into", (target, given))


def _reshaped(given: list[Any], shape: Shape) -> tuple[str, Call]:
    return "of", (aten.reshape.default, [list(shape)])


def _permuted(given: list[Any], shape: Shape) -> tuple[str, Call]:
    dims = [d % len(shape) for d in given[0]]
    return "of", (aten.permute.default, [[dims.index(d) for d in range(len(dims))]])


def _narrowed(given: list[Any], shape: Shape) -> tuple[str, Call]:
    dim, start, length = given
    start %= shape[dim]
    return "into", (aten.slice_scatter.default, [dim, start, start + length])


def _moved(given: list[Any], shape: Shape) -> tuple[str, Call]:
    source, destination = given
    target = aten.movedim.int if isinstance(source, int) else aten.movedim.intlist
    return "of", (target, [destination, source])


def _again(target: Any) -> Callable[[list[Any], Shape], tuple[str, Call]]:
    return lambda given, shape: ("of", (target, given))


BACK: dict[str, Callable[[list[Any], Shape], tuple[str, Call]]] = {
    "slice": _scatter(aten.slice_scatter.default),
    "select": _scatter(aten.select_scatter.default),
    "diagonal": _scatter(aten.diagonal_scatter.default),
    **dict.fromkeys(
        "view reshape flatten unflatten squeeze unsqueeze _unsafe_view view_as contiguous".split(),
        _reshaped,
    ),
    "narrow": _narrowed,
    "permute": _permuted,
    "movedim": _moved,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _again(aten.transpose.int)),
    "mT": _again(aten.mT.default),
    "t": _again(aten.t.default),
}


def is_copy(node: fx.Node, parent: fx.Node) -> bool:
    """Whether an operator that may give a view gives a copy here."""
    before, after = parent.meta.get("val"), node.meta.get("val")
    name = str(getattr(getattr(node.target, "_schema", None), "name", "")).removeprefix("aten::")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    if name in ("to", "type_as", "contiguous"):
        return bool(before.dtype != after.dtype or before.stride() != after.stride())
    if name not in ("reshape", "flatten"):
        return False
    try:
        before.view(after.shape)
    except (RuntimeError, ValueError):  # by the kind of tensor
        return True
    return False


def functional(target: Any) -> Any:
    """The form of an `out=` operator that returns what the other one writes; itself if none is."""
    schema = target._schema
    written = {a.name for a in schema.arguments if a.kwarg_only and a.is_out}
    if not written:
        return target
    wanted = [(a.name, str(a.type)) for a in schema.arguments if a.name not in written]
    packet = target.overloadpacket
    for name in packet.overloads():
        other = getattr(packet, name)
        given = [(a.name, str(a.type)) for a in other._schema.arguments]
        if given == wanted and not other._schema.is_mutable:
            return other
    return target
