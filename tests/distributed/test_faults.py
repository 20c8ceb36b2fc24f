"""Training that is killed or told to end, and goes on as if nothing had been: the short version.

The cases are those of benchmarks/faults.py, which runs many more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def cases(folder: Path, *names: str, kills: int = 0) -> dict[str, Any]:
    """What benchmarks/faults.py found of some cases."""
    out = folder / "found.json"
    chosen = [word for name in names for word in ("--case", name)]
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), *chosen]
    found = subprocess.run(
        [*command, "--kills", str(kills), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert out.exists(), found.stderr
    results: dict[str, Any] = json.loads(out.read_text())
    return results


def test_kills_change_nothing_and_sigterm_saves_and_ends(tmp_path: Path) -> None:
    found = cases(tmp_path, "kills", "sigterm", kills=3)
    kills, sigterm = found["kills"], found["sigterm"]
    assert kills["ok"], kills
    assert kills["kills"] == 3
    assert kills["loss_difference"] <= 1e-6
    assert kills["longest_hang_seconds"] < 30
    assert sigterm["ok"], sigterm
    assert sigterm["step_saved"] == sigterm["steps_taken"]
