"""Breadth-first dynamic programming: the comparison of the PaSE paper, not a method to use.

The recurrence is that of `eliminate`; only the order is the graph's own, from its first vertex on.
On branching graphs the tables span the whole front of the search and soon fit no memory.
"""

from __future__ import annotations

import numpy as np

from shardfold.errors import InputError
from shardfold.search.eliminate import eliminate, trace_back
from shardfold.search.factors import factors_of
from shardfold.search.orders import forecast
from shardfold.search.problem import Problem
from shardfold.search.solution import Answer
from shardfold.search.watch import Watch, ignore


def breadth(problem: Problem, *, table_bytes: float, watch: Watch = ignore) -> Answer:
    """Eliminate breadth-first; an error, before anything is allocated, if that cannot fit."""
    factors = factors_of(problem)
    plan = forecast(factors, "breadth-first")
    if 8 * plan.stored > table_bytes:
        raise InputError(
            f"Breadth-first tables need {8 * plan.stored:.3g} bytes, more than the "
            f"{table_bytes:.3g} allowed. Use method 'exact', which chooses its own order."
        )
    chosen: dict[int, int] = {}
    trail, optimum = eliminate(factors, plan.order, watch)
    trace_back(trail, chosen)
    choice = np.array([chosen[v] for v in range(len(problem))], dtype=np.int64)
    return Answer(choice, optimum, plan.name, int(plan.largest), int(8 * plan.stored))
