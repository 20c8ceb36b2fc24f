"""docs/results/cluster.md, from the measured figures alone."""

from __future__ import annotations

import statistics
from itertools import combinations
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "cluster.md"
DDP, OURS = "torch DDP", "shardfold"
LOSS_SAME = 1e-4  # relative, in float32 after some steps

HEAD = """# Step times on slow links

Real processes with a real, slow network between them: every rank has a network namespace of its own
and one thread, `tc` limits each rank's link in both directions, gloo runs over these links, and
torchrun starts the ranks as on several machines. The ranks measure the cluster (products,
convolutions, memory, each kind of collective, and one step of the model on one rank), shardfold
plans for it, and steps under all strategies are taken in turns, so that what disturbs the machine
disturbs all alike. `torch DDP` is torch's DistributedDataParallel; the other names are plans in our
runner: ours, and baselines. All use fused AdamW. Predictions are made before the first
step, with overlap; DDP's is that of data parallel.

"""


def write_page(entries: list[dict[str, Any]]) -> None:
    """Write the page."""
    PAGE.write_text(page(entries))


def page(entries: list[dict[str, Any]]) -> str:
    """The page: what it comes to, then a table for every network and model."""
    lines = [*_overview(entries), ""]
    for entry in entries:
        for name, model in entry["models"].items():
            lines += [f"## {name}, {_network(entry)}", "", *_table(model), "", *_said(model), ""]
    return HEAD + "\n".join(lines) + "\n" + _foot(entries)


def _network(entry: dict[str, Any]) -> str:
    found = f"{entry['ranks']} ranks at {entry['megabits']:g} Mbit/s"
    if entry["between_megabits"]:
        found += f", {entry['nodes']} nodes at {entry['between_megabits']:g} Mbit/s between them"
    return found


def _overview(entries: list[dict[str, Any]]) -> list[str]:
    """Ours against DDP and against the best of all others."""
    lines = [
        "| model | network | shardfold | torch DDP | faster than DDP | next best | against it |",
        "|---|---|---:|---:|---:|---|---:|",
    ]
    for entry in entries:
        for name, model in entry["models"].items():
            medians = model["median_seconds"]
            others = {m: s for m, s in medians.items() if m not in (OURS, DDP)}
            best = min(others, key=lambda m: others[m])
            against = medians[best] / medians[OURS]
            tie = " (tie)" if _ties(model, OURS, best) else ""
            lines.append(
                f"| {name} | {_network(entry)} | {_ms(medians[OURS])} | {_ms(medians[DDP])} "
                f"| **{medians[DDP] / medians[OURS]:.2f}x** | {best} | {against:.2f}x{tie} |"
            )
    return lines


def _table(model: dict[str, Any]) -> list[str]:
    lines = [
        "| strategy | measured (median) | spread | faster than DDP | predicted | off by |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    medians = model["median_seconds"]
    for method in sorted(medians, key=lambda m: medians[m]):
        low, high = quartiles(model["step_seconds"][method])
        predicted = model["predicted_seconds"][method]
        lines.append(
            f"| {method} | {_ms(medians[method])} | {_ms(low)} to {_ms(high)} "
            f"| {medians[DDP] / medians[method]:.2f}x | {_ms(predicted)} "
            f"| {predicted / medians[method] - 1:+.0%} |"
        )
    return lines


def _said(model: dict[str, Any]) -> list[str]:
    """Ties, order and losses, in sentences."""
    found = []
    for method, same in model["same_as"].items():
        found.append(f"The plan of {method} is that of {same}, decision for decision.")
    wrong = [
        f"{a} before {b}"
        for a, b in combinations(sorted(model["median_seconds"], key=_key(model)), 2)
        if not _ties(model, a, b) and not _is_order_predicted(model, a, b)
    ]
    found.append(
        "The measured order is the predicted one, ties aside."
        if not wrong
        else f"Measured, but not predicted: {'; '.join(wrong)}."
    )
    apart = largest_loss_difference(model)
    found.append(
        f"Losses of the first {len(model['losses'][DDP])} steps differ by at most {apart:.0e} of "
        f"DDP's{'' if apart <= LOSS_SAME else ': TOO MUCH'}."
    )
    return [" ".join(found)]


def _key(model: dict[str, Any]) -> Any:
    return lambda method: model["median_seconds"][method]


def _is_order_predicted(model: dict[str, Any], a: str, b: str) -> bool:
    # DDP and data parallel have one prediction: neither is predicted to be before the other.
    return bool(model["predicted_seconds"][a] <= model["predicted_seconds"][b])


def _ties(model: dict[str, Any], a: str, b: str) -> bool:
    """Within noise: the middle halves of the two meet."""
    (low_a, high_a), (low_b, high_b) = (quartiles(model["step_seconds"][m]) for m in (a, b))
    return low_a <= high_b and low_b <= high_a


def quartiles(values: list[float]) -> tuple[float, float]:
    """The ends of the middle half."""
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def largest_loss_difference(model: dict[str, Any]) -> float:
    """Of any strategy's loss from DDP's, relative."""
    return max(
        abs(found - expected) / abs(expected)
        for losses in model["losses"].values()
        for found, expected in zip(losses, model["losses"][DDP], strict=True)
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _foot(entries: list[dict[str, Any]]) -> str:
    where = entries[-1]["environment"]
    loads = [entry["environment"]["load_before"] for entry in entries]
    rounds = min(entry["rounds"] for entry in entries)
    return (
        f"{where['processor']}, {where['cores']} cores for all ranks, {where['date']}; medians of "
        f"{rounds} or more interleaved steps, spread: the middle "
        "half. Two strategies tie where their middle halves meet. Other work ran on the machine "
        f"(load averages {min(loads):.0f} to {max(loads):.0f}). Made by `benchmarks/cluster.py`.\n"
    )
