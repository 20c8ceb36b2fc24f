"""The table of operator rules, one family a file.

A rule maker is a function from a `Call` to a `Rule`. `TABLE` maps an operator's name without
its overload (`aten.linear`) to its maker; a user's own makers are looked up before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from shardfold.graph import Graph
from shardfold.operators import (
    attention,
    convolution,
    elementwise,
    indexing,
    losses,
    matrix,
    norms,
    pooling,
    recurrent,
    reductions,
    views,
)
from shardfold.operators.call import Call
from shardfold.operators.notation import Rule
from shardfold.operators.unsupported import offered

Maker: TypeAlias = Callable[[Call], Rule]

TABLE: Mapping[str, Maker] = {
    **matrix.TABLE,
    **convolution.TABLE,
    **pooling.TABLE,
    **attention.TABLE,
    **norms.TABLE,
    **losses.TABLE,
    **elementwise.TABLE,
    **reductions.TABLE,
    **views.TABLE,
    **indexing.TABLE,
    **recurrent.TABLE,
}


# What runs whole on every device by its nature: no rule is missing.
WHOLE = ("shardfold.write",)


def rule_for(call: Call, extra: Mapping[str, Maker] | None = None) -> Rule:
    """The rule of a call; an operator without one is left unsplit and says so."""
    maker = (extra or {}).get(call.op.kind) or TABLE.get(call.op.kind)
    if maker is None:
        return call.undescribed(known=call.op.kind in WHOLE)
    return maker(call)


def rules_of(graph: Graph, extra: Mapping[str, Maker] | None = None) -> tuple[Rule, ...]:
    """The rule of every operator of a graph, as the planner offers it; alike calls share one."""
    known: dict[object, Rule] = {}
    rules = []
    for op in graph.ops:
        call = Call.of(graph, op)
        names = tuple(operand.name for operand in op.operands)
        key = (op.kind, names, call.inputs, call.results, repr(op.attributes))
        if key not in known:
            known[key] = offered(rule_for(call, extra), call)
        rules.append(known[key])
    return tuple(rules)
