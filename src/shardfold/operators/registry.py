"""The description of every kind of operator, and the rule of every call.

`REGISTRY` maps an operator's name without its overload (`aten.linear`) to its description, which is
in the file of its family. A user's own descriptions, or rules alone, are looked up before it.

What capture makes of a step's effects is described here: writes to buffers, and functions with
their own backward. Both run whole on every device: the one by its nature, the other as it has no
rule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from shardfold.graph import Dims, Graph, Splits
from shardfold.operators import (
    attention,
    convolution,
    elementwise,
    experts,
    indexing,
    losses,
    matrix,
    norms,
    recurrent,
    reductions,
    views,
)
from shardfold.operators.notation import Call, Engine, Rule
from shardfold.operators.operator import SHARED, UNKNOWN, Local, Maker, Operator, aten, keeps_means


def _whole(call: Call) -> Rule:
    return call.undescribed()


EFFECTS: Mapping[str, Operator] = {
    "shardfold.write": Operator(_whole, "own form"),
    "shardfold.function": Operator(local="own form"),
    # Checks of a trace, which capture leaves out.
    **aten(
        "_assert_tensor_metadata _assert_async _assert_scalar sym_constrain_range "
        "sym_constrain_range_for_size",
        Operator(left_out="check"),
    ),
}


# Families in the order in which their words for a dim are believed.
REGISTRY: Mapping[str, Operator] = {
    **attention.TABLE,
    **indexing.TABLE,
    **experts.TABLE,
    **recurrent.TABLE,
    **losses.TABLE,
    **matrix.TABLE,
    **convolution.TABLE,
    **norms.TABLE,
    **reductions.TABLE,
    **views.TABLE,
    **elementwise.TABLE,
    **EFFECTS,
}

Rules: TypeAlias = "Mapping[str, Operator | Maker]"  # a user's own, by kind


def operator_of(kind: str, own: Rules | None = None) -> Operator:
    """The description of a kind: the user's, the registry's, or that of an unknown one.

    A rule alone takes the place of the registry's rule, and is run by the same call on parts.
    """
    known = REGISTRY.get(kind, UNKNOWN)
    given = (own or {}).get(kind, known)
    if isinstance(given, Operator):
        return given
    return replace(known, rule=given, local="same call")


def rule_for(call: Call, own: Rules | None = None) -> Rule:
    """The rule of a call; an operator without one is left unsplit and says so.

    What names a dim of a single number (`loss.mean(-1)`) has nothing to split.
    """
    operator = operator_of(call.op.kind, own)
    if NAMES_DIMS & call.op.attributes.keys() and not any(t.shape for t in call.inputs):
        engine: Engine = "none" if operator.memory in SHARED else "vector"
        return call.undescribed(engine=engine, operator=replace(operator, local="same call"))
    if operator.rule is not None:
        return replace(operator.rule(call), operator=operator)
    if call.op.splits is not None:
        return found_rule(call, call.op.splits, operator)
    return call.undescribed(known=False, operator=operator)


NAMES_DIMS = {"dim", "dims", "source"}  # which a single number has not: it is taken as it is
FLOPS: Mapping[Engine, float] = {"matrix": 2.0, "vector": 1.0, "none": 0.0}  # of each point


def found_rule(call: Call, splits: Splits, operator: Operator) -> Rule:
    """The rule that an experiment found: a part is run by the same call.

    Arithmetic is not seen. A product of torch's own has a multiply-add for every point; all else,
    a user's chain of products too, one operation for every element of its largest tensor.
    """
    sizes = dict(splits.sizes)
    local: Local = "own form" if operator.local == "own form" else "same call"
    described = replace(operator, local=local, is_mean=lambda op: bool(splits.means))
    sums = [f for f in sizes if not _carried(f, splits.results)]
    is_product = any(_carried(f, splits.operands) > 1 for f in sums if f not in splits.means)
    is_product &= call.op.kind.startswith("aten.") and len(call.inputs) <= 3
    tensors = [{f for dim in dims for f in dim} for dims in (*splits.operands, *splits.results)]
    largest = max(tensors, key=lambda own: math.prod(sizes[f] for f in own))
    engine: Engine = "matrix" if is_product else "vector"
    engine = "none" if operator.memory in SHARED else engine
    work = (set(sizes) if is_product else largest) - splits.whole
    return Rule(
        splits.operands,
        splits.results,
        sizes,
        over=tuple(f for f in sizes if f in work),
        whole=splits.whole,
        ranges=splits.ranges,
        means=splits.means,
        linear=splits.linear,
        saves=splits.saves,
        saves_results=splits.saves_results,
        engine=engine,
        flops=FLOPS[engine],
        found=True,
        operator=replace(described, keeps_means=keeps_means) if splits.linear else described,
    )


def _carried(factor: str, tensors: Dims) -> int:
    """How many of these tensors run over a factor."""
    return sum(any(factor in dim for dim in dims) for dims in tensors)


def rules_of(graph: Graph, own: Rules | None = None) -> tuple[Rule, ...]:
    """The rule of every operator of a graph, as the planner offers it; alike calls share one."""
    known: dict[object, Rule] = {}
    rules = []
    for op in graph.ops:
        call = Call.of(graph, op)
        names = tuple(operand.name for operand in op.operands)
        key = (op.kind, names, call.inputs, call.results, repr(op.attributes), op.splits)
        if key not in known:
            known[key] = offered(rule_for(call, own), call)
        rules.append(known[key])
    return _writing_together(graph, rules)


def _writing_together(graph: Graph, rules: list[Rule]) -> tuple[Rule, ...]:
    """What an operator writes to is whole where others read or write it, too.

    As a norm that is called twice, or whose running mean forward reads. Each is split by a decision
    of its own: where one has written its part, another would find what was there before.
    """
    uses = Counter(tensor for op in graph.ops for tensor in set(op.inputs))
    found = []
    for op, rule in zip(graph.ops, rules, strict=True):
        places = [k for k, each in enumerate(op.operands) if each.name in rule.operator.writes]
        dims = [dim for k in places if uses[op.inputs[k]] > 1 for dim in rule.operands[k]]
        held = frozenset(factor for dim in dims for factor in dim)
        found.append(replace(rule, whole=rule.whole | held) if held - rule.whole else rule)
    return tuple(found)


def offered(rule: Rule, call: Call) -> Rule:
    """The rule with every factor whole that the runtime cannot split for this call.

    The rules stay as the operators are, and are tested so; what is planned must be what is run.
    """
    operator = rule.operator
    held = operator.unsupported(call)
    if operator.local == "whole":
        held |= set(rule.factors)
    elif operator.local == "same call":  # which does not send anything
        held |= {exchange.factor for exchange in rule.exchanges}
    # Neighbours hold the rows before and after a part, so a part with a halo is one range.
    haloed = {exchange.factor for exchange in rule.exchanges if exchange.kind == "halo"}
    ranges = rule.ranges | haloed | operator.ranges(call) & set(rule.sizes)
    return replace(rule, whole=rule.whole | (held & set(rule.sizes)), ranges=ranges)
