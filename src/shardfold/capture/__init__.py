"""From an unmodified `nn.Module` and an example batch to a `Graph`, without allocating weights."""

from shardfold.capture.capture import capture

__all__ = ["capture"]
