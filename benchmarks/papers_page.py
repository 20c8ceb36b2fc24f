"""The page of results and its figures, from the files that the benchmarks wrote."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from papers_lines import Line, lines

PUBLISHED = tomllib.loads(Path(__file__).with_name("published.toml").read_text())
NAMES = {
    "alexnet": "AlexNet",
    "inceptionv3": "InceptionV3",
    "rnnlm": "RNNLM",
    "transformer": "Transformer",
}
Row = Mapping[str, Any]


def write(folder: Path) -> None:
    """Write the page, with a part for each file that is there."""
    parts = [INTRODUCTION]
    for name, part in (("search", search), ("speed", speed), ("depth", depth)):
        file = folder / f"papers-{name}.json"
        if file.exists():
            whole = json.loads(file.read_text())
            parts.append(part(whole["rows"], folder))
            parts.append(made(whole, f"python benchmarks/papers.py {name}"))
    (folder / "papers.md").write_text("\n\n".join(parts) + "\n")


INTRODUCTION = """# The papers' tables and figures, and ours

shardfold stands on two papers: PaSE (V. Elango, "PaSE: Parallelization Strategies for Efficient DNN
Training", IPDPS 2021) and TAPAS (Shi et al., ICPP 2025, arXiv 2302.00247). This page holds their
figures beside ours. It is written by `benchmarks/papers.py` from the JSON files next to it; the
papers' figures are in `benchmarks/published.toml`. Table II has [a page of its
own](paper-strategies.md)."""


def made(whole: Mapping[str, Any], command: str) -> str:
    """What a part was made with."""
    at = whole["environment"]
    return (
        f"Made by `{command}` on {at['date']}, {at['processor']}, one core, Python {at['python']}, "
        f"numpy {at['numpy']}, in {whole['seconds']:.0f} s."
    )


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))


def took(seconds: float | None) -> str:
    """A time in three figures.

    >>> took(0.000451), took(12.0), took(None)
    ('0.451 ms', '12 s', '-')
    """
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def search(rows: Sequence[Row], folder: Path) -> str:
    """Table I: search time."""
    body = []
    for row in rows:
        paper = PUBLISHED["search"][row["model"]]
        at = PUBLISHED["devices"].index(row["devices"])
        theirs = [took(paper[k][at] if k in paper else None) for k in PAPERS_METHODS]
        moves, exact = row["mcmc"], row["exact"]
        body.append(
            [
                f"{NAMES[row['model']]}, {row['devices']}",
                *theirs,
                took(row["breadth-first"]["seconds"]),
                f"{took(moves['seconds'])} (+{moves['cost'] / exact['cost'] - 1:.1%})",
                took(exact["seconds"]),
                took(row["tables_seconds"]),
            ]
        )
    return "\n\n".join([SEARCH, table(SEARCH_HEAD, body)])


PAPERS_METHODS = ("breadth_first", "flexflow", "pase")
SEARCH_HEAD = (
    "model, devices",
    "paper: breadth-first",
    "paper: FlexFlow",
    "paper: PaSE",
    "breadth-first",
    "random moves (behind)",
    "exact",
    "tables, all meshes",
)
SEARCH = """## Search time (PaSE's Table I)

The left half is what the paper prints, on its machine; the right half is measured here, on our own
search problems for the same models under the paper's cost model. A dash in the paper's columns
means out of memory or not available, in ours that the tables would need more than 1 GiB. Random
moves follow FlexFlow's rule: from the best strategy by hand, 250,000 moves, or until half of the
time has brought nothing; in brackets how much longer the step is that they end with. They are cheap
here, because a move is priced by a few table entries where FlexFlow simulates it. The exact search
is proven optimal in every row. Making the tables costs more than searching them."""


def speed(rows: Sequence[Row], folder: Path) -> str:
    """Figure 6: speed-up over data parallelism."""
    parts = [SPEED]
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        body = []
        for row in (row for row in rows if row["gpu"] == gpu):
            paper = PUBLISHED["speedup"][gpu][row["model"]]
            at = PUBLISHED["devices"].index(row["devices"])
            theirs = [paper[k][at] if k in paper else None for k in ("expert", "flexflow", "pase")]
            ours = [row["speedups"][k] for k in ("expert", "mcmc", "exact")]
            cells = ["-" if value is None else f"{value:.2f}" for value in (*theirs, *ours)]
            body.append([f"{NAMES[row['model']]}, {row['devices']}", *cells])
        parts.append(f"### {gpu.replace('ti', ' Ti')}\n\n" + table(SPEED_HEAD, body))
    return "\n\n".join(parts)


SPEED_HEAD = (
    "model, devices",
    "paper: expert",
    "paper: FlexFlow",
    "paper: PaSE",
    "expert",
    "random moves",
    "exact",
)
SPEED = """## Speed-up over data parallelism (PaSE's Figure 6)

The paper measured; we simulate. Its figures are read off the plot to about 0.02. The experts are
one-weird-trick for the convolutional networks and Mesh-TensorFlow's layout for the Transformer; the
paper's expert for RNNLM places whole layers on devices, which is not a split, so ours is absent."""


def depth(rows: Sequence[Row], folder: Path) -> str:
    """TAPAS: time against depth."""
    body = []
    for row in rows:
        program = row["ilp"]
        proven = "" if program.get("proven") else " (stopped)"
        ratio = row["megatron_over_exact"]
        body.append(
            [
                f"{row['series']}" + (f", {row['layers']}" if row["layers"] else ""),
                f"{row['operators']:,}",
                took(row["plan_seconds"]["folded"]),
                took(row["plan_seconds"]["unfolded"]),
                took(row["exact_seconds"]),
                took(program["seconds"]) + proven,
                f"{program['seconds'] / row['exact_seconds']:,.0f}x",
                "-" if ratio is None else f"{ratio:.2f}x",
            ]
        )
    (folder / "papers-depth.svg").write_text(_depth_figure(rows))
    return "\n\n".join([DEPTH, "![Seconds against depth](papers-depth.svg)", table(HEAD, body)])


HEAD = (
    "model, layers",
    "operators",
    "plan, folded",
    "plan, unfolded",
    "exact search",
    "integer program",
    "exact is faster by",
    "Megatron's step",
)
DEPTH = """## Time against depth (TAPAS)

From the module to the plan, folded and not; then the search alone, on the problem of all layers, by
the exact search and by an integer program on HiGHS, which is stopped after a minute. The last
column is the step of the best strategy in Megatron-LM's way (for ResNet, one-weird-trick) over the
plan's. 16 V100 in two nodes."""


def _depth_figure(rows: Sequence[Row]) -> str:
    found = []
    for model, label in (("gpt2", "GPT"), ("t5-large", "T5")):
        mine = [row for row in rows if row["model"] == model]
        for key, words in (("folded", "folded"), ("unfolded", "unfolded")):
            points = [(row["layers"], row["plan_seconds"][key]) for row in mine]
            found.append(Line(f"{label}, plan {words}", points))
        found.append(
            Line(f"{label}, integer program", [(r["layers"], r["ilp"]["seconds"]) for r in mine])
        )
    return lines(found, "Seconds against layers", "layers", "seconds")
