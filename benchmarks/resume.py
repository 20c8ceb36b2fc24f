"""Whether losses stay the same when training is resumed under other plans, on fewer ranks.

Trains 30 steps of each model under a random legal plan on four processes, saves, and goes on to 60;
then resumes from the middle under another random plan on two, and on one. Compares the losses of
steps 31 to 60, in float32 and in float64: plans sum in other orders, which shows in float32 where
a model makes much of small differences, and a wrong resumption would show in both. How much a model
makes of them is measured apart: resumed on one device with the last bits of some weights changed.

    python benchmarks/resume.py --out benchmarks/results/resume.json
    python benchmarks/resume.py --report benchmarks/results/resume.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from environment import environment

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the processes' work is that of the tests

MODELS = ("llama3-8b-tiny", "rnnlm-tiny", "resnet50-tiny", "gpt2-tiny")
EQUAL = 1e-6
PAGE = ROOT / "docs" / "results" / "resume.md"


@click.command()
@click.argument("models", nargs=-1)
@click.option("--steps", type=int, default=30, show_default=True, help="Before and after.")
@click.option("--out", type=Path, help="Add the results to this JSON file.")
@click.option("--report", type=Path, help="Only write docs/results/resume.md from this file.")
def main(models: tuple[str, ...], steps: int, out: Path | None, report: Path | None) -> None:
    """Compare every model."""
    if report is not None:
        write_page(json.loads(report.read_text()))
        return
    for name in models or MODELS:
        found = measure(name, steps)
        click.echo(json.dumps({k: v for k, v in found.items() if k != "environment"}))
        if out is not None:
            entries = json.loads(out.read_text()) if out.exists() else {}
            entries[name] = found
            out.write_text(json.dumps(entries, indent=1) + "\n")


def measure(name: str, steps: int) -> dict[str, Any]:
    """The largest differences of any loss after the middle."""
    from distributed.choices import Chooser
    from distributed.resume import Case, resumed_runs, tied, whole_runs
    from shardfold.plans.files import dumps
    from shardfold.runtime.ranks import launch

    with tempfile.TemporaryDirectory() as folder:

        def cases(cluster: str, mesh: str, seed: int | None) -> list[Case]:
            chooser = Chooser(*tied(name), cluster, mesh)
            plan = chooser.best() if seed is None else chooser.random(seed)
            data = dumps(plan).encode()
            return [Case(name, data, Path(folder) / str(wide), wide) for wide in (False, True)]

        whole = launch(whole_runs, 4, cases("4xcpu", "2x2", 3), steps)[0]
        two = launch(resumed_runs, 2, cases("2xcpu", "2", 5), steps)[0]
        alone = cases("1xcpu", "1", None)
        one = launch(resumed_runs, 1, alone, steps)[0]
        shaken = resumed_runs(0, [replace(case, shaken=True) for case in alone], steps)
    return {
        "steps": steps,
        "first_loss": whole[0][0],
        "last_loss": whole[0][-1],
        **{
            f"{width}_on_{label}": _differences(found[k], whole[k][steps:], whole[k][0])
            for k, width in enumerate(("float32", "float64"))
            for label, found in (("two", two), ("one", one))
        },
        **{
            f"{width}_shaken": _differences(shaken[k], one[k], whole[k][0])
            for k, width in enumerate(("float32", "float64"))
        },
        "environment": environment(),
    }


def _differences(found: list[float], expected: list[float], first: float) -> list[float]:
    """The largest, as a share of the loss itself, and of the first loss; as it is; as both.

    Both: |a - b| <= t (1 + |b|), as numpy's and torch's `allclose` with t for either tolerance;
    the least t.
    """
    pairs = list(zip(found, expected, strict=True))
    most = max(abs(a - b) for a, b in pairs)
    both = max(abs(a - b) / (1 + abs(b)) for a, b in pairs)
    return [max(abs(a - b) / abs(b) for a, b in pairs), most / abs(first), most, both]


def write_page(entries: dict[str, Any]) -> None:
    """docs/results/resume.md."""
    lines = [
        "# Resuming under other plans",
        "",
        "Each model is trained with AdamW under a random legal plan on four processes (2x2), saved",
        "half way, and trained on; then resumed from there under another random plan on two",
        "processes, and on one. The table has the largest difference of any loss after the middle,",
        "as a share of that loss, which may come to next to nothing, and in brackets as it is. The",
        "language models' first and last weights are tied.",
        "",
        f"Equal within {EQUAL:g} in float32 means |a - b| <= {EQUAL:g} (1 + |b|), as `allclose` has"
        " it.",
        "",
        "Plans sum in other orders, which shows in float32; a wrong resumption would show in",
        "float64, too. How much of float32's differences is the model's own doing is in the last",
        "columns: resumed on one device with the last bit (of float32) of a third of the weights",
        "changed once, and trained in float32 and in float64. Where that alone moves the losses,",
        "as it does where units switch on and off and a batch norm has few points, no two ways of",
        "summing can agree to more.",
        "",
        "| model | steps | first loss | last | float32: two | one | float64: two | one "
        f"| last bits changed: float32 | float64 | equal within {EQUAL:g} |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    columns = [f"float{width}_on_{label}" for width in (32, 64) for label in ("two", "one")]
    columns += ["float32_shaken", "float64_shaken"]
    for name, e in entries.items():
        figures = " | ".join(f"{e[c][0]:.1e} ({e[c][2]:.0e})" for c in columns)
        worst = max(e["float32_on_two"][3], e["float32_on_one"][3])
        verdict = f"{'yes' if worst <= EQUAL else 'no'}, {worst:.1e}"
        lines.append(
            f"| {name} | {e['steps']} + {e['steps']} | {e['first_loss']:.4f} "
            f"| {e['last_loss']:.4f} | {figures} | {verdict} |"
        )
    where = next(iter(entries.values()))["environment"]
    lines += ["", f"{where['processor']}, {where['date']}. Made by `benchmarks/resume.py`.", ""]
    PAGE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
