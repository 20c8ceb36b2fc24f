"""ResNet with bottleneck blocks (He et al. 2015), stride on the 3x3 convolution."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.zoo.resize import ConvShape

RESNET50 = ConvShape(image=224, classes=1000, width=64, blocks=(3, 4, 6, 3))
RESNET101 = ConvShape(image=224, classes=1000, width=64, blocks=(3, 4, 23, 3))
RESNET50_WIDE = ConvShape(image=224, classes=100_000, width=64, blocks=(3, 4, 6, 3))
TINY = ConvShape(image=32, classes=10, width=4, blocks=(2, 2, 2, 2))
TINY_DEEP = ConvShape(image=32, classes=10, width=4, blocks=(2, 2, 4, 2))
TINY_WIDE = ConvShape(image=32, classes=257, width=4, blocks=(2, 2, 2, 2))
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
