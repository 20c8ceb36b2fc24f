"""What a plan gathers again for backward is what autograd keeps: the operand, not a copy of it.

The runtime replaces what autograd keeps of a gathered parameter by a promise to gather it again.
Where a kernel keeps a copy instead, there is nothing to replace, and a planned gather never runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shardfold.capture import Invocation
from shardfold.capture.small_call import kept_by, leaf
from shardfold.operators.registry import rule_for

from .cases import case, normal
from .oracle import Case
from .test_offered import EVERY, captured_once


def products() -> list[Case]:
    """Equations and batches that torch can put into one product as they are, and others."""
    pairs = {
        "b s d, d e -> b s e": ((2, 3, 4), (4, 5)),
        "b s d, e d -> b s e": ((2, 3, 4), (5, 4)),
        "b i d, i j d e -> b i j e": ((2, 3, 4), (3, 5, 4, 6)),
        "b i d, i d j e -> b i j e": ((2, 3, 4), (3, 4, 5, 6)),
        "b s h d, h d e -> b s e": ((2, 3, 4, 5), (4, 5, 6)),
        "b s h d, h e d -> b s e": ((2, 3, 4, 5), (4, 6, 5)),
        "b s d, d h k -> b h s k": ((2, 3, 4), (4, 5, 6)),
        "b d, e d k -> b e": ((2, 3), (4, 3, 5)),
        "b d, d -> b d": ((2, 3), (3,)),
    }
    found = [
        case("einsum", {"equation": each, "tensors": [normal(*a), normal(*b)]}, label=each)
        for each, (a, b) in pairs.items()
    ]
    shapes = [
        ((2, 3, 4, 5), (3, 5, 6)),
        ((3, 4, 5), (2, 3, 5, 6)),
        ((4, 5), (3, 5, 6)),
        ((3, 4, 5), (5, 6)),
        ((3, 4, 5), (5,)),
        ((5,), (3, 5, 6)),
        ((2, 3, 4, 5), (2, 3, 5, 6)),
        ((1, 4, 5), (3, 5, 6)),
    ]
    return found + [
        case("matmul", {"self": normal(*a), "other": normal(*b)}, label=f"{a} {b}")
        for a, b in shapes
    ]


def kept_operands(invocation: Invocation, given: Sequence[Tensor]) -> tuple[list[bool], set[int]]:
    """Which operands have a gradient, and which are kept; all that torch gives one."""
    for wanted in (lambda k: True, lambda k: k == 0):
        leaves = [leaf(t, t.is_floating_point() and wanted(k)) for k, t in enumerate(given)]
        try:
            return [t.requires_grad for t in leaves], set(kept_by(invocation, leaves)[0])
        except (RuntimeError, NotImplementedError):
            continue
    return [False] * len(given), set()


def operands_of(given: Case) -> list[Tensor]:
    values = [
        v
        for value in given.arguments.values()
        for v in (value if isinstance(value, list) else [value])
    ]
    return [v for v in values if isinstance(v, Tensor)]


@pytest.mark.parametrize("given", [*EVERY, *products()], ids=str)
def test_an_operand_that_is_gathered_again_is_what_autograd_keeps(given: Case) -> None:
    call, invocation = captured_once(given)
    rule, operands = rule_for(call), operands_of(given)
    with torch.enable_grad():
        gradients, kept = kept_operands(invocation, operands)
    again = {k for k, g in enumerate(gradients) if g and rule.needs_again(k, gradients)}
    assert again <= kept, [call.op.operands[k].name for k in again - kept]


@pytest.mark.parametrize("given", [*EVERY, *products()], ids=str)
def test_the_same_where_the_first_operand_needs_no_gradient(given: Case) -> None:
    call, invocation = captured_once(given)
    rule, operands = rule_for(call), operands_of(given)
    leaves = [leaf(t, k > 0) for k, t in enumerate(operands)]
    gradients = [t.requires_grad for t in leaves]
    try:
        with torch.enable_grad():
            kept = set(kept_by(invocation, leaves)[0])
    except (RuntimeError, NotImplementedError):
        return  # it runs without gradients only
    if rule.found:
        return  # by an experiment, which is asked for each set of gradients
    again = {k for k, g in enumerate(gradients) if g and rule.needs_again(k, gradients)}
    assert again <= kept, [call.op.operands[k].name for k in again - kept]


def test_a_weight_that_einsum_can_use_as_it_is_is_gathered_again() -> None:
    """Not every weight is kept whole for the sake of some."""
    plain = [each for each in products() if str(each).endswith(("d e -> b s e", "e d -> b s e"))]
    assert plain
    for given in plain[:2]:
        rule = rule_for(captured_once(given)[0])
        assert rule.needs_again(1, [True, True]), str(given)
