"""Statistics of parts, pooled: as exact as those of the whole, however far it is from zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardfold.runtime.ops.norms import _centred


def pooled(parts: list[Tensor], dims: list[int], count: int) -> list[tuple[Tensor, ...]]:
    """What every device finds, when each has one of the parts."""
    sent: list[Tensor] = []

    def note(sums: Tensor) -> Tensor:
        sent.append(sums)
        return sums

    for part in parts:
        _centred(part, dims, count, note)
    total = torch.stack(sent).sum(0)
    return [_centred(part, dims, count, lambda sums: total.clone()) for part in parts]


@pytest.mark.parametrize("mean", [0.0, 10.0, 1000.0])
@pytest.mark.parametrize("cuts", [[4, 4], [1, 7], [0, 8]])
def test_parts_give_the_statistics_of_the_whole(mean: float, cuts: list[int]) -> None:
    torch.manual_seed(0)
    whole = torch.randn(8, 3, 5) * torch.tensor([0.1, 1.0, 3.0])[:, None] + mean
    exact = whole.double()
    found = pooled(list(whole.split(cuts)), [0, 2], 40)
    variance, middle = torch.var_mean(exact, [0, 2], correction=0, keepdim=True)
    for _, found_mean, found_variance in found:
        torch.testing.assert_close(found_mean, middle, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found_variance, variance, rtol=5e-5, atol=0)
    apart = torch.cat([each for each, _, _ in found])
    assert apart.dtype == torch.float32
    torch.testing.assert_close(apart.double(), exact - middle, rtol=1e-5, atol=1e-6 * (1 + mean))


def test_sums_are_sent_in_float64() -> None:
    seen: list[torch.dtype] = []

    def note(sums: Tensor) -> Tensor:
        seen.append(sums.dtype)
        return sums

    _centred(torch.randn(4, 6), [1], 6, note)
    assert seen == [torch.float64]
