"""docs/results/faults.md, from the measured figures alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "faults.md"

HEAD = """# Faults

A small model with dropout is trained by `shardfold train --checkpoints`, saved every other step and
disturbed. Its losses are compared, step by step, with those of a run that nobody disturbed.

| case | what is done | what came of it | largest difference of a loss |
|---|---|---|---:|
"""

DONE = {
    "kills": "kill -9 of a random rank at a random moment, again and again; the ranks are started "
    "again when all have ended by themselves",
    "restarts": "kill -9 in forward, in a collective and while a checkpoint is written; torchrun "
    "starts all ranks again",
    "full_disk": "the checkpoints' file system fills up, is emptied, and training is started again",
    "slow_rank": "a rank stands still for some seconds",
    "sigterm": "SIGTERM to torchrun; started again later",
    "link": "a rank's link goes down and comes back",
    "elastic": "one of four nodes is lost with all its processes; later it comes back",
}


def write_page(results: dict[str, Any]) -> None:
    """Write the page."""
    lines = [
        f"| {name} | {done} | {_outcome(name, results[name])} | {_difference(results[name])} |"
        for name, done in DONE.items()
        if name in results
    ]
    where = next(iter(results.values()))["environment"]
    foot = f"\n\n{where['processor']}, {where['date']}. Made by `benchmarks/faults.py`.\n"
    PAGE.write_text(HEAD + "\n".join(lines) + foot)


def _difference(found: dict[str, Any]) -> str:
    return f"{found['loss_difference']:.1e}" if "loss_difference" in found else "-"


def _outcome(name: str, found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"not run: {found['skipped']}"
    return ("" if found["ok"] else "**FAILED**: ") + OUTCOMES[name](found)


def _kills(f: dict[str, Any]) -> str:
    points = ", ".join(f"{count} {point}" for point, count in f["points"].items() if count)
    return (
        f"{f['kills']} kills ({points}); the other rank ended within "
        f"{f['longest_hang_seconds']:.1f} s every time; at most {f['most_steps_lost']} steps were "
        "taken again"
    )


OUTCOMES = {
    "kills": _kills,
    "restarts": lambda f: (
        f"{f['kills']} kills, started again within {f['longest_restart_seconds']:.1f} s"
    ),
    "full_disk": lambda f: f"refused with the reason; step {f['step_kept']} was whole",
    "slow_rank": lambda f: f"waited for ({f['slept_seconds']:g} s), nothing started again",
    "sigterm": lambda f: f"saved after step {f['step_saved']}, where it stood, and went on from it",
    "link": lambda f: (
        f"down for {f['down_seconds']:g} s; {f['starts']} start(s), the longest "
        f"pause {f['longest_step_seconds']:.1f} s"
    ),
    "elastic": lambda f: (
        f"ranks: {' then '.join(map(str, f['worlds']))}, planned again for three; "
        f"{f['seconds_to_go_on_with_three']:.0f} s to go on with three, "
        f"{f['seconds_to_go_on_with_four']:.0f} s with four, of which "
        f"{' and '.join(f'{s:.0f} s' for s in f['of_which_until_started_again'])} until torchrun "
        "had started the processes again"
    ),
}
