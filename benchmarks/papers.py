"""The two papers' tables and figures beside ours: JSON, figures and a page in docs/results.

PaSE's Table I (search time, also with moves that are simulated, as FlexFlow's), Table II
(strategies) and Figure 6 (speed-up over data parallelism), TAPAS's search time against depth. Every
part can be made alone; the page is written from what the JSON files hold.

    python benchmarks/papers.py                 # everything, about half an hour on 2 cores
    python benchmarks/papers.py search depth    # two parts
    python benchmarks/papers.py page            # the page again, without measuring
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import papers_depth
import papers_flexflow
import papers_page
import papers_search
import papers_speed
import table2
from environment import environment

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "results"
ROWS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "search": papers_search.rows,
    "moves": papers_flexflow.rows,
    "speed": papers_speed.rows,
    "depth": papers_depth.rows,
}
PARTS = ("search", "moves", "strategies", "speed", "depth", "page")


def measure(part: str, console: Console) -> None:
    """Make one part and write its file."""
    begin = time.perf_counter()
    where = environment()
    found = []
    with console.status(part) as status:
        for row in ROWS[part]():
            found.append(row)
            named = " ".join(str(row[k]) for k in ("gpu", "model", "devices", "layers") if k in row)
            status.update(f"{part}: {named}, {len(found)} done")
    whole = {"environment": where, "seconds": time.perf_counter() - begin, "rows": found}
    (FOLDER / f"papers-{part}.json").write_text(json.dumps(whole, indent=1) + "\n")
    console.print(f"{part}: {len(found)} rows in {whole['seconds']:.0f} s")


@click.command(help=__doc__)
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
def main(parts: Sequence[str]) -> None:
    """Measure the parts that are named, or all, then write the page."""
    import torch

    torch.set_num_threads(1)
    console = Console()
    for part in parts or PARTS:
        if part in ROWS:
            measure(part, console)
        elif part == "strategies":
            table2.main()
    papers_page.write(FOLDER)


if __name__ == "__main__":
    main()
