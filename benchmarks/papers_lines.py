"""Lines on two log scales, as plain SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, FOOT = 860, 420, 70, 210, 50, 50
COLOURS = ("#c2452d", "#7d9bb5", "#5d8a66", "#b08a3e", "#8a6aa8", "#b9b2a6")


@dataclass(frozen=True)
class Line:
    """A named series of points."""

    name: str
    points: Sequence[tuple[float, float]]


def lines(series: Sequence[Line], title: str, across: str, up: str) -> str:
    """Every series as a line with dots and its name at the right end."""
    points = [point for line in series for point in line.points]
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    scale = _Scale(min(xs), max(xs), min(ys), max(ys))
    body = [*scale.grid(), _text(16, 24, title, size=15, weight="bold")]
    body += [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across, "middle"), _text(16, 44, up)]
    last = 0.0
    ends = sorted(enumerate(series), key=lambda pair: scale.y(pair[1].points[-1][1]))
    for number, line in ends:
        colour = COLOURS[number % len(COLOURS)]
        places = [(scale.x(x), scale.y(y)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
        last = max(last + 15, places[-1][1])  # names must not lie upon each other
        body.append(_text(WIDTH - RIGHT + 12, last + 4, line.name, colour=colour))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
            *body,
            "</svg>\n",
        ]
    )


@dataclass(frozen=True)
class _Scale:
    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        share = math.log(value / self.left) / math.log(self.right / self.left)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._decades()
        share = (math.log10(value) - low) / (high - low)
        return HEIGHT - FOOT - share * (HEIGHT - TOP - FOOT)

    def _decades(self) -> tuple[int, int]:
        return math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))

    def grid(self) -> list[str]:
        low, high = self._decades()
        found = []
        for power in range(low, high + 1):
            y = self.y(10.0**power)
            ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
            found.append(f'<line {ends} stroke="#e4e4e4"/>')
            found.append(_text(LEFT - 8, y + 4, f"{10.0**power:g}", "end"))
        value = self.left
        while value <= self.right * 1.001:
            found.append(_text(self.x(value), HEIGHT - FOOT + 18, f"{value:g}", "middle"))
            value *= 2
        return found


def _text(
    x: float,
    y: float,
    words: str,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
    colour: str = "#222",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'font-weight="{weight}" fill="{colour}">{escape(words)}</text>'
    )
