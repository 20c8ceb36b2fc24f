"""Draws the pictures of the explanation pages from the library's own values, as plain SVG.

    python docs/drawings/draw.py

Nothing is sketched by hand: layouts come from rules, meshes from clusters, curves from the cost
model, operators from a captured model, a step from the simulator, and the architecture from the
imports of the sources.
"""

from __future__ import annotations

import ast
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

INK, SOFT, LINE, BLUE, GREEN, ORANGE, PURPLE = (
    "#1f2328 #57606a #d0d7de #4f7fa8 #1a7f64 #d08a3e #8f83b5".split()
)
TINTS = ("#7fa8cc", "#e3b27d", "#8fc1b1", "#b9b0d6")


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A picture on white, so that it reads on a dark page too."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img">\n<title>{escape(title)}</title>\n'
        f"<style>text {{ font: 12px system-ui, sans-serif; fill: {SOFT} }} "
        f".b {{ font-weight: 600; fill: {INK} }} .m {{ font-family: ui-monospace, monospace }}"
        f"</style>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, w: float, h: float, fill: str = "none", more: str = "") -> str:
    """A rectangle."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="3" '
        f'fill="{fill}" stroke="{LINE}" {more}/>'
    )


def line(points: Sequence[tuple[float, float]], colour: str, width: float = 1.5) -> str:
    """A line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def sharding() -> str:
    """A linear layer split by each of its factors over two devices: how its tensors lie."""
    from shardfold.cluster import Mesh
    from shardfold.cluster.mesh import Axis
    from shardfold.graph import Graph, Op, Tensor, TensorType
    from shardfold.graph.graph import Operand
    from shardfold.operators.notation import Rule
    from shardfold.sharding import find_subdims, space_of

    sizes = {"b": 4, "m": 4, "n": 4}
    tensors = [
        Tensor((name,), TensorType((4, 4), "float32"), role, True)
        for name, role in (("x", "input"), ("w", "parameter"), ("y", "activation"))
    ]
    call = Op("linear", "aten.linear", (Operand("x", 0), Operand("w", 1)), (2,))
    graph = Graph(tuple(tensors), (call,), 2)
    subdims = find_subdims(graph, [Rule.parse("b m, n m -> b n", sizes)])
    space = space_of(subdims.rules[0], Mesh((Axis("gpu", 2, 0),)))
    names = ("x [b m]", "w [n m]", "y [b n]")
    parts = []
    for row, (factor, note) in enumerate(
        (
            ("b", "data parallel: the gradient of w is summed"),
            ("n", "by out features: the gradient of x is summed"),
            ("m", "by in features: y is partial"),
        )
    ):
        config = next(
            c
            for c in range(len(space.configs))
            if space.configs[c, 0] >= 0 and space.rule.factors[space.configs[c, 0]] == factor
        )
        y = 30 + row * 118
        parts.append(text(16, y + 42, f"{factor} over 2", "b"))
        layouts = [space.operand_layouts(0), space.operand_layouts(1), space.result_layouts(0)]
        for column, (name, layout) in enumerate(zip(names, layouts, strict=True)):
            parts += _matrix(118 + column * 170, y, name, int(layout[config, 0]))
        parts.append(text(118, y + 92, note))
    return svg(640, 378, "A linear layer split by each of its factors", parts)


def _matrix(x: float, y: float, name: str, state: int) -> list[str]:
    """A 4 by 4 matrix: split by rows (0) or columns (1), replicated, or partial."""
    from shardfold.sharding.layouts import PENDING

    found = [text(x, y - 6, name, "m")]
    for r in range(4):
        for c in range(4):
            part = (r if state == 0 else c) // 2
            fill = TINTS[part] if state >= 0 else "#e6e8ea"
            more = 'stroke-dasharray="3 2"' if state == PENDING else ""
            found.append(box(x + c * 18, y + r * 18, 17, 17, fill, more))
    words = {0: "by rows", 1: "by columns", PENDING: "partial"}
    found.append(text(x + 78, y + 40, words.get(state, "replicated")))
    return found


def clusters() -> str:
    """Two nodes of four devices, and the meshes that lie along their links."""
    from shardfold.cluster import parse

    cluster = parse("2x8xa100")
    outer, inner = cluster.levels
    parts = [text(16, 24, f"{cluster.name}: {cluster.size} devices, two levels of links", "b")]
    for node in range(outer.size):
        x = 16 + node * 300
        parts.append(box(x, 40, 288, 66))
        parts.append(text(x + 8, 56, f"node {node}"))
        for device in range(inner.size):
            parts.append(box(x + 8 + device * 34, 66, 30, 28, TINTS[0]))
            parts.append(
                text(x + 23 + device * 34, 84, str(node * inner.size + device), "", "middle")
            )
    for number, level in enumerate((inner, outer)):
        speed = f"{level.bandwidth / 1e9:.3g} GB/s, {level.latency_seconds * 1e6:.2g} us"
        parts.append(text(16, 128 + 18 * number, f"links of level {level.name}: {speed}"))
    parts.append(text(16, 186, "Meshes that are searched", "b"))
    for number, mesh in enumerate(cluster.meshes()):
        words = " x ".join(
            f"{a.name}={a.size} on {cluster.levels[a.level].name} links" for a in mesh.axes
        )
        parts.append(text(16, 206 + 18 * number, f"{mesh}:  {words}"))
    return svg(640, 216 + 18 * len(cluster.meshes()), "A cluster and its meshes", parts)


def costs() -> str:
    """Seconds of an all-reduce by its bytes, over the links of one level and of two."""
    import numpy as np

    from shardfold.cluster import mesh_from_text, parse
    from shardfold.costs import Roofline
    from shardfold.costs.steps import Collective

    cluster = parse("4x8xa100")
    mesh = mesh_from_text("4x8", cluster)
    model = Roofline(cluster, mesh)
    left, top, width, height = 70, 40, 420, 230
    sizes = np.logspace(3, 9.5, 60)
    cases = (
        ("in a node (8)", (1,), GREEN),
        ("over nodes (4)", (0,), ORANGE),
        ("over all 32", (0, 1), BLUE),
    )
    low, high = -5.5, 0.5
    parts = [text(16, 24, f"An all-reduce on {cluster.name}, by the roofline model", "b")]

    def place(size: float, seconds: float) -> tuple[float, float]:
        x = left + width * (math.log10(size) - 3) / 6.5
        return x, top + height * (high - math.log10(seconds)) / (high - low)

    for power, name in ((3, "1 KB"), (6, "1 MB"), (9, "1 GB")):
        x, _ = place(10.0**power, 1)
        parts += [
            line([(x, top), (x, top + height)], LINE, 0.8),
            text(x, top + height + 18, name, "", "middle"),
        ]
    for power, name in ((-5, "10 us"), (-3, "1 ms"), (-1, "100 ms")):
        _, y = place(1e3, 10.0**power)
        parts += [
            line([(left, y), (left + width, y)], LINE, 0.8),
            text(left - 8, y + 4, name, "", "end"),
        ]
    for name, axes, colour in cases:
        step = Collective("forward", "all_reduce", axes, np.arange(len(sizes)), sizes)
        points = [place(s, t) for s, t in zip(sizes, model.collective_seconds(step), strict=True)]
        x, y = points[-1]
        parts += [
            line(points, colour, 2),
            text(x + 8, y + {(0, 1): 2, (1,): 14}.get(axes, -2), name, "b"),
        ]
    return svg(640, 300, "Seconds of an all-reduce", parts)


def folding() -> str:
    """A run of equal blocks: every other vertex is taken out, which squares the table."""
    parts = [text(16, 24, "A run of 8 equal blocks, folded: each round squares one table", "b")]
    count, y = 8, 60
    for number in range(4):
        gap = 560 / count
        centres = [40 + gap * (k + 0.5) for k in range(count)]
        for a, b in pairwise(centres):
            parts.append(line([(a, y), (b, y)], SOFT, 1.2))
        for k, x in enumerate(centres):
            fill = BLUE if k % 2 == 0 or count == 1 else "#ffffff"
            parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="8" fill="{fill}" stroke="{BLUE}"/>')
        power = f" to the power {2**number}" if number else ""
        parts.append(text(16, y + 28, f"{count} left, joined by the table T{power}"))
        count, y = count // 2, y + 62
    parts.append(
        text(
            16, y - 8, "Three products for 8 blocks, seven for 128. White ones are taken out next."
        )
    )
    return svg(640, 312, "A run of equal blocks is folded", parts)


def capture() -> str:
    """The operators of one block of GPT-2, as they are captured, whole."""
    from shardfold import zoo
    from shardfold.capture import capture as captured

    module, args, kwargs = zoo.build("gpt2-tiny", layers=3)
    graph = captured(module, args, kwargs)
    inside = [op for op in graph.ops if ".h.1" in op.origin.module]
    parts = [text(16, 24, f"One block of GPT-2: {len(inside)} operators, each whole", "b")]
    x, y = 16.0, 44.0
    for op in inside:
        kind = op.kind.rpartition(".")[2]
        weighted = any(graph.tensors[t].role == "parameter" for t in op.inputs)
        width = 7.0 * len(kind) + 16
        if x + width > 624:
            x, y = 16.0, y + 34
        parts.append(box(x, y, width, 24, "#dbe7f1" if weighted else "#f3f4f5"))
        parts.append(text(x + width / 2, y + 16, kind, "m", "middle"))
        x += width + 8
    parts.append(
        text(
            16,
            y + 52,
            "Blue ones read parameters. Backward is not captured: it follows from the rules.",
        )
    )
    return svg(640, int(y) + 68, "Operators of a block", parts)


def running() -> str:
    """A step of a small model on two nodes, as it is simulated: work, and links beside it."""
    import shardfold as sf
    from shardfold import zoo
    from shardfold.simulate import COMPUTE, timeline

    module, args, kwargs = zoo.build("transformer")
    plan = sf.plan(module, args, kwargs, cluster="2x8xa100", dtype="bf16", mesh="2x8")
    figures, found = timeline(plan.schedule)
    left, width = 96, 520
    parts = [text(16, 24, "The Transformer on 2x8xa100: one simulated step", "b")]
    for k, stream in enumerate(found.streams):
        y = 42 + 40 * k
        parts.append(text(16, y + 18, stream if stream == COMPUTE else f"{stream} links"))
        for span in (s for s in found.spans if s.stream == stream):
            x = left + width * span.start_seconds / figures.step_seconds
            w = max(0.4, width * (span.end_seconds - span.start_seconds) / figures.step_seconds)
            colour = {"forward": BLUE, "update": PURPLE}.get(span.phase, "#35506b")
            if stream != COMPUTE:
                colour = ORANGE if span.exposed_seconds > 0 else "#f0d9bd"
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="26" fill="{colour}"/>')
    y = 42 + 40 * len(found.streams)
    words = "Blue: forward, dark: backward, purple: update. Orange: work waits; pale: hidden."
    parts.append(text(16, y + 16, words))
    return svg(640, y + 30, "A simulated step", parts)


def architecture() -> str:
    """The packages in the order of the pipeline, and which imports which, read from the sources."""
    root = Path(__file__).resolve().parents[2]
    source = root / "src" / "shardfold"
    contract = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contract["contracts"][0]["layers"]
    listed = [name for layer in layers for name in re.findall(r"\w+", layer)]
    packages = [name for name in reversed(listed) if (source / name).is_dir()]
    uses = {name: _imported(source / name) for name in packages}
    left, cell, top = 150, 22, 118
    parts = [text(16, 24, "Packages in the order of the pipeline", "b")]
    parts.append(text(16, 44, "A dot: the package of the row imports that of the column."))
    for k, name in enumerate(packages):
        x, y = left + cell * k, top + cell * k
        parts.append(text(16, y + 15, name, "b m"))
        turned = f'transform="translate({x + 14:.1f} {top - 8}) rotate(-55)"'
        parts.append(f'<text {turned} class="m">{name}</text>')
        parts.append(line([(left, y), (left + cell * len(packages), y)], LINE, 0.5))
        parts.append(box(x + 5, y + 5, 12, 12, "#e6e8ea"))
        for other in sorted(uses[name]):
            if other != name and other in packages:
                column = left + cell * packages.index(other) + cell / 2
                parts.append(f'<circle cx="{column:.1f}" cy="{y + 11:.1f}" r="4" fill="{BLUE}"/>')
    height = top + cell * len(packages) + 16
    return svg(left + cell * len(packages) + 60, height, "Packages and their imports", parts)


def _imported(package: Path) -> set[str]:
    """The packages of shardfold that the modules of a package import, inside functions too."""
    found: set[str] = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardfold"):
                inside = (node.module or "").split(".")[1:]
                found |= {inside[0]} if inside else {alias.name for alias in node.names}
    return found


DRAWINGS: dict[str, Callable[[], str]] = {
    "sharding": sharding,
    "clusters": clusters,
    "costs": costs,
    "folding": folding,
    "capture": capture,
    "running": running,
    "architecture": architecture,
}


def main() -> None:
    """Draw those that are named, or all."""
    here = Path(__file__).resolve().parent
    for name in sys.argv[1:] or DRAWINGS:
        (here / f"{name}.svg").write_text(DRAWINGS[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
