"""Matrix products: linear, mm, addmm, bmm, baddbmm, matmul, einsum.

Two operations a point; the factor that both operands share and the result lacks is reduced, so
splitting it leaves a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from shardfold.operators.kernels import Kernel, KernelMaker, LocalWork, Values, memory_pass
from shardfold.operators.notation import Call, Rule
from shardfold.operators.operator import Operator

PARITIES = ("", ".even", ".odd")  # of the features: a multiple of 8, of 2, or neither
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
        copied=_expanded(a, b),
    )


def _expanded(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[str, ...]:
    """The operands that torch may copy to put all batch dims into one: those of unlike batches.

    A product with a matrix or a vector folds the batch into rows, of the second operand's
    transpose if that is the one with a batch.
    """
    if len(a) < 3 or len(b) < 3:
        return ("other",) if len(b) > 2 else ()
    return () if a[:-2] == b[:-2] else ("self", "other")


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
        operands,
        " ".join(result),
        engine="matrix",
        flops=2.0,
        saves=kept,
        crossed=kept,
        copied=tuple(n for n, t in zip(kept, terms, strict=True) if _rearranged(t, terms, result)),
    )


def _rearranged(term: list[str], terms: list[list[str]], result: list[str]) -> bool:
    """Whether einsum may copy an operand of two for its batched product, or sum it up first.

    The factors of both operands and the result are put into one dim, so are those that are summed,
    and those of one operand: `b i d, i j d e -> b i j e` copies the second: j and e are apart.
    """
    if len(terms) != 2:
        return True
    other = terms[0] if term is terms[1] else terms[1]
    if any(f not in other and f not in result for f in term):
        return True
    both = [f for f in result if f in term and f in other]
    own = [f for f in result if f in term and f not in other]
    summed = sorted(f for f in term if f not in result)
    return any(not _is_run(group, term) for group in (both, own, summed))


def _is_run(group: list[str], term: list[str]) -> bool:
    """Whether these factors stand side by side, in this order."""
    at = term.index(group[0]) if group else 0
    return term[at : at + len(group)] == group


def _letters(term: str, rank: int) -> list[str]:
    """The factors of one term; the dims of `...` count from the right."""
    before, dots, after = term.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f"dot{k}" for k in reversed(range(hidden))), *after]


def _linear_kernels(*, is_transposed: bool) -> KernelMaker:
    """The weight is stored by rows of outputs, but for addmm, whose second matrix is not."""

    def make(work: LocalWork, phase: str) -> list[Kernel]:
        first = 0 if is_transposed else len(work.inputs) - 2
        weight, bias = (1, 2) if is_transposed else (first + 1, 0 if first else -1)
        k, n = work.factor("m"), work.factor("n")
        rows, dtype = work.result_items(0) / n, work.dtype
        if phase != "backward":
            return _products("nt" if is_transposed else "nn", dtype, (rows, n, k), (n, k))
        found = []
        if first in work.trained:
            found += _products("nn" if is_transposed else "nt", dtype, (rows, k, n), (n, k))
        if weight in work.trained:
            sizes = (n, k, rows) if is_transposed else (k, n, rows)
            found += _products("tn", dtype, sizes, (n, k))
        if bias in work.trained:
            found.append(Kernel("sum_columns", dtype, (rows, n)))
        return found

    return make


def _products(
    layout: str, dtype: str, sizes: tuple[Values, ...], features: tuple[Values, Values]
) -> list[Kernel]:
    """A product, by whether a device's own features fill the words that matrix units read.

    Eight, two, or one at a time: 30,522 classes are even, half of them are odd.
    """
    n, k = (np.asarray(each).astype(np.int64) for each in features)
    common = np.gcd(n, k)
    parities = np.where(common % 8 == 0, "", np.where(common % 2 == 0, ".even", ".odd"))
    return [
        Kernel(f"matmul.{layout}{parity}", dtype, (sizes[0] * (parities == parity), *sizes[1:]))
        for parity in PARITIES
        if (parities == parity).any()
    ]


def _batched_kernels(work: LocalWork, phase: str) -> list[Kernel]:
    m, k, n = work.factor("b"), work.factor("m"), work.factor("n")
    b = np.maximum(work.result_items(0) / (m * n), 1.0)
    if phase != "backward":
        return [Kernel("bmm", work.dtype, (b, m, n, k))]
    ways = {0: (b, m, k, n), 1: (b, k, n, m)}
    return [Kernel("bmm", work.dtype, ways[t]) for t in work.trained if t in ways]


def _added_batches(work: LocalWork, phase: str) -> list[Kernel]:
    """What is added is copied into the result first."""
    found = _batched_kernels(work, phase)
    if phase != "backward":
        found.append(memory_pass(2.0 * work.result_bytes(0), work.dtype, "strided"))
    return found


def _described(kind: str) -> Operator:
    return Operator(_from_notation(kind))


FEATURES = ("m", "n")
PRODUCT = Operator(
    makes_result=True,
    makes_gradients=frozenset({"input", "weight", "self", "other", "mat1", "mat2"}),
)

TABLE: Mapping[str, Operator] = {
    "aten.linear": replace(
        PRODUCT,
        rule=_from_notation("aten.linear"),
        local="own form",
        kernels=_linear_kernels(is_transposed=True),
        launched_as="aten.linear",
        features=FEATURES,
    ),
    "aten.mm": replace(
        PRODUCT,
        rule=_from_notation("aten.mm"),
        kernels=_linear_kernels(is_transposed=False),
        launched_as="aten.matmul",
        features=FEATURES,
    ),
    **{kind: _described(kind) for kind in ("aten.mv", "aten.dot", "aten.outer")},
    "aten.bmm": replace(
        PRODUCT,
        rule=_from_notation("aten.bmm"),
        kernels=_batched_kernels,
        launched_as="aten.matmul",
    ),
    "aten.addmm": replace(
        PRODUCT,
        rule=_addmm,
        local="own form",
        kernels=_linear_kernels(is_transposed=False),
        launched_as="aten.linear",
        makes_gradients=frozenset({"mat1", "mat2"}),
        features=FEATURES,
    ),
    "aten.baddbmm": Operator(_addmm, "own form", kernels=_added_batches),
    "aten.matmul": replace(PRODUCT, rule=_matmul, kernels=_batched_kernels, features=FEATURES),
    "aten.einsum": Operator(_einsum),
}
