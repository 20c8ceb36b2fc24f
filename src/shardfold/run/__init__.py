"""Running a plan: one rank's module on local parts, with the collectives that the plan lists."""

from shardfold.run.module import Parallel
from shardfold.run.parallelize import parallelize

__all__ = ["Parallel", "parallelize"]
