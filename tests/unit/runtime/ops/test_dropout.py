"""Dropout by position: one kernel draws what operators of torch draw, whatever part is here.

The kernels run on a GPU; or anywhere in Triton's interpreter, where it is installed and asked for:

    TRITON_INTERPRET=1 pytest tests/unit/runtime/ops/test_dropout.py
"""

from __future__ import annotations

import importlib.util
import math
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardfold.graph import Op, Operand, TensorType
from shardfold.operators.attention import TABLE, drops_in_place
from shardfold.operators.kernels import Access
from shardfold.operators.notation import Call
from shardfold.runtime.ops import attention, counter_rng
from shardfold.runtime.ops.counter_rng import kernels_for, random_bits, runs
from shardfold.runtime.ops.dropout import dropped
from shardfold.runtime.ops.local_op import Context
from shardfold.runtime.process_groups import Groups
from shardfold.runtime.shards import Place, extent

IS_INTERPRETED = bool(os.environ.get("TRITON_INTERPRET")) and importlib.util.find_spec("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_A_GPU = pytest.mark.skipif(
    DEVICE.type == "cpu" and not IS_INTERPRETED, reason="needs a GPU, or Triton's interpreter"
)
P = 0.3

DIMS: dict[str, list[list[tuple[int, tuple[int, int]]]]] = {
    "all": [[(5, (0, 5))], [(300, (0, 300))]],
    "rows": [[(7, (2, 5))], [(300, (0, 300))], [(3, (0, 3))]],
    "columns": [[(7, (0, 7))], [(300, (100, 333))]],
    "pieces": [[(3, (1, 3)), (5, (0, 5))], [(4, (0, 2)), (9, (3, 8))]],
    "six runs": [[(3, (1, 3))], [(2, (0, 1)), *[(3, (0, 2))] * 3], [(5, (1, 5)), (4, (1, 4))]],
    "seven runs": [[(3, (0, 2)), (3, (0, 2))], [(3, (0, 2))] * 3, [(3, (1, 3)), (3, (0, 2))]],
    "far": [[(2**20, (2**20 - 1, 2**20))], [(2**30, (2**30 - 7, 2**30))]],
    "one": [[(1, (0, 1))], []],
    "none": [[(4, (2, 2))], [(8, (0, 8))]],
}


def context(device: torch.device = DEVICE, step: int = 5) -> Context:
    return Context(Groups(Place((), ())), device, seed=3, step=step)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too."""
    from shardfold.runtime.ops import dropout_kernels

    def found(of: Context) -> Any:
        return None if of.traced or of.device.type == "meta" else dropout_kernels

    for module in ("counter_rng", "dropout", "attention"):
        monkeypatch.setattr(f"shardfold.runtime.ops.{module}.kernels_for", found)


def plainly(dims: Any, step: int = 5) -> torch.Tensor:
    """The bits as operators of torch find them."""
    return counter_rng._bits(dims, context(torch.device("cpu"), step), 7)


@ON_A_GPU
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("dims", DIMS.values(), ids=DIMS)
def test_a_kernel_draws_the_same_bits(dims: Any) -> None:
    for step in range(3):
        expected = plainly(dims, step)
        assert torch.equal(random_bits(dims, context(step=step), 7).cpu(), expected)
        kept = counter_rng.keep_mask(dims, P, context(step=step), 7)
        assert torch.equal(kept.cpu(), expected >= int(P * 2**53))


@ON_A_GPU
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_kernel_drops_what_lies_in_any_order(order: Any, gap: bool, dtype: torch.dtype) -> None:
    dims = DIMS["rows"]
    shape = [math.prod(high - low for _, (low, high) in pieces) for pieces in dims]
    back = [order.index(dim) for dim in range(3)]
    x = torch.randn([shape[dim] for dim in order], device=DEVICE).to(dtype).permute(back)
    x = (torch.cat([x, x], -1)[..., : shape[-1]] if gap else x).detach().requires_grad_()
    scope = context()
    scope.drawn = []
    y = dropped(x, dims, P, scope, 7)
    kept = (plainly(dims) >= int(P * 2**53)).to(DEVICE)
    assert [torch.equal(mask, kept) for mask in scope.drawn] == [True]
    expected = (x.detach().double() * kept / (1 - P)).to(dtype)
    torch.testing.assert_close(y, expected)
    assert gap or y.stride() == x.stride()
    gradient = torch.randn(shape, device=DEVICE).to(dtype)
    (found,) = torch.autograd.grad(y, x, gradient)
    torch.testing.assert_close(found, (gradient.double() * kept / (1 - P)).to(dtype))


def test_runs_are_as_few_as_can_be() -> None:
    assert [len(runs(dims)[1]) for dims in DIMS.values()] == [1, 1, 2, 3, 6, 7, 1, 1, 1]
    assert runs(DIMS["rows"], [2, 0, 1]) == (1800, [(3, 1), (900, 3)])


def test_a_compiler_and_a_cpu_get_operators_of_torch() -> None:
    assert kernels_for(context(torch.device("cpu"))) is None
    traced = context(torch.device("cuda"))
    traced.traced = True
    assert kernels_for(traced) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_dropout_keeps_a_byte_an_element(dtype: torch.dtype) -> None:
    x = torch.randn(7, 300).to(dtype).requires_grad_()
    scope, kept = context(torch.device("cpu")), []
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
    "short keys": {"keys": 23},
    "long keys": {"keys": 70, "is_causal": True},
    "part": {"row": (0, 2), "is_causal": True},
    "heads in parts": {"row": (1, -1)},
    "rows in pieces": {"row": (-1, 3)},
    "shared heads": {"shared": 2, "enable_gqa": True},
    "wide values": {"width": 40},
    "mask": {"mask": (2, 1, 1, 48)},
    "full mask": {"mask": (2, 4, 48, 48), "scale": 1},
    "no batch": {"dims": 3, "is_causal": True},
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


def results(site: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    y = attention._attention(site)(given, context())
    torch.manual_seed(1)
    gradient = torch.randn(y.shape).to(y)
    return [y, *torch.autograd.grad(y, given[:3], gradient)]


@ON_A_GPU
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_kernel_gives_the_numbers_of_operators_of_torch(
    call: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter multiplies no bfloat16."""
    site, dtype = site_of(**call), torch.float16 if DEVICE.type == "cpu" else torch.bfloat16
    given = operands(site, dtype)
    wide = [t if t.dtype == torch.bool else t.detach().double().requires_grad_() for t in given]
    expected = results(site, wide)
    request.getfixturevalue("by_kernels")
    monkeypatch.setattr(attention, "dropped", None)  # the kernel has taken the call
    near = 0.01 if dtype == torch.bfloat16 else 0.002  # operators of torch: 0.0085 and 0.0013
    for found, wanted in zip(results(site, given), expected, strict=True):
        assert (found.double() - wanted).norm() <= near * wanted.norm() + 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["whole", "causal", "shared heads", "wide values", "heads in parts"]
)
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
        y = attention._attention(site)(given, context(torch.device("cpu")))
    own = {t.untyped_storage().data_ptr() for t in (*given, y)}
    rows, keys = y.shape[-2], given[1].shape[-2]
    small = int(CALLS[name].get("is_causal", False))  # bytes of a causal mask
    made = sum(size for at, size in kept.items() if at not in own) - small * rows * keys

    names = ("query", "key", "value")
    kinds = tuple(TensorType(tuple(t.shape), str(t.dtype)[6:]) for t in (*given, y))
    op = Op(
        "a", "aten.scaled_dot_product_attention", tuple(map(Operand, names, range(3))), (3,),
        {"dropout_p": P, **CALLS[name]},
    )  # fmt: skip
    access = Access(attributes=op.attributes, is_compiled=True)
    call = Call(op, kinds[:3], kinds[3:])
    extras = TABLE["aten.scaled_dot_product_attention"].extras(call, access)
    every = [math.prod(kind.shape) for kind in kinds]
    assert made == sum(e.per_item * every[e.of] for e in extras if e.life == "kept")


def test_the_kernel_takes_halves_of_narrow_heads() -> None:
    shapes = [(2, 4, 48, 64)] * 3
    halves = ["bfloat16"] * 3
    assert drops_in_place(shapes, halves, is_strided=False)
    assert drops_in_place([*shapes, (2, 1, 1, 48)], [*halves, "bool"], is_strided=False)
    assert not drops_in_place([*shapes, (2, 1, 1, 48)], [*halves, "bfloat16"], is_strided=False)
    assert not drops_in_place(shapes, ["float32"] * 3, is_strided=False)
    assert not drops_in_place(shapes, halves, is_strided=True)
    assert not drops_in_place([(2, 4, 48, 192)] * 3, halves, is_strided=False)
    assert not drops_in_place([(48, 64)] * 3, halves, is_strided=False)
