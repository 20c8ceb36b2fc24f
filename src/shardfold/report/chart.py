"""A comparison as a bar chart: SVG text, drawn without any library."""

from __future__ import annotations

from xml.sax.saxutils import escape

from shardfold.planner.compare_methods import SELECTED, Comparison, Result
from shardfold.report.units import seconds

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
