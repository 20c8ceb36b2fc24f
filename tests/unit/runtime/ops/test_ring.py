"""Attention in pieces: who sees what, who has what, and the numbers of one call."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from allocations import Allocations
from shardfold.graph import Op, Operand, TensorType
from shardfold.operators.attention import _in_slices
from shardfold.operators.kernels import Access
from shardfold.operators.notation import Call
from shardfold.operators.registry import operator_of
from shardfold.runtime.ops import ring as rings
from shardfold.runtime.ops.ring import Deal, Ring, RingAttention, blocks

cuts = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def ranges(lengths: list[int]) -> list[tuple[int, int]]:
    """Ranges of these lengths, one after the other."""
    ends = list(itertools.accumulate(lengths, initial=0))
    return list(itertools.pairwise(ends))


def positions(found: Any) -> list[int]:
    return [place for low, high in found for place in range(low, high)]


@given(cuts, cuts, st.booleans(), st.booleans(), st.randoms())
def test_blocks_are_all_that_is_seen_once(
    rows: list[int], columns: list[int], is_causal: bool, shuffled: bool, rng: Any
) -> None:
    queries, keys = ranges(rows), ranges(columns)
    if shuffled:
        rng.shuffle(queries)
        rng.shuffle(keys)
    at, of = positions(queries), positions(keys)
    seen = torch.zeros(len(at), len(of), dtype=torch.int64)
    for block in blocks(tuple(queries), tuple(keys), is_causal=is_causal):
        (a, b), (c, d) = block.queries, block.keys
        part = torch.ones(b - a, d - c, dtype=torch.int64)
        seen[a:b, c:d] += part.tril() if block.is_causal else part
    wanted = torch.tensor([[int(not is_causal or k <= q) for k in of] for q in at])
    assert torch.equal(seen, wanted)


@given(cuts, st.randoms())
def test_every_position_is_dealt_once_and_nobody_has_more_than_before(
    lengths: list[int], rng: Any
) -> None:
    own = ranges(lengths)
    rng.shuffle(own)
    deal = Deal.of(own, 0, in_balance=True)
    hands = [positions(deal.ranges(member)) for member in range(len(own))]
    assert sorted(place for hand in hands for place in hand) == positions(ranges(lengths))
    assert [len(hand) for hand in hands] == [high - low for low, high in own]


@given(st.integers(1, 9), st.integers(1, 9))
def test_equal_parts_are_dealt_in_balance(members: int, rows: int) -> None:
    deal = Deal.of(ranges([rows] * members), 0, in_balance=True)
    work = [sum(place + 1 for place in positions(deal.ranges(k))) for k in range(members)]
    # The two pieces of a hand mirror each other, but for one row, where their number is odd.
    assert max(work) - min(work) <= (rows % 2) * rows * members


class Threads:
    """Collectives between threads, as `Groups` has them between processes."""

    def __init__(self, members: int) -> None:
        pairs = itertools.product(range(members), repeat=2)
        self.boxes: dict[Any, SimpleQueue[Tensor]] = {pair: SimpleQueue() for pair in pairs}
        self.members = members

    def at(self, me: int) -> Any:
        boxes, everyone = self.boxes, range(self.members)

        class Own:
            def start_hop(self, tensor: Tensor, shape: Any, to: int, of: int, axes: Any) -> Any:
                boxes[me, to].put(tensor.clone())
                return lambda: boxes[of, me].get(timeout=20).view(shape)

            def all_to_all(self, sent: list[Tensor], counts: list[int], axes: Any) -> list[Tensor]:
                for member in everyone:
                    boxes[me, member].put(sent[member].reshape(-1).clone())
                found = [boxes[member, me].get(timeout=20) for member in everyone]
                assert [len(piece) for piece in found] == counts
                return found

        return Own()


@pytest.mark.parametrize("members", [1, 2, 3, 4])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float64"), ("cuda", "bfloat16")])
def test_pieces_give_the_numbers_of_one_call(
    members: int, is_causal: bool, device: str, dtype: str
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(0)
    rows, kind = 50, getattr(torch, dtype)
    query, key, value, dy = (
        torch.randn(2, heads, rows, 16, dtype=kind, device=device) for heads in (4, 2, 2, 4)
    )
    whole = [t.clone().double().requires_grad_() for t in (query, key, value)]
    out = scaled_dot_product_attention(*whole, is_causal=is_causal, enable_gqa=True, scale=0.3)
    wanted = [out, *torch.autograd.grad(out, whole, dy.double())]
    chunk = -(-rows // members)
    own = [(k * chunk, min(rows, (k + 1) * chunk)) for k in range(members)]
    threads = Threads(members)

    def one(me: int) -> list[Tensor]:
        deals = [Deal.of(own, me, in_balance=is_causal and members > 1) for _ in range(2)]
        low, high = own[me]
        parts = [t[:, :, low:high].clone().requires_grad_() for t in (query, key, value)]
        how = (Ring(*deals, is_causal, 0.3), threads.at(me))
        found = RingAttention.apply(*parts, None, how)
        return [found, *torch.autograd.grad(found, parts, dy[:, :, low:high])]

    with ThreadPoolExecutor(members) as pool:
        found = list(pool.map(one, range(members)))
    near = {"rtol": 1e-10, "atol": 1e-10} if kind is torch.float64 else {"rtol": 0.03, "atol": 0.03}
    for k, expected in enumerate(wanted):
        together = torch.cat([each[k] for each in found], 2).double()
        torch.testing.assert_close(together, expected, **near)


FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {  # leads of queries, keys; width
    "window": ((2, 4), (2, 2), 10),
    "wide values": ((2, 4), (2, 2), 24),
    "narrow values": ((2, 4), (2, 4), 6),
    "no batch": ((4,), (4,), 10),
    "two batches": ((2, 3, 4), (2, 3, 2), 10),
    "one batch of keys": ((3, 4), (1, 4), 10),
}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_any_form_of_a_call_in_pieces(form: str, is_causal: bool) -> None:
    if form == "window" and is_causal:
        pytest.skip("a mask says what is seen")
    torch.manual_seed(0)
    lead, shared, wide = FORMS[form]
    rows, members = 34, 3
    shapes = ((*lead, rows, 10), (*shared, rows, 10), (*shared, rows, wide), (*lead, rows, wide))
    query, key, value, dy = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    gap = torch.arange(rows)[:, None] - torch.arange(rows)
    mask = (gap >= 0) & (gap < 5) & (torch.arange(rows) > 2)[:, None] if form == "window" else None
    whole = [t.clone().requires_grad_() for t in (query, key, value)]
    out = scaled_dot_product_attention(
        *whole, mask, is_causal=is_causal, enable_gqa=lead[-1] != shared[-1], scale=0.3
    )
    wanted = [out, *torch.autograd.grad(out, whole, dy)]
    own, threads = ranges([12, 12, 10]), Threads(members)

    def one(me: int) -> list[Tensor]:
        deal = Deal.of(own, me, in_balance=is_causal)
        low, high = own[me]
        parts = [t[..., low:high, :].clone().requires_grad_() for t in (query, key, value)]
        how = (Ring(deal, deal, is_causal, 0.3), threads.at(me))
        found = RingAttention.apply(*parts, None if mask is None else mask[low:high], how)
        return [found, *torch.autograd.grad(found, parts, dy[..., low:high, :])]

    with ThreadPoolExecutor(members) as pool:
        found = list(pool.map(one, range(members)))
    for k, expected in enumerate(wanted):
        together = torch.cat([each[k] for each in found], -2)
        torch.testing.assert_close(together, expected, rtol=1e-10, atol=1e-10)


class Alone:
    """A device among others of which nothing comes but room for it."""

    def start_hop(self, tensor: Tensor, shape: Any, to: int, of: int, axes: Any) -> Any:
        found = tensor.new_zeros(shape)
        return lambda: found

    def all_to_all(self, sent: list[Tensor], counts: list[int], axes: Any) -> list[Tensor]:
        return [sent[0].new_zeros(count) for count in counts]


def as_on_cuda(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Any:
    """What CUDA's kernel takes and gives, with the copies of shared heads around it."""
    copies = [rings._like(t, q) for t in (k, v)]
    del copies
    return torch.zeros_like(q), q.new_zeros(q.shape[:-1], dtype=torch.float32)


def as_on_cuda_backward(*given: Any) -> Any:
    _, q, k, v = given[:4]
    copies = [rings._like(t, q) for t in (k, v)]
    dq, dk, dv = torch.zeros_like(q), *map(torch.zeros_like, copies)
    return dq, rings._fewer(dk, k), rings._fewer(dv, v)


def counted(shapes: list[tuple[int, ...]], dtype: str, *, is_causal: bool) -> dict[str, float]:
    """The bytes of every life that prices take a ring for, beside what every attention keeps."""
    query, key = (TensorType(shape, dtype) for shape in shapes)
    names = ("query", "key", "value")
    attributes = {"is_causal": is_causal, "enable_gqa": True}
    operands = tuple(Operand(name, k) for k, name in enumerate(names))
    op = Op("a", "aten.scaled_dot_product_attention", operands, (3,), attributes)
    found = dict.fromkeys(("kept", "forward", "backward"), 0.0)
    call, access = Call(op, (query, key, key), (query,)), Access(attributes=attributes)
    for extra in operator_of(op.kind).extras(call, access):
        if extra.factor == "c":
            items = math.prod((query, key, key, query)[extra.of].shape)
            found[extra.life] += extra.per_item * items
    return found


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_ring_takes_the_memory_that_is_counted(
    dtype: str, heads: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA: its fused kernel for halves, rows in slices for float32."""
    fused = {"cpu": (as_on_cuda, as_on_cuda_backward)} if dtype == "bfloat16" else {}
    monkeypatch.setattr(rings, "FUSED", fused)
    rows, members = 256, 4
    shapes = [(1, heads, rows, 64), (1, 4, rows, 64)]
    kind = getattr(torch, dtype)
    given = [torch.randn(s, dtype=kind).requires_grad_() for s in (*shapes, shapes[1])]
    own = ranges([rows] * members)
    deal = Deal.of(own, 0, in_balance=is_causal)
    with Allocations() as seen:
        out = RingAttention.apply(*given, None, (Ring(deal, deal, is_causal, 0.1), Alone()))
        forward = seen.most
        dy = torch.ones_like(out)
        seen.most = before = seen.now
        torch.autograd.grad(out, given, dy)
    wanted = counted(shapes, dtype, is_causal=is_causal)
    kept = sum(t.nbytes for t in (*given[1:], out))
    assert 0.7 < forward / (kept + wanted["kept"] + wanted["forward"]) < 1.001
    least = 0.95 if dtype == "bfloat16" else 0.7  # of slices, the worst is counted
    assert least < (seen.most - before) / wanted["backward"] < 1.001


@pytest.mark.parametrize("width", [64, 256, 264])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("is_masked", [True, False])
def test_rows_are_priced_in_slices_where_a_gpu_runs_them_so(
    dtype: str, width: int, is_masked: bool
) -> None:
    shapes = [(1, 8, 512, width), (1, 2, 512, width), (1, 2, 512, width)]
    with FakeTensorMode():
        given = [torch.empty(s, dtype=getattr(torch, dtype), device="cuda") for s in shapes]
        mask = torch.empty(512, 512, dtype=torch.bool, device="cuda") if is_masked else None
        is_sliced = rings._rows_at_once(*given, mask) is not None
    types = [TensorType(shape, dtype) for shape in shapes]
    types += [TensorType((512, 512), "bool")] if is_masked else []
    assert _in_slices(types) == is_sliced
