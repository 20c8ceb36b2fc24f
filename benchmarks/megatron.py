"""A small GPT, and the same model split by hand over a process group as Megatron-LM does it.

Column-parallel and row-parallel linears with the conjugate pair of autograd functions (identity
forward and all-reduce backward, and the reverse), a vocabulary-parallel embedding, and a
cross-entropy over logits that are never gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention; `heads` are those of this process."""

    def __init__(self, width: int, heads: int, per_head: int, *, shared: bool = False) -> None:
        super().__init__()
        inner = heads * per_head
        self.heads, self.shared = heads, shared
        self.query, self.key, self.value = (nn.Linear(width, inner) for _ in range(3))
        self.out = Row(inner, width) if shared else nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        x = Copy.apply(x) if self.shared else x
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (f(x).view(split).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class FeedForward(nn.Module):
    """Two linears around a gelu; `inner` features are those of this process."""

    def __init__(self, width: int, inner: int, *, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.up = nn.Linear(width, inner)
        self.down = Row(inner, width) if shared else nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Up, gelu, down."""
        x = Copy.apply(x) if self.shared else x
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, parts: int = 1) -> None:
        super().__init__()
        shared = parts > 1
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads // parts, width // heads, shared=shared)
        self.feed_forward = FeedForward(width, 4 * width // parts, shared=shared)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class GPT(nn.Module):
    """Returns the loss of predicting `labels`."""

    def __init__(self, vocabulary: int, seq: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(0.02 * torch.randn(seq, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class SplitGPT(nn.Module):
    """The same, this process's part of it; all processes of the default group share the rest."""

    def __init__(self, vocabulary: int, seq: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        parts, rank = dist.get_world_size(), dist.get_rank()
        self.rows = vocabulary // parts
        self.first = rank * self.rows
        self.tokens = nn.Embedding(self.rows, width)
        self.positions = nn.Parameter(0.02 * torch.randn(seq, width))
        self.blocks = nn.ModuleList(Block(width, heads, parts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.rows, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy."""
        x = self._embedded(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(Copy.apply(self.norm(x)))
        return SplitLoss.apply(logits.flatten(0, 1), labels.flatten(), self.first).mean()

    def _embedded(self, tokens: Tensor) -> Tensor:
        others = (tokens < self.first) | (tokens >= self.first + self.rows)
        rows = self.tokens((tokens - self.first).masked_fill(others, 0))
        return Sum.apply(rows.masked_fill(others.unsqueeze(-1), 0.0))

    @torch.no_grad()
    def take(self, whole: GPT) -> None:
        """Take the part of the whole model's weights that is this process's."""
        parts, rank = dist.get_world_size(), dist.get_rank()
        source = dict(whole.named_parameters())
        for name, parameter in self.named_parameters():
            value = source[name]
            for dim, size in enumerate(parameter.shape):
                if value.shape[dim] != size:
                    value = value.chunk(parts, dim)[rank]
            parameter.copy_(value)


class Copy(torch.autograd.Function):
    """Forward the same, backward the sum of everyone's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Nothing."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Add up, in place."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """Forward the sum of everyone's part, backward the same gradient for all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Add up, in place."""
        x = x.detach()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Nothing."""
        return gradient


class Row(nn.Module):
    """A linear whose input features are split; the bias is added after the sum."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        made = nn.Linear(inner, width)
        self.weight, self.bias = made.weight, made.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, add up, add the bias."""
        return Sum.apply(functional.linear(x, self.weight)) + self.bias


class SplitLoss(torch.autograd.Function):
    """Cross-entropy of each row, from this process's part of the classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int) -> Tensor:
        """Maximum, then sum of exponentials and picked logit, each over all processes."""
        most = logits.amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        shifted = logits - most.unsqueeze(-1)
        others = (labels < first) | (labels >= first + logits.shape[-1])
        local = (labels - first).masked_fill(others, 0)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(others, 0.0)
        dist.all_reduce(picked)
        shares = shifted.exp_()
        total = shares.sum(-1)
        dist.all_reduce(total)
        shares.div_(total.unsqueeze(-1))
        ctx.save_for_backward(shares, local, others)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Shares less one where the label is."""
        shares, local, others = ctx.saved_tensors
        rows = torch.arange(len(local))
        shares[rows, local] -= (~others).to(shares.dtype)
        return shares.mul_(gradient.unsqueeze(-1)), None, None
