"""Sixty modules in the manner of researchers' code, under many plans, against the plain module.

Each runs on 2 and on 2x2 gloo processes in float64 under the best plan, data parallel, fully
sharded and random plans; two steps on different batches are held against the plain eager module:
loss, gradients, buffers. The collectives that run are held against those planned.

    python benchmarks/modules.py --out benchmarks/results/modules.json
    python benchmarks/modules.py UNet SoftActor --random 2
    python benchmarks/modules.py --page       # write the page from what was measured before
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections import Counter
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

import architectures
from environment import environment
from research_modules import MODULES

PAGE = architectures.ROOT / "docs" / "results" / "modules.md"
RESULTS = architectures.ROOT / "benchmarks" / "results" / "modules.json"


class Runner(architectures.Runner):
    """A module with its batch, the same on every process; all is widened to float64 there."""

    def __init__(self, name: str) -> None:
        import torch

        torch.manual_seed(0)
        known = MODULES[name]
        self.model, self.args = known.make().train(), known.batch()
        self.kwargs: dict[str, Any] = {}

    def plain(self) -> Any:
        """The module as it is."""
        return copy.deepcopy(self.model)


def page(results: dict[str, Any]) -> str:
    """All modules with their outcomes, as a page."""
    found = results["modules"]
    count = Counter(each["outcome"] for each in found.values())
    listed = ", ".join(f"{n} {outcome}" for outcome, n in count.most_common())
    plans = sum(each["plans"] for each in found.values())
    random = architectures.spread([each["random"] for each in found.values()])
    where = ", ".join(f"{key} {value}" for key, value in results["environment"].items())
    lines = [
        "# Modules in the manner of researchers' code",
        "",
        f"Written by `python benchmarks/modules.py`; {where}. {len(found)} modules of "
        "`benchmarks/research_modules.py`, written down before any of them was run: on 2 and 2x2 "
        "processes in float64, under the best plan, data parallel, fully sharded and "
        f"{random} random plans each ({plans} in all), two steps against the plain "
        "eager module. A difference is relative, the largest of losses, gradients and buffers; "
        "right is within 1e-6 with the planned collectives. Rows are measured again as modules are "
        "mended, the first on 2026-11-16; the facts are those of the last.",
        "",
        f"**{listed}.**",
        "",
        "| module | field | outcome | plans | difference | told |",
        "|---|---|---|--:|--:|---|",
    ]
    for name, each in found.items():
        told = each["told"].splitlines()[0].replace("|", "\\|") if each["told"] else ""
        apart = f"{each['apart']:.0e}" if each["plans"] else ""
        lines.append(
            f"| {name} | {MODULES[name].field} | {each['outcome']} | {each['plans'] or ''} "
            f"| {apart} | {told} |"
        )
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--random", "random_plans", default=10, show_default=True, help="Plans of each mesh.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write results as JSON; add to them.")
@click.option("--again", is_flag=True, help="Also what the file has under so many random plans.")
@click.option("--page", "write", is_flag=True, help="Write the page from the stored results.")
def main(
    names: tuple[str, ...], random_plans: int, out: str | None, again: bool, write: bool
) -> None:
    """Run each module under its plans, and print a line for it."""
    if write:
        PAGE.write_text(page(json.loads(RESULTS.read_text())))
        return
    unknown = sorted(set(names) - set(MODULES))
    if unknown:
        raise click.UsageError(f"No module is called {unknown[0]}. There are {', '.join(MODULES)}.")
    warnings.simplefilter("ignore")
    for name in ("torch", "torch.distributed.tensor._redistribute"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    facts = {**environment(), "torch": version("torch")}
    click.echo(", ".join(f"{key} {value}" for key, value in facts.items()))
    stored: dict[str, Any] = {}
    if out and Path(out).exists():
        stored = json.loads(Path(out).read_text())["modules"]
    for name in names or MODULES:
        if again or architectures.is_left(stored.get(name), random_plans):
            stored[name] = architectures.ran(
                partial(Runner, name), random_plans, architectures.MESHES
            )
        click.echo(architectures.line(name, {"tiny": stored[name]}))
        if out:  # after each, so that a long run that is cut short leaves what it has
            results = {"environment": facts, "random": random_plans, "modules": stored}
            Path(out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
