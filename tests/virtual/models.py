"""Small torch models that plans are made for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a two-layer network, each with a norm before and a residual around."""

    def __init__(self, hidden: int, heads: int, is_causal: bool = True) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """Blocks between an embedding and a projection, which may share their weight."""

    def __init__(
        self,
        layers: int = 3,
        hidden: int = 32,
        heads: int = 4,
        vocabulary: int = 64,
        tied: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(batch: int = 8, seq: int = 16, vocabulary: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (batch, seq), generator=generator)


def without_dropout(module: nn.Module) -> nn.Module:
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
    return module
