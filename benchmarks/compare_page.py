"""The page of the comparison with all methods, from the file that the comparison wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "results" / "compare.md"
TIE = 1e-9  # relative: what rounding can explain
Row = Mapping[str, Any]


def write(whole: Mapping[str, Any]) -> None:
    """Write the page."""
    PAGE.write_text(page(whole))


def page(whole: Mapping[str, Any]) -> str:
    """All cases, and what each method comes to over all of them."""
    rows, at, effort = whole["rows"], whole["environment"], whole["effort"]
    parts = (
        "# The plan against every other method",
        f"Written by `python benchmarks/compare.py` on {at['date']}; {at['processor']}, one "
        f"core, Python {at['python']}. Models of the zoo in their full size; bf16, and fp32 on "
        "1080 Ti and 2080 Ti. Steps are [simulated](../explanation/simulation.md) with the "
        "roofline's prices, each "
        f"method's best within memory. Random moves get {effort['mcmc_moves']:,} moves from "
        "the best baseline, an integer program "
        f"{effort['ilp_seconds']:.0f} s; programs of more than 300,000 variables are not "
        "tried: they could at best find the additive optimum, which has a row of its own. "
        "[How to compare](../how-to/compare.md) says what the methods are.",
        summary(rows),
        *([whole["note"]] if "note" in whole else []),
        "## By method\n\nSteps as multiples of the plan's, over the cases in which the method "
        "applies and fits, or in which the plan does not fit either. *Ties*: the same step as the "
        "plan, to nine digits.",
        _table(METHOD_HEAD, [_method(name, rows) for name in _methods(rows)]),
        "## By case\n\nThe fastest of all other methods that fit, as a multiple of the plan's "
        "step; where methods tie with the plan, all that do. A plan that does not fit in "
        "memory is the fastest of all, and is compared with all.",
        _table(CASE_HEAD, [_case(row) for row in rows]),
    )
    return "\n\n".join(parts) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """How many cases there are, and in how many something is faster, ties or is slower."""
    found = Counter(_standing(row) for row in rows)
    models, clusters = {row["model"] for row in rows}, {row["cluster"] for row in rows}
    return (
        f"{len(rows)} cases, {len(models)} models on {len(clusters)} clusters: in "
        f"{found['faster']} another method is faster than the plan; in {found['ties']} one ties "
        f"with it; in {found['slower']} all are slower."
    )


def _standing(row: Row) -> str:
    best = min((ratio for _, ratio in _others(row)), default=float("inf"))
    return "faster" if best < 1 - TIE else "ties" if best <= 1 + TIE else "slower"


def _others(row: Row) -> Iterator[tuple[str, float]]:
    """Every other method that fits, or all where the plan does not, over the plan's step."""
    plan, *others = row["results"]
    for result in others:
        if result["step_seconds"] is not None and result["fits"] >= plan["fits"]:
            yield result["method"], result["step_seconds"] / plan["step_seconds"]


def _methods(rows: Sequence[Row]) -> list[str]:
    return [result["method"] for result in rows[0]["results"][1:]]


METHOD_HEAD = ("method", "cases", "faster", "ties", "least", "median", "most")


def _method(name: str, rows: Sequence[Row]) -> list[str]:
    ratios = [ratio for row in rows for method, ratio in _others(row) if method == name]
    if not ratios:
        return [name, "0", *"-----"]
    faster = sum(ratio < 1 - TIE for ratio in ratios)
    ties = sum(abs(ratio - 1) <= TIE for ratio in ratios)
    figures = (f"{f(ratios):.3f}" for f in (min, median, max))
    return [name, str(len(ratios)), str(faster), str(ties), *figures]


CASE_HEAD = (
    "model",
    "cluster",
    "plan's step",
    "fits",
    "fastest other",
    "over the plan",
    "data parallel",
)


def _case(row: Row) -> list[str]:
    plan = row["results"][0]
    plain = next(r for r in row["results"] if r["method"] == "data-parallel")
    others = sorted(_others(row), key=lambda pair: pair[1])
    ties = [name for name, ratio in others if abs(ratio - 1) <= TIE]
    names, ratio = others[0] if others else ("none fits", None)
    return [
        row["model"],
        row["cluster"],
        f"{plan['step_seconds'] * 1e3:,.2f} ms",
        "yes" if plan["fits"] else "no",
        ", ".join(ties) or names,
        "-" if ratio is None else "tie" if ties else f"{ratio:.3f}",
        f"{plain['step_seconds'] / plan['step_seconds']:.2f}"
        + ("" if plain["fits"] else ", does not fit"),
    ]


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rule = ["---" if cell in ("model", "cluster", "method") else "---:" for cell in head]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))
