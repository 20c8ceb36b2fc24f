"""The problem as an integer program, as Alpa and autoparallel pose it, solved by HiGHS.

One 0/1 variable s[v, i] per choice and one variable e[u, v, i, j] per entry of an edge table:

    minimise    sum c[v, i] s[v, i] + sum t[u, v, i, j] e[u, v, i, j]
    subject to  sum over i of s[v, i] = 1
                sum over j of e[u, v, i, j] = s[u, i]  and  sum over i of e[...] = s[v, j]

The e are then 0/1 by themselves. A memory limit is one more row. HiGHS comes with scipy.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from shardfold.errors import InfeasibleError, InputError
from shardfold.search.elimination import Pairwise, factors_of
from shardfold.search.interning import Array
from shardfold.search.problem import Problem
from shardfold.search.solution import Answer

SECONDS = 600.0
MAX_VARIABLES = 5_000_000


def ilp(problem: Problem, *, memory_limit: float | None = None, seconds: float = SECONDS) -> Answer:
    """Hand the problem to HiGHS; proven when it finishes, with its bound when it does not."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import, seldom needed

    cost = Pairwise.of(factors_of(problem))
    objective = _flat(cost)
    if objective.size > MAX_VARIABLES:
        raise InputError(
            f"The integer program would have {objective.size:,} variables, more than "
            f"{MAX_VARIABLES:,}. Use method 'exact'."
        )
    if not objective.size:
        return Answer(np.zeros(0, np.int64))
    scale = max(float(np.abs(objective).max()), 1e-300)
    rows, right = _rows(cost)
    constraints = [LinearConstraint(rows, right, right)]
    if memory_limit is not None:
        size = _flat(Pairwise.of(factors_of(problem.blended(0.0, 1.0))))
        unit = max(abs(memory_limit), 1.0)
        constraints.append(LinearConstraint(size[None] / unit, -np.inf, memory_limit / unit))
    chosen = int(sum(len(vector) for vector in cost.unary))
    whole = np.zeros(objective.size)
    whole[:chosen] = 1
    options = {"mip_rel_gap": 0.0, "time_limit": seconds}
    result = milp(
        objective / scale,
        constraints=constraints,
        integrality=whole,
        bounds=Bounds(0, 1),
        options=options,
    )
    return _answer(problem, cost, result, scale, memory_limit)


def _answer(
    problem: Problem, cost: Pairwise, result: Any, scale: float, memory_limit: float | None
) -> Answer:
    if result.status == 2 and memory_limit is not None:
        needed = ilp(problem.blended(0.0, 1.0)).choice
        raise InfeasibleError(needed_bytes=problem.total_bytes(needed), limit_bytes=memory_limit)
    if result.x is None:
        raise InputError(
            f"HiGHS found no choice: {result.message} Give it more time, or use method 'exact'."
        )
    starts = np.cumsum([0, *(len(vector) for vector in cost.unary)])
    choice = np.array(
        [np.argmax(result.x[a:b]) for a, b in itertools.pairwise(starts)], dtype=np.int64
    )
    bound = None if result.status == 0 else float(result.mip_dual_bound) * scale
    return Answer(choice, bound, "highs")


def _flat(problem: Pairwise) -> Array:
    """All vertex vectors, then all matrices row by row."""
    parts = [*problem.unary, *(table.reshape(-1) for table in problem.tables)]
    return np.concatenate(parts) if parts else np.zeros(0)


def _rows(problem: Pairwise) -> tuple[Any, Array]:
    """One row per vertex, then one per row and one per column of every matrix; right-hand sides."""
    from scipy.sparse import coo_matrix

    sizes = [len(vector) for vector in problem.unary]
    starts = np.cumsum([0, *sizes])
    row = [np.repeat(np.arange(len(sizes)), sizes)]
    column = [np.arange(starts[-1])]
    value = [np.ones(starts[-1])]
    next_row, next_column = len(sizes), int(starts[-1])
    for (u, v), table in zip(problem.pairs, problem.tables, strict=True):
        m, n = table.shape
        entries = next_column + np.arange(m * n)
        row += [next_row + np.repeat(np.arange(m), n), next_row + np.arange(m)]
        column += [entries, starts[u] + np.arange(m)]
        value += [np.ones(m * n), -np.ones(m)]
        row += [next_row + m + np.tile(np.arange(n), m), next_row + m + np.arange(n)]
        column += [entries, starts[v] + np.arange(n)]
        value += [np.ones(m * n), -np.ones(n)]
        next_row, next_column = next_row + m + n, next_column + m * n
    at = np.concatenate(row), np.concatenate(column)
    matrix = coo_matrix((np.concatenate(value), at), shape=(next_row, next_column)).tocsr()
    right = np.zeros(next_row)
    right[: len(sizes)] = 1
    return matrix, right
