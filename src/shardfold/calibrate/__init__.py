"""Measuring a machine: kernels, what the host takes to launch them, and collectives."""

from shardfold.calibrate.profile import calibrate
from shardfold.progress import Stage

__all__ = ["Stage", "calibrate"]
