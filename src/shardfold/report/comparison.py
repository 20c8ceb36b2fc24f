"""Comparisons of methods, and of plans that differ: tables for the terminal, a bar chart in SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from shardfold.planner.compare_methods import DATA_PARALLEL, SELECTED, Comparison, Result
from shardfold.plans.diff import Difference, Line
from shardfold.report.units import seconds, size

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


PRICES = (
    "step: simulated with overlap{paper}. additive: the cost without overlap, which searches "
    "minimise. {over}sent: bytes that one device sends."
)
SMALL_LINE = 0.005  # of the additive cost: lines that are left out


def comparison_view(found: Comparison, title: str) -> Group:
    """A row for each method; notes on methods are below the table."""
    from rich.console import Group
    from rich.text import Text

    results = found.results
    notes = [(r.method, _remark(r)) for r in results if _remark(r)]
    return Group(
        Text(title, style="bold"),
        "",
        _methods([r for r in results if r.step_seconds is not None], found.speedups),
        "",
        Text(f"Memory limit {size(found.limit_bytes)} per device."),
        "",
        *(Text(f"{method}: {remark}.") for method, remark in notes),
        Text(_prices(found), style="dim"),
    )


def _prices(found: Comparison) -> str:
    is_paper = all(r.mfu is None for r in found.results)
    paper = " where the costs know overlap; here it is the additive cost" if is_paper else ""
    return PRICES.format(paper=paper, over=f"speed-up: over {over(found)}. " if over(found) else "")


def over(found: Comparison) -> str:
    """What speed-ups are over, and why."""
    if found.baseline in (None, DATA_PARALLEL):
        return found.baseline or ""
    return f"{found.baseline}, the fastest baseline that fits"


def _remark(result: Result) -> str:
    return ", ".join(filter(None, ("proven best" if result.proven else "", result.note)))


def _methods(results: Sequence[Result], speedups: Mapping[str, float]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in ("mesh", "step", "speed-up", "additive", "memory", "fits", "sent", "search"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(*_row(result, speedups), style="bold" if result.method == SELECTED else "")
    return table


def _row(result: Result, speedups: Mapping[str, float]) -> tuple[str, ...]:
    ratio = speedups.get(result.method)
    return (
        result.method,
        result.mesh or "",
        seconds(result.step_seconds or 0.0),
        "" if ratio is None else f"{ratio:.2f}x",
        "" if result.additive_seconds is None else seconds(result.additive_seconds),
        size(result.peak_bytes or 0.0),
        "yes" if result.fits else "NO",
        "" if result.communication_bytes is None else size(result.communication_bytes),
        seconds(result.search_seconds or 0.0),
    )


def difference_view(found: Difference, names: tuple[str, str], everything: bool = False) -> Group:
    """Two plans of one model: their totals, then the operators that they split differently."""
    from rich.console import Group
    from rich.text import Text

    shown = [line for line in found.lines if everything or _matters(line, found)]
    more = len(found.lines) - len(shown)
    stored = "parameter is" if found.parameters == 1 else "parameters are"
    return Group(
        _totals(found, names),
        "",
        _lines(shown, names),
        *([Text(f"{more} more lines of small operators (--all shows them).")] if more else []),
        Text(
            f"{found.same} of {found.operators} operators are split alike; "
            f"{found.parameters} {stored} stored in another way."
        ),
    )


def _matters(line: Line, found: Difference) -> bool:
    """Whether under either plan the operators take a noticeable share of the additive cost."""
    pairs = zip(line.seconds, found.additive_seconds, strict=True)
    return any(own >= SMALL_LINE * total for own, total in pairs)


def _totals(found: Difference, names: tuple[str, str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in ("plan", "cluster", "mesh", "step", "memory"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for k, name in enumerate(names):
        figures = (seconds(found.step_seconds[k]), size(found.peak_bytes[k]))
        table.add_row(name, found.clusters[k], found.meshes[k], *figures)
    return table


def _lines(lines: Sequence[Line], names: tuple[str, str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("operator", overflow="fold")
    for name in names:
        table.add_column(name, overflow="fold")
        table.add_column("", justify="right", no_wrap=True)
    for line in lines:
        often = f" x{line.count}" if line.count > 1 else ""
        cells = [f"{line.place} {line.kind}{often}".strip()]
        for k in range(2):
            # Where the splits agree, the collectives are what differs.
            told = line.traffic[k] or "no collectives"
            alike = line.splits[0] == line.splits[1]
            words = f"{line.splits[k]}\n{told}" if alike else line.splits[k]
            cells += [words, seconds(line.seconds[k])]
        table.add_row(*cells)
    return table


LEFT, TOP, ROW, WIDTH, RIGHT = 150, 64, 28, 460, 190

SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>{title}</title>
<style>
  rect.back {{ fill: #ffffff }}
  text {{ font: 12px system-ui, sans-serif; fill: #57606a }}
  .title {{ font-size: 16px; font-weight: 600; fill: #1f2328 }}
  .name, .value {{ fill: #1f2328 }}
  .exact {{ fill: #1a7f64 }}
  .other {{ fill: #8c96a0 }}
  .large {{ fill: #d0d7de }}
</style>
<rect class="back" width="100%" height="100%"/>
{body}
</svg>
"""


def chart(found: Comparison, title: str) -> str:
    """Speeds (one over the step) as bars, the fastest first; methods without one are left out."""
    shown = [r for r in found.results if r.step_seconds is not None]
    shown.sort(key=lambda r: r.step_seconds or 0.0)
    fastest = min((r.step_seconds or 0.0 for r in shown), default=0.0)
    how = "simulated with overlap" if any(r.mfu is not None for r in shown) else "additive cost"
    body = [
        _text(16, 26, title, "title"),
        _text(16, 46, f"Predicted speed, {how}; pale bars do not fit in memory"),
    ]
    for number, result in enumerate(shown):
        ratio = found.speedups.get(result.method)
        words = "" if ratio is None else f" ({ratio:.2f}x {found.baseline})"
        body += _bar(result, words, TOP + ROW * number, fastest)
    return SVG.format(
        width=LEFT + WIDTH + RIGHT,
        height=TOP + ROW * len(shown) + 16,
        title=escape(title),
        body="\n".join(body),
    )


def _bar(result: Result, ratio: str, y: float, fastest: float) -> list[str]:
    step = result.step_seconds or 0.0
    width = WIDTH * fastest / step if step else WIDTH
    style = "large" if not result.fits else "exact" if result.method == SELECTED else "other"
    return [
        _text(LEFT - 10, y + 14.5, result.method, "name", "end"),
        f'<rect x="{LEFT}" y="{y:.1f}" width="{width:.1f}" height="20" class="{style}"/>',
        _text(LEFT + width + 6, y + 14.5, seconds(step) + ratio, "value"),
    ]


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">'
        f"{escape(words)}</text>"
    )
