"""Draws other examples than `make test` for FUZZ_SECONDS, round after round, each with a new seed.

The first find ends it: what was drawn is printed, and the command that draws it again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUND = "-n 2 --dist worksteal -x -m hypothesis --hypothesis-profile=fuzz".split()


def main() -> int:
    """Run rounds until one finds something or the time is over; not 0 if something was found."""
    end = time.time() + float(os.environ.get("FUZZ_SECONDS", "300"))
    seed = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(2**31)))
    while time.time() < end:
        print(f"Drawing with seed {seed}", flush=True)
        command = [sys.executable, "-m", "pytest", *ROUND, f"--hypothesis-seed={seed}"]
        done = subprocess.run(
            [*command, *sys.argv[1:]],
            check=False,
            cwd=ROOT,
            env={**os.environ, "FUZZ_END": str(end)},
        )
        if done.returncode:
            return done.returncode
        seed += 1
    print("Nothing was found.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
