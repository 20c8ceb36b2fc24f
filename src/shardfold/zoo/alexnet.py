"""AlexNet (Krizhevsky 2012) without its two groups: five convolutions, three linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.zoo.resize import ConvShape

FULL = ConvShape(image=227, classes=1000, width=96)
TINY = ConvShape(image=95, classes=10, width=12)


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
