"""Products of rows with the matrix of their own expert.

`... m, e n m, ... -> ... n`: a device with some of the experts gives zeros for the rows of the
others, so that splitting the experts leaves a partial sum.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardfold.operators.kernels import Access, Kernel, LocalWork, Values, memory_pass
from shardfold.operators.notation import Call, Rule
from shardfold.operators.operator import Extra, Operator, factors

SORTED_BYTES, SORT_PASSES = 16.0, 8.0  # a key and a place; a byte of the key in each pass


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


def _kernels(work: LocalWork, phase: str) -> list[Kernel]:
    """Rows sorted by expert, once, which the host waits for; gathered, multiplied, put back.

    As many rows as the experts at hand are of all: balanced routing.
    """
    n, m, e = work.factor("n"), work.factor("m"), work.factor("e")
    rows, dtype = work.result_items(0) / n, work.dtype
    mine = rows * (e / work.inputs[1].shape[0])
    per = mine / e
    sort = Kernel("vector", "float32", (2.0 * SORTED_BYTES * rows,), SORT_PASSES, is_awaited=True)

    def moved(columns: Values) -> Kernel:
        return Kernel("lookup.forward", dtype, (mine, columns))

    written = [memory_pass(2.0 * rows * m * work.inputs[0].item_bytes, dtype, "strided")]
    written = written if work.access.copies else []
    if phase != "backward":
        sorts = [] if work.access.is_shared else [sort]
        return [*sorts, *written, moved(m), Kernel("matmul.nt", dtype, (per, n, m), e), moved(n)]
    found = [moved(n)]
    if 0 in work.trained:
        found += [Kernel("matmul.nn", dtype, (per, m, n), e), moved(m)]
    if 1 in work.trained:
        zeros = memory_pass(work.operand_bytes(1), dtype, "fill")
        found += [*written, moved(m), zeros, Kernel("matmul.tn", dtype, (n, m, per), e)]
    return found


def _extras(call: Call, access: Access) -> tuple[Extra, ...]:
    """Copies of the rows in the experts' order, of operand and result, in either pass."""
    given, result = call.inputs[0].item_bytes, call.results[0].item_bytes
    copies = given * (2.0 if access.copies else 1.0)  # what is out of order is written out first
    return tuple(
        Extra(of, float(size), life=life)
        for life in ("forward", "backward")
        for of, size in ((0, copies), (-1, result))
    )


def _same_rows(call: Call) -> object:
    """Rows are sorted once for all that send them to the same experts."""
    return call.op.inputs[call.position("expert")], call.shape("weight")[0]


TABLE: Mapping[str, Operator] = {
    "aten._grouped_mm": Operator(_grouped_mm),
    "shardfold.expert_linear": Operator(
        _expert_linear,
        "own form",
        ranges=factors("e"),
        kernels=_kernels,
        calls="many",
        shares=_same_rows,
        reads_in_order=True,
        extras=_extras,
        words={"e": "experts"},
        features=("m", "n"),
    ),
}
