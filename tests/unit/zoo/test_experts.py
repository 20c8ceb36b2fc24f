"""The experts' operator equals one matrix product a row, split or whole."""

from __future__ import annotations

import pytest
import torch

from shardfold.zoo.experts import expert_linear

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


def test_operator_is_well_formed() -> None:
    x, weight, expert = draw(6, 2)
    torch.library.opcheck(expert_linear, (x, weight, expert))


def test_shards_of_the_experts_add_up() -> None:
    x, weight, expert = draw(6, 2)
    parts = [
        expert_linear(x, weight[first : first + 2], expert - first) for first in range(0, E, 2)
    ]
    torch.testing.assert_close(sum(parts), expert_linear(x, weight, expert))
