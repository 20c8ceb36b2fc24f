"""Running a plan: one rank's module on local shards, with the collectives that the plan lists."""

from shardfold.runtime.module import Parallel
from shardfold.runtime.parallelize import parallelize

__all__ = ["Parallel", "parallelize"]
