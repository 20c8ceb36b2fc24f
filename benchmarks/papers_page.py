"""The page of results and its figures, from the files that the benchmarks wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from papers_lines import Line, lines
from papers_speed_page import speed
from papers_table import NAMES, PUBLISHED, table, took

Row = Mapping[str, Any]


def write(folder: Path) -> None:
    """Write the page, with a part for each file that is there."""
    parts, seconds = [INTRODUCTION], 0.0
    for name, part in (
        ("search", search),
        ("moves", moves),
        ("speed", speed),
        ("depth", depth),
    ):
        file = folder / f"papers-{name}.json"
        if file.exists():
            whole = json.loads(file.read_text())
            parts.append(part(whole["rows"], folder))
            parts.append(made(whole, f"python benchmarks/papers.py {name}"))
            seconds += whole["seconds"]
    parts.append(f"All of these parts together took {seconds / 60:.0f} minutes.")
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
        f"numpy {at['numpy']}, in {whole['seconds']:.0f} s; the load was "
        f"{at['load_before']:.1f} on {at['cores']} cores as it began."
    )


def search(rows: Sequence[Row], folder: Path) -> str:
    """Table I: search time."""
    body = []
    for row in rows:
        paper = PUBLISHED["search"][row["model"]]
        at = PUBLISHED["devices"].index(row["devices"])
        theirs = [took(paper[k][at] if k in paper else None) for k in PAPERS_METHODS]
        moves, every, exact = row["mcmc"], row["all_moves"], row["exact"]
        body.append(
            [
                _case(row),
                *theirs,
                took(row["breadth-first"]["seconds"]),
                f"{took(moves['seconds'])} (+{moves['cost'] / exact['cost'] - 1:.1%})",
                f"{took(every['seconds'])} (+{every['cost'] / exact['cost'] - 1:.1%})",
                took(exact["seconds"]),
                f"{every['seconds'] / exact['seconds']:,.0f}x",
                took(row["tables_seconds"]),
            ]
        )
    faster = [row["all_moves"]["seconds"] / row["exact"]["seconds"] for row in rows]
    worse = sum(row[k]["cost"] < row["exact"]["cost"] * (1 - 1e-9) for row in rows for k in MOVED)
    kept = sum(ratio >= 100 for ratio in faster)
    closing = (
        f"The exact search is {min(faster):,.0f} to {max(faster):,.0f} times faster than 250,000 "
        f"moves, at least 100 times in {kept} of {len(rows)} rows, and worse than them in {worse}."
    )
    return "\n\n".join([SEARCH, table(SEARCH_HEAD, body), closing])


def _case(row: Row) -> str:
    return f"{NAMES[row['model']]}, {row['devices']}"


MOVED = ("mcmc", "all_moves")
PAPERS_METHODS = ("breadth_first", "flexflow", "pase")
SEARCH_HEAD = (
    "model, devices",
    "paper: breadth-first",
    "paper: FlexFlow",
    "paper: PaSE",
    "breadth-first",
    "moves, FlexFlow's end (behind)",
    "250,000 moves (behind)",
    "exact",
    "exact is faster by",
    "tables, all meshes",
)
SEARCH = """## Search time (PaSE's Table I)

The left part is what the paper prints, on its machine; the right part is measured here, on our own
search problems for the same models under the paper's cost model. A dash in the paper's columns
means out of memory or not available, in ours that the tables would need more than 1 GiB. Random
moves start from the best baseline. FlexFlow ends them after 250,000, or when half of the
time has brought nothing; the next column is all 250,000; in brackets how much longer the step is
that they end with. They are cheap here, because a move is priced by a few table entries where
FlexFlow simulates it: the table after this one has such moves. The exact search is proven optimal
in every row; *faster by* is over 250,000 moves. Making the tables costs more than searching them,
and all methods need them."""


def moves(rows: Sequence[Row], folder: Path) -> str:
    """FlexFlow's way of judging moves."""
    body = [
        [
            _case(row),
            took(row["exact_seconds"]),
            f"{row['granted_moves']:,}",
            f"{row['start_over_plan']:.3f}",
            f"{row['granted_over_plan']:.3f}",
            f"{row['exact_over_plan']:.3f}",
            f"{row['moves']:,} in {took(row['seconds'])}",
            f"{row['found_over_plan']:.3f}",
            took(row["all_moves_seconds"]),
            took(row["decide_seconds"]),
            f"{row['all_moves_seconds'] / row['decide_seconds']:,.0f}x",
        ]
        for row in rows
    ]
    return "\n\n".join([MOVES, table(MOVES_HEAD, body), _granted(rows)])


def _granted(rows: Sequence[Row]) -> str:
    """How far moves get in a multiple of the exact search's time: what was measured, in words."""
    times = min(row["granted_over_exact"] for row in rows)
    most = max(rows, key=lambda row: row["granted_moves"])
    behind = max(row["granted_over_plan"] / row["exact_over_plan"] for row in rows)
    ahead = sum(row["granted_over_plan"] < row["exact_over_plan"] * (1 - 1e-9) for row in rows)
    beaten = sum(row["found_over_plan"] < 1 - 1e-9 for row in rows)
    ratios = [row["all_moves_seconds"] / row["exact_seconds"] for row in rows]
    return (
        f"Measured: in at least {times:.0f} times the exact search's time, at most "
        f"{most['granted_moves']:,} of the 250,000 moves were made ({_case(most)}). The best step "
        f"met by then, the start included, is up to {behind:.1f} times as long as the exact "
        f"search's, and shorter in {ahead} of {len(rows)} rows: the exact search minimises the "
        f"additive cost, and a simulated step counts overlap, as the plan does. The plan's step is "
        f"beaten in {beaten} rows. Extrapolated, all 250,000 moves take {min(ratios):,.0f} to "
        f"{max(ratios):,.0f} times as long as the exact search."
    )


MOVES_HEAD = (
    "model, devices",
    "exact search",
    "moves in 100 times that",
    "start",
    "best by then",
    "exact search's",
    "moves made",
    "best of them",
    "250,000 would take (extrapolated)",
    "whole plan",
    "faster by (extrapolated)",
)
MOVES = """## Moves that are simulated, as FlexFlow's are

FlexFlow simulates the step for every proposal. Here the same random moves use our simulator and our
roofline on 1080 Ti, and start from the best baseline. *Exact search*
is the search on the same tables, and beside it how many moves are made in 100 times its time.
*Start*, *best by then* and *exact search's* are simulated steps over the plan's: of the baseline,
of the best that the moves had met by then, and of the exact search's choice on those tables.
The moves then went on to 8 s, where that is longer. What all 250,000 would take is extrapolated
from the second half of them, not measured. FlexFlow simulates only what a move changes, where ours
describes and simulates the step anew: by Table I its own moves were faster, at most 112 a second on
InceptionV3 with 64 devices (37 minutes for at most 250,000). *Whole plan* is all that
`shardfold plan` does after tracing: tables and searches on every mesh, and the simulation of all
candidates."""


def depth(rows: Sequence[Row], folder: Path) -> str:
    """TAPAS: time against depth; and integer programs."""
    body = []
    for row in rows:
        ratio = row["megatron_over_exact"]
        body.append(
            [
                _layers(row),
                f"{row['operators']:,}",
                took(row["plan_seconds"]["folded"]),
                took(row["plan_seconds"]["unfolded"]),
                took(row["exact_seconds"]),
                "-" if ratio is None else f"{ratio:.2f}x",
            ]
        )
    (folder / "papers-depth.svg").write_text(_depth_figure(rows))
    figure = "![Seconds against depth](papers-depth.svg)"
    programs = [_program(row, program) for row in rows for program in row["ilp"]]
    return "\n\n".join([DEPTH, figure, table(HEAD, body), ILP, table(ILP_HEAD, programs)])


def _layers(row: Row) -> str:
    return row["series"] + (f", {row['layers']}" if row["layers"] else "")


HEAD = (
    "model, layers",
    "operators",
    "plan, folded",
    "plan, unfolded",
    "exact search",
    "Megatron's cost",
)
DEPTH = """## Time against depth (TAPAS)

From the module to the plan, folded and not; then the search alone, on the problem of all layers.
The last column is the additive cost of the best strategy in Megatron-LM's way (for ResNet,
krizhevsky-2014) over the exact search's. 16 V100 in two nodes, as a mesh of 2x2x4; T5 has as many
layers again in its decoder."""

ILP_HEAD = ("model, layers", "mesh", "variables", "exact", "integer program", "faster by", "ends")
ILP = """### An integer program on the same tables

As Alpa and autoparallel pose it, on HiGHS, stopped after 30 s (a ratio is then *at least*). On
meshes of three axes, as above, it would have millions of variables; so it is given one node as one
axis, and two nodes as two. *Ends*: with what, over the exact search's optimum."""


def _program(row: Row, program: Row) -> list[str]:
    over, proven = program["over_exact"], program["proven"]
    ratio = f"{program['seconds'] / program['exact_seconds']:,.0f}x"
    ends = "no choice" if over is None else "the same cost" if proven else f"{over:.3f}, unproven"
    return [
        _layers(row),
        program["mesh"],
        f"{program['variables']:,}",
        took(program["exact_seconds"]),
        took(program["seconds"]) + ("" if proven else ", stopped"),
        ratio if proven else f"> {ratio}",
        ends,
    ]


def _depth_figure(rows: Sequence[Row]) -> str:
    found = []
    for model, label in (("gpt2", "GPT"), ("t5-large", "T5")):
        mine = [row for row in rows if row["model"] == model]
        for key, words in (("folded", "folded"), ("unfolded", "unfolded")):
            points = [(row["layers"], row["plan_seconds"][key]) for row in mine]
            found.append(Line(f"{label}, plan {words}", points))
        programs = [(row["layers"], row["ilp"][0]["seconds"]) for row in mine]
        found.append(Line(f"{label}, integer program, 1 axis", programs))
    return lines(found, "Seconds against layers", "layers", "seconds")
