"""Random search problems: ties, parallel edges, isolated vertices, single choices, repeats."""

from __future__ import annotations

import numpy as np

from shardfold.search import Problem


def random_problem(seed: int, *, most_vertices: int = 7, with_bytes: bool = False) -> Problem:
    """A small problem of any shape; tables are often shared, and often full of ties."""
    random = np.random.default_rng(seed)
    n = int(random.integers(0, most_vertices + 1))
    sizes = random.integers(1, 5, n).tolist()
    has_ties, sharing = random.random() < 0.5, random.random()
    pool: dict[tuple[int, ...], list[np.ndarray]] = {}

    def table(*shape: int) -> np.ndarray:
        made = pool.setdefault(shape, [])
        if made and random.random() < sharing:
            return made[int(random.integers(len(made)))]
        whole = random.integers(0, 3, shape).astype(float)
        made.append(whole if has_ties else random.normal(size=shape))
        return made[-1]

    edges: list[tuple[int, int]] = []
    for _ in range(int(random.integers(0, 2 * n + 1)) if n > 1 else 0):
        u, v = random.choice(n, 2, replace=False)
        edges.append((int(u), int(v)))
    costs = tuple(table(k) for k in sizes)
    edge_costs = tuple(table(sizes[u], sizes[v]) for u, v in edges)
    if not with_bytes:
        return Problem(costs, tuple(edges), edge_costs)
    sizes_in_bytes = tuple(random.integers(0, 9, k).astype(float) for k in sizes)
    between = tuple(random.integers(0, 4, t.shape).astype(float) for t in edge_costs)
    return Problem(costs, tuple(edges), edge_costs, sizes_in_bytes, between)


def repeated_problem(seed: int, *, copies: int, has_hub: bool = False) -> Problem:
    """A block of a few vertices again and again, with something before and after it."""
    random = np.random.default_rng(seed)
    period = int(random.integers(1, 6))
    sizes = random.integers(1, 4, period).tolist()
    vectors = [random.integers(0, 5, k).astype(float) for k in sizes]
    block = []
    for _ in range(int(random.integers(period, 2 * period + 1))):
        u = int(random.integers(period))
        v = u + 1 + int(random.integers(period))
        block.append((u, v, random.integers(0, 5, (sizes[u], sizes[v % period])).astype(float)))
    first = 1 + int(random.integers(0, 3))
    costs = [random.random(2) for _ in range(first)]
    costs += [vectors[i % period] for i in range(period * copies)]
    edges, tables = [], []
    to_hub = random.integers(0, 5, (2, sizes[0])).astype(float)
    for copy in range(copies):
        at = first + copy * period
        for u, v, values in block:
            if at + v < len(costs):
                edges.append((at + u, at + v))
                tables.append(values)
        if has_hub:
            edges.append((0, at))
            tables.append(to_hub)
    for before in range(first):
        edges.append((before, first))
        tables.append(random.random((2, sizes[0])))
    costs.append(random.random(3))
    edges.append((len(costs) - 2, len(costs) - 1))
    tables.append(random.random((sizes[-1], 3)))
    return Problem(tuple(costs), tuple(edges), tuple(tables))


def renumbered(problem: Problem, seed: int) -> tuple[Problem, np.ndarray]:
    """The same problem with its vertices and edges shuffled; new number of each old vertex."""
    random = np.random.default_rng(seed)
    new = random.permutation(len(problem))
    old = np.argsort(new)
    order = random.permutation(len(problem.edges)).tolist()
    edges = tuple((int(new[problem.edges[e][0]]), int(new[problem.edges[e][1]])) for e in order)
    costs = tuple(problem.costs[v] for v in old)
    return Problem(costs, edges, tuple(problem.edge_costs[e] for e in order)), new
