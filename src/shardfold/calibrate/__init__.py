"""Measuring a machine: kernels, what the host takes to launch them, and collectives."""

from shardfold.calibrate.calibrate import calibrate
from shardfold.stages import Stage

__all__ = ["Stage", "calibrate"]
