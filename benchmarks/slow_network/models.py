"""Models in the shapes of the paper's, sized for one CPU core a rank; without dropout.

Dropout is left out because the masks of DistributedDataParallel differ from rank to rank, and the
losses of all strategies are compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardfold.zoo import convnets, language
from shardfold.zoo.catalog import ConvShape, StackShape

SEED = 0


def _alexnet() -> tuple[Any, Any]:
    batch, shape = 16, ConvShape(image=191, classes=1000, width=48)
    model = convnets.AlexNet(shape)
    model.dropout.p = 0.0
    return model, (torch.randn(batch, 3, 191, 191), torch.randint(1000, (batch,)))


def _rnnlm() -> tuple[Any, Any]:
    batch, seq, words = 16, 16, 16_000
    model = language.RNNLM(StackShape(layers=2, hidden=256, feedforward=256, vocabulary=words))
    return model, (torch.randint(words, (batch, seq)), torch.randint(words, (batch, seq)))


def _transformer() -> tuple[Any, Any]:
    batch, seq, words = 8, 16, 8_000
    language.DROPOUT = 0.0
    shape = StackShape(
        layers=2, hidden=256, feedforward=1024, vocabulary=words, heads=8, kv_heads=8
    )
    model = language.Transformer(shape, seq)
    return model, tuple(torch.randint(words, (batch, seq)) for _ in range(3))


class _Block(nn.Module):
    """A residual block of products, as in the feed-forward half of a transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Decoder(nn.Module):
    """Tokens, equal layers in a list, and a head that is the table of tokens."""

    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.layers = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.table.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _decoder() -> tuple[Any, Any]:
    batch, seq, words = 16, 16, 1_000
    model = _Decoder(layers=8, width=384, words=words)
    return model, tuple(torch.randint(words, (batch, seq)) for _ in range(2))


MODELS = {
    "alexnet": _alexnet,
    "rnnlm": _rnnlm,
    "transformer": _transformer,
    "decoder": _decoder,
}


def build(name: str) -> tuple[Any, Any]:
    """A model and its batch; alike in every process."""
    torch.manual_seed(SEED)
    found: tuple[Any, Any] = MODELS[name]()
    return found
