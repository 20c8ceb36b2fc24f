"""Look-ups, scatters, sorting and creation.

`v d, ... -> ... d`: rows v of a table are picked by index. A device with a part of the rows looks
up what it holds and gives zero for the rest, so a split of v leaves a partial sum. Writing is the
mirror image: `v d, t, t d -> v d`, a part of v takes only the rows that fall in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardfold.operators.kernels import Kernel, LocalWork
from shardfold.operators.notation import Call, Rule
from shardfold.operators.operator import Operator, aten


def _own(shape: tuple[int, ...], prefix: str = "i") -> list[str]:
    return [f"{prefix}{k}" for k in range(len(shape))]


def _lookup(call: Call, table: str, operands: dict[str, str], result: str, **more: Any) -> Rule:
    """A read of some rows: no arithmetic, only the rows that are asked for are touched."""
    return call.rule(
        operands,
        result,
        flops=0.0,
        over=(),
        sparse=(call.position(table),),
        **{"saves": tuple(name for name in operands if name != table), "backward": 1.0, **more},
    )


def _embedding(call: Call) -> Rule:
    rows = " ".join(_own(call.shape("indices")))
    return _lookup(call, "weight", {"weight": "v d", "indices": rows}, f"{rows} d")


def _embedding_bag(call: Call) -> Rule:
    """The rows of a bag are added, averaged, or the largest taken; a padded one is not counted."""
    mode, is_padded = call.attribute("mode"), call.attribute("padding_idx", -1) >= 0
    is_mean = mode == 1
    whole = {"l"} if mode == 2 or (is_mean and is_padded) else set()
    return _lookup(
        call,
        "weight",
        {"weight": "v d", "indices": "b l"},
        "b d",
        whole=frozenset(whole | ({"v"} if mode == 2 or is_padded else set())),
        means=frozenset({"l"} if is_mean and not is_padded else ()),
    )


def _index_select(call: Call) -> Rule:
    names = _own(call.shape("self"))
    if not names:
        return call.undescribed(flops=0.0, backward=1.0)
    dim = call.attribute("dim") % len(names)
    after = [*names[:dim], "t", *names[dim + 1 :]]
    table = [*names[:dim], "v", *names[dim + 1 :]]
    return _lookup(call, "self", {"self": " ".join(table), "index": "t"}, " ".join(after))


def _indices(call: Call) -> list[str | None]:
    """For each leading dim of self, the index operand that picks from it, or None."""
    pattern = call.attribute("indices")
    names = [o.name for o in call.op.operands if o.name.startswith("indices[")]
    if pattern is None:
        return list(names)
    return [f"indices[{k}]" if item == "*" else None for k, item in enumerate(pattern)]


def _picked(call: Call) -> tuple[dict[str, str], list[str], frozenset[str]]:
    """Notation of self and of the indices, the dims of what is picked, and what stays whole.

    Indices broadcast against each other; the dims that they make stand where the indexed dims
    stood, or in front where those were not neighbours.
    """
    indices = _indices(call)
    shapes = {name: call.shape(name) for name in indices if name}
    rank = max(len(shape) for shape in shapes.values())
    made = _own((0,) * rank, "t")
    at = [k for k, name in enumerate(indices) if name]
    names = _own(call.shape("self"))
    table = [f"v{k}" if k in at else name for k, name in enumerate(names)]
    notation = {"self": " ".join(table)}
    for name, shape in shapes.items():
        notation[name] = " ".join(made[rank - len(shape) :])
    rest = [name for k, name in enumerate(names) if k not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    whole = frozenset(f"v{k}" for k in at) if len(at) > 1 else frozenset()
    return notation, [*rest[:first], *made, *rest[first:]], whole


def _broadcast_sizes(call: Call) -> dict[str, int]:
    shapes = [call.shape(name) for name in _indices(call) if name]
    rank = max(map(len, shapes))
    return {f"t{k}": max(s[k - rank] for s in shapes if len(s) + k >= rank) for k in range(rank)}


def _index(call: Call) -> Rule:
    notation, after, whole = _picked(call)
    if any(call.inputs[call.position(name)].dtype == "bool" for name in notation if name != "self"):
        return call.undescribed(flops=0.0, backward=1.0)
    sizes = _broadcast_sizes(call)
    return _lookup(call, "self", notation, " ".join(after), whole=whole, sizes=sizes)


def _index_put(call: Call) -> Rule:
    """Writes rows; adding rows, parts of them leave a partial sum."""
    notation, after, whole = _picked(call)
    if any(call.inputs[call.position(name)].dtype == "bool" for name in notation if name != "self"):
        return call.undescribed(flops=0.0, backward=1.0)
    sizes = _broadcast_sizes(call)
    values = " ".join(after[len(after) - len(call.shape("values")) :])
    made = frozenset() if call.attribute("accumulate", False) else frozenset(sizes)
    for name, size in zip(_own(call.shape("self")), call.shape("self"), strict=True):
        sizes[name] = size
    return call.rule(
        {**notation, "values": values},
        notation["self"],
        sizes=sizes,
        flops=1.0 if call.attribute("accumulate", False) else 0.0,
        over=tuple(after),
        whole=whole | made,
        saves=tuple(name for name in notation if name != "self"),
        backward=1.0,
    )


def _along(call: Call, index: str, picked: str, table: str) -> tuple[list[str], list[str]]:
    """Notation of self and index where they agree on all dims but `dim`; others are undescribed."""
    before, asked = call.shape("self"), call.shape(index)
    dim = call.attribute("dim") % len(before)
    same = [f"i{k}" if n == m else "." for k, (n, m) in enumerate(zip(before, asked, strict=True))]
    mine = [*same[:dim], table, *same[dim + 1 :]]
    other = [
        f if f != "." else f"j{k}" for k, f in enumerate([*same[:dim], picked, *same[dim + 1 :]])
    ]
    return mine, other


def _unaligned(factors: list[str]) -> frozenset[str]:
    return frozenset(f for f in factors if f.startswith("j"))


def _gather(call: Call) -> Rule:
    index = "index" if call.has("index") else "indices"
    if not call.shape("self") or call.attribute("dim") is None:
        return call.undescribed(flops=0.0, backward=1.0)
    table, picked = _along(call, index, "t", "v")
    return _lookup(
        call,
        "self",
        {"self": " ".join(table), index: " ".join(picked)},
        " ".join(picked),
        whole=_unaligned(picked),
        saves=("self", index),  # the table for its size alone
    )


def _scatter(call: Call) -> Rule:
    """Rows go where the index says; sums of rows add up over parts, overwriting does not."""
    if not call.shape("self"):
        return call.undescribed(flops=0.0, backward=1.0)
    table, picked = _along(call, "index", "t", "v")
    reduce = "add" if call.op.kind == "aten.scatter_add" else call.attribute("reduce", "")
    # With include_self false, rows that are written replace what was there: not a sum.
    adds = reduce in ("add", "sum") and call.attribute("include_self", True)
    operands = {"self": " ".join(table), "index": " ".join(picked)}
    if call.has("src") and call.shape("src") == call.shape("index"):
        operands["src"] = " ".join(picked)
    elif call.has("src"):
        adds = False
    return call.rule(
        operands,
        " ".join(table),
        flops=1.0 if adds else 0.0,
        over=tuple(f for f in picked if f != "."),
        whole=_unaligned(picked) | (frozenset() if adds else frozenset({"t"})),
        saves=("index",),
        backward=1.0,
    )


def _index_write(call: Call) -> Rule:
    """index_add, index_copy: `v d, t, t d -> v d`."""
    names = _own(call.shape("self"))
    dim = call.attribute("dim") % len(names)
    table = " ".join([*names[:dim], "v", *names[dim + 1 :]])
    rows = " ".join([*names[:dim], "t", *names[dim + 1 :]])
    adds = call.op.kind == "aten.index_add"
    return call.rule(
        {"self": table, "index": "t", "source": rows},
        table,
        flops=1.0 if adds else 0.0,
        over=tuple(rows.split()),
        whole=frozenset() if adds else frozenset({"t"}),
        saves=("index",),
        backward=1.0,
    )


def _ordered(call: Call) -> Rule:
    """sort, argsort, topk: the dim that is put in order stays whole, the others run through."""
    names = _own(call.inputs[0].shape)
    if not names:
        return call.undescribed(backward=1.0)
    dim = call.attribute("dim", -1) % len(names)
    same = call.results[0].shape == call.inputs[0].shape
    after = names if same else [*names[:dim], ".", *names[dim + 1 :]]
    return call.rule(
        {call.op.operands[0].name: " ".join(names)},
        " ".join(after),
        flops=8.0,
        whole=frozenset({names[dim]}),
        saves_results=True,
        backward=1.0,
    )


def _one_hot(call: Call) -> Rule:
    rows = " ".join(_own(call.shape("self")))
    return call.rule({"self": rows}, f"{rows} c", whole=frozenset({"c"}), backward=0.0)


def _bucketize(call: Call) -> Rule:
    """Every value is looked up in the whole list of boundaries."""
    table = "boundaries" if call.has("boundaries") else "sorted_sequence"
    if not call.has("self") or len(call.shape(table)) != 1:
        return call.undescribed(backward=0.0)
    rows = " ".join(_own(call.shape("self")))
    return call.rule({"self": rows}, rows, flops=8.0, backward=0.0)


def _histogram(call: Call) -> Rule:
    """Counts of a fixed range add up over parts; a range read off the data does not."""
    rows = _own(call.shape("self"))
    fixed = call.attribute("min", 0) != call.attribute("max", 0)
    whole = frozenset() if fixed else frozenset(rows)
    return call.rule({"self": " ".join(rows)}, ".", whole=whole, backward=0.0)


def _triangle(call: Call) -> Rule:
    """What is kept depends on row and column, which stay whole."""
    names = _own(call.shape("self"))
    return call.rule(
        {"self": " ".join(names)},
        " ".join(names),
        whole=frozenset(names[-2:]),
        linear=(0,) if call.inputs[0].is_floating else (),
        backward=1.0,
    )


def _created(call: Call) -> Rule:
    """Made from nothing, by every device for itself."""
    return call.undescribed(flops=float(math.prod(call.results[0].shape)), backward=0.0)


def _created_like(call: Call) -> Rule:
    names = " ".join(_own(call.inputs[0].shape))
    return call.rule({call.op.operands[0].name: names}, names, backward=0.0)


def _lookup_kernels(work: LocalWork, phase: str) -> list[Kernel]:
    columns = work.factor("d")
    rows = work.result_items(0) / columns
    if phase != "backward":
        return [Kernel("lookup.forward", work.dtype, (rows, columns))]
    table = work.operand_items(0) / columns
    return [Kernel("lookup.backward", work.dtype, (rows, table, columns))]


def _counted_rows(call: Call) -> frozenset[str]:
    """Gradients that are scaled by how often a row is read, or sparse, need all reads."""
    counted = call.attribute("scale_grad_by_freq", False) or call.attribute("sparse", False)
    indices = _own(call.shape("indices"))
    return frozenset({"v", "d", *indices} if counted else ())


def _rows(call: Call) -> frozenset[str]:
    """The rows of the table, by any of its dims."""
    return frozenset({"v", *(f"v{k}" for k in range(len(call.inputs[0].shape)))})


WRITE = Operator(local="own form", unsupported=_rows)
CREATED = Operator(_created, stops_gradient=True)
FILLED = replace(CREATED, fills=True)
LIKE = Operator(_created_like, stops_gradient=True)
RANDOM = Operator(_created, "own form", stops_gradient=True)

TABLE: Mapping[str, Operator] = {
    "aten.embedding": Operator(
        _embedding,
        "own form",
        _counted_rows,
        ranges=_rows,
        kernels=_lookup_kernels,
        makes_result=True,
        makes_gradients=frozenset({"weight"}),
        words={"v": "vocab"},
    ),
    "shardfold.embedding_bag": Operator(
        _embedding_bag,
        "own form",
        ranges=_rows,
        kernels=_lookup_kernels,
        makes_result=True,
        makes_gradients=frozenset({"weight"}),
        words={"v": "vocab"},
    ),
    "aten.index_select": Operator(_index_select, "own form", ranges=_rows),
    "aten.index": Operator(_index, "own form", ranges=_rows),
    "aten.gather": Operator(_gather, "own form", ranges=_rows),
    "aten.take_along_dim": Operator(_gather, "own form", _rows),
    **aten("scatter scatter_add scatter_reduce", replace(WRITE, rule=_scatter)),
    **aten("index_add index_copy", replace(WRITE, rule=_index_write)),
    "aten.index_put": replace(WRITE, rule=_index_put),
    **aten("topk sort argsort", Operator(_ordered)),
    "aten.one_hot": Operator(_one_hot),
    **aten("bucketize searchsorted", Operator(_bucketize)),
    "aten.histc": Operator(_histogram),
    **aten("tril triu", Operator(_triangle)),
    **aten("arange eye linspace tril_indices triu_indices new_empty", CREATED),
    **aten("zeros ones full empty scalar_tensor new_zeros new_ones new_full", FILLED),
    **aten("zeros_like ones_like full_like", replace(LIKE, fills=True)),
    "aten.empty_like": LIKE,
    **aten("rand randn randint randperm", RANDOM),
    **aten("rand_like randn_like randint_like", replace(RANDOM, rule=_created_like)),
}
