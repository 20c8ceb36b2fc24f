"""How fast search and planning are beside another revision, in turns on one machine.

    git worktree add ../before REVISION
    python benchmarks/beside.py ../before [FOLDER OF .npz FILES] [--no-plans]

Each revision has a process of its own, which makes the same problems and models. The two take
turns, so that a disturbance meets both; the least processor seconds of all turns count. Searches
are those of `search.py`, plans those of `scaling.py`: of Llama-3 (8B dims) on 8x8xh100 without a
limit of memory. A plan that takes seconds goes fewer turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from math import exp, log
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAYERS = (2, 32, 126)
CHAINS = (2, 10, 100, 1_000, 10_000)
GRAPHS = 20
TURNS = 7
REPEATED = 0.2  # seconds of one turn, at least, where one call is shorter


def work(name: str) -> Callable[[], object]:
    """What is timed, by its name."""
    kind, _, which = name.partition(" ")
    if kind == "plan":
        import shardfold as sf
        from shardfold import zoo

        given = zoo.build("llama3-8b", layers=int(which), batch=8, seq=1024)
        asked = {"cluster": "8x8xh100", "dtype": "bf16", "memory_limit": 1e18}
        return lambda: sf.plan(*given, **asked)
    from search_problems import encoder_chain, random_graph
    from shardfold.search import read_problem, solve

    made = {
        "file": lambda: read_problem(which),
        "chain": lambda: encoder_chain(int(which)),
        "graph": lambda: random_graph(int(which), 30 + int(which) % 31),
    }
    problem = made[kind]()
    return lambda: solve(problem)


def serve() -> None:
    """Time what is asked for on standard input, one turn a line."""
    known: dict[str, Callable[[], object]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in known:
            known[name] = work(name)
            known[name]()  # to warm up
        times, begin = list[float](), time.process_time()
        while not times or time.process_time() - begin < REPEATED:
            started = time.process_time()
            known[name]()
            times.append(time.process_time() - started)
        print(min(times), flush=True)


class Revision:
    """A process that imports shardfold from one checkout."""

    def __init__(self, root: Path) -> None:
        paths = os.pathsep.join(map(str, (root / "src", HERE)))
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, name: str) -> float:
        """Of one turn."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(name, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def compared(before: Path, names: list[str]) -> Iterator[dict[str, object]]:
    """A row for each name: the least seconds of both revisions, and their ratio."""
    both = Revision(before), Revision(HERE.parent)
    for name in names:
        turns = 3 if name.startswith("plan") else TURNS
        seconds = [[each.seconds(name) for each in both] for _ in range(turns)]
        old, new = (min(column) for column in zip(*seconds, strict=True))
        label = f"file {Path(name).stem}" if name.startswith("file") else name
        print(f"{label:>22}  {1e3 * old:10.2f} ms  {1e3 * new:10.2f} ms  {new / old:6.2f}x")
        yield {"what": label, "before_seconds": old, "seconds": new, "ratio": new / old}


def revision(root: Path) -> str:
    """The commit that is checked out there."""
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Compare, and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", type=Path, help="the other checkout")
    parser.add_argument("folder", nargs="?", type=Path, help="folder of .npz problem files")
    parser.add_argument("--no-plans", action="store_true", help="searches only")
    parser.add_argument("--out", type=Path, default=HERE / "results/beside.json")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve()
    names = [f"file {path.resolve()}" for path in sorted((options.folder or HERE).glob("*.npz"))]
    names += [f"chain {layers}" for layers in CHAINS]
    names += [f"graph {seed}" for seed in range(GRAPHS)]
    names += [] if options.no_plans else [f"plan {layers}" for layers in LAYERS]
    from environment import environment

    made = environment()
    rows = list(compared(options.before, names))
    searches = [log(row["ratio"]) for row in rows if not str(row["what"]).startswith("plan")]
    mean = exp(sum(searches) / len(searches))
    print(f"searches: {mean:.3f} times as long, in the geometric mean")
    found = {
        "environment": made,
        "before": revision(options.before),
        "revision": revision(HERE.parent),
        "searches_ratio": mean,
        "rows": rows,
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
