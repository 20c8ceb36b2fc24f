"""Every rule in the table against the operator itself, run in parts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardfold.operators import REGISTRY, rule_for
from shardfold.operators.notation import Rule

from . import cases
from .cases import case, normal
from .elementwise_cases import elementwise
from .oracle import Case, call_of, difference, passes_sums, run, splits, splittable
from .view_cases import views

CASES: list[Case] = [
    *cases.matrix(),
    *cases.attention(),
    *cases.convolution(),
    *cases.pooling(),
    *cases.normalisation(),
    *cases.losses(),
    *cases.reduction(),
    *cases.indexing(),
    *cases.creation(),
    *cases.recurrent(),
    *cases.found(),
    *elementwise(),
    *views(),
]
each_case = pytest.mark.parametrize("given", CASES, ids=str)


def test_every_operator_of_the_table_has_a_case() -> None:
    described = {kind for kind, operator in REGISTRY.items() if operator.rule is not None}
    made_by_capture = {"shardfold.write"}
    assert sorted(described - made_by_capture - {given.kind for given in CASES}) == []


@each_case
def test_parts_give_what_the_whole_gives(given: Case) -> None:
    rule = rule_for(call_of(given))
    for factor, count in splits(given, rule):
        assert difference(given, rule, factor, count) == ""


@each_case
def test_dims_multiply_to_the_sizes_of_the_tensors(given: Case) -> None:
    call = call_of(given)
    rule = rule_for(call)
    types = (*call.inputs, *call.results)
    assert rule.known
    for kind, dims in zip(types, (*rule.operands, *rule.results), strict=True):
        assert len(kind.shape) == len(dims)
        for size, dim in zip(kind.shape, dims, strict=True):
            sizes = [rule.sizes[f] for f in dim]
            product = math.prod(sizes) if sizes else size
            assert size == product or (len(dim) == 1 and size % product == 0)
            assert size > 1 or not dim
            assert len(dim) < 2 or min(sizes) > 1


@each_case
def test_work_and_exchanges_run_over_factors_of_some_tensor(given: Case) -> None:
    """The cost model counts points of the factors that tensors carry, and of no others."""
    rule = rule_for(call_of(given))
    named = set(rule.work_factors) | {f for e in rule.exchanges for f in e.over}
    lost = {f for f in named - set(rule.factors) if rule.sizes[f] > 1}
    assert lost == set()


@each_case
def test_a_pending_sum_passes_where_the_rule_says_so(given: Case) -> None:
    rule = rule_for(call_of(given))
    if rule.linear and given.same_values:
        assert passes_sums(given, rule)


MATRIX = [*cases.matrix(), *cases.attention(), *cases.convolution(), *cases.recurrent()]
EXPERTS = {"aten._grouped_mm", "shardfold.expert_linear", "shardfold.routed_experts"}
UNCOUNTED = {"aten.mv", "aten.dot", "aten.outer", *EXPERTS}


@pytest.mark.parametrize("given", [g for g in MATRIX if g.kind not in UNCOUNTED], ids=str)
def test_matrix_work_is_what_torch_counts(given: Case) -> None:
    rule = rule_for(call_of(given))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run(given.overload, given.arguments)
    counted = counter.get_total_flops()
    if given.label == "causal":
        counted //= 2  # torch multiplies the masked half, too
    if not counted:  # a product with a vector: torch counts none
        counted = 2 * math.prod(rule.sizes[f] for f in rule.factors)
    assert rule.flops * rule.points == pytest.approx(counted)


def planted() -> list[tuple[str, Case, Rule]]:
    """Rules that promise a split which is not there, or lose one operand's share of it."""
    softmax = case("softmax.int", {"self": normal(4, 6), "dim": 1})
    top = case("topk", {"self": normal(4, 6), "k": 2})
    conv = case(
        "conv2d", {"input": normal(2, 4, 6, 6), "weight": normal(8, 4, 3, 3), "padding": [1, 1]}
    )
    linear = case("linear", {"input": normal(4, 6), "weight": normal(8, 6)})
    heads = case(
        "view", {"self": normal(4, 6), "size": [4, 2, 3]}, localise=cases.parts.sized("size")
    )
    amax = case("amax", {"self": normal(4, 6), "dim": [1]})
    swapped = Rule.parse("b (d h) -> b h d", {"b": 4, "h": 2, "d": 3})
    return [
        ("i1", softmax, replace(rule_for(call_of(softmax)), exchanges=())),
        ("i1", top, replace(rule_for(call_of(top)), whole=frozenset())),
        ("h", conv, replace(rule_for(call_of(conv)), exchanges=())),
        ("m", linear, Rule.parse("b m, n m -> b m", {"b": 4, "m": 6, "n": 8})),
        ("n", linear, Rule.parse("b ., n . -> b .", {"b": 4, "n": 8})),
        ("h", heads, swapped),
        ("i1", amax, replace(rule_for(call_of(amax)), whole=frozenset())),
    ]


def caught(factor: str, given: Case, rule: Rule) -> bool:
    """Whether the parts differ from the whole, or do not even fit together."""
    try:
        return bool(difference(given, rule, factor, 2))
    except (RuntimeError, AssertionError, IndexError):
        return True


@pytest.mark.parametrize(("factor", "given", "rule"), planted(), ids=str)
def test_a_wrong_rule_is_caught(factor: str, given: Case, rule: Rule) -> None:
    assert caught(factor, given, rule)


@each_case
def test_no_exchange_is_superfluous(given: Case) -> None:
    """Without the exchange that a rule asks for, the parts give something else."""
    rule = rule_for(call_of(given))
    for factor in {exchange.factor for exchange in rule.exchanges} & set(splittable(rule)):
        assert caught(factor, given, rule)


def test_a_wrong_pass_of_sums_is_caught() -> None:
    square = case("square", {"self": normal(4, 6)})
    rule = replace(rule_for(call_of(square)), linear=(0,))
    assert not passes_sums(square, rule)
