"""From an unmodified `nn.Module` and an example batch to a `Graph`, without allocating weights."""

from shardfold.capture.capture import capture, capture_program, capture_short
from shardfold.capture.program import Invocation, Program, Slot, Source, places_of

__all__ = [
    "Invocation",
    "Program",
    "Slot",
    "Source",
    "capture",
    "capture_program",
    "capture_short",
    "places_of",
]
