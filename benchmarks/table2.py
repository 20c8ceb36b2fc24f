"""PaSE's Table II beside what shardfold finds: writes docs/results/paper-strategies.md and .json.

Every row of the table is also forced upon the search, alone and all together: the best plan that
splits those layers as the paper does, and how much longer its step is than the best plan's.

    .venv/bin/python benchmarks/table2.py
"""

from __future__ import annotations

import json
import platform
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import shardfold as sf
from shardfold import zoo
from shardfold.capture import capture
from shardfold.cluster import parse
from shardfold.costs import Tables as Tabulated
from shardfold.costs import optimizer_named, pricing_named, tabulate
from shardfold.graph import Graph, Op
from shardfold.operators import rules_of
from shardfold.search import solve
from shardfold.sharding import Subdims, find_subdims
from shardfold.sharding.names import word, words_of

CLUSTER = "4x8x1080ti"
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results"
PENALTY_SECONDS = 1e3  # more than any step: whatever carries it is chosen only by necessity
Split = Mapping[str, int]


@dataclass(frozen=True)
class Row:
    """A line of the paper's table; the data file says what each field means."""

    model: str
    layers: str
    factors: str
    paper: str
    module: str
    kind: str
    splits: tuple[Split, ...]


ROWS = tuple(
    Row(**{**row, "splits": tuple(row["splits"])})
    for row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["rows"]
)


@dataclass(frozen=True)
class Tables:
    """A model's search problem on one mesh."""

    graph: Graph
    subdims: Subdims
    tabulated: Tabulated
    words: Mapping[int, str]

    def forced(self, rows: Iterable[Row]) -> float:
        """Seconds of the best step whose operators are split as the rows say; inf if none is."""
        wanted = [row for row in rows if row.splits]
        problem = self.tabulated.problem
        costs = list(problem.costs)
        for v, vertex in enumerate(self.tabulated.vertices):
            if vertex.space is not None:
                op = self.graph.ops[vertex.index]
                for row in (row for row in wanted if matches(row, op)):
                    costs[v] = costs[v] + PENALTY_SECONDS * ~self._allowed(v, row)
        cost = solve(replace(problem, costs=tuple(costs))).cost
        return cost if cost < PENALTY_SECONDS else float("inf")

    def _allowed(self, v: int, row: Row) -> np.ndarray:
        vertex = self.tabulated.vertices[v]
        space, identities = vertex.space, self.subdims.factors[vertex.index]
        assert space is not None
        found = []
        for counts in space.parts(self.tabulated.mesh.shape):
            split: dict[str, int] = {}
            for factor, parts in enumerate(counts.tolist()):
                if parts > 1:
                    name = word(space.rule, factor, identities[factor], self.words)
                    split[name] = split.get(name, 1) * parts
            found.append(split in row.splits)
        return np.array(found)


def matches(row: Row, op: Op) -> bool:
    """Whether a row of the table speaks of this operator."""
    return op.kind == row.kind and re.fullmatch(row.module, op.origin.module) is not None


def tables_of(model: str) -> list[Tables]:
    """The search problems of a model, one a mesh, under the paper's costs."""
    module, args, kwargs = zoo.build(model)
    graph = capture(module, args, kwargs)
    pricing, cluster = pricing_named("paper"), parse(CLUSTER)
    subdims = find_subdims(graph, rules_of(graph, pricing.rules))
    words = words_of(graph, subdims)
    found = []
    for mesh in cluster.meshes():
        prices = pricing.model(cluster, mesh)
        tabulated = tabulate(graph, subdims, mesh, prices, optimizer_named("adamw"))
        found.append(Tables(graph, subdims, tabulated, words))
    return found


def found_splits(plan: sf.Plan, row: Row) -> list[dict[str, Any]]:
    """How the plan splits the operators of a row, the most frequent first."""
    counts = Counter(
        " ".join(f"{name}/{parts}" for name, parts in sorted(entry.split.items())) or "unsplit"
        for entry in plan.operators
        if entry.kind == row.kind and re.fullmatch(row.module, entry.module)
    )
    return [{"split": split, "operators": count} for split, count in counts.most_common()]


def measure(model: str) -> dict[str, Any]:
    """One model: the plan's splits, and the price of the paper's."""
    module, args, kwargs = zoo.build(model)
    plan = sf.plan(module, args, kwargs, cluster=CLUSTER, cost="paper")
    rows = [row for row in ROWS if row.model == model]
    tables = tables_of(model)
    best = min(t.forced(()) for t in tables)
    return {
        "model": model,
        "mesh": "x".join(str(axis.size) for axis in plan.mesh),
        "step_seconds": plan.estimate.step_seconds,
        "data_parallel_seconds": plan.estimate.data_parallel_seconds,
        "optimal": plan.estimate.optimal,
        "paper_strategy_ratio": min(t.forced(rows) for t in tables) / best,
        "rows": [
            {
                "layers": row.layers,
                "factors": row.factors,
                "paper": row.paper,
                "found": found_splits(plan, row),
                "paper_split_ratio": min(t.forced([row]) for t in tables) / best
                if row.splits
                else None,
            }
            for row in rows
        ],
    }


def environment() -> dict[str, str]:
    """What the figures were made with."""
    return {
        "shardfold": sf.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy")},
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| model | layers | factors | PaSE | shardfold | PaSE's split here |",
        "|---|---|---|---|---|---:|",
    ]
    for result in results:
        for row in result["rows"]:
            found = ", ".join(
                f"`{f['split']}`" + (f" ({f['operators']})" if len(row["found"]) > 1 else "")
                for f in row["found"]
            )
            ratio = row["paper_split_ratio"]
            price = "-" if ratio is None else "best" if ratio < 1 + 1e-9 else f"+{ratio - 1:.2%}"
            cells = (
                result["model"],
                row["layers"],
                f"`{row['factors']}`",
                row["paper"],
                found,
                price,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def totals(results: Sequence[Mapping[str, Any]]) -> str:
    """Steps and the price of the paper's whole strategy, as a Markdown table."""
    lines = [
        "| model | step | data parallel | all of PaSE's splits together |",
        "|---|---:|---:|---:|",
    ]
    for r in results:
        step, plain = r["step_seconds"], r["data_parallel_seconds"]
        behind = f"+{r['paper_strategy_ratio'] - 1:.2%}"
        lines.append(f"| {r['model']} | {step * 1e3:.2f} ms | {plain / step:.2f}x | {behind} |")
    return "\n".join(lines)


def fill(page: str, name: str, text: str) -> str:
    """Replace what stands between the marks of a generated part."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{text}\n{end}{after}"


def main() -> None:
    """Measure, and write the results beside the text that explains them."""
    results = [measure(model) for model in dict.fromkeys(row.model for row in ROWS)]
    whole = {"cluster": CLUSTER, "cost": "paper", "environment": environment(), "models": results}
    (FOLDER / "paper-strategies.json").write_text(json.dumps(whole, indent=2) + "\n")
    page = FOLDER / "paper-strategies.md"
    text = fill(page.read_text(), "strategies", table(results))
    page.write_text(fill(text, "totals", totals(results)))


if __name__ == "__main__":
    main()
