"""Matrix products: linear, mm, addmm, bmm, baddbmm, matmul, einsum, grouped products.

Two operations a point; the factor that both operands share and the result lacks is reduced, so
splitting it leaves a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from shardfold.operators.call import Call
from shardfold.operators.notation import Rule

# operator: (notation per operand, notation of the result)
NOTATION: Mapping[str, tuple[Mapping[str, str], str]] = {
    "aten.linear": ({"input": "... m", "weight": "n m", "bias": "n"}, "... n"),
    "aten.mm": ({"self": "b m", "mat2": "m n"}, "b n"),
    "aten.mv": ({"self": "b m", "vec": "m"}, "b"),
    "aten.dot": ({"self": "m", "tensor": "m"}, ""),
    "aten.outer": ({"self": "b", "vec2": "n"}, "b n"),
    "aten.bmm": ({"self": "g b m", "mat2": "g m n"}, "g b n"),
}


def _product(call: Call, operands: Mapping[str, str], result: str) -> Rule:
    matrices = tuple(name for name in operands if name != "bias")
    return call.rule(operands, result, engine="matrix", flops=2.0, saves=matrices, crossed=matrices)


def _from_notation(kind: str) -> Callable[[Call], Rule]:
    operands, result = NOTATION[kind]
    return lambda call: _product(call, operands, result)


def _addmm(call: Call) -> Rule:
    """Add self (a bias, broadcast) to mat1 @ mat2, with or without a batch."""
    batched = "batch1" in {o.name for o in call.op.operands}
    left, right = ("batch1", "batch2") if batched else ("mat1", "mat2")
    full = ["g", "b", "n"] if batched else ["b", "n"]
    bias = " ".join(full[len(full) - len(call.shape("self")) :])
    head = "g " if batched else ""
    return call.rule(
        {"self": bias, left: f"{head}b m", right: f"{head}m n"},
        f"{head}b n",
        engine="matrix",
        flops=2.0,
        saves=(left, right),
        crossed=(left, right),
    )


def _matmul(call: Call) -> Rule:
    """The broadcasting product: leading dims align from the right, vectors lose their dim."""
    a, b = call.shape("self"), call.shape("other")
    left = ["m"] if len(a) == 1 else ["b", "m"]
    right = ["m"] if len(b) == 1 else ["m", "n"]
    batch = [f"g{k}" for k in range(max(len(a), len(b)) - 2)]
    left = batch[len(batch) - max(len(a) - 2, 0) :] + left
    right = batch[len(batch) - max(len(b) - 2, 0) :] + right
    kept: list[str] = [f for f in ("b", "n") if f in left + right]
    sizes = {f: n for f, n in zip(left + right, a + b, strict=True) if n > 1}
    sizes |= {f: 1 for f in left + right if f not in sizes}
    return call.rule(
        {"self": " ".join(left), "other": " ".join(right)},
        " ".join(batch + kept),
        sizes=sizes,
        engine="matrix",
        flops=2.0,
        saves=("self", "other"),
        crossed=("self", "other"),
    )


def _einsum(call: Call) -> Rule:
    """The notation is given: one letter a factor, and one a dim that `...` stands for."""
    left, arrow, right = call.attribute("equation").replace(" ", "").partition("->")
    shapes = [kind.shape for kind in call.inputs]
    terms = [_letters(term, len(s)) for term, s in zip(left.split(","), shapes, strict=True)]
    letters = [f for term in terms for f in term]
    if arrow:
        result = _letters(right, len(call.results[0].shape))
    else:
        dots = sorted({f for f in letters if len(f) > 1}, reverse=True)
        result = dots + sorted(f for f in set(letters) if letters.count(f) == len(f) == 1)
    if any(len(set(term)) < len(term) for term in terms):
        pairs = [zip(term, s, strict=True) for term, s in zip(terms, shapes, strict=True)]
        sizes = {f: n for pair in pairs for f, n in pair}
        return call.undescribed(engine="matrix", flops=2.0 * math.prod(sizes.values()))
    operands = {o.name: " ".join(t) for o, t in zip(call.op.operands, terms, strict=True)}
    kept = tuple(operands)
    return call.rule(
        operands, " ".join(result), engine="matrix", flops=2.0, saves=kept, crossed=kept
    )


def _letters(term: str, rank: int) -> list[str]:
    """The factors of one term; the dims of `...` count from the right."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f"dot{k}" for k in reversed(range(hidden))), *after]


def _grouped_mm(call: Call) -> Rule:
    """Rows sorted by expert, each expert's rows times its own matrix.

    A part of the rows belongs to experts that another device may hold, so rows and experts stay
    whole; the features split as in any product.
    """
    names = [o.name for o in call.op.operands]
    left, right = names[0], names[1]
    if len(call.shape(left)) != 2 or len(call.shape(right)) != 3:
        return call.undescribed(engine="matrix")
    return call.rule(
        {left: "t m", right: "e m n"},
        "t n",
        engine="matrix",
        flops=2.0,
        over=("t", "m", "n"),
        whole=frozenset({"t", "e"}),
        saves=(left, right),
        crossed=(left, right),
    )


def _expert_linear(call: Call) -> Rule:
    """Each row times its own expert's matrix.

    A device with some of the experts gives zeros for the rows of the others, so that splitting
    the experts leaves a partial sum. The rows that meet a part of the experts are taken to be
    that part of all rows: balanced routing.
    """
    experts = call.shape("weight")[0]
    rows = " ".join(f"i{k}" for k in range(len(call.shape("expert"))))
    given = len(call.shape("x")) - 1
    x_rows = " ".join(f"i{k}" for k in range(given))
    return call.rule(
        {"x": f"{x_rows} m", "weight": "e n m", "expert": rows},
        f"{rows} n",
        engine="matrix",
        flops=2.0 / experts,
        saves=("x", "weight", "expert"),
        crossed=("x", "weight"),
        backward=2.0,
    )


TABLE: Mapping[str, Callable[[Call], Rule]] = {
    **{kind: _from_notation(kind) for kind in NOTATION},
    "aten.addmm": _addmm,
    "aten.baddbmm": _addmm,
    "aten.matmul": _matmul,
    "aten.einsum": _einsum,
    "aten._grouped_mm": _grouped_mm,
    "shardfold.expert_linear": _expert_linear,
}
