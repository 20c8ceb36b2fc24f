"""Parts of forward that are passed over where a mask selects nothing, as loops over experts have.

    for number, expert in enumerate(self.experts):
        token, choice = torch.where(marks[number])
        if token.numel() == 0:                         or: if not marks[number].any()
            continue
        found.index_add_(0, token, expert(x[token]))

Which parts run depends on values, and a plan runs all of them. That is the same if what a part
leaves is only added or put where the mask selects: of an empty mask that is nothing. So the
question is answered as if something were selected, and the part is watched: a tensor that is made
there and read after it, a write by something else and a number of Python's that it changes are
refused.

A loop may also go over the places of those that are hit, as in transformers:

    for expert in torch.greater(marks.sum((-1, -2)), 0).nonzero():
        place, token = torch.where(marks[expert].squeeze(0))
        found.index_add_(0, token, self.experts[expert](x[token]))

It then goes over all places, and what is located in a turn is nothing if its place is not hit.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardfold.capture.selection import Selections
from shardfold.capture.user_code import asking, frames, is_within, looping, plain_locals

SOME = (1, 2, 3, 7, 1000)  # sizes of what is not empty
ANY = {torch.any, Tensor.any}
LEAVES = ast.Return | ast.Break | ast.Continue | ast.Yield
Advice = Callable[[str, str], Exception]


@dataclass(slots=True)
class Part:
    """Lines of a function that run only if a mask selects something."""

    frame: FrameType
    first: int
    last: int
    masks: list[Tensor]  # where it may add and put
    before: dict[str, Any]  # numbers of Python's that are assigned there, before it


class Skips:
    """The parts that run now, outermost first, and what is there only if parts have run."""

    def __init__(self, selections: Selections, refuse: Advice) -> None:
        self.selections, self.refuse = selections, refuse
        self.parts: list[Part] = []
        self.made: dict[int, tuple[Tensor, Part]] = {}
        self.memory: set[int] = set()  # of what was made in a part
        self.asked: dict[int, tuple[Tensor, Tensor, int]] = {}  # `mask.any()`: it, the mask

    def of_size(self, expression: Any) -> bool | None:
        """The answer to a question about a size that says whether anything is selected."""
        answers = _answers(expression)
        if answers is None:
            return None
        (symbol,) = expression.free_symbols
        mask = self.selections.mask_of_size(symbol)
        return None if mask is None else self._answered(mask, answers)

    def of_tensor(self, tensor: Tensor) -> bool | None:
        """The answer to `mask.any()`."""
        _, mask, version = self.asked.get(id(tensor), (None, None, 0))
        is_as_it_was = mask is not None and mask._version == version
        return self._answered(mask, True) if is_as_it_was else None

    def _answered(self, mask: Tensor, answer: bool) -> bool | None:
        """The answer, if what depends on it can be watched."""
        *_, frame = frames()  # the user's, after torch's own
        lines = _depending(frame, answer)
        if lines is None:
            return None
        self._leave_others()
        self._enter(frame, lines, [mask])
        return answer

    def over(self, gates: Iterable[Tensor], places: Iterable[Any]) -> Iterator[Any]:
        """A loop over the places where a mask has its ones: over all, with what gates each turn."""
        *_, frame = frames()
        lines = _repeated(frame)
        if lines is None:
            raise self.refuse(
                "goes over the places that a mask selects, whose number depends on values",
                "A plan goes over all of them: write it as a plain `for` loop (no break, return or "
                "enumerate) that only adds or puts what torch.where finds in its turn",
            )
        outer = len(self.parts)
        for gate, place in zip(gates, places, strict=True):
            self._leave(outer)
            self.selections.gate, self.selections.gated = gate, []
            self._enter(frame, lines, self.selections.gated)
            yield place
        self._leave(outer)
        self.selections.gate = None

    def _enter(self, frame: FrameType, lines: tuple[int, int, set[str]], masks: Any) -> None:
        first, last, names = lines
        self.parts.append(Part(frame, first, last, masks, plain_locals(frame, names)))

    def before(self, given: Any) -> None:
        """Called before every function of forward."""
        self._leave_others()
        for leaf in filter(is_tensor, pytree.tree_leaves(given) if self.made else ()):
            made, part = self.made.get(id(leaf), (None, None))
            if made is leaf and not any(part is each for each in self.parts):
                raise self._refused("reads a tensor that was made in a part")

    def after(self, func: Any, args: Any, kwargs: Any, versions: Any, found: Any) -> None:
        """Called with what a function has given, and the versions of its tensors before."""
        if func in ANY and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            self.asked[id(found)] = found, args[0], args[0]._version
        if not self.parts:
            return
        mask = self.selections.mask_of_put(func, args)
        is_put = mask is not None and any(mask is each for each in self.parts[-1].masks)
        written = [t for t, version in versions if t._version != version]
        if not is_put and any(_memory(t) not in self.memory for t in written):
            raise self._refused("writes to a tensor, but not where its mask selects, in a part")
        of, results = self.selections.of, [t for t in pytree.tree_leaves(found) if is_tensor(t)]
        if not is_put and any(of(t) for t, _ in versions) and not all(map(of, results)):
            raise self._refused("reduces what its mask selects in a part")
        given = {id(t) for t, _ in versions}
        is_kept = is_put and id(args[0]) not in self.made
        for leaf in results:
            if id(leaf) not in given and not is_kept:
                self.made[id(leaf)] = leaf, self.parts[-1]
                if _memory(leaf) not in {_memory(t) for t, _ in versions}:
                    self.memory.add(_memory(leaf))

    def _leave_others(self) -> None:
        """Leave the parts that no longer run."""
        inside = (is_within(part.frame, part.first, part.last) for part in self.parts)
        self._leave(next((k for k, each in enumerate(inside) if not each), len(self.parts)))

    def _leave(self, outer: int) -> None:
        """Leave all parts but so many."""
        left, self.parts = self.parts[outer:], self.parts[:outer]
        if any(plain_locals(part.frame, {*part.before}) != part.before for part in left):
            raise self._refused("changes a number of Python's in a part")

    def _refused(self, what: str) -> Exception:
        return self.refuse(
            f"{what} that is passed over where a mask selects nothing",
            "A plan runs every part: leave the test out, and make what the part gives zero, or "
            "what was there before, where nothing is selected",
        )


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf of a structure is a tensor."""
    return isinstance(leaf, Tensor)


def _memory(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


def _answers(expression: Any) -> bool | None:
    """What a condition on a single size is for all but nothing, if it is another for nothing."""
    if not isinstance(expression, sympy.Basic) or len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    found = {expression.subs(symbol, size) for size in SOME}
    empty = expression.subs(symbol, 0)
    if len(found) != 1 or empty in found or not found | {empty} <= {sympy.true, sympy.false}:
        return None
    return found == {sympy.true}


def _depending(frame: FrameType, answer: bool) -> tuple[int, int, set[str]] | None:
    """The lines that run only if something is selected, and the names that they assign.

    What follows `if empty: continue` in a loop, or the body of `if selected:`.
    """
    tree, statement = asking(frame)
    if tree is None or not isinstance(statement, ast.If) or statement.orelse:
        return None
    if any(isinstance(node, ast.BoolOp | ast.NamedExpr) for node in ast.walk(statement.test)):
        return None
    is_turned = isinstance(statement.test, ast.UnaryOp) and isinstance(statement.test.op, ast.Not)
    body: list[ast.stmt] = statement.body
    if answer == is_turned:  # the body is for nothing
        if len(body) != 1 or not isinstance(body[0], ast.Continue):
            return None
        loops = (node for node in ast.walk(tree) if isinstance(node, ast.For))
        loop = next((each for each in loops if statement in each.body), None)
        if loop is None:
            return None
        body = loop.body[loop.body.index(statement) + 1 :]
    return _watched(tree, body, frame, LEAVES)


def _repeated(frame: FrameType) -> tuple[int, int, set[str]] | None:
    """The lines of the loop whose turns begin now, and the names that they assign."""
    tree, loop = looping(frame)
    if tree is None or loop is None or loop.orelse or not _is_tensors(loop.iter, frame):
        return None
    return _watched(tree, loop.body, frame, ast.Return | ast.Break | ast.Yield)


def _is_tensors(node: ast.expr, frame: FrameType) -> bool:
    """Whether what a loop goes over is a tensor or its list, and not what counts or pairs them."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and hasattr(Tensor, node.func.attr)
    if isinstance(node, ast.Name):
        return isinstance(frame.f_locals.get(node.id), Tensor | Generator)
    return isinstance(node, ast.Subscript)


def _watched(
    tree: ast.Module, body: list[ast.stmt], frame: FrameType, leaving: Any
) -> tuple[int, int, set[str]] | None:
    """Lines, and the names that they assign; None if they leave, or fill a list."""
    inner = [node for each in body for node in ast.walk(each)]
    if not body or any(isinstance(node, leaving) or _fills(node, frame) for node in inner):
        return None
    names = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own = {name for name in names if _is_own(name, tree, body, frame)}
    return body[0].lineno, body[-1].end_lineno or body[-1].lineno, names - own


def _is_own(name: str, tree: ast.Module, body: list[ast.stmt], frame: FrameType) -> bool:
    """Whether lines set a name before they read it, and nothing else of the function reads it."""
    first = next(each for each in body if name in _named(each))
    is_set = isinstance(first, ast.Assign) and name not in _named(first.value)
    line = frame.f_code.co_firstlineno
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.lineno >= line)
    around = min(functions, key=lambda n: n.lineno, default=None)
    if not is_set or around is None or not around.lineno <= body[0].lineno:
        return False
    read = [n for n in ast.walk(around) if isinstance(n, ast.Name) and n.id == name]
    return all(body[0].lineno <= n.lineno <= (body[-1].end_lineno or 0) for n in read)


def _named(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _fills(node: ast.AST, frame: FrameType) -> bool:
    """Whether a list or dictionary of the function's is written to."""
    is_stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    owner = getattr(node, "value", None) if is_stored or isinstance(node, ast.Attribute) else None
    held = frame.f_locals.get(owner.id) if isinstance(owner, ast.Name) else None
    return isinstance(held, list | dict | set)
