"""Convolutional networks: AlexNet, DenseNet, Inception v3 and ResNet.

AlexNet (Krizhevsky 2012) is without its two groups. In DenseNet (Huang et al. 2016), every layer of
a block reads all layers before it. Inception v3 (Szegedy et al. 2015) is without the auxiliary
head, as PaSE plans it. ResNet (He et al. 2015) has bottleneck blocks, with the stride on the 3x3
convolution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.zoo.catalog import ConvShape

ALEXNET = ConvShape(image=227, classes=1000, width=96)
ALEXNET_TINY = ConvShape(image=95, classes=10, width=12)


class AlexNet(nn.Module):
    """Images and labels to cross-entropy; `width` channels in the first convolution."""

    def __init__(self, shape: ConvShape) -> None:
        super().__init__()
        w = shape.width
        wide = w * 8 // 3
        features = w * 128 // 3
        self.conv1 = nn.Conv2d(3, w, 11, stride=4)
        self.conv2 = nn.Conv2d(w, wide, 5, padding=2)
        self.conv3 = nn.Conv2d(wide, 4 * w, 3, padding=1)
        self.conv4 = nn.Conv2d(4 * w, 4 * w, 3, padding=1)
        self.conv5 = nn.Conv2d(4 * w, wide, 3, padding=1)
        self.dropout = nn.Dropout(0.5)
        self.fc6 = nn.Linear(wide * _side(shape.image) ** 2, features)
        self.fc7 = nn.Linear(features, features)
        self.fc8 = nn.Linear(features, shape.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the batch."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 3, 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 3, 2)
        x = F.relu(self.conv3(x))
        x = F.relu(self.conv4(x))
        x = F.max_pool2d(F.relu(self.conv5(x)), 3, 2)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc6(self.dropout(x)))
        x = F.relu(self.fc7(self.dropout(x)))
        return F.cross_entropy(self.fc8(x), labels)


def _side(image: int) -> int:
    """The side of the last feature map: one strided convolution, then three poolings."""
    side = (image - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


DENSENET121 = ConvShape(image=224, classes=1000, width=64, blocks=(6, 12, 24, 16), growth=32)
DENSENET_TINY = ConvShape(image=32, classes=10, width=16, blocks=(2, 2, 2, 2), growth=8)
BOTTLENECK = 4


class DenseLayer(nn.Module):
    """Two convolutions that make `growth` new channels out of all channels so far."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, BOTTLENECK * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        """The new channels."""
        x = torch.cat(features, 1)
        x = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(x)))


class DenseBlock(nn.Module):
    """Dense layers in a row; the output is all channels, old and new."""

    def __init__(self, channels: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(channels + index * growth, growth) for index in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        """All channels, concatenated."""
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Module):
    """Halves the channels and the side between blocks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The halved map."""
        return F.avg_pool2d(self.conv(F.relu(self.norm(x))), 2, 2)


class DenseNet(nn.Module):
    """Images and labels to cross-entropy."""

    def __init__(self, shape: ConvShape) -> None:
        super().__init__()
        channels = shape.width
        self.conv0 = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.norm0 = nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential()
        for index, count in enumerate(shape.blocks):
            if index > 0:
                self.blocks.append(Transition(channels))
                channels //= 2
            self.blocks.append(DenseBlock(channels, shape.growth, count))
            channels += count * shape.growth
        self.norm5 = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, shape.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the batch."""
        x = F.max_pool2d(F.relu(self.norm0(self.conv0(images))), 3, 2, padding=1)
        x = F.relu(self.norm5(self.blocks(x)))
        return F.cross_entropy(self.fc(x.mean((2, 3))), labels)


# `width` is the channels of the first convolution; every other width is a multiple of it.
INCEPTION_V3 = ConvShape(image=299, classes=1000, width=32)
INCEPTION_TINY = ConvShape(image=75, classes=10, width=4)

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
        return published * self._unit // INCEPTION_V3.width

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


RESNET50 = ConvShape(image=224, classes=1000, width=64, blocks=(3, 4, 6, 3))
RESNET101 = ConvShape(image=224, classes=1000, width=64, blocks=(3, 4, 23, 3))
RESNET50_WIDE = ConvShape(image=224, classes=100_000, width=64, blocks=(3, 4, 6, 3))
RESNET_TINY = ConvShape(image=32, classes=10, width=4, blocks=(2, 2, 2, 2))
RESNET_TINY_DEEP = ConvShape(image=32, classes=10, width=4, blocks=(2, 2, 4, 2))
RESNET_TINY_WIDE = ConvShape(image=32, classes=257, width=4, blocks=(2, 2, 2, 2))
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around which the input is added."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, rectified after the sum."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images and labels to cross-entropy; each stage doubles the width and halves the side."""

    def __init__(self, shape: ConvShape) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, shape.width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(shape.width)
        channels = shape.width
        self.stages = nn.ModuleList()
        for stage, count in enumerate(shape.blocks):
            width = shape.width * 2**stage
            blocks = nn.Sequential()
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Bottleneck(channels, width, stride))
                channels = EXPANSION * width
            self.stages.append(blocks)
        self.fc = nn.Linear(channels, shape.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of the batch."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, padding=1)
        for stage in self.stages:
            x = stage(x)
        return F.cross_entropy(self.fc(x.mean((2, 3))), labels)
