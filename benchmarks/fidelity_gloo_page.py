"""The page of predicted against measured on gloo processes: every plan in a table, and a picture.

python benchmarks/fidelity_gloo_page.py benchmarks/results/fidelity-gloo-*.json
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

PAGE = Path("docs/results/fidelity-gloo.md")
PICTURE = Path("docs/results/fidelity-gloo.svg")
SIDE, LEFT, TOP, FOOT = 460, 70, 60, 62
COLOURS = ("#c2452d", "#7d9bb5")


def draw(results: list[dict[str, Any]]) -> str:
    """A dot a plan: measured across, predicted up, both on a log scale; the line is agreement."""
    times = [
        case[f"{what}_seconds"]
        for result in results
        for case in result["cases"]
        for what in ("measured", "predicted")
    ]
    low, high = math.log10(min(times)) - 0.05, math.log10(max(times)) + 0.05

    def at(seconds: float) -> float:
        return (math.log10(seconds) - low) / (high - low) * SIDE

    wide, tall = LEFT + SIDE + 30, TOP + SIDE + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{wide}" height="{tall}" fill="#fff"/>',
        '<text x="16" y="24" font-size="15" font-weight="bold">'
        "Seconds of a step on gloo processes: predicted against measured</text>",
        f'<line x1="{LEFT}" y1="{TOP + SIDE}" x2="{LEFT + SIDE}" y2="{TOP}" stroke="#bbb"/>',
    ]
    for tick in (t * 10.0**p for p in range(-3, 2) for t in (1, 2, 5)):
        if low <= math.log10(tick) <= high:
            x, y = LEFT + at(tick), TOP + SIDE - at(tick)
            faint = 'stroke="#e4e4e4"'
            parts += [
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + SIDE}" {faint}/>',
                f'<line x1="{LEFT}" x2="{LEFT + SIDE}" y1="{y:.1f}" y2="{y:.1f}" {faint}/>',
                f'<text x="{x:.1f}" y="{TOP + SIDE + 18}" text-anchor="middle">{tick:g} s</text>',
                f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g} s</text>',
            ]
    for number, (result, colour) in enumerate(zip(results, COLOURS, strict=False)):
        x = LEFT + 130 * number
        parts.append(f'<circle cx="{x}" cy="42" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 10}" y="46">{result["processes"]} processes</text>')
        for case in result["cases"]:
            x, y = at(case["measured_seconds"]), at(case["predicted_seconds"])
            parts.append(
                f'<circle cx="{LEFT + x:.1f}" cy="{TOP + SIDE - y:.1f}" r="4" fill="{colour}" '
                'fill-opacity="0.75"/>'
            )
    parts.append(
        f'<text x="{LEFT + SIDE / 2}" y="{tall - 22}" text-anchor="middle">measured</text>'
        f'<text x="16" y="{tall - 6}" fill="#777" font-size="11">Predicted upwards. '
        f"{_machine(results[0])}</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _machine(result: dict[str, Any]) -> str:
    where = result["environment"]
    return (
        f"{where['processor']}, {where['cores']} cores, PyTorch {where['torch']}, {where['date']}."
    )


def page(results: list[dict[str, Any]]) -> str:
    """The results as a page."""
    lines = [
        "# Predicted against measured on gloo processes",
        "",
        "One model (feed-forward blocks and a classifier, 15 million parameters, a batch of 128, "
        "float32, AdamW) under many plans, good ones and bad ones, on processes of one machine. "
        "The machine is calibrated first, with as many processes side by side; each plan is run, "
        "and its step predicted by that profile. A process has one thread. A plan's time is the "
        "median of three steps after two, in six passes over all plans, each in another order: "
        "the median of the passes, each as a share of what it took a plan in the median, times "
        "that of the fastest pass. "
        f"{_machine(results[0])}",
        "",
        "| processes | plans | Kendall's rank correlation | the predicted best takes, of the "
        "measured best | median error of time | calibrated and measured in |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        lines.append(
            f"| {result['processes']} | {result['plans']} | {result['kendall']:.3f} | "
            f"{result['predicted_best_over_measured_best']:.1%} | {result['median_error']:.1%} | "
            f"{result['seconds']} s |"
        )
    lines += ["", "![Predicted against measured](fidelity-gloo.svg)", ""]
    for result in results:
        lines += _table(result)
    lines += HOW
    return "\n".join(lines) + "\n"


def _table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"## {result['processes']} processes",
        "",
        "| plan | predicted | measured | error | passes apart |",
        "|---|---|---|---|---|",
    ]
    for case in sorted(result["cases"], key=lambda case: float(case["measured_seconds"])):
        guess, found = case["predicted_seconds"], case["measured_seconds"]
        apart = max(case["passes"]) / min(case["passes"]) - 1
        lines.append(
            f"| {case['plan']} | {guess * 1e3:.1f} ms | {found * 1e3:.1f} ms | "
            f"{guess / found - 1:+.1%} | {apart:.1%} |"
        )
    return [*lines, ""]


HOW = [
    "The plans are drawn: the best by the datasheet, data parallel and fully sharded, each with a "
    "share of its decisions drawn at random; of those, the ones whose prices by the datasheet are "
    "spread evenly. Nothing was chosen by a measured time.",
    "",
    "What was looked at before: some of the plans of another draw (seed 0), on both numbers of "
    "processes, phase by phase; the three that nothing is drawn of are in both draws. After that "
    "the runner was changed (freed memory is kept: gradients were faulted in page by page at every "
    "step), and the model: a parameter is updated for itself, in its cache or out of it; a "
    "collective of fewer bytes takes no longer than one of more. That sending between processes of "
    "one machine takes their processor, so that nothing overlaps, was there before. Then the plans "
    "of a second draw (seed 1) were measured, once: 0.831 and 0.823. Those of this page (seed 2) "
    "were drawn after small parameters came to share a gather. A first timing of them, the best of "
    "three passes that all took them in one order, gave 0.766 on two processes; its passes were up "
    "to twice as long as one another. After it the timing was changed, and not the model. No "
    "factor was fitted to a step.",
    "",
    "The machine is virtual, and its speed varied: the forward pass of one device took 30 ms, and "
    "50 ms fifteen seconds later; whole passes differ by a third and more. So a pass counts by its "
    "shares.",
    "",
    "To do it again (about eight minutes a number of processes, alone on the machine):",
    "",
    "```sh",
    "export OMP_NUM_THREADS=1 PYTHONPATH=src:benchmarks",
    "for n in 2 4; do",
    "  python benchmarks/fidelity_gloo.py --processes $n --seed 2 --folder gloo-$n \\",
    "    -o benchmarks/results/fidelity-gloo-$n.json",
    "done",
    "python benchmarks/fidelity_gloo_page.py benchmarks/results/fidelity-gloo-*.json",
    "```",
]


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
def main(files: tuple[str, ...]) -> None:
    """Write the page and its picture."""
    results = [json.loads(Path(file).read_text()) for file in files]
    results.sort(key=lambda result: int(result["processes"]))
    PICTURE.write_text(draw(results))
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
