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
class Dims:
    """The sizes of a decoder."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int


class Attention(nn.Module):
    """Causal attention, in one kernel or with its scores in memory."""

    table: Tensor

    def __init__(self, dims: Dims, family: Family) -> None:
        super().__init__()
        self.dims, self.family = dims, family
        self.size = dims.hidden // dims.heads
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


class FeedForward(nn.Module):
    """Two or three products."""

    def __init__(self, dims: Dims, family: Family) -> None:
        super().__init__()
        self.up = nn.Linear(dims.hidden, dims.ffn, bias=family.bias)
        self.gate = nn.Linear(dims.hidden, dims.ffn, bias=False) if family.gated else None
        self.copies = family.copies
        if family.gated and family.copies:
            self.up, self.gate = nn.Linear(dims.hidden, 2 * dims.ffn, bias=False), None
        self.down = nn.Linear(dims.ffn, dims.hidden, bias=family.bias)

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

    def __init__(self, dims: Dims, family: Family) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(dims, family), _norm(dims, family)
        self.attention, self.feedforward = Attention(dims, family), FeedForward(dims, family)
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
        self.blocks = nn.ModuleList(Block(dims, family) for _ in range(dims.layers))
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
