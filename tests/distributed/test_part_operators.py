"""What users write about parameters and gradients, in parts beside whole ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import OpDispatcher

from shardfold.errors import RunError
from shardfold.runtime.lower import Stored
from shardfold.runtime.parameters import Keeping, keeping
from shardfold.runtime.part_operators import complete_dtensors
from shardfold.runtime.shards import Place, extent
from shardfold.sharding.layouts import storable

from .ranks import Launch

# Of p, a parameter with a gradient, and v, a plain tensor of its shape; `out` is compared, too.
STATEMENTS = """
p[3].zero_()
p[0] = 0.0
p[:2].mul_(2)
p[1:4, 2:5].add_(1.0)
p[0, 0] += 3.0
p[...] = 1.5
p[-1] = p[0]
p[0] = p.grad[1]
p[:2] = v[1:3]
p[0], p[1] = p[1].clone(), p[0].clone()
p[0] = torch.arange(float(p.shape[1]))
p.data[:, 2] = 0
p.detach()[0].mul_(0.5)
p.grad[2] = 0
p.grad[0] *= 0.5
p.grad[[0, 2]] = 0
p.grad[p.grad.abs() > 1] = 0
p[v > 0] = 0.0
p[p.norm(dim=1) < 2] = 0
p[[0, 1]] = p[[1, 0]]
p[torch.tensor([0, 1]), torch.tensor([2, 3])] = 9.0
p.t()[1].zero_()
p.T[0].zero_()
p.view(-1)[3:11].zero_()
p.view(-1).clamp_(-0.1, 0.1)
p.flatten()[5] = 1.0
q = p.view(2, -1)[1] if p.shape[0] % 2 == 0 else p[1]; q.clamp_(0)
p.narrow(0, 1, 2).fill_(1)
p.chunk(2, 1)[1].mul_(3)
p.unsqueeze(0)[0, 1].zero_()
p.diagonal().fill_(1)
p.fill_diagonal_(0)
p.unfold(0, 2, 2)[0].zero_()
p.as_strided((2, 2), (p.shape[1], 1)).zero_()
[row.div_(row.norm()) for row in p]
q = p[1:3]; q[0].zero_(); q[1] = p[0]; out = q
q = p[1:3][:, 1:4]; q.mul_(2); out = q.sum()
q = p[1]; r = p[1]; q.mul_(2); out = r
a, b = p.chunk(2, 0); a.copy_(a * 2); out = b
q = torch.zeros_like(p); q[1] = p[2]; out = q
q = p.clone(); q[:, 0].fill_(7); out = q
torch.relu_(p[0])
torch._foreach_mul_([p[0], p.grad[1]], 0.5)
p.add_(v)
p.copy_(v)
p.lerp_(v, 0.3)
p.addcmul_(v, v, value=0.1)
v.mul_(0.9).add_(p, alpha=0.1); out = v
v.copy_(p); out = v
torch._foreach_copy_([p], [v])
torch.mul(p, v, out=p)
out = torch.where(p > 0, p, v)
out = v @ p.t()
out = nn.functional.linear(v, p)
out = torch.cat([p, v])
out = nn.functional.mse_loss(p, p.grad)
out = nn.functional.embedding(torch.tensor([0, 2]), p)
p.data = v * 2; p[0] = 1
b = p.data; p.data = v.clone(); out = p.sum(); p.data = b
p.grad = v * 2
nn.utils.vector_to_parameters(torch.arange(float(p.numel())), [p])
out = nn.utils.parameters_to_vector([p, p.grad])
nn.init.eye_(p)
nn.init.orthogonal_(p)
nn.init.normal_(p, 0, 0.02)
nn.init.trunc_normal_(p, std=0.02)
nn.init.sparse_(p, 0.3)
p.grad.add_(torch.randn_like(p.grad), alpha=0.01)
p[0].uniform_()
out = torch.bernoulli(p.sigmoid())
out = nn.functional.dropout(p, 0.5)
p.div_(p.norm(dim=1, keepdim=True).clamp_(min=1))
p.div_(p.norm().clamp_(min=1e-6))
p.tril_()
p.renorm_(2, 0, 1.0)
p.cumsum_(0)
p.index_add_(0, torch.tensor([1, 1]), v[:2])
p.view(-1).index_add_(0, torch.tensor([0, 3]), torch.tensor([1.0, 2.0]))
p.scatter_(0, torch.zeros(1, p.shape[1], dtype=torch.long), v[:1])
p.masked_scatter_(v > 0, v)
p.fill_(p.mean())
p.mul_(p.abs() > p.abs().flatten().kthvalue(4).values)
p.copy_(p[torch.randperm(p.shape[0])])
p.t_(); p.t_()
out = p[p > 0]
out = p.argmax(dim=1)
out = p.unique()
out = p.tolist()
out = p.detach().numpy().sum()
out = torch.allclose(p, v)
out = torch.linalg.pinv(p)
a = p.norm(dim=1); a += 1; out = p / a[:, None]
out = p.norm(dim=0).sum()
out = p.norm(3, dim=1).cumsum(0)
out = torch.stack([p.norm(dim=0).mean(), p.grad.norm(1)]).sum()
out = (p > 0).any(0) * 2.0 + (p > 0).all(0).sum()
out = p.amax(0).sum() * p.amin(1).prod()
""".strip().splitlines()

EACH = 2  # so many of the storages are tried with each statement
SUBDIMS = {"rows": ((6, 8), (0, 1)), "packed": ((3, 4, 5), (0, 0, 1)), "uneven": ((5, 7), (0, 1))}
Case = tuple[str, Keeping, Tensor]


def storages(rank: int, shape: tuple[int, ...]) -> Iterator[Case]:
    """Every storage that can be planned of a few tensors."""
    place = Place.of_rank(rank, shape)
    for name, (subdims, dims) in SUBDIMS.items():
        sizes = [math.prod(n for n, d in zip(subdims, dims, strict=True) if d == k) for k in (0, 1)]
        whole = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).double()
        for row in product(range(-1, len(subdims)), repeat=len(shape)):
            if storable(row, subdims, dims, shape) == row:
                kept = keeping(Stored(0, row, extent(subdims, dims, 2, row, place), shape))
                yield f"{name} {row}", kept, whole


def plain(found: Any) -> list[Tensor]:
    """What came out, whole and flat."""
    if isinstance(found, list | tuple):
        return [each for one in found for each in plain(one)]
    if isinstance(found, DTensor):
        found = found.full_tensor()
    return [torch.as_tensor(found, dtype=torch.float64)]


@torch.no_grad()
def left(statement: str, parameter: Any) -> list[Tensor]:
    """What a statement gives, and leaves in the parameter and its gradient."""
    torch.manual_seed(3)
    v = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)).double()
    names: dict[str, Any] = {"torch": torch, "nn": nn, "p": parameter, "v": v}
    exec(statement, names)
    return plain([names.get("out", 0), parameter.detach(), parameter.grad])


def otherwise(rank: int, shape: tuple[int, ...]) -> list[str]:
    """The statements that leave something else of a parameter in parts than of a whole one."""
    complete_dtensors()
    torch.set_default_dtype(torch.float64)
    mesh, told = init_device_mesh("cpu", shape), []
    cases = [case for case in storages(rank, shape) if case[1].part(case[2]).shape != case[2].shape]
    assert len(cases) >= 6
    for number, statement in enumerate(STATEMENTS):
        every = len(cases) // EACH
        for label, kept, whole in cases[number % every :: every]:
            single = nn.Parameter(whole.clone())
            split = kept.parameter(kept.part(whole), mesh, True)
            single.grad, split.grad = whole + 1, kept.wrapped(kept.part(whole + 1), mesh)
            expected = left(statement, single)
            try:
                found = left(statement, split)
                same = [torch.allclose(*pair) for pair in zip(found, expected, strict=True)]
            except (RuntimeError, NotImplementedError) as error:
                same = [False]
                label += f" {error}"
            if not all(same):
                told.append(f"{label}: {statement}")
    torch.set_default_dtype(torch.float32)
    return told


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_parts_are_written_and_read_as_the_whole(shape: tuple[int, ...], on_ranks: Launch) -> None:
    for told in on_ranks(otherwise, math.prod(shape), shape):
        assert told == []


def refused(rank: int) -> tuple[list[str], bool]:
    complete_dtensors()
    mesh = init_device_mesh("cpu", (2,))
    kept, whole = next((k, w) for _, k, w in storages(rank, (2,)) if k.placements[0].is_shard())
    split, said = kept.parameter(kept.part(whole), mesh, False), []
    for change in (
        lambda p: p.add_(torch.full((6, 8), float(rank))),
        lambda p: setattr(p, "data", torch.zeros(3)),
    ):
        with pytest.raises(RunError) as error:
            change(split)
        said.append(str(error.value))
    view = split[1:3, 1:]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        split.mul_(2)
    said += [str(warning.message) for warning in caught]
    return said, bool(view.isnan().all())


def test_what_parts_cannot_know_is_said(on_ranks: Launch) -> None:
    for said, is_lost in on_ranks(refused, 2):
        assert "The ranks gave add_ plain tensors (of shape [6, 8]) of different values" in said[0]
        assert "of shape [6, 8] and torch.float64 cannot be given the data" in said[1]
        assert "take the view again after the write" in said[2]
        assert is_lost


def test_a_torch_that_works_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OpDispatcher, "_dispatch_fast_path_python_tail")
    with pytest.raises(RunError, match="there is no _dispatch_fast_path_python_tail"):
        complete_dtensors.__wrapped__()
