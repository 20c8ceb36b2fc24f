"""Calibration on processes side by side: every collective on every group size, one profile.

The lines of the page on calibration run as printed, and measure little.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from shardfold.calibrate import collectives
from shardfold.calibrate.collectives import collective_entries
from shardfold.calibrate.grids import Grid, Plan
from shardfold.calibrate.profile import assembled, machine_of, together
from shardfold.calibrate.timers import CpuClock
from shardfold.cli import main
from shardfold.costs.profile import HostEntry, Profile, Table, load, loads
from shardfold.costs.profile import dumps as written

from .ranks import Launch
from .torchrun import start_as_torchrun

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/calibrate.md"
MODULE = sys.modules[assembled.__module__]  # the package has a function of this name
GRIDS = (
    Grid("matmul.nt", "float32", ((8, 16), (8,), (8,))),
    Grid("vector", "float32", ((1 << 10, 1 << 12),)),
)
LITTLE: dict[str, Any] = {
    "_device": lambda device: "cpu",
    "cpu_plan": lambda quick: Plan(GRIDS, 1.0, {"float32": 1e9}, 1e9, 1e6),
    "clock_of": lambda *_: CpuClock(span_seconds=1e-4, rounds=1),
    "host_entries": lambda *_: (HostEntry("update", 1e-6, 1e-6),),
    "added_entries": lambda *_: (HostEntry("update.parts", 2e-6, 2e-6),),
}


@contextlib.contextmanager
def measuring_little() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "SIZES", (1024.0, 4096.0))
        patch.setattr(collectives, "ROUNDS", 2)
        for name, value in LITTLE.items():
            patch.setattr(MODULE, name, value)
        yield


def job(rank: int) -> str:
    """A profile in which every process measured something else."""
    with measuring_little():
        entries = collective_entries("cpu", lambda *_: None)
    tables = (
        Table("matmul.nt", "float32", ((8.0,), (8.0,), (8.0,)), (1.0 + rank,)),
        Table("vector", "float32", ((1024.0,),), (1e-6,)),
    )
    host = (HostEntry("update", 1.0 + rank, 3.0),)
    return written(together(assembled(machine_of("cpu"), tables, {}, host, entries)))


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_make_one_profile(processes: int, on_ranks: Launch) -> None:
    found = on_ranks(job, processes)
    assert len(set(map(_tables, found))) == 1  # all agree on the tables
    profile = loads(found[0].encode())
    middle = 1.0 + (processes - 1) / 2
    assert profile.machine.processes == processes
    assert profile.tables[0].seconds == (middle,)
    assert profile.host == (HostEntry("update", middle, 3.0),)
    sizes = [2] if processes == 2 else [2, 4]
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    assert [(e.kind, e.size, e.groups) for e in profile.collectives] == [
        (kind, size, processes // size) for size in sizes for kind in kinds
    ]
    assert all(s > 0 for e in profile.collectives for s in e.seconds)


def _tables(text: str) -> object:
    profile: Profile = loads(text.encode())
    return profile.tables


def on_rank(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    with measuring_little():
        return function(rank, *args)


def test_the_lines_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_ranks: Launch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        MODULE, "launch", lambda job, *args: on_ranks(on_rank, args[0], job, *args[1:])
    )
    text = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    lines = [line.partition(" #")[0] for line in text.splitlines() if " calibrate " in line]
    assert len(lines) == 5
    for line in lines:
        name, *words = shlex.split(line)
        if name == "torchrun":
            assert words[:4] == ["--nproc-per-node", "8", "-m", "shardfold"]
            start_as_torchrun(words[4:], tmp_path, 2, measuring_little)
            continue
        with measuring_little():
            result = CliRunner().invoke(main, words)
        if words[-1] == "--host" and not torch.cuda.is_available():
            assert "a host beside a GPU, and there is none here" in result.output
            continue
        assert result.exit_code == 0, f"{line}\n{result.output}"
        assert result.output.strip()
    found = {path.stem: load(path) for path in tmp_path.glob("*.json")}
    processes = {name: profile.machine.processes for name, profile in found.items()}
    assert processes == {"machine": 1, "node": 2, "four": 4}
    assert [entry.kind for entry in found["machine"].host] == ["update", "update.parts"]
