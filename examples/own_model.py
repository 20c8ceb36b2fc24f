"""A model of your own, for `shardfold plan examples/own_model.py:make --cluster 8xa100`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Tagger(nn.Module):
    """Embeds words, mixes them with one layer of attention, and tags each."""

    def __init__(self, words: int, width: int, tags: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, num_heads=8, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.tags = nn.Linear(width, tags)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        """The loss: training minimises what forward returns."""
        x = self.embedding(words)
        mixed, _ = self.attention(x, x, x, need_weights=False)
        scores = self.tags(self.norm(x + mixed))
        return functional.cross_entropy(scores.flatten(0, 1), tags.flatten())


def make(batch: int = 256, seq: int = 128) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and an example batch; on the meta device neither takes memory."""
    with torch.device("meta"):
        model = Tagger(words=200_000, width=1024, tags=50_000)
        words = torch.zeros(batch, seq, dtype=torch.long)
        tags = torch.zeros(batch, seq, dtype=torch.long)
    return model, (words, tags), {}
