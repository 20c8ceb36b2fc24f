"""Attention with dropout by position in one kernel, in Triton; two backward.

The weights P of a row are normalised by the sum over all keys; those that are dropped are left out
of the product with the values, the rest is scaled. Nothing of them is kept but the logarithm of
each row's sum: backward makes weights and mask again, a tile at a time. With M the mask over
1 - p, and D a row's sum of dO * O:

    O = (P * M) V        dV = (P * M)^T dO        dS = P * ((dO V^T) * M - D)

A weight's position in the whole tensor is that of its batch and head, of its query and of its key;
the first two come as tables, so that any part of them can be here. Keys are all here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardfold.runtime.ops.counter_rng import threshold_of
from shardfold.runtime.ops.dropout_kernels import GOLDEN, mixed

ROWS, KEYS, WARPS, STAGES = 64, 64, 4, 2  # a tile, and who works on it

RUNTIME = ["H", "GROUP", "M", "N", "low", "key", "threshold"]


@triton.jit
def _tile(pointer, rows, columns, step, M, N):
    """Rows and columns of a matrix; zeros where it ends."""
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    return tl.load(
        pointer + rows.to(tl.int64)[:, None] * step + columns[None, :], mask=inside, other=0.0
    )


@triton.jit
def _seen(
    mask, rows, keys, mask_row, mask_key, M, N, low, CAUSAL: tl.constexpr, MASKED: tl.constexpr
):
    """Which rows meet which keys: all, those up to their own place, those that the mask says."""
    found = (rows < M) & (keys < N)
    if MASKED:
        at = mask + rows.to(tl.int64) * mask_row + keys.to(tl.int64) * mask_key
        found = found & (tl.load(at, mask=found, other=0) != 0)
    if CAUSAL:
        found = found & (keys <= low + rows)
    return found


@triton.jit
def _begins(places, rows, base, M, N, key):
    """What the bits of each row begin with."""
    place = tl.load(places + rows, mask=rows < M, other=0) + base
    return (place.to(tl.uint64) * N.to(tl.uint64)) * GOLDEN + key.to(tl.uint64)


@triton.jit(do_not_specialize=RUNTIME)
def _forward(
    q, k, v, mask, out, lse, bases, places,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, mb, mh, mm, mn, ob, oh, om,
    H, GROUP, M, N, low, scale, key, threshold, rescale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(M, ROWS)
    which = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    b, h = (which // H).to(tl.int64), (which % H).to(tl.int64)
    shared = h // GROUP
    rows, d, e = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    query = _tile(q + b * qb + h * qh, rows, d, qm, M, D)
    begins = _begins(places, rows, tl.load(bases + which), M, N, key)
    limit = threshold.to(tl.uint64)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDE_E], tl.float32)
    end = N
    if CAUSAL:
        end = tl.minimum(N, low + (block + 1) * ROWS)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        here = _tile(k + b * kb + shared * kh, keys, d, kn, N, D)
        value = _tile(v + b * vb + shared * vh, keys, e, vn, N, E)
        seen = _seen(
            mask + b * mb + h * mh, rows[:, None], keys[None, :], mm, mn, M, N, low, CAUSAL, MASKED
        )
        scores = tl.where(seen, tl.dot(query, tl.trans(here)) * scale, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        weights, faded = tl.exp(scores - safe[:, None]), tl.exp(most - safe)
        total = total * faded + tl.sum(weights, 1)
        kept = mixed(begins[:, None] + keys.to(tl.uint64)[None, :] * GOLDEN) >= limit
        weights = tl.where(kept, weights, 0.0).to(value.dtype)
        found = found * faded[:, None] + tl.dot(weights, value)
        most = new
    nothing = total == 0.0  # a row that sees nothing gives zeros
    found = found * (rescale / tl.where(nothing, 1.0, total))[:, None]
    at = out + b * ob + h * oh + rows.to(tl.int64)[:, None] * om + e[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (e < E)[None, :])
    sums = tl.where(nothing, float("inf"), most + tl.log(tl.where(nothing, 1.0, total)))
    tl.store(lse + which.to(tl.int64) * M + rows, sums, mask=rows < M)


@triton.jit(do_not_specialize=RUNTIME)
def _of_queries(
    q, k, v, mask, out, dy, lse, rests, dq, bases, places,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, mb, mh, mm, mn, ob, oh, om, yb, yh, ym, db, dh, dm,
    H, GROUP, M, N, low, scale, key, threshold, rescale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(M, ROWS)
    which = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    b, h = (which // H).to(tl.int64), (which % H).to(tl.int64)
    shared = h // GROUP
    rows, d, e = block * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    query = _tile(q + b * qb + h * qh, rows, d, qm, M, D)
    given = _tile(dy + b * yb + h * yh, rows, e, ym, M, E)
    result = _tile(out + b * ob + h * oh, rows, e, om, M, E)
    rest = tl.sum(result.to(tl.float32) * given.to(tl.float32), 1)
    at = which.to(tl.int64) * M + rows
    tl.store(rests + at, rest, mask=rows < M)  # the other kernel reads them, too
    sums = tl.load(lse + at, mask=rows < M, other=float("inf"))
    begins = _begins(places, rows, tl.load(bases + which), M, N, key)
    limit = threshold.to(tl.uint64)
    found = tl.zeros([ROWS, WIDE_D], tl.float32)
    end = N
    if CAUSAL:
        end = tl.minimum(N, low + (block + 1) * ROWS)
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        here = _tile(k + b * kb + shared * kh, keys, d, kn, N, D)
        value = _tile(v + b * vb + shared * vh, keys, e, vn, N, E)
        seen = _seen(
            mask + b * mb + h * mh, rows[:, None], keys[None, :], mm, mn, M, N, low, CAUSAL, MASKED
        )
        scores = tl.where(seen, tl.dot(query, tl.trans(here)) * scale, float("-inf"))
        weights = tl.exp(scores - sums[:, None])
        kept = mixed(begins[:, None] + keys.to(tl.uint64)[None, :] * GOLDEN) >= limit
        passed = tl.where(kept, tl.dot(given, tl.trans(value)) * rescale, 0.0)
        change = weights * (passed - rest[:, None])
        found += tl.dot(change.to(here.dtype), here)
    at = dq + b * db + h * dh + rows.to(tl.int64)[:, None] * dm + d[None, :]
    inside = (rows < M)[:, None] & (d < D)[None, :]
    tl.store(at, (found * scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def _of_keys(
    q, k, v, mask, dy, lse, rests, dk, dv, bases, places,
    qb, qh, qm, kb, kh, kn, vb, vh, vn, mb, mh, mm, mn, yb, yh, ym, db, dh, dn, eb, eh, en,
    H, GROUP, M, N, low, scale, key, threshold, rescale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE_D: tl.constexpr, WIDE_E: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(N, KEYS)
    which = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    heads = H // GROUP
    b, shared = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    keys, d, e = block * KEYS + tl.arange(0, KEYS), tl.arange(0, WIDE_D), tl.arange(0, WIDE_E)
    here = _tile(k + b * kb + shared * kh, keys, d, kn, N, D)
    value = _tile(v + b * vb + shared * vh, keys, e, vn, N, E)
    limit = threshold.to(tl.uint64)
    along = keys.to(tl.uint64)[:, None] * GOLDEN
    to_keys = tl.zeros([KEYS, WIDE_D], tl.float32)
    to_values = tl.zeros([KEYS, WIDE_E], tl.float32)
    first = 0
    if CAUSAL:  # rows before meet none of these keys
        first = tl.maximum(block * KEYS - low, 0) // ROWS * ROWS
    for one in range(GROUP):
        h = shared * GROUP + one
        head = b * H + h
        base = tl.load(bases + head)
        for start in range(first, M, ROWS):
            rows = start + tl.arange(0, ROWS)
            query = _tile(q + b * qb + h * qh, rows, d, qm, M, D)
            given = _tile(dy + b * yb + h * yh, rows, e, ym, M, E)
            sums = tl.load(lse + head * M + rows, mask=rows < M, other=float("inf"))
            rest = tl.load(rests + head * M + rows, mask=rows < M, other=0.0)
            seen = _seen(
                mask + b * mb + h * mh, rows[None, :], keys[:, None], mm, mn, M, N, low,
                CAUSAL, MASKED,
            )  # fmt: skip
            scores = tl.where(seen, tl.dot(here, tl.trans(query)) * scale, float("-inf"))
            weights = tl.exp(scores - sums[None, :])
            kept = mixed(_begins(places, rows, base, M, N, key)[None, :] + along) >= limit
            left = tl.where(kept, weights * rescale, 0.0)
            to_values += tl.dot(left.to(given.dtype), given)
            passed = tl.where(kept, tl.dot(value, tl.trans(given)) * rescale, 0.0)
            change = weights * (passed - rest[None, :])
            to_keys += tl.dot(change.to(query.dtype), query)
    rows64 = keys.to(tl.int64)[:, None]
    at = dk + b * db + shared * dh + rows64 * dn + d[None, :]
    inside = (keys < N)[:, None] & (d < D)[None, :]
    tl.store(at, (to_keys * scale).to(dk.dtype.element_ty), mask=inside)
    at = dv + b * eb + shared * eh + rows64 * en + e[None, :]
    inside = (keys < N)[:, None] & (e < E)[None, :]
    tl.store(at, to_values.to(dv.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Drop:
    """How weights are dropped: the tables of positions, the key and the share; and the scale.

    `bases` has for each batch and head the place of its first query, `places` for each row how far
    it is from there, both in rows of the whole. `low` is the first row, where it matters.
    """

    bases: Tensor
    places: Tensor
    key: int
    p: float
    scale: float
    is_causal: bool
    low: int
    tile: tuple[int, int, int, int] = (ROWS, KEYS, WARPS, STAGES)

    def numbers(self) -> tuple[Any, ...]:
        """Of which kernels are told after the sizes."""
        return self.low, self.scale, self.key, threshold_of(self.p), 1 / (1 - self.p)


class DroppedAttention(torch.autograd.Function):
    """Of queries, keys and values with batch and heads first; the mask, if any, as large."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drop: Drop) -> Any:
        """The result lies with heads inside positions, as the kernels of torch leave it."""
        batch, heads, rows, _ = q.shape
        out = q.new_empty(batch, rows, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(batch, heads, rows, dtype=torch.float32)
        sizes, options = _options(q, k, v, mask, drop)
        tile = triton.cdiv(rows, drop.tile[0])
        _forward[(tile * batch * heads,)](
            q, k, v, q if mask is None else mask, out, lse, drop.bases, drop.places,
            *_steps(q), *_steps(k), *_steps(v), *_mask_steps(mask), *_steps(out),
            *sizes, *drop.numbers(), **options,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.drop = drop
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Gradients of queries first: with them comes what those of keys and values need."""
        q, k, v, mask, out, lse = ctx.saved_tensors
        drop: Drop = ctx.drop
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        dq, dk, dv = _like(q), _like(k), _like(v)
        rests = torch.empty_like(lse)
        sizes, options = _options(q, k, v, mask, drop)
        masked = q if mask is None else mask
        lie = (*_steps(q), *_steps(k), *_steps(v), *_mask_steps(mask))
        batch, heads, rows, _ = q.shape
        tile = triton.cdiv(rows, drop.tile[0])
        _of_queries[(tile * batch * heads,)](
            q, k, v, masked, out, dy, lse, rests, dq, drop.bases, drop.places,
            *lie, *_steps(out), *_steps(dy), *_steps(dq), *sizes, *drop.numbers(), **options,
        )  # fmt: skip
        tile = triton.cdiv(k.shape[2], drop.tile[1])
        _of_keys[(tile * batch * k.shape[1],)](
            q, k, v, masked, dy, lse, rests, dk, dv, drop.bases, drop.places,
            *lie, *_steps(dy), *_steps(dk), *_steps(dv), *sizes, *drop.numbers(), **options,
        )  # fmt: skip
        return dq, dk, dv, None, None


def _options(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drop: Drop
) -> tuple[tuple[int, ...], dict[str, Any]]:
    depth, width = q.shape[-1], v.shape[-1]
    rows, keys, warps, stages = drop.tile
    sizes = (q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2])
    return sizes, {
        "CAUSAL": drop.is_causal, "MASKED": mask is not None, "D": depth, "E": width,
        "WIDE_D": max(16, triton.next_power_of_2(depth)),
        "WIDE_E": max(16, triton.next_power_of_2(width)),
        "ROWS": rows, "KEYS": keys, "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """Of batch, heads and rows."""
    batch, heads, rows, _ = tensor.stride()
    return batch, heads, rows


def _mask_steps(mask: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if mask is None else mask.stride()


def _like(tensor: Tensor) -> Tensor:
    """A gradient that lies as its tensor, if that has its features side by side without gaps."""
    found = torch.empty_like(tensor)
    return found if found.stride(-1) == 1 else tensor.new_empty(tensor.shape)
