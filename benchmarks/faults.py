"""Training that is killed, starved and cut off, and ends with the loss that it would have had.

Every case trains the same small model with `shardfold train` under torchrun and compares its
losses with those of an undisturbed run: random kills (forward, backward, collective, every moment
of a checkpoint), a full disk, a slow rank, SIGTERM, a link that goes down and comes back, and
nodes that are lost and come back.

    python benchmarks/faults.py --kills 50 --out benchmarks/results/faults.json
    python benchmarks/faults.py --case kills --case sigterm --kills 3
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from environment import environment
from fault_injection.cases import CASES
from fault_injection.report import write_page


@click.command()
@click.option("--case", "cases", multiple=True, type=click.Choice(list(CASES)))
@click.option("--kills", type=int, default=50, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=Path, help="Add the results to this JSON file.")
@click.option("--report", type=Path, help="Only write docs/results/faults.md from this file.")
def main(
    cases: tuple[str, ...], kills: int, seed: int, out: Path | None, report: Path | None
) -> None:
    """Run the cases; the exit status says whether all went well."""
    if report is not None:
        write_page(json.loads(report.read_text()))
        return
    results: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {}
    failed = False
    for name in cases or tuple(CASES):
        with tempfile.TemporaryDirectory(prefix="shardfold-faults-") as folder:
            begin = time.monotonic()
            found = CASES[name](Path(folder), random.Random(seed), kills)
        found["seconds"] = time.monotonic() - begin
        found["environment"] = environment()
        results[name] = found
        failed |= not found["ok"]
        click.echo(f"{name}: {json.dumps({k: v for k, v in found.items() if k != 'environment'})}")
        if out is not None:
            out.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
