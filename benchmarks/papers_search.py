"""PaSE's Table I with our tables: breadth-first, FlexFlow's random moves, and the exact search.

Every method gets the same search problem: the model's, on the mesh on which the exact search wins.
Random moves start from the best baseline, as FlexFlow did, and get its 250,000 iterations:
once until half of the time has brought nothing, as FlexFlow stops, and once all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from shardfold import zoo
from shardfold.capture import capture
from shardfold.cluster import parse
from shardfold.costs import Tables, optimizer_named, pricing_named, tabulate
from shardfold.errors import ShardfoldError
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.search import Problem, solve
from shardfold.search.baselines import MOVES, mcmc
from shardfold.sharding import Subdims, find_subdims
from shardfold.strategies.baselines import STRATEGIES, Setting, Unfit

MODELS = ("alexnet", "inceptionv3", "rnnlm", "transformer")
DEVICES = (4, 8, 16, 32, 64)
REPEATS = 5  # of the exact search, which takes milliseconds; the least counts


def cluster_of(devices: int, gpu: str) -> str:
    """Nodes of 8, as in the paper.

    >>> cluster_of(4, "1080ti"), cluster_of(32, "1080ti")
    ('4x1080ti', '4x8x1080ti')
    """
    return f"{devices}x{gpu}" if devices <= 8 else f"{devices // 8}x8x{gpu}"


def rows() -> Iterator[dict[str, Any]]:
    """One row a model and number of devices."""
    for model in MODELS:
        module, args, kwargs = zoo.build(model)
        graph = capture(module, args, kwargs)
        pricing = pricing_named("paper")
        subdims = find_subdims(graph, rules_of(graph, pricing.rules))
        for devices in DEVICES:
            yield {"model": model, "devices": devices, **_row(graph, subdims, devices)}


def _row(graph: Graph, subdims: Subdims, devices: int) -> dict[str, Any]:
    pricing, cluster = pricing_named("paper"), parse(cluster_of(devices, "1080ti"))
    begin = time.perf_counter()
    made = [
        tabulate(graph, subdims, mesh, pricing.model(cluster, mesh), optimizer_named("sgd"))
        for mesh in cluster.meshes()
    ]
    tables = time.perf_counter() - begin
    found = [(solve(tables.problem), tables) for tables in made]
    best, tables = min(found, key=lambda pair: pair[0].cost)
    again = min(solve(tables.problem).statistics.seconds for _ in range(REPEATS))
    start = _by_hand(graph, subdims, tables)
    return {
        "mesh": str(tables.mesh),
        "vertices": len(tables.problem),
        "most_choices": int(tables.problem.sizes.max()),
        "tables_seconds": tables,
        "all_meshes_seconds": sum(solution.statistics.seconds for solution, _ in found),
        "exact": {"seconds": again, "cost": best.cost, "optimal": best.is_optimal},
        "breadth-first": _other(tables, "breadth-first", None),
        "mcmc": _other(tables, "mcmc", start),
        "all_moves": _all_moves(tables.problem, start),
    }


def _by_hand(graph: Graph, subdims: Subdims, tables: Tables) -> tuple[int, ...]:
    """The best baseline on these tables, from which random moves start."""
    setting = Setting(graph, subdims, tables)
    found = (strategy(setting) for strategy in STRATEGIES.values())
    choices = [choice for choice in found if not isinstance(choice, Unfit)]
    return min(choices, key=setting.rank)


def _other(tables: Tables, method: str, start: tuple[int, ...] | None) -> dict[str, Any]:
    try:
        solution = solve(tables.problem, method=method, start=start)
    except ShardfoldError as error:
        return {"seconds": None, "cost": None, "note": str(error)}
    return {"seconds": solution.statistics.seconds, "cost": solution.cost}


def _all_moves(problem: Problem, start: tuple[int, ...]) -> dict[str, Any]:
    """Every one of the 250,000 moves, whatever they bring."""
    begin = time.perf_counter()
    answer = mcmc(problem, start=start, moves=MOVES, patient=True)
    seconds = time.perf_counter() - begin
    return {"moves": MOVES, "seconds": seconds, "cost": problem.total(answer.choice.tolist())}
