"""The LSTM language model of PaSE: embedding, stacked LSTM, projection to the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.zoo.catalog import StackShape

# Billion-Word has 793,471 words; PaSE rounds its vocabulary up to a multiple of 8.
FULL = StackShape(layers=2, hidden=2048, feedforward=2048, vocabulary=793_472)
TINY = StackShape(layers=2, hidden=32, feedforward=32, vocabulary=257)


class RNNLM(nn.Module):
    """Tokens and their successors to cross-entropy; embedding and LSTM are equally wide."""

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
