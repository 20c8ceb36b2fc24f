"""Products of rows with the matrices of their own experts.

`... m, e n m, ... -> ... n` is one product. A block of experts is two, with something elementwise
between them, and a weighted sum over the k experts of a row:

    i0 m, i0 k, i0 k, e (g f) m, e n f -> i0 n

Where an axis splits the experts alone, a device gives zeros for the rows of the others: a partial
sum. Where it splits rows and experts together (`dispatch`), each device sends its rows to the
devices of their experts and gets the results back, by all-to-all. How many go where is known only
in the step, and agreed on by a small all-to-all of counts. Prices take the rows as evenly spread
over the experts, times a stated imbalance on the fullest device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardfold.graph import Graph
from shardfold.operators.kernels import Access, Kernel, LocalWork, Values, memory_pass
from shardfold.operators.notation import Call, Exchange, Rule
from shardfold.operators.operator import Extra, Operator, factors

ROUTED = "shardfold.routed_experts"
COUNT_BYTES = 8  # of an expert's number of rows, as devices tell each other
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
        return [*sorts, *written, moved(m), _grouped("matmul.nt", dtype, (per, n, m), e), moved(n)]
    found = [moved(n)]
    if 0 in work.trained:
        found += [_grouped("matmul.nn", dtype, (per, m, n), e), moved(m)]
    if 1 in work.trained:
        zeros = memory_pass(work.operand_bytes(1), dtype, "fill")
        found += [*written, moved(m), zeros, _grouped("matmul.tn", dtype, (n, m, per), e)]
    return found


def _grouped(family: str, dtype: str, sizes: tuple[Values, ...], experts: Values) -> Kernel:
    """The products of all experts."""
    return Kernel(family, dtype, sizes, experts, is_grouped=True)


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


@dataclass(frozen=True, slots=True)
class Between:
    """What stands between a block's two products, as far as prices and splits need to know it.

    `pairing` says which features of the first product make one of the second's: `halves` of them,
    neighbouring `pairs`, each its `own`, or `any`. `steps` are its operators; they read and write
    `moves` arrays of the second's features, and autograd keeps `keeps` of them. `code` is a Python
    function of rows, which prices do not read.

    >>> str(Between.parse("halves silu+mul moves 5 keeps 3: def forward(rows): ..."))
    'halves silu+mul moves 5 keeps 3: def forward(rows): ...'
    """

    pairing: str
    steps: tuple[str, ...]
    moves: int
    keeps: int
    code: str

    @classmethod
    def parse(cls, text: str) -> Between:
        """Read what `str` gives."""
        head, _, code = text.partition(": ")
        pairing, steps, _, moves, _, keeps = head.split()
        return cls(pairing, tuple(steps.split("+")), int(moves), int(keeps), code)

    def __str__(self) -> str:
        steps = "+".join(self.steps)
        return f"{self.pairing} {steps} moves {self.moves} keeps {self.keeps}: {self.code}"


UP: Mapping[str, str] = {"halves": "(g f)", "pairs": "(f g)", "own": "f", "any": "u"}


def _routed_experts(call: Call) -> Rule:
    """A block of experts; rows are split by themselves, or together with the experts.

    What stands between the products is not linear, so the features that go in stay whole.
    """
    experts, wide, features = call.shape("up")
    _, out, inner = call.shape("down")
    pairing = Between.parse(call.attribute("between")).pairing
    gates, up = wide // inner, UP[pairing]
    operands = {"x": "i0 m", "expert": "i0 k", "share": "i0 k", "up": f"e {up} m", "down": "e n f"}
    parts = min(call.shape("x")[0], experts)
    return call.rule(
        operands | {"up_bias": f"e {up}", "down_bias": "e n"},
        "i0 n",
        sizes={"d": parts, "f": inner} | ({"g": gates} if "g" in up else {}),
        engine="matrix",
        flops=2.0 * (gates * features + out) / experts,
        over=("i0", "k", "e", "f"),
        whole=frozenset({"m", "n", "k"} | ({"g"} & set(up)) | ({"u", "f"} if up == "u" else set())),
        joint={"d": ("i0", "e")},
        exchanges=_exchanges(call),
        saves=("x", "expert", "share", "up", "down"),
        backward=2.0,
    )


def _exchanges(call: Call) -> tuple[Exchange, ...]:
    """Counts, rows to their experts and results back; backward the gradients of both."""
    experts, item = call.shape("up")[0], call.inputs[call.position("x")].item_bytes

    def rows(features: str, phase: str, of: int | None = None) -> Exchange:
        over = ("i0", "k", "e", features)
        sent = Exchange("all_to_all", "d", over, 1.0 / experts, item, together=True)
        return replace(sent, phase=phase, of=of)  # type: ignore[arg-type]

    return (
        Exchange("all_to_all", "d", ("e",), item_bytes=COUNT_BYTES, together=True),
        rows("m", "forward"),
        rows("n", "forward"),
        rows("n", "backward"),
        rows("m", "backward", call.position("x")),
    )


def _block_kernels(work: LocalWork, phase: str) -> list[Kernel]:
    """Rows sorted, sent, gathered and multiplied; what stands between; the same back, and the sum.

    On each device as many rows as its experts are of all, times the stated imbalance.
    """
    m, n, f, e = (work.factor(base) for base in ("m", "n", "f", "e"))
    between = Between.parse(work.access.attributes["between"])
    wide = f * (work.inputs[3].shape[1] // work.inputs[4].shape[2])
    all_experts = work.inputs[3].shape[0]
    rows, dtype, item = work.factor("i0") * work.factor("k"), work.dtype, work.inputs[0].item_bytes
    mine = work.points("i0", "k", "e") / all_experts
    per, sent = mine / e, np.where(work.parts("d") > 1, mine, 0.0)

    def moved(count: Values, columns: Values) -> Kernel:
        return Kernel("lookup.forward", dtype, (count, columns))

    def passes(arrays: float) -> Kernel:
        return memory_pass(arrays * mine * f * item, dtype)

    if phase != "backward":
        sort = (2.0 * SORTED_BYTES * rows,)
        return [
            Kernel("vector", "float32", sort, SORT_PASSES, is_awaited=True),
            *(moved(mine, m), moved(sent, m)),
            _grouped("matmul.nt", dtype, (per, wide, m), e),
            passes(between.moves),
            _grouped("matmul.nt", dtype, (per, n, f), e),
            *(moved(sent, n), moved(mine, n)),
            memory_pass(3.0 * rows * n * item, dtype),
            memory_pass((rows + work.factor("i0")) * n * item, dtype),
        ]
    found = [memory_pass(4.0 * rows * n * item, dtype), moved(mine, n), moved(sent, n)]
    found += [_grouped("matmul.nn", dtype, (per, f, n), e), passes(3.0 * len(between.steps))]
    for k, product in ((4, (n, f, per)), (3, (wide, m, per))):
        if k in work.trained:
            found.append(memory_pass(work.operand_bytes(k), dtype, "fill"))
            found.append(_grouped("matmul.tn", dtype, product, e))
    if 0 in work.trained:
        found += [_grouped("matmul.nn", dtype, (per, m, wide), e), moved(sent, m), moved(mine, m)]
        found.append(memory_pass((rows + work.factor("i0")) * m * item, dtype))
    return found


def _block_extras(call: Call, access: Access) -> tuple[Extra, ...]:
    """Kept of every routed row: what stands between the products, its result, and it if it came."""
    experts, item = call.shape("up")[0], call.inputs[0].item_bytes
    between = Between.parse(call.attribute("between"))

    def routed(arrays: float, features: str, life: str = "kept", sent: str = "") -> Extra:
        over = ("i0", "k", "e", features)
        return Extra(0, arrays * item / experts, life=life, points=over, factor=sent)  # type: ignore[arg-type]

    def of_rows(arrays: float, life: str = "kept") -> Extra:
        return Extra(0, arrays * item, life=life, points=("i0", "k", "n"))  # type: ignore[arg-type]

    return (
        *(routed(1, "m", sent="d"), routed(between.keeps + 1, "f"), of_rows(1)),
        *(routed(1, "m", "forward"), routed(2, "n", "forward"), of_rows(1, "forward")),
        *(routed(2, "n", "backward"), routed(between.keeps, "f", "backward")),
        *(routed(2, "m", "backward"), of_rows(1, "backward")),
    )


def experts_in(graph: Graph) -> int:
    """The most experts of a block to which rows can be sent; 1 where there is none."""
    counts = [graph.tensors[op.inputs[3]].type.shape[0] for op in graph.ops if op.kind == ROUTED]
    return max(counts, default=1)


def imbalanced(imbalance: float) -> Mapping[str, Operator]:
    """The block's description where the fullest device has so many times the even share of rows."""

    def rule(call: Call) -> Rule:
        made = _routed_experts(call)
        exchanges = tuple(
            replace(e, words=e.words * imbalance) if "i0" in e.over else e for e in made.exchanges
        )
        return replace(made, imbalance=imbalance, exchanges=exchanges)

    return {} if imbalance == 1.0 else {ROUTED: replace(TABLE[ROUTED], rule=rule)}


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
    ROUTED: Operator(
        _routed_experts,
        "own form",
        ranges=factors("e"),
        kernels=_block_kernels,
        launched_as="shardfold.expert_linear",
        calls="many",
        extras=_block_extras,
        words={"e": "experts", "d": "dispatch", "f": "inner"},
    ),
}
