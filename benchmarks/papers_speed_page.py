"""The part of the papers' page on speed: Figure 6, what is behind it, and where orders differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from papers_table import NAMES, PUBLISHED, table

Row = Mapping[str, Any]
READ_OFF = 0.04  # of the paper's figures: both are read off a plot to about 0.02
METHODS = (("expert", "expert"), ("flexflow", "mcmc"), ("pase", "plan"))  # theirs, ours
WORDS = {"expert": "expert", "mcmc": "random moves", "plan": "plan"}


def speed(rows: Sequence[Row], folder: Path) -> str:
    """Figure 6: speed-up over data parallelism."""
    parts = [SPEED]
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        body = [_cells(row) for row in rows if row["gpu"] == gpu]
        parts.append(f"### {_gpu(gpu)}\n\n" + table(HEAD, body))
    return "\n\n".join([*parts, _behind(rows), _orders(rows), _pipelined(rows)])


HEAD = (
    "model, devices",
    "paper: expert",
    "paper: FlexFlow",
    "paper: PaSE",
    "expert",
    "random moves",
    "exact sum",
    "plan",
)
SPEED = """## Speed-up over data parallelism (PaSE's Figure 6)

The paper measured; we simulate. Its figures are read off the plot to about 0.02. The experts are
one-weird-trick for the convolutional networks, Mesh-TensorFlow's layout in its best degree for the
Transformer (within a node that is Megatron's), and for RNNLM layers placed on two halves of the
devices, data parallel within: priced, not run, since a plan splits operators and does not place
them (`benchmarks/papers_placed.py` says how). Random moves are FlexFlow's 250,000, on sums, from
the best strategy by hand; *exact sum* is the best sum of all, *plan* what `shardfold plan`
returns."""


def _cells(row: Row) -> list[str]:
    theirs = [_theirs(row, method) for method, _ in METHODS]
    ours = [row["speedups"][k] for k in ("expert", "mcmc", "exact", "plan")]
    cells = ["-" if value is None else f"{value:.2f}" for value in (*theirs, *ours)]
    return [_case(row), *cells]


def _theirs(row: Row, method: str) -> float | None:
    paper = PUBLISHED["speedup"][row["gpu"]][row["model"]]
    at = PUBLISHED["devices"].index(row["devices"])
    return paper[method][at] if method in paper else None


def _case(row: Row) -> str:
    return f"{NAMES[row['model']]}, {row['devices']}"


def _gpu(gpu: str) -> str:
    return gpu.replace("ti", " Ti")


def _behind(rows: Sequence[Row]) -> str:
    """Every case in which the paper's speed-up is larger, and what our costs say to it."""
    behind = [row for row in rows if row["speedups"]["plan"] < (_theirs(row, "pase") or 0.0)]
    large = [row for row in rows if row["devices"] >= 32]
    kept = len(large) - sum(row in large for row in behind)
    text = (
        f"### Where the paper's speed-up is larger\n\nOf the {len(large)} cases with 32 and 64 "
        f"devices, the plan's speed-up is at least the paper's in {kept}; of all {len(rows)}, in "
        f"{len(rows) - len(behind)}."
    )
    if not behind:
        return text
    body = [_reason(row) for row in behind]
    return "\n\n".join([text, BEHIND, table(BEHIND_HEAD, body)])


BEHIND_HEAD = (
    "case",
    "paper",
    "plan",
    "data parallel's step",
    "of it waiting for links",
    "at most",
    "without overlap",
)
BEHIND = """Our costs say why in the rest. Data parallelism's reductions run beside backward work in
our simulator, as they do in DistributedDataParallel; the paper ran on Mesh-TensorFlow and priced no
overlap. What a plan can save is what data parallelism waits for links: if all of that were saved
and nothing else lost, the speed-up would be *at most* the figure in that column. *Without overlap*
is the ratio of the two sums, in which every reduction is waited for, as in the paper's costs."""


def _reason(row: Row) -> list[str]:
    by_name = {r["method"]: r for r in row["results"]}
    plain, plan = by_name["data-parallel"], by_name["plan"]
    step, waits = plain["simulated_seconds"], plain["exposed_seconds"]
    return [
        f"{_gpu(row['gpu'])} {_case(row)}",
        f"{_theirs(row, 'pase'):.2f}",
        f"{row['speedups']['plan']:.2f}",
        f"{step * 1e3:.1f} ms",
        f"{waits / step:.0%}",
        f"{step / (step - waits):.2f}",
        f"{plain['step_seconds'] / plan['step_seconds']:.2f}",
    ]


def _orders(rows: Sequence[Row]) -> str:
    """Every pair of methods that the paper orders and we order the other way."""
    wrong = [(row, *pair) for row in rows for pair in reversed_pairs(row)]
    columns = len({id(row) for row, *_ in wrong})
    text = (
        f"### The order of expert, random moves and plan\n\nIn {len(rows) - columns} of "
        f"{len(rows)} columns it is the paper's order of expert, FlexFlow and PaSE (differences of "
        f"{READ_OFF} and less in the paper's figure count as ties)."
    )
    if not wrong:
        return text
    body = [
        [
            f"{_gpu(row['gpu'])} {_case(row)}",
            f"{WORDS[high]} {_theirs(row, _paper(high)):.2f}, "
            f"{WORDS[low]} {_theirs(row, _paper(low)):.2f}",
            f"{row['speedups'][high]:.2f}, {row['speedups'][low]:.2f}",
        ]
        for row, high, low in wrong
    ]
    return "\n\n".join([text, ORDERS, table(("case", "paper", "ours"), body)])


ORDERS = """In these it is not."""


def _paper(ours: str) -> str:
    return next(theirs for theirs, mine in METHODS if mine == ours)


def reversed_pairs(row: Row) -> Iterator[tuple[str, str]]:
    """Pairs of methods of which the paper has the first clearly ahead, and we the second."""
    for (one, first), (other, second) in combinations(METHODS, 2):
        a, b = _theirs(row, one), _theirs(row, other)
        if a is None or b is None or abs(a - b) <= READ_OFF:
            continue
        high, low = (first, second) if a > b else (second, first)
        if row["speedups"][high] < row["speedups"][low] * (1 - 1e-9):
            yield high, low


def _pipelined(rows: Sequence[Row]) -> str:
    placed = [row for row in rows if "expert_pipelined" in row["speedups"]]
    if not placed:
        return ""
    most = max(row["speedups"]["expert_pipelined"] for row in placed)
    least = min(row["speedups"]["plan"] for row in placed)
    return (
        "RNNLM's layers are priced one after the other. Were the two halves to work side by side "
        f"all the time, the expert's speed-up would be at most {most:.2f} in any column; the "
        f"plan's is at least {least:.2f}."
    )
