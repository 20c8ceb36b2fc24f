"""The simulator: what runs when on which stream, and how much memory it takes."""

from shardfold.simulate.schedule import (
    CLASSES,
    COMPUTE,
    Again,
    Exposed,
    Operator,
    Sample,
    Schedule,
    Segment,
    Simulation,
    Span,
    Task,
    Timeline,
)
from shardfold.simulate.simulate import simulate, timeline

__all__ = [
    "CLASSES",
    "COMPUTE",
    "Again",
    "Exposed",
    "Operator",
    "Sample",
    "Schedule",
    "Segment",
    "Simulation",
    "Span",
    "Task",
    "Timeline",
    "simulate",
    "timeline",
]
