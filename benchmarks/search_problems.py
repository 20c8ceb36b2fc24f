"""Search problems made from seeds: chains of encoder layers, dense blocks, random graphs."""

from __future__ import annotations

import numpy as np

from shardfold.search import Problem

# One encoder layer as PaSE draws it; vertex 12 is the next layer's vertex 0.
LAYER = (
    (0, 1), (0, 7), (1, 2), (2, 3), (2, 5), (3, 4), (4, 5), (5, 6), (6, 7),
    (7, 8), (8, 9), (8, 11), (9, 10), (10, 11), (11, 12),
)  # fmt: skip


def encoder_chain(layers: int, choices: int = 30, seed: int = 0) -> Problem:
    """`layers` identical Transformer layers in a row, random costs."""
    random = np.random.default_rng(seed)
    vectors = [random.random(choices) for _ in range(12)]
    tables = tuple(random.random((choices, choices)) for _ in LAYER)
    edges = tuple((12 * t + u, 12 * t + v) for t in range(layers) for u, v in LAYER)
    costs = tuple(vectors[v % 12] for v in range(12 * layers + 1))
    return Problem(costs, edges, tables * layers)


def dense_block(vertices: int, choices: int, layouts: int, seed: int = 0) -> Problem:
    """Every vertex reads all before it, as in DenseNet; moving costs when layouts differ."""
    random = np.random.default_rng(seed)
    layout = [random.integers(0, layouts, choices) for _ in range(vertices)]
    edges = tuple((u, v) for u in range(vertices) for v in range(u + 1, vertices))
    costs = tuple(random.random(choices) * 3 for _ in range(vertices))
    tables = []
    for u, v in edges:
        moving = random.random((layouts, layouts))[layout[u]][:, layout[v]]
        tables.append(moving * (layout[u][:, None] != layout[v]))
    return Problem(costs, edges, tuple(tables))


def random_graph(seed: int, vertices: int) -> Problem:
    """A sparse random graph with 3 to 6 choices a vertex, and bytes that fall as cost rises."""
    random = np.random.default_rng(seed)
    sizes = random.integers(3, 7, vertices)
    edges = {(int(random.integers(max(0, v - 6), v)), v) for v in range(1, vertices)}
    for _ in range(vertices // 3):
        u = int(random.integers(vertices - 4))
        edges.add((u, u + int(random.integers(2, 5))))
    costs = tuple(random.random(k) for k in sizes)
    tables = tuple(random.random((sizes[u], sizes[v])) for u, v in sorted(edges))
    return Problem(costs, tuple(sorted(edges)), tables, falling_bytes(costs, seed))


def falling_bytes(costs: tuple[np.ndarray, ...], seed: int) -> tuple[np.ndarray, ...]:
    """Bytes for each choice, larger where it is cheaper, the same for the same array."""
    random = np.random.default_rng(seed)
    made: dict[int, np.ndarray] = {}
    for cost in costs:
        if id(cost) not in made:
            rank = np.argsort(np.argsort(-cost)) / max(len(cost) - 1, 1)
            made[id(cost)] = np.round(1e6 * (0.2 + rank + 0.3 * random.random(len(cost))))
    return tuple(made[id(cost)] for cost in costs)
