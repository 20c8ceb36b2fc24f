"""DenseNet (Huang et al. 2016): every layer of a block reads all layers before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.zoo.resize import ConvShape

FULL = ConvShape(image=224, classes=1000, width=64, blocks=(6, 12, 24, 16), growth=32)
TINY = ConvShape(image=32, classes=10, width=16, blocks=(2, 2, 2, 2), growth=8)
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
