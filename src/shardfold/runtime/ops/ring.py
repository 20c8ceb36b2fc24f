"""Attention over pieces of the keys: those at hand, or those that go round the devices of an axis.

Each device meets its queries with one piece of keys and values after the other. A piece gives a
result and the logarithm of each row's sum, by which results are put together. While a piece is met,
the next one comes. Backward, a piece comes round once more; what each device adds to its gradient
goes on to the next device behind it, and comes home last.

Of a causal mask every device takes an early and a late piece of queries and keys, so that each has
as much to do in every hop: positions are dealt out before, and results taken back after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardfold.runtime.ops.local_op import HALVES, statistics_dtype
from shardfold.runtime.process_groups import Axes, Groups
from shardfold.sharding.layouts import Bounds

Ranges = tuple[Bounds, ...]
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Deal:
    """The positions that each member of a group has: a range of its own, and those dealt to it.

    What is dealt is in ranges that each come from one member.
    """

    own: Ranges
    dealt: tuple[tuple[tuple[Bounds, int], ...], ...]
    at: int

    @classmethod
    def of(cls, own: Sequence[Bounds], at: int, *, in_balance: bool) -> Deal:
        """An early and a late piece for everyone, as long together as what they had; or just that.

        >>> Deal.of([(0, 4), (4, 8)], 0, in_balance=True).ranges(0)
        ((0, 2), (6, 8))
        """
        if not in_balance:
            return cls(tuple(own), tuple(((each, k),) for k, each in enumerate(own)), at)
        order = sorted(range(len(own)), key=lambda k: own[k])
        dealt: list[tuple[tuple[Bounds, int], ...]] = [()] * len(own)
        start = 0
        for turn in (order, order[::-1]):
            for member in turn:
                rows = own[member][1] - own[member][0]
                cut = (start, start + (rows // 2 if turn is order else rows - rows // 2))
                dealt[member] += tuple(_owned(own, order, cut))
                start = cut[1]
        return cls(tuple(own), tuple(dealt), at)

    def ranges(self, member: int) -> Ranges:
        """The positions dealt to a member, those that touch as one range."""
        found: list[Bounds] = []
        for (low, high), _ in self.dealt[member]:
            if found and found[-1][1] == low:
                found[-1] = (found[-1][0], high)
            else:
                found.append((low, high))
        return tuple(found)

    def rows(self, member: int) -> int:
        """How many positions a member has, as dealt."""
        return sum(high - low for (low, high), _ in self.dealt[member])

    def there(self, tensor: Tensor, groups: Groups, axes: Axes) -> Tensor:
        """From everyone's own range to what is dealt."""
        first = self.own[self.at][0]
        sent = [
            [tensor.narrow(-2, low - first, high - low) for (low, high), k in each if k == self.at]
            for each in self.dealt
        ]
        mine = self.dealt[self.at]
        came = [[each for each, k in mine if k == member] for member in range(len(self.own))]
        found = _exchanged(tensor, sent, came, groups, axes)
        return torch.cat([found[each] for each, _ in mine], -2)

    def back(self, tensor: Tensor, groups: Groups, axes: Axes) -> Tensor:
        """From what is dealt to everyone's own range."""
        mine = self.dealt[self.at]
        parts = tensor.split([high - low for (low, high), _ in mine], -2)
        pairs = list(zip(parts, mine, strict=True))
        sent = [[part for part, (_, k) in pairs if k == member] for member in range(len(self.own))]
        came = [[each for each, k in dealt if k == self.at] for dealt in self.dealt]
        found = _exchanged(tensor, sent, came, groups, axes)
        return torch.cat([found[each] for each in sorted(found)], -2)


def _owned(
    own: Sequence[Bounds], order: Sequence[int], cut: Bounds
) -> Iterator[tuple[Bounds, int]]:
    """The ranges that members have of a cut through all their positions in order."""
    passed = 0
    for member in order:
        low, high = own[member]
        first, last = max(cut[0] - passed, 0), min(cut[1] - passed, high - low)
        if first < last:
            yield (low + first, low + last), member
        passed += high - low


def _exchanged(
    tensor: Tensor,
    sent: Sequence[Sequence[Tensor]],
    came: Sequence[Sequence[Bounds]],
    groups: Groups,
    axes: Axes,
) -> dict[Bounds, Tensor]:
    """What members send each other, by positions."""
    lead, features = tensor.shape[:-2], tensor.shape[-1]
    nothing = tensor.narrow(-2, 0, 0)
    sizes = [[high - low for low, high in each] for each in came]
    counts = [sum(each) * math.prod(lead) * features for each in sizes]
    flat = groups.all_to_all([torch.cat([nothing, *each], -2) for each in sent], counts, axes)
    found: dict[Bounds, Tensor] = {}
    for piece, each, rows in zip(flat, came, sizes, strict=True):
        parts = piece.view(*lead, sum(rows), features).split(rows, -2) if rows else ()
        found.update(zip(each, parts, strict=True))
    return found


@dataclass(frozen=True, slots=True)
class Block:
    """Local rows of queries that meet local rows of keys: all of them, or each those up to it."""

    queries: Bounds
    keys: Bounds
    is_causal: bool = False


def blocks(queries: Ranges, keys: Ranges, *, is_causal: bool) -> list[Block]:
    """What some positions see of others: rectangles, and squares on the diagonal.

    >>> blocks(((2, 4),), ((0, 4),), is_causal=True)  # doctest: +NORMALIZE_WHITESPACE
    [Block(queries=(0, 2), keys=(0, 2), is_causal=False),
     Block(queries=(0, 2), keys=(2, 4), is_causal=True)]
    """
    found: list[Block] = []
    for start, (low, high) in _placed(queries):
        for at, (first, last) in _placed(keys):
            for block in _seen((low, high), (first, last), is_causal=is_causal):
                (a, b), (c, d) = block.queries, block.keys
                moved = ((a - low + start, b - low + start), (c - first + at, d - first + at))
                found.append(Block(*moved, block.is_causal))
    return _joined(_joined(found, "keys"), "queries")


def _placed(ranges: Ranges) -> Iterator[tuple[int, Bounds]]:
    start = 0
    for low, high in ranges:
        yield start, (low, high)
        start += high - low


def _seen(queries: Bounds, keys: Bounds, *, is_causal: bool) -> Iterator[Block]:
    if not is_causal:
        yield Block(queries, keys)
        return
    cuts = sorted({*queries, *(cut for cut in keys if queries[0] < cut < queries[1])})
    for low, high in pairwise(cuts):
        before = (keys[0], min(keys[1], low))
        if before[0] < before[1]:
            yield Block((low, high), before)
        if keys[0] <= low and high <= keys[1]:
            yield Block((low, high), (low, high), True)


def _in_slices(found: Sequence[Block], rows: int) -> Iterator[Block]:
    """The same, of so many rows at most."""
    for block in found:
        (low, high), (first, last) = block.queries, block.keys
        for at in range(low, high, rows):
            end = min(at + rows, high)
            if not block.is_causal:
                yield Block((at, end), (first, last))
                continue
            if at > low:
                yield Block((at, end), (first, first + at - low))
            yield Block((at, end), (first + at - low, first + end - low), True)


def _joined(found: Sequence[Block], side: str) -> list[Block]:
    """Rectangles that touch along one side, and are the same on the other, as one."""
    other = "queries" if side == "keys" else "keys"
    done: list[Block] = []
    for block in sorted(found, key=lambda b: (b.is_causal, getattr(b, other), getattr(b, side))):
        last = done[-1] if done else None
        if (
            last is not None
            and not (last.is_causal or block.is_causal)
            and getattr(last, other) == getattr(block, other)
            and getattr(last, side)[1] == getattr(block, side)[0]
        ):
            longer = (getattr(last, side)[0], getattr(block, side)[1])
            pair = {side: longer, other: getattr(block, other)}
            done[-1] = Block(pair["queries"], pair["keys"])
        else:
            done.append(block)
    return done


@dataclass(frozen=True, slots=True)
class Ring:
    """How one device meets the pieces of all members of a group; of one member, its own alone."""

    queries: Deal
    keys: Deal
    is_causal: bool
    scale: float
    axes: Axes = ()

    @property
    def at(self) -> int:
        """The number of this device in the group."""
        return self.keys.at

    @property
    def members(self) -> int:
        """How many devices the group has."""
        return len(self.keys.own)

    @property
    def is_dealt(self) -> bool:
        """Whether positions go to other devices and back."""
        return self.is_causal and self.members > 1

    def blocks(self, piece: int, rows: int | None) -> list[Block]:
        """What this device's queries see of the keys of a member, of so many rows at most."""
        mine = self.queries.ranges(self.at)
        found = blocks(mine, self.keys.ranges(piece), is_causal=self.is_causal)
        return found if rows is None else list(_in_slices(found, rows))

    def columns(self, mask: Tensor | None, piece: int) -> Tensor | None:
        """What a mask says of the keys of a member."""
        if mask is None or mask.shape[-1] == 1:
            return mask
        low, high = self.keys.own[piece]
        return mask[..., low:high]


class Coming:
    """A piece on its way from the device before, while this one's goes to the next."""

    def __init__(self, piece: Tensor, rows: int, ring: Ring, groups: Groups) -> None:
        shape = (*piece.shape[:-2], rows, piece.shape[-1])
        to, of = (ring.at + 1) % ring.members, (ring.at - 1) % ring.members
        self.sent: Tensor | None = piece.contiguous()  # held until it has gone
        self.wait = groups.start_hop(self.sent, shape, to, of, ring.axes)

    def taken(self) -> Tensor:
        """What came; what was sent has gone, and is held no longer."""
        found = self.wait()
        self.sent, self.wait = None, _nothing
        return found


def _nothing() -> Tensor:
    raise AssertionError("A piece is taken once.")


class RingAttention(torch.autograd.Function):
    """Queries with all keys that they see, piece by piece."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: Any
    ) -> Tensor:
        """Merge the results of all pieces, each as it comes."""
        ring, groups = how
        pairs, widths = torch.cat([key, value], -1), (key.shape[-1], value.shape[-1])
        if ring.is_dealt:
            query = ring.queries.there(query, groups, ring.axes)
            pairs = ring.keys.there(pairs, groups, ring.axes)
        wide = statistics_dtype(query.dtype)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        lse = query.new_full(query.shape[:-1], -math.inf, dtype=wide)
        piece = pairs
        for hop in range(ring.members):
            number = (ring.at - hop) % ring.members
            coming = None
            if hop < ring.members - 1:
                coming = Coming(piece, ring.keys.rows((number - 1) % ring.members), ring, groups)
            _meet((out, lse), query, piece.split(widths, -1), ring, number, mask)
            piece = piece if coming is None else coming.taken()
        out = out.to(query.dtype)
        ctx.save_for_backward(query, pairs, out, lse, mask)
        ctx.how = (ring, groups, widths)
        return ring.queries.back(out, groups, ring.axes) if ring.is_dealt else out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """The pieces once more, with their gradients behind them."""
        query, pairs, out, lse, mask = ctx.saved_tensors
        ring, groups, widths = ctx.how
        if ring.is_dealt:
            dy = ring.queries.there(dy, groups, ring.axes)
        dq = torch.zeros_like(query, dtype=lse.dtype)
        piece, own = pairs, dq
        behind: Coming | None = None
        for hop in range(ring.members):
            number = (ring.at - hop) % ring.members
            before = ring.keys.rows((number - 1) % ring.members)
            coming = Coming(piece, before, ring, groups) if hop < ring.members - 1 else None
            given = (dy, query, *piece.split(widths, -1))
            gradient = _meet_again(dq, given, (out, lse, mask), ring, number)
            if behind is not None:
                gradient += behind.taken()
            if hop == 0:
                own = gradient
            else:
                behind = Coming(gradient.to(pairs.dtype), before, ring, groups)
            del gradient, given
            piece = piece if coming is None else coming.taken()
        if behind is not None:
            own += behind.taken()
        summed, dq = own.to(pairs.dtype), dq.to(query.dtype)
        if ring.is_dealt:
            dq = ring.queries.back(dq, groups, ring.axes)
            summed = ring.keys.back(summed, groups, ring.axes)
        dk, dv = summed.split(widths, -1)
        return dq, dk, dv, None, None


def _meet(
    sums: tuple[Tensor, Tensor],
    query: Tensor,
    piece: tuple[Tensor, ...],
    ring: Ring,
    number: int,
    mask: Tensor | None,
) -> None:
    """Add what the queries see of one member's keys to what they have."""
    (key, value), seen = piece, ring.columns(mask, number)
    for block in ring.blocks(number, _rows_at_once(query, key, value, mask)):
        _merge(*sums, block, attend(query, key, value, block, seen, ring.scale))


def _meet_again(
    dq: Tensor,
    given: Sequence[Tensor],
    kept: tuple[Tensor, Tensor, Tensor | None],
    ring: Ring,
    number: int,
) -> Tensor:
    """The gradient of one member's keys and values; that of the queries is added up."""
    (dy, query, key, value), (out, lse, mask) = given, kept
    widths = (key.shape[-1], value.shape[-1])
    gradient = dq.new_zeros((*key.shape[:-1], sum(widths)))
    parts, kept = (dq, *gradient.split(widths, -1)), (out, lse, ring.columns(mask, number))
    for block in ring.blocks(number, _rows_at_once(query, key, value, mask)):
        ends = (block.queries, block.keys, block.keys)
        found = attend_backward(dy, query, key, value, block, kept, ring.scale)
        for total, part, (low, high) in zip(parts, found, ends, strict=True):
            total[..., low:high, :] += part
        del found, part
    return gradient


def _merge(out: Tensor, lse: Tensor, block: Block, more: tuple[Tensor, Tensor]) -> None:
    """Add what a block gives to the result of its rows, each weighted by its part of the sum."""
    low, high = block.queries
    have, sums = out[..., low:high, :], lse[..., low:high]
    together = torch.logaddexp(sums, more[1])
    least = together.masked_fill(together == -math.inf, 0.0)  # rows that see nothing yet
    have *= (sums - least).exp().unsqueeze(-1)
    have += more[0] * (more[1] - least).exp().unsqueeze(-1)
    sums.copy_(together)


def attend(
    query: Tensor, key: Tensor, value: Tensor, block: Block, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """What a block of rows sees: the weighted values, and the logarithm of each row's sum."""
    q, k, v = _rows(query, key, value, block)
    if _is_fused(q, k, v, mask):
        forward, _ = FUSED[q.device.type]
        out, lse = forward(*_four(q, k, v), block.is_causal, scale)
        return out[..., : v.shape[-1]].reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])
    k, v = (_like(t, q) for t in (k, v))
    scores = _scores(q, k, block, mask, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
    return weights @ v.to(weights.dtype), lse


def attend_backward(
    dy: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: Block,
    kept: tuple[Tensor, Tensor, Tensor | None],
    scale: float,
) -> Sequence[Tensor]:
    """Gradients of queries, keys and values in a block, given the whole result and its sums."""
    out, lse, mask = kept
    low, high = block.queries
    q, k, v = _rows(query, key, value, block)
    dy, out, lse = dy[..., low:high, :], out[..., low:high, :], lse[..., low:high]
    if _is_fused(q, k, v, mask):
        _, backward = FUSED[q.device.type]
        wide = _four(dy, q, k, v, out)
        found = backward(*wide, lse.reshape(wide[-1].shape[:-1]), block.is_causal, scale)
        pairs = zip(found, (q, k, v), strict=True)
        return [t[..., : of.shape[-1]].reshape(of.shape) for t, of in pairs]
    many_k, many_v = (_like(t, q) for t in (k, v))
    kind, lse = lse.dtype, lse.unsqueeze(-1)
    dy, out, many_k, many_v = (t.to(kind) for t in (dy, out, many_k, many_v))
    scores = _scores(q, many_k, block, mask, scale)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp()
    moved = dy @ many_v.transpose(-1, -2) - (dy * out).sum(-1, keepdim=True)
    moved = weights * moved * scale
    dk, dv = moved.transpose(-1, -2) @ q.to(kind), weights.transpose(-1, -2) @ dy
    return moved @ many_k, _fewer(dk, k), _fewer(dv, v)


def _is_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether torch has a kernel that gives the sums, too."""
    if mask is not None or query.shape[:-3] != key.shape[:-3]:
        return False
    if query.device.type == "cuda":
        return query.dtype in HALVES and max(query.shape[-1], value.shape[-1]) <= MOST_FEATURES
    return query.device.type in FUSED


def _rows_at_once(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> int | None:
    """How many rows meet keys at a time: all; or, where scores are written to memory, few.

    There are as many as features, so that scores take no more memory than keys.
    """
    return None if _is_fused(query, key, value, mask) else query.shape[-1]


def _four(*tensors: Tensor) -> list[Tensor]:
    """With four dims, and with zeros for the features that some have and others do not."""
    wide = 8 * math.ceil(max(tensor.shape[-1] for tensor in tensors) / 8)
    padded = (pad(t, (0, wide - t.shape[-1])) if t.shape[-1] < wide else t for t in tensors)
    return [t.reshape(-1, *(1, 1, *t.shape)[-3:]) for t in padded]


def _cpu(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Sequence[Tensor]:
    found = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return found[0], found[1]


def _cpu_backward(*given: Any) -> Sequence[Tensor]:
    *tensors, lse, is_causal, scale = given
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, lse.contiguous(), 0.0, is_causal, scale=scale
    )
    return dq, dk, dv


def _cuda(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Sequence[Tensor]:
    many = (_like(t, q) for t in (k, v))
    found = aten._scaled_dot_product_flash_attention(q, *many, 0.0, is_causal, False, scale=scale)
    return found[0], found[1]


def _cuda_backward(*given: Any) -> Sequence[Tensor]:
    dy, q, k, v, out, lse, is_causal, scale = given
    many = (_like(t, q) for t in (k, v))
    nothing = torch.zeros(2, dtype=torch.uint64, device=q.device)  # no numbers are drawn
    sizes = (None, None, q.shape[-2], k.shape[-2], 0.0, is_causal)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        dy, q, *many, out, lse.contiguous(), *sizes, nothing, nothing[:0], scale=scale
    )
    return dq, _fewer(dk, k), _fewer(dv, v)


Found = Callable[..., Sequence[Tensor]]
FUSED: Mapping[str, tuple[Found, Found]] = {
    "cpu": (_cpu, _cpu_backward),
    "cuda": (_cuda, _cuda_backward),
}
MOST_FEATURES = 256  # of CUDA's kernel


def _rows(query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, ...]:
    (low, high), (first, last) = block.queries, block.keys
    return query[..., low:high, :], key[..., first:last, :], value[..., first:last, :]


def _scores(query: Tensor, key: Tensor, block: Block, mask: Tensor | None, scale: float) -> Tensor:
    wide = statistics_dtype(query.dtype)
    scores = (query.to(wide) * scale) @ key.to(wide).transpose(-1, -2)
    if block.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(hidden, -math.inf)
    return scores if mask is None else scores.masked_fill(~_cut(mask, block), -math.inf)


def _cut(mask: Tensor, block: Block) -> Tensor:
    """The rows and columns of a mask that a block has; a dim of size 1 is for all."""
    for dim, (low, high) in ((-2, block.queries), (-1, block.keys)):
        if mask.dim() >= -dim and mask.shape[dim] > 1:
            mask = mask.narrow(dim, low, high - low)
    return mask


def _like(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values for every head of the queries."""
    times = query.shape[-3] // shared.shape[-3] if query.dim() > 2 else 1
    return shared if times == 1 else shared.repeat_interleave(times, -3)


def _fewer(gradient: Tensor, shared: Tensor) -> Tensor:
    """The sum of gradients over what was repeated."""
    if gradient.dim() > 2 and gradient.shape[-3] != shared.shape[-3]:
        gradient = gradient.unflatten(-3, (shared.shape[-3], -1)).sum(-3)
    return gradient.sum_to_size(shared.shape)
