"""Min-sum search over small integer choices: exact, folded, and bounded by memory."""

from shardfold.search.problem import Problem
from shardfold.search.solution import Solution, Statistics
from shardfold.search.solver import solve
from shardfold.search.watch import Progress, Watch, ignore

__all__ = ["Problem", "Progress", "Solution", "Statistics", "Watch", "ignore", "solve"]
