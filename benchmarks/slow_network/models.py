"""Models in the shapes of the paper's, sized for one CPU core a rank; without dropout.

Dropout is left out because the masks of DistributedDataParallel differ from rank to rank, and the
losses of all strategies are compared.
"""

from __future__ import annotations

from typing import Any

import torch

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


MODELS = {"alexnet": _alexnet, "rnnlm": _rnnlm, "transformer": _transformer}


def build(name: str) -> tuple[Any, Any]:
    """A model and its batch; alike in every process."""
    torch.manual_seed(SEED)
    found: tuple[Any, Any] = MODELS[name]()
    return found
