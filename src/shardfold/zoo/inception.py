"""Inception v3 (Szegedy et al. 2015), without the auxiliary head, as PaSE plans it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.zoo.resize import ConvShape

# `width` is the channels of the first convolution; every other width is a multiple of it.
FULL = ConvShape(image=299, classes=1000, width=32)
TINY = ConvShape(image=75, classes=10, width=4)

Kernel = tuple[int, int]


class Conv(nn.Module):
    """Convolution, batch norm and rectifier; `same` pads a stride of 1 to keep the side."""

    def __init__(self, i: int, o: int, kernel: Kernel, stride: int = 1, same: bool = True) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if same else (0, 0)
        self.conv = nn.Conv2d(i, o, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(o, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """The rectified map."""
        return F.relu(self.bn(self.conv(x)))


def _chain(i: int, *steps: tuple[int, Kernel], reduce: bool = False) -> nn.Sequential:
    """Convolutions in a row; with `reduce`, the last halves the side."""
    chain = nn.Sequential()
    for index, (o, kernel) in enumerate(steps):
        halves = reduce and index == len(steps) - 1
        chain.append(Conv(i, o, kernel, stride=2 if halves else 1, same=not halves))
        i = o
    return chain


class AvgPool(nn.Module):
    """Average over 3x3 at stride 1: the pooling before a 1x1 convolution."""

    def forward(self, x: Tensor) -> Tensor:
        """The smoothed map."""
        return F.avg_pool2d(x, 3, stride=1, padding=1)


class MaxPool(nn.Module):
    """Maximum over 3x3 at stride 2: the pooling that halves the side."""

    def forward(self, x: Tensor) -> Tensor:
        """The halved map."""
        return F.max_pool2d(x, 3, stride=2)


class Fork(nn.Module):
    """Two convolutions of one input, side by side (module E's 1x3 and 3x1)."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.wide = Conv(i, o, (1, 3))
        self.tall = Conv(i, o, (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Both results, concatenated."""
        return torch.cat([self.wide(x), self.tall(x)], 1)


class Module(nn.Module):
    """Branches of one input, concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """All branches' channels."""
        return torch.cat([branch(x) for branch in self.branches], 1)


ONE, THREE, FIVE, WIDE, TALL = (1, 1), (3, 3), (5, 5), (1, 7), (7, 1)


class Inception(nn.Module):
    """Images and labels to cross-entropy: the stem, modules A (3), B, C (4), D, E (2), the head."""

    def __init__(self, shape: ConvShape) -> None:
        super().__init__()
        self._unit: int = shape.width
        c = self._channels
        self.stem = nn.Sequential(
            Conv(3, c(32), THREE, stride=2, same=False),
            Conv(c(32), c(32), THREE, same=False),
            Conv(c(32), c(64), THREE),
            MaxPool(),
            Conv(c(64), c(80), ONE, same=False),
            Conv(c(80), c(192), THREE, same=False),
            MaxPool(),
        )
        self.a = nn.Sequential(self._a(192, 32), self._a(256, 64), self._a(288, 64))
        self.b = self._b(288)
        self.c = nn.Sequential(*(self._c(768, width) for width in (128, 160, 160, 192)))
        self.d = self._d(768)
        self.e = nn.Sequential(self._e(1280), self._e(2048))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(c(2048), shape.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the batch."""
        x = self.e(self.d(self.c(self.b(self.a(self.stem(images))))))
        return F.cross_entropy(self.fc(self.dropout(x.mean((2, 3)))), labels)

    def _channels(self, published: int) -> int:
        return published * self._unit // FULL.width

    def _branch(
        self,
        i: int,
        *steps: tuple[int, Kernel],
        reduce: bool = False,
        first: nn.Module | None = None,
    ) -> nn.Sequential:
        c = self._channels
        chain = _chain(c(i), *((c(o), kernel) for o, kernel in steps), reduce=reduce)
        return chain if first is None else nn.Sequential(first, *chain)

    def _a(self, i: int, pooled: int) -> Module:
        return Module(
            self._branch(i, (64, ONE)),
            self._branch(i, (48, ONE), (64, FIVE)),
            self._branch(i, (64, ONE), (96, THREE), (96, THREE)),
            self._branch(i, (pooled, ONE), first=AvgPool()),
        )

    def _b(self, i: int) -> Module:
        return Module(
            self._branch(i, (384, THREE), reduce=True),
            self._branch(i, (64, ONE), (96, THREE), (96, THREE), reduce=True),
            MaxPool(),
        )

    def _c(self, i: int, w: int) -> Module:
        return Module(
            self._branch(i, (192, ONE)),
            self._branch(i, (w, ONE), (w, WIDE), (192, TALL)),
            self._branch(i, (w, ONE), (w, TALL), (w, WIDE), (w, TALL), (192, WIDE)),
            self._branch(i, (192, ONE), first=AvgPool()),
        )

    def _d(self, i: int) -> Module:
        return Module(
            self._branch(i, (192, ONE), (320, THREE), reduce=True),
            self._branch(i, (192, ONE), (192, WIDE), (192, TALL), (192, THREE), reduce=True),
            MaxPool(),
        )

    def _e(self, i: int) -> Module:
        c = self._channels
        return Module(
            self._branch(i, (320, ONE)),
            nn.Sequential(*self._branch(i, (384, ONE)), Fork(c(384), c(384))),
            nn.Sequential(*self._branch(i, (448, ONE), (384, THREE)), Fork(c(384), c(384))),
            self._branch(i, (192, ONE), first=AvgPool()),
        )
