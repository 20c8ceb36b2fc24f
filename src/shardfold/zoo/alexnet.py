"""AlexNet in one tower (Krizhevsky 2014): five convolutions, three fully-connected layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.zoo.shapes import ConvShape

FULL = ConvShape(image=224, classes=1000, width=64)
TINY = ConvShape(image=95, classes=10, width=8)


class AlexNet(nn.Module):
    """Images and labels to cross-entropy; `width` channels in the first convolution."""

    def __init__(self, shape: ConvShape) -> None:
        super().__init__()
        w = shape.width
        self.conv1 = nn.Conv2d(3, w, 11, stride=4, padding=2)
        self.conv2 = nn.Conv2d(w, 3 * w, 5, padding=2)
        self.conv3 = nn.Conv2d(3 * w, 6 * w, 3, padding=1)
        self.conv4 = nn.Conv2d(6 * w, 4 * w, 3, padding=1)
        self.conv5 = nn.Conv2d(4 * w, 4 * w, 3, padding=1)
        self.dropout = nn.Dropout(0.5)
        self.fc6 = nn.Linear(4 * w * _side(shape.image) ** 2, 64 * w)
        self.fc7 = nn.Linear(64 * w, 64 * w)
        self.fc8 = nn.Linear(64 * w, shape.classes)

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
    side = (image + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side
