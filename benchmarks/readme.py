"""The README's figure and table of results: plans, one after the other, and what they predict.

Writes docs/results/readme.json, draws docs/results/speedup.svg from it, and prints the table.

    .venv/bin/python benchmarks/readme.py            # measure, then draw
    .venv/bin/python benchmarks/readme.py --draw     # draw what was measured before
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from shardfold.report.units import number, seconds, size

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results"
PAPER = "4x8x1080ti"
CASES = (
    ("alexnet", PAPER, None),
    ("inceptionv3", PAPER, None),
    ("rnnlm", PAPER, None),
    ("transformer", PAPER, None),
    ("resnet50-wide", "8xv100", None),
    ("gpt2", "8xa100", "bf16"),
    ("bert-large", "8xa100", "bf16"),
    ("llama3-8b", "16x8xh100", "bf16"),
)


def measure(model: str, cluster: str, dtype: str | None) -> dict[str, Any]:
    """Plan one model of the zoo, and keep what the README shows."""
    import shardfold as sf
    from shardfold import zoo

    module, args, kwargs = zoo.build(model)
    plan = sf.plan(module, args, kwargs, cluster=cluster, dtype=dtype)
    e, made = plan.estimate, plan.provenance
    assert plan.simulation is not None
    return {
        "model": model,
        "cluster": plan.cluster,
        "dtype": dtype or "fp32",
        "batch": zoo.entry(model).batch,
        "parameters": made.parameters,
        "operators": made.operators,
        "step_seconds": e.step_seconds,
        "data_parallel_seconds": e.data_parallel_seconds,
        "fully_sharded_seconds": e.fully_sharded_seconds,
        "additive_seconds": e.additive_seconds,
        "peak_bytes": e.peak_bytes,
        "data_parallel_bytes": e.data_parallel_bytes,
        "limit_bytes": e.limit_bytes,
        "capture_seconds": made.capture_seconds,
        "search_seconds": made.search_seconds,
    }


def environment() -> dict[str, str]:
    """What the figures were made with."""
    found = {"shardfold": version("shardfold"), "python": platform.python_version()}
    return found | {name: version(name) for name in ("torch", "transformers", "numpy")}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| model | cluster | parameters | step | data parallel | memory | planned in |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        step = r["step_seconds"]
        fits = "" if r["data_parallel_bytes"] <= r["limit_bytes"] else ", does not fit"
        cells = (
            f"`{r['model']}`",
            f"`{r['cluster']}`",
            number(r["parameters"]),
            seconds(step),
            f"{r['data_parallel_seconds'] / step:.2f}x{fits}",
            size(r["peak_bytes"]),
            seconds(r["capture_seconds"] + r["search_seconds"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


LEFT, TOP, ROW, WIDTH = 110, 78, 34, 520
TICKS = (1, 2, 4, 8, 16, 32)


def _x(ratio: float) -> float:
    low, high = math.log(TICKS[0]), math.log(TICKS[-1] * 1.5)
    return LEFT + WIDTH * (math.log(ratio) - low) / (high - low)


def _text(x: float, y: float, words: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{words}</text>'


def _bar(y: float, ratio: float, words: str) -> list[str]:
    """A bar from 1x to the ratio, with its number at the far end."""
    start, end = sorted((_x(1.0), _x(ratio)))
    bar = f'<rect x="{start:.1f}" y="{y:.1f}" width="{end - start:.1f}" height="22" class="plan"/>'
    at, anchor = (end + 5, "start") if ratio >= 1 else (start - 5, "end")
    return [bar, _text(at, y + 15.5, words, anchor, "value")]


def figure(results: Sequence[Mapping[str, Any]]) -> str:
    """Speed-up over data parallelism on the paper's cluster, as an SVG."""
    shown = [r for r in results if r["cluster"] == PAPER]
    height = TOP + ROW * len(shown) + 40
    body = [_text(LEFT, 22, "Predicted speed-up over data parallelism", style="title")]
    body.append(
        _text(LEFT, 42, "4 nodes of 8 GTX 1080 Ti, the paper's models and batches; logarithmic")
    )
    if any(r["data_parallel_bytes"] > r["limit_bytes"] for r in shown):
        body.append(_text(LEFT, 58, "* data parallelism would not fit in memory"))
    for tick in TICKS:
        style = "one" if tick == 1 else "grid"
        body.append(f'<line x1="{_x(tick):.1f}" x2="{_x(tick):.1f}" y1="{TOP - 8}" '
                    f'y2="{height - 32}" class="{style}"/>')  # fmt: skip
        body.append(_text(_x(tick), height - 16, f"{tick:g}x", "middle"))
    for i, r in enumerate(shown):
        y = TOP + ROW * i
        plain = r["data_parallel_seconds"]
        best = plain / r["step_seconds"]
        body.append(_text(LEFT - 12, y + 15.5, r["model"], "end", "name"))
        fits = r["data_parallel_bytes"] <= r["limit_bytes"]
        body += _bar(y, best, f"{best:.2f}x" + ("" if fits else " *"))
    return SVG.format(width=LEFT + WIDTH + 40, height=height, body="\n".join(body))


SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>Predicted speed-up over data parallelism on 4 nodes of 8 GTX 1080 Ti</title>
<style>
  rect.back {{ fill: #ffffff }}
  text {{ font: 12px system-ui, sans-serif; fill: #57606a }}
  .title {{ font-size: 16px; font-weight: 600; fill: #1f2328 }}
  .name {{ font-size: 13px; fill: #1f2328 }}
  .value {{ fill: #1f2328 }}
  .plan {{ fill: #1a7f64 }}
  .grid {{ stroke: #e4e8ec }}
  .one {{ stroke: #57606a; stroke-dasharray: 3 3 }}
</style>
<rect class="back" width="100%" height="100%"/>
{body}
</svg>
"""


@click.command(help=__doc__)
@click.option("--draw", "only_draw", is_flag=True, help="From the stored figures, anew.")
def main(only_draw: bool) -> None:
    """Measure unless told otherwise, draw, and print the table."""
    path = FOLDER / "readme.json"
    if not only_draw:
        results = [measure(*case) for case in CASES]
        whole = {"environment": environment(), "results": results}
        path.write_text(json.dumps(whole, indent=2) + "\n")
    results = json.loads(path.read_text())["results"]
    (FOLDER / "speedup.svg").write_text(figure(results))
    print(table(results))


if __name__ == "__main__":
    main()
