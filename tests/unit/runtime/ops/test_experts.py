"""The experts' operator equals one matrix product a row, split or whole.

Rows are sorted once for all operators of a block, and for their backward.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from captures import captured_anew
from shardfold import zoo
from shardfold.capture import capture_program
from shardfold.capture.experts import described
from shardfold.operators import rules_of
from shardfold.runtime.lower import alone
from shardfold.runtime.ops import matrix
from shardfold.runtime.ops.experts import Sorted, SortedLinear, expert_linear
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.sharding import find_subdims

E, N, M = 4, 5, 3


def draw(*rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(*rows, M, dtype=torch.double, requires_grad=True)
    weight = torch.randn(E, N, M, dtype=torch.double, requires_grad=True)
    return x, weight, torch.randint(E - 1, rows)  # the last expert gets no row


@pytest.mark.parametrize("rows", [(7,), (6, 2), (2, 3, 2)])
def test_each_row_meets_its_expert(rows: tuple[int, ...]) -> None:
    x, weight, expert = draw(*rows)
    expected = torch.einsum("...nm,...m->...n", weight[expert], x)
    torch.testing.assert_close(expert_linear(x, weight, expert), expected)


def test_gradients_are_those_of_finite_differences() -> None:
    x, weight, expert = draw(6, 2)
    assert torch.autograd.gradcheck(lambda x, w: expert_linear(x, w, expert), (x, weight))


@pytest.mark.parametrize("experts", [E, 2])
def test_rows_that_were_sorted_before_give_the_same(experts: int) -> None:
    x, weight, expert = draw(6, 2)
    weight = weight.detach()[:experts].requires_grad_()
    found = Sorted.of(expert, experts)
    assert (found.places is None) == (experts < E)
    mine, its = SortedLinear.apply(x, weight, found, expert.shape), expert_linear(x, weight, expert)
    assert mine.equal(its)
    seed = torch.randn_like(mine)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), seed) for y in (mine, its)), strict=True):
        assert a.equal(b)


def test_operator_is_well_formed() -> None:
    x, weight, expert = draw(6, 2)
    torch.library.opcheck(expert_linear, (x, weight, expert))


def test_shards_of_the_experts_add_up() -> None:
    x, weight, expert = draw(6, 2)
    parts = [
        expert_linear(x, weight[first : first + 2], expert - first) for first in range(0, E, 2)
    ]
    torch.testing.assert_close(sum(parts), expert_linear(x, weight, expert))


def test_rows_of_experts_elsewhere_are_zero_and_have_no_gradient() -> None:
    x, weight, expert = draw(6, 2)
    here = expert_linear(x, weight[:1], expert)
    elsewhere = expert != 0
    assert not here[elsewhere].any()
    dx, dw = torch.autograd.grad(here.sum(), (x, weight))
    assert not dx[elsewhere].any()
    assert not dw[1:].any()
    torch.testing.assert_close(dw[0], x[~elsewhere].sum(0).expand(N, M))


@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_only_the_gradient_that_is_wanted_is_made(wanted: str) -> None:
    x, weight, expert = draw(5)
    given = {"x": x, "weight": weight}
    fixed = {name: t if name == wanted else t.detach() for name, t in given.items()}
    y, plain = (
        expert_linear(**fixed, expert=expert),
        torch.einsum("rnm,rm->rn", fixed["weight"][expert], fixed["x"]),
    )
    found, expected = (torch.autograd.grad(z.square().sum(), given[wanted]) for z in (y, plain))
    torch.testing.assert_close(found, expected)


def test_a_block_of_experts_sorts_its_rows_once(monkeypatch):
    model, args, kwargs = zoo.build("mixtral-8x7b-tiny", device="cpu")
    monkeypatch.setattr("shardfold.capture.export.one_operator", nullcontext)  # an operator each
    with captured_anew():
        program = capture_program(model, args, kwargs)
    lowered = alone(program, find_subdims(program.graph, rules_of(program.graph)))
    module = assemble(model, program, lowered, Settings())
    calls = []

    class Counted(Sorted):
        @classmethod
        def of(cls, expert, experts):
            calls.append(experts)
            return Sorted.of(expert, experts)

    monkeypatch.setattr(matrix, "Sorted", Counted)
    operators = [op for op in program.graph.ops if op.kind == "shardfold.expert_linear"]
    for _ in range(2):  # each step anew
        calls.clear()
        loss = module(*args, **kwargs)
        loss.backward()
        assert len(calls) == len({op.inputs[2] for op in operators}) < len(operators)
    torch.testing.assert_close(loss, model(*args, **kwargs))


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return gate.tanh() * up


def block(*rows: int, biased: bool = False) -> tuple[Any, ...]:
    """The operands of a block of experts with one that gets no row."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    between = str(described(gated, 16, torch.float64))
    given = (drawn(*rows, 5), torch.randint(E - 1, (*rows, 2)), drawn(*rows, 2))
    weights = (drawn(E, 6, 5), drawn(E, 4, 3), between)
    return (*given, *weights, *((drawn(E, 6), drawn(E, 4)) if biased else ()))


@pytest.mark.parametrize("biased", [False, True])
def test_a_block_adds_up_what_its_experts_make_of_a_row(biased: bool) -> None:
    x, expert, share, up, down, _, *biases = given = block(7, biased=biased)
    first = torch.einsum("tkum,tm->tku", up[expert], x) + (biases[0][expert] if biased else 0)
    made = torch.einsum("tknf,tkf->tkn", down[expert], gated(first))
    expected = ((made + (biases[1][expert] if biased else 0)) * share.unsqueeze(-1)).sum(1)
    found = torch.ops.shardfold.routed_experts(*given)
    torch.testing.assert_close(found, expected)
    trained = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    grads = (torch.autograd.grad(y.square().sum(), trained) for y in (found, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("biased", [False, True])
def test_a_compiler_can_take_a_block_for_granted(biased: bool) -> None:
    torch.library.opcheck(torch.ops.shardfold.routed_experts.default, block(7, biased=biased))
