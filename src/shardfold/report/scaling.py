"""A model on ever more nodes, as a table and as a figure: rate over devices, beside the ideal."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from shardfold.planner.scaling import ScaleRow, Scaling
from shardfold.report.stack_text import aligned
from shardfold.report.units import number, seconds, size

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 400, 80, 64, 48
STYLE = """
  rect.back { fill: #ffffff }
  text { font: 12px system-ui, sans-serif; fill: #57606a }
  .title { font-size: 16px; font-weight: 600; fill: #1f2328 }
  .own { stroke: #1a7f64; fill: none; stroke-width: 2 }
  .point { fill: #1a7f64 }
  .ideal { stroke: #8c96a0; fill: none; stroke-dasharray: 4 4 }
  .axis { stroke: #d0d7de }
"""


def scaling_lines(found: Scaling, model: str) -> Iterator[str]:
    """A row for each number of nodes."""
    yield f"{model} on {found.cluster}"
    yield ""
    unit = next((row.unit for row in found.rows if row.unit), "tokens")
    heads = ["nodes", "devices", "step", f"{unit}/s", "efficiency", "peak"]
    if found.price is not None:
        heads += ["cost/h", "per 1e9"]
    rows = [(*heads, "how"), *(_row(found, row) for row in found.rows)]
    yield from aligned(rows)
    yield ""
    yield f"Efficiency: {unit}/s of a device, over that in the first row."
    if found.price is not None:
        yield f"Cost: {found.price:g} an hour of a device; per 1e9: of a billion {unit}."


def _row(found: Scaling, row: ScaleRow) -> tuple[str, ...]:
    efficiency = found.efficiency(row)
    cells = [
        str(row.nodes),
        str(row.devices),
        "" if row.step_seconds is None else seconds(row.step_seconds),
        "" if row.rate is None else f"{row.rate:,.0f}",
        "" if efficiency is None else f"{efficiency:.0%}",
        "" if row.peak_bytes is None else size(row.peak_bytes),
    ]
    if found.price is not None:
        hour, each = found.cost_per_hour(row), found.cost_per_billion(row)
        cells += [f"{hour:,.2f}", "" if each is None else f"{each:,.2f}"]
    return (*cells, row.how or row.reason)


def scaling_figure(found: Scaling, title: str) -> str:
    """The rate over devices as SVG; the dashed line is the first row's rate of a device."""
    rows = [row for row in found.rows if row.rate]
    devices = max((row.devices for row in found.rows), default=1)
    ideal = max((row.rate_per_device or 0.0 for row in rows[:1]), default=0.0) * devices
    most = max([ideal, *(row.rate or 0.0 for row in rows), 1e-9])

    def place(count: int, rate: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 24) * count / devices
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * rate / most

    unit = rows[0].unit if rows else "tokens"
    (x0, y0), (x1, y1) = place(0, 0.0), place(devices, ideal)
    body = [
        _text(16, 26, title, "title"),
        _text(16, 46, f"Predicted {unit}/s over devices; dashed: all devices as fast as the first"),
        f'<path class="axis" d="M{x0:.1f} {TOP} V{y0:.1f} H{WIDTH - 24}"/>',
        f'<path class="ideal" d="M{x0:.1f} {y0:.1f} L{x1:.1f} {y1:.1f}"/>',
    ]
    points = [place(row.devices, row.rate or 0.0) for row in rows]
    if points:
        body.append(f'<path class="own" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')
    for (x, y), row in zip(points, rows, strict=True):
        body.append(f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        body.append(_text(x - 8, y - 8, number(row.rate or 0.0), anchor="end"))
        body.append(_text(x, HEIGHT - BOTTOM + 18, str(row.devices), anchor="middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        '<rect class="back" width="100%" height="100%"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def scaling_page(found: Scaling, model: str) -> str:
    """The figure and the table as one HTML page that needs nothing else."""
    title = f"{model} on {found.cluster}"
    table = escape("\n".join(scaling_lines(found, model)))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<body>\n{scaling_figure(found, title)}<pre>{table}</pre>\n</body></html>\n"
    )


def _text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">'
        f"{escape(words)}</text>"
    )
