"""Statistics of parts, pooled: as exact as those of the whole, however far it is from zero.

Batch norm of a part: whole where there are no others, and alike however its passes are done.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardfold.runtime.ops.norms import BatchNorm, Native, Shared, Written, _centred, passes_for


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


EPS = 1e-5


def drawn(device="cpu", dtype=torch.double, shape=(6, 5, 4, 3)):
    torch.manual_seed(0)
    x = (3 + torch.randn(shape, device=device)).to(dtype).requires_grad_()
    weight, bias = (torch.randn(shape[1], device=device).to(dtype) for _ in range(2))
    return x, weight.requires_grad_(), bias.requires_grad_()


def normalised(x, weight, bias, passes):
    shared = Shared(x.numel() // x.shape[1], EPS, lambda sums: sums, passes)
    return BatchNorm.apply(x, weight, bias, shared)


@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (7, 5)])
def test_the_only_part_is_the_whole(shape):
    x, weight, bias = drawn(shape=shape)
    y, mean, variance = normalised(x, weight, bias, Written)
    expected = functional.batch_norm(x, None, None, weight, bias, True, eps=EPS)
    torch.testing.assert_close(y, expected)
    dims = [d for d in range(x.dim()) if d != 1]
    torch.testing.assert_close(mean, x.mean(dims))
    torch.testing.assert_close(variance, x.var(dims, unbiased=False))
    g = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(z, (x, weight, bias), g) for z in (y, expected))
    torch.testing.assert_close(found, wanted)


def test_parts_give_what_the_whole_gives():
    """The sums of two parts are added up, as two devices would."""
    x, weight, bias = drawn()
    parts = [x[:4], x[4:]]
    count = x.numel() // x.shape[1]
    own = [Written.spread(part) for part in parts]
    sums = [
        torch.stack([n * m, s + n * m.square()])
        for (m, s), n in zip(own, [4 * 12, 2 * 12], strict=True)
    ]

    def reduce(sent):
        return sum(sums) if sent.shape == sums[0].shape else sent

    y = torch.cat(
        [
            BatchNorm.apply(part, weight, bias, Shared(count, EPS, reduce, Written))[0]
            for part in parts
        ]
    )
    expected = functional.batch_norm(x, None, None, weight, bias, True, eps=EPS)
    torch.testing.assert_close(y, expected)


def test_nothing_as_large_as_the_input_is_kept_beside_it():
    x, weight, bias = drawn(dtype=torch.bfloat16)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        normalised(x, weight, bias, Written)
    large = {t.untyped_storage().data_ptr() for t in kept if t.numel() >= x.numel()}
    assert large == {x.untyped_storage().data_ptr()}


def test_halves_are_normalised_in_float32():
    x, weight, bias = drawn(dtype=torch.bfloat16)
    y, _, _ = normalised(x, weight, bias, Written)
    expected = functional.batch_norm(
        x.float(), None, None, weight.float(), bias.float(), True, eps=EPS
    )
    assert torch.equal(y, expected.to(torch.bfloat16))


def test_a_compiler_gets_plain_operators():
    assert passes_for(torch.ones(2, 2), is_traced=True) is Written


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (7, 5)])
def test_the_kernels_of_a_gpu_do_the_same(dtype, shape):
    given = drawn("cuda", dtype, shape)
    results = []
    for passes in (Written, Native):
        y, mean, variance = normalised(*given, passes)
        g = torch.ones_like(y).mul_(y.detach())
        results.append((y, mean, variance, *torch.autograd.grad(y, given, g)))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
