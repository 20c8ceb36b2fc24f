"""Attention in pieces: who sees what, who has what, and the numbers of one call."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

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
