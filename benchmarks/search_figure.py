"""The search benchmark as a picture: seconds per problem on a log scale, as plain SVG."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

WIDTH, ROW, LEFT, TOP, FOOT = 860, 30, 150, 66, 46
LOW, HIGH = -4, 4
SERIES = (
    ("reference_seconds", "PaSE's own code", "#b9b2a6"),
    ("plain_seconds", "plain numpy elimination", "#7d9bb5"),
    ("seconds", "shardfold", "#c2452d"),
)


def draw(results: dict[str, Any]) -> str:
    """A dot for each way of solving each problem, joined by a line."""
    rows = [row for row in results["files"] if row["vertices"] > 100]
    height = TOP + ROW * len(rows) + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="16" y="24" font-size="15" font-weight="bold">'
        "Seconds to the proven optimum, on one core</text>",
        *_legend(),
        *_axis(height),
    ]
    for number, row in enumerate(rows):
        parts += _row(row, TOP + ROW * number + ROW // 2)
    where = results["environment"]
    parts.append(
        f'<text x="16" y="{height - 10}" fill="#777" font-size="11">{where["processor"]}, '
        f"numpy {where['numpy']}, {where['date']}. The reference's times are as measured on a "
        f"machine of the same kind, or (transformer_p64) as its paper reports.</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(seconds: float) -> float:
    return LEFT + (math.log10(seconds) - LOW) / (HIGH - LOW) * (WIDTH - LEFT - 30)


def _legend() -> list[str]:
    parts, x = [], 16
    for _, label, colour in SERIES:
        parts.append(f'<circle cx="{x + 5}" cy="42" r="5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="46">{label}</text>')
        x += 40 + 7 * len(label)
    return parts


def _axis(height: int) -> list[str]:
    parts = []
    for power in range(LOW, HIGH + 1):
        x = _x(10.0**power)
        label = {-3: "1 ms", 0: "1 s", 3: "1000 s"}.get(power, "")
        down = f'y1="{TOP}" y2="{height - FOOT + 4}" stroke="#e4e4e4"'
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" {down}/>')
        parts.append(
            f'<text x="{x:.1f}" y="{height - FOOT + 18}" text-anchor="middle">{label}</text>'
        )
    return parts


def _row(row: dict[str, Any], y: int) -> list[str]:
    known = [(row[key], colour) for key, _, colour in SERIES if row[key] is not None]
    ends = [_x(seconds) for seconds, _ in known]
    parts = [
        f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{row["problem"]}</text>',
        f'<line x1="{min(ends):.1f}" x2="{max(ends):.1f}" y1="{y}" y2="{y}" stroke="#ccc"/>',
    ]
    for seconds, colour in known:
        parts.append(f'<circle cx="{_x(seconds):.1f}" cy="{y}" r="5" fill="{colour}"/>')
    if row["reference_seconds"] is None:
        x = _x(600.0)
        parts.append(f'<text x="{x:.1f}" y="{y + 4}" fill="#8a8274">over 600 s</text>')
    else:
        x = max(ends) + 10
        parts.append(
            f'<text x="{x:.1f}" y="{y + 4}" fill="#8a8274">{row["times_reference"]:,.0f}x</text>'
        )
    return parts


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())))
