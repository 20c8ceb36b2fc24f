"""Example batches: empty on the meta device, random and reproducible elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

SEED = 0
IGNORED = -100  # the label that cross-entropy skips by default


class Draw:
    """Draws inputs on a device; the same draws in the same order give the same numbers."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_meta = self.device.type == "meta"
        self._generator = torch.Generator("cpu").manual_seed(SEED)

    def integers(self, below: int, *size: int) -> Tensor:
        """Integers in [0, below): tokens or class labels."""
        if self.is_meta:
            return torch.empty(size, dtype=torch.long, device=self.device)
        with torch.device("cpu"):
            drawn = torch.randint(below, size, generator=self._generator)
        return drawn.to(self.device)

    def images(self, batch: int, side: int) -> Tensor:
        """Normally distributed RGB images, of the default dtype."""
        size = (batch, 3, side, side)
        if self.is_meta:
            return torch.empty(size, device=self.device)
        with torch.device("cpu"):
            drawn = torch.randn(size, generator=self._generator)
        return drawn.to(self.device)

    def masked_labels(self, tokens: Tensor, share: float = 0.15) -> Tensor:
        """The tokens at a share of the positions, and `IGNORED` at the others."""
        if self.is_meta:
            return torch.empty_like(tokens)
        with torch.device("cpu"):
            kept = torch.rand(tokens.shape, generator=self._generator) < share
        kept[:, 0] = True  # never a batch without a label: its loss would be nan
        return tokens.masked_fill(~kept.to(self.device), IGNORED)
