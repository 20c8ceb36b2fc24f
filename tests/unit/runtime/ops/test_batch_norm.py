"""Batch norm of a part: whole where there are no others, and alike however its passes are done."""

import pytest
import torch
from torch.nn import functional

from shardfold.runtime.ops.batch_norm import BatchNorm, Native, Shared, Written, passes_for

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
