"""Dropout by position: what is kept of it for backward, and of attention that has it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardfold.graph import Op, Operand, TensorType
from shardfold.operators.attention import TABLE
from shardfold.operators.kernels import Access
from shardfold.operators.notation import Call
from shardfold.runtime.ops import attention
from shardfold.runtime.ops.dropout import dropped
from shardfold.runtime.ops.local_op import Context
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.shards import Place, extent

DEVICE = torch.device("cpu")
P = 0.3


def context() -> Context:
    return Context(Groups(Place((), ())), DEVICE, seed=3, step=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_dropout_keeps_a_byte_an_element(dtype: torch.dtype) -> None:
    x = torch.randn(7, 300).to(dtype).requires_grad_()
    scope, kept = context(), []
    scope.drawn = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = dropped(x, [[(9, (2, 9))], [(300, (0, 300))]], P, scope, 7)
    mask = scope.drawn[0]
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.bool, x.numel())]
    torch.testing.assert_close(y, (x.double() * mask / (1 - P)).to(dtype))
    gradient = torch.randn(x.shape).to(dtype)
    (found,) = torch.autograd.grad(y, x, gradient)
    torch.testing.assert_close(found, (gradient.double() * mask / (1 - P)).to(dtype))


CALLS: dict[str, dict[str, Any]] = {
    "whole": {},
    "causal": {"is_causal": True},
    "shared heads": {"shared": 2, "enable_gqa": True},
    "wide values": {"width": 40},
    "heads in parts": {"row": (1, -1)},
}


def site_of(
    *, row: Any = (-1, -1), keys: int = 48, width: int = 16, shared: int = 1, mask: Any = None,
    dims: int = 4, **arguments: Any,
) -> Any:  # fmt: skip
    """A call on the second device of (2, 2), and its operands: 48 rows in pieces of 2, 24."""
    place = Place((2, 2), (1, 1))
    subdims, of = (2, 4, 2, 24, width), (0, 1, 2, 2, 3)
    if dims == 3:
        subdims, of, row = subdims[1:], (0, 1, 1, 2), (-1, -1)
    result = extent(subdims, of, dims, row, place)
    lead, rows = result.shape[:-2], result.shape[-2]
    few = (*lead[:-1], lead[-1] // shared)
    shapes = [(*lead, rows, 16), (*few, keys, 16), (*few, keys, width)]
    known = {"dropout_p": P, **arguments}

    def part(base: str) -> tuple[int, int]:
        (_, (low, high)), (inner, _) = result.pieces(dims - 2)
        return low * inner, high * inner

    names = ["query", "key", "value", *(["attn_mask"] if mask else [])]
    return SimpleNamespace(
        number=7,
        results=[result],
        inputs=[SimpleNamespace(shape=shape) for shape in shapes],
        mask=mask,
        argument=lambda name, default=None: known.get(name, default),
        position=lambda name: names.index(name) if name in names else None,
        part=part,
        axes=lambda *bases: (),
    )


def operands(site: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Heads lie inside positions; in a full mask the fourth row sees nothing."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(each.shape) for each in site.inputs)
    lying = [t.transpose(-3, -2).contiguous().transpose(-3, -2) for t in (q, k, v)]
    made = [t.to(DEVICE, dtype).requires_grad_() for t in lying]
    if site.mask is not None:
        mask = torch.rand(site.mask) > 0.4
        if site.mask[-2] > 1:
            mask[..., 3, :] = False
        made.append(mask.to(DEVICE))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_weights_in_memory_are_priced(name: str, dtype: torch.dtype) -> None:
    """What operators of torch keep for backward beside operands and result."""
    site = site_of(**CALLS[name])
    given = [t.cpu().detach().requires_grad_() for t in operands(site, dtype)]
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = attention._attention(site)(given, context())
    own = {t.untyped_storage().data_ptr() for t in (*given, y)}
    rows, keys = y.shape[-2], given[1].shape[-2]
    small = 1 if CALLS[name].get("is_causal") else 0  # of a causal mask, a byte for a row and a key
    made = sum(size for at, size in kept.items() if at not in own) - small * rows * keys

    names = ("query", "key", "value")
    kinds = tuple(TensorType(tuple(t.shape), str(t.dtype)[6:]) for t in (*given, y))
    op = Op(
        "a", "aten.scaled_dot_product_attention", tuple(map(Operand, names, range(3))), (3,),
        {"dropout_p": P, **CALLS[name]},
    )  # fmt: skip
    access = Access(attributes=op.attributes)
    call = Call(op, kinds[:3], kinds[3:])
    extras = TABLE["aten.scaled_dot_product_attention"].extras(call, access)
    every = [math.prod(kind.shape) for kind in kinds]
    assert made == sum(e.per_item * every[e.of] for e in extras if e.life == "kept")
