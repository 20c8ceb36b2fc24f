"""The simulator: what runs when on which stream, and how much memory it takes."""

from shardfold.simulate.schedule import CLASSES, COMPUTE, Again, Operator, Schedule, Segment, Task
from shardfold.simulate.simulate import simulate, timeline
from shardfold.simulate.timeline import Exposed, Sample, Simulation, Span, Timeline

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
