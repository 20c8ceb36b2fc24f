"""The models of text in the PaSE paper: an encoder-decoder Transformer and an LSTM.

The Transformer is that of Vaswani et al. (2017), with the layer norm before each block.
One matrix serves both embeddings and the projection before the softmax, as in the paper's
section 3.4. Norms come first, as in the authors' later code and in PaSE's graph.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.zoo.catalog import StackShape

BASE = StackShape(layers=6, hidden=512, feedforward=2048, vocabulary=32_000, heads=8, kv_heads=8)
BIG = StackShape(layers=6, hidden=1024, feedforward=4096, vocabulary=32_000, heads=16, kv_heads=16)
TINY = StackShape(layers=2, hidden=32, feedforward=128, vocabulary=257, heads=4, kv_heads=4)
TINY_BIG = StackShape(layers=2, hidden=64, feedforward=256, vocabulary=257, heads=4, kv_heads=4)
DROPOUT = 0.1

# Billion-Word has 793,471 words; PaSE rounds its vocabulary up to a multiple of 8.
RNNLM_FULL = StackShape(layers=2, hidden=2048, feedforward=2048, vocabulary=793_472)
RNNLM_TINY = StackShape(layers=2, hidden=32, feedforward=32, vocabulary=257)


class Attention(nn.Module):
    """Multi-head attention with separate query, key and value projections."""

    def __init__(self, shape: StackShape, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = shape.heads, is_causal
        self.query = nn.Linear(shape.hidden, shape.hidden)
        self.key = nn.Linear(shape.hidden, shape.hidden)
        self.value = nn.Linear(shape.hidden, shape.hidden)
        self.out = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """What the positions of `x` read from the positions of `memory`."""
        q = self._split(self.query(x))
        k, v = self._split(self.key(memory)), self._split(self.value(memory))
        dropout = DROPOUT if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with a rectifier between them."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.feedforward)
        self.down = nn.Linear(shape.feedforward, shape.hidden)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """The transformed positions."""
        return self.down(self.dropout(F.relu(self.up(x))))


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.attention = Attention(shape, is_causal=False)
        self.feedforward = FeedForward(shape)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """The next layer's positions."""
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y))
        return x + self.dropout(self.feedforward(self.norm2(x)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder, then feed-forward."""

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.hidden), nn.LayerNorm(shape.hidden)
        self.norm3 = nn.LayerNorm(shape.hidden)
        self.self_attention = Attention(shape, is_causal=True)
        self.cross_attention = Attention(shape, is_causal=False)
        self.feedforward = FeedForward(shape)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """The next layer's positions."""
        y = self.norm1(x)
        x = x + self.dropout(self.self_attention(y, y))
        x = x + self.dropout(self.cross_attention(self.norm2(x), memory))
        return x + self.dropout(self.feedforward(self.norm3(x)))


class Transformer(nn.Module):
    """Source, target and the target's successors to cross-entropy."""

    positions: Tensor

    def __init__(self, shape: StackShape, seq: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        nn.init.normal_(self.embedding.weight, std=shape.hidden**-0.5)
        self.encoder = nn.ModuleList(EncoderLayer(shape) for _ in range(shape.layers))
        self.decoder = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.encoder_norm = nn.LayerNorm(shape.hidden)
        self.decoder_norm = nn.LayerNorm(shape.hidden)
        self.projection = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.projection.weight = self.embedding.weight
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer("positions", sinusoids(seq, shape.hidden), persistent=False)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy over the target's positions."""
        memory = self._embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoder_norm(memory)
        x = self._embed(target)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = self.projection(self.decoder_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _embed(self, tokens: Tensor) -> Tensor:
        scale = math.sqrt(self.embedding.embedding_dim)
        return self.dropout(self.embedding(tokens) * scale + self.positions)


def sinusoids(seq: int, hidden: int) -> Tensor:
    """The paper's position encoding, [seq, hidden]: sines in the even dims, cosines in the odd."""
    position = torch.arange(seq)[:, None]
    rate = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10_000.0) / hidden))
    angles = position * rate
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class RNNLM(nn.Module):
    """The LSTM language model: tokens and their successors to cross-entropy.

    Embedding and LSTM are equally wide.
    """

    def __init__(self, shape: StackShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.lstm = nn.LSTM(shape.hidden, shape.hidden, shape.layers, batch_first=True)
        self.projection = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy over all positions."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits = self.projection(hidden)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
