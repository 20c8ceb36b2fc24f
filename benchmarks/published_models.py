"""Decoders from their dims, written as their stacks run them: one call for each fused kernel.

A kernel that fuses several operators is written as one operator with the same traffic: scale, mask
and softmax as a softmax, a rotation of queries or keys as one product with a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Family:
    """What decoders of one kind are made of."""

    name: str
    root_mean_square: bool = False  # norms without mean and bias
    gated: bool = False  # feed-forward: down(silu(gate(x)) * up(x))
    rotary: bool = False  # else positions are learnt
    bias: bool = True
    tied: bool = True  # the embedding is the last projection
    keeps_scores: bool = False  # attention as two products, with the scores in memory
    dropout: float = 0.0
    embedding_norm: bool = False
    float32_logits: bool = True
    copies: bool = False  # nanotron's layers: keys beside values, gate beside up, loss by parts


GPT = Family("gpt")
LLAMA = Family("llama", root_mean_square=True, gated=True, rotary=True, bias=False, tied=False)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: how many, of which a row takes some, and their inner features."""

    count: int
    chosen: int
    ffn: int
    shared: int = 0  # inner features of what every row takes
    dense: int = 0  # layers without experts, which are the first


@dataclass(frozen=True, slots=True)
class Latent:
    """DeepSeek's attention: queries, keys and values from narrow tensors."""

    queries: int
    keys: int
    size: int  # of a head without its position
    position: int
    value: int


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes of a decoder."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    experts: Experts | None = None
    latent: Latent | None = None
    head: int | None = None  # features of a head; None: heads share the hidden ones


class Attention(nn.Module):
    """Causal attention, in one kernel or with its scores in memory."""

    table: Tensor

    def __init__(self, dims: Dims, family: Family) -> None:
        super().__init__()
        self.dims, self.family = dims, family
        self.size = dims.head or dims.hidden // dims.heads
        width = (dims.heads + 2 * dims.kv_heads) * self.size
        self.qkv = nn.Linear(dims.hidden, width, bias=family.bias)
        self.out = nn.Linear(dims.heads * self.size, dims.hidden, bias=family.bias)
        if family.rotary:
            self.register_buffer("table", torch.ones(dims.seq, self.size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """What each position reads from those before it."""
        group = self.dims.heads // self.dims.kv_heads  # queries beside their key and value
        each = self.qkv(x).unflatten(-1, (self.dims.kv_heads, group + 2, self.size))
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in each.split([group, 1, 1], -2))
        if self.family.copies:
            k, v = torch.stack((k, v)).permute(1, 2, 3, 0, 4).contiguous().unbind(3)
        if self.family.rotary:
            q, k = q * self.table, k * self.table
        core = self._with_scores if self.family.keeps_scores else self._fused
        return self.out(core(q, k, v).transpose(1, 2).flatten(2))

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = self.dims.kv_heads != self.dims.heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    def _with_scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.transpose(-2, -1), -1)
        return F.dropout(weights, self.family.dropout) @ v


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are made of one narrow tensor."""

    table: Tensor

    def __init__(self, dims: Dims, latent: Latent) -> None:
        super().__init__()
        self.heads, self.latent = dims.heads, latent
        self.q_down = nn.Linear(dims.hidden, latent.queries, bias=False)
        self.q_norm, self.kv_norm = nn.RMSNorm(latent.queries), nn.RMSNorm(latent.keys)
        wide = latent.size + latent.position
        self.q_up = nn.Linear(latent.queries, dims.heads * wide, bias=False)
        self.kv_down = nn.Linear(dims.hidden, latent.keys + latent.position, bias=False)
        both = latent.size + latent.value
        self.kv_up = nn.Linear(latent.keys, dims.heads * both, bias=False)
        self.out = nn.Linear(dims.heads * latent.value, dims.hidden, bias=False)
        self.register_buffer("table", torch.ones(dims.seq, latent.position), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """What each position reads from those before it."""
        sizes = self.latent
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        narrow, position = self.kv_down(x).split([sizes.keys, sizes.position], -1)
        kv = self.kv_up(self.kv_norm(narrow)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = kv.split([sizes.size, sizes.value], -1)
        plain, turned = q.split([sizes.size, sizes.position], -1)
        q = torch.cat((plain, turned * self.table), -1)
        each = (position * self.table).unsqueeze(1).expand(-1, self.heads, -1, -1)
        k = torch.cat((k, each), -1)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(read.transpose(1, 2).flatten(2))


class RoutedExperts(nn.Module):
    """Gated experts, of which a row takes the best, and one that every row takes."""

    def __init__(self, dims: Dims, family: Family, experts: Experts) -> None:
        super().__init__()
        self.router = nn.Linear(dims.hidden, experts.count, bias=False)
        self.chosen = experts.chosen
        self.up = nn.Parameter(torch.empty(experts.count, 2 * experts.ffn, dims.hidden))
        self.down = nn.Parameter(torch.empty(experts.count, dims.hidden, experts.ffn))
        self.shared = FeedForward(dims, family, experts.shared) if experts.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of a row's experts."""
        rows = x.flatten(0, 1)
        share, expert = torch.softmax(self.router(rows).float(), -1).topk(self.chosen, -1)
        weights = (self.up, self.down, _between(self.up.dtype))
        found: Tensor = torch.ops.shardfold.routed_experts(
            rows, expert, share.to(x.dtype), *weights, None, None
        )
        found = found.view_as(x)
        return found if self.shared is None else found + self.shared(x)


@lru_cache(maxsize=4)
def _between(dtype: torch.dtype) -> str:
    """What stands between the products of an expert."""
    from shardfold.capture.experts import described

    return str(described(_gated, 16, dtype))


def _gated(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, -1)
    return F.silu(gate) * up


class FeedForward(nn.Module):
    """Two or three products."""

    def __init__(self, dims: Dims, family: Family, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(dims.hidden, ffn, bias=family.bias)
        self.gate = nn.Linear(dims.hidden, ffn, bias=False) if family.gated else None
        self.copies = family.copies
        if family.gated and family.copies:
            self.up, self.gate = nn.Linear(dims.hidden, 2 * ffn, bias=False), None
        self.down = nn.Linear(ffn, dims.hidden, bias=family.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The transformed positions."""
        if self.copies:
            gate, up = self.up(x).unflatten(-1, (2, -1)).unbind(-2)
            return self.down(F.silu(gate) * up)
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then feed-forward, each after its norm."""

    def __init__(self, dims: Dims, family: Family, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(dims, family), _norm(dims, family)
        latent, experts = dims.latent, dims.experts
        self.attention = LatentAttention(dims, latent) if latent else Attention(dims, family)
        is_routed = experts is not None and number >= experts.dense
        self.feedforward: nn.Module
        if is_routed and experts is not None:
            self.feedforward = RoutedExperts(dims, family, experts)
        else:
            self.feedforward = FeedForward(dims, family, dims.ffn)
        self.dropout = family.dropout

    def forward(self, x: Tensor) -> Tensor:
        """The next block's positions."""
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout)
        return x + F.dropout(self.feedforward(self.norm2(x)), self.dropout)


class Decoder(nn.Module):
    """Tokens and their successors to cross-entropy."""

    order: Tensor

    def __init__(self, dims: Dims, family: Family) -> None:
        super().__init__()
        self.family = family
        self.tokens = nn.Embedding(dims.vocab, dims.hidden)
        self.positions = None if family.rotary else nn.Embedding(dims.seq, dims.hidden)
        self.embedding_norm = _norm(dims, family) if family.embedding_norm else None
        self.blocks = nn.ModuleList(Block(dims, family, k) for k in range(dims.layers))
        self.norm = _norm(dims, family)
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False)
        if family.tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("order", torch.arange(dims.seq), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy over all positions."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(self.order)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(F.dropout(x, self.family.dropout) if block is self.blocks[0] else x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        logits = logits.float() if self.family.float32_logits else logits
        return F.cross_entropy(logits, labels.flatten())


def _norm(dims: Dims, family: Family) -> nn.Module:
    return nn.RMSNorm(dims.hidden) if family.root_mean_square else nn.LayerNorm(dims.hidden)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parameters(dims: Dims, family: Family) -> int:
    """The parameters of a decoder, tied ones once."""
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(dims, family).parameters())


@lru_cache(maxsize=64)
def captured(dims: Dims, family: Family, dtype: str, batch: int) -> Any:
    """The graph of one micro-batch over all replicas; no weight is allocated."""
    from shardfold.capture import capture_short

    with torch.device("meta"):
        module = Decoder(dims, family).to(DTYPES[dtype])
        tokens = torch.zeros(batch, dims.seq, dtype=torch.long)
    return capture_short(module, (tokens, tokens))
