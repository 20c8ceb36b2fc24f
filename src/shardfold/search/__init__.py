"""Min-sum search over small integer choices: exact, folded, and bounded by memory.

>>> import numpy as np
>>> move = np.array([[0.0, 2.0], [2.0, 0.0]])
>>> problem = Problem((np.array([1.0, 3.0]), np.array([4.0, 0.5])), ((0, 1),), (move,))
>>> solution = solve(problem)
>>> solution.choice, solution.cost, solution.is_optimal
((0, 1), 3.5, True)
"""

from shardfold.search.elimination import ORDERS
from shardfold.search.problem import Problem, read_problem, write_problem
from shardfold.search.solution import Progress, Solution, Statistics, Watch, ignore, unproven
from shardfold.search.solve import METHODS, solve

__all__ = [
    "METHODS",
    "ORDERS",
    "Problem",
    "Progress",
    "Solution",
    "Statistics",
    "Watch",
    "ignore",
    "read_problem",
    "solve",
    "unproven",
    "write_problem",
]
