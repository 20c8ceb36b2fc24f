"""Measuring a machine: kernels, what the host takes to launch them, and collectives."""

from shardfold.calibrate.calibrate import Stage, calibrate

__all__ = ["Stage", "calibrate"]
