"""The cases: each trains undisturbed and disturbed, and compares."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fault_injection.forks import Ended, preload, start_once
from fault_injection.job import EVERY, Job, largest_difference
from fault_injection.network_cases import HANG_SECONDS, elastic, link

SAME = 1e-6
NEVER_REACHED = 100_000  # steps
SPARE = 5  # starts beyond one a kill
POINTS = ("forward", "backward", "collective", "write", "index", "rename", "prune")
ONE_NODE = ("--nproc-per-node", "2", "--monitor-interval", "0.1")

Case = Callable[[Path, random.Random, int], dict[str, Any]]


def undisturbed(folder: Path, steps: int, cluster: str = "2xcpu") -> dict[int, float]:
    """The losses that there should be."""
    job = Job(folder, steps, cluster, name="undisturbed")
    job.prepare()
    process = job.start("--standalone", *ONE_NODE)
    if process.wait(timeout=600):
        raise SystemExit(f"The undisturbed run failed: {job.said.read_text()}")
    return job.losses()


def undisturbed_forks(folder: Path, steps: int) -> dict[int, float]:
    """As `undisturbed`, without torchrun: in a moment."""
    job = Job(folder, steps, name="undisturbed")
    job.prepare()
    preload(job)
    start_once(job, 0, 2)
    return job.losses()


def kills(folder: Path, rng: random.Random, count: int) -> dict[str, Any]:
    """Kill -9 at random points on random ranks, `count` times; started again each time."""
    steps = 8 * count + 10  # more than can be taken between kills
    expected = undisturbed_forks(folder, steps)
    faults = [_fault(rng) for _ in range(count)]
    job = Job(folder, steps, faults=faults)
    job.prepare()
    ended: list[Ended] = []
    while len(ended) < count + SPARE and not (ended and not any(ended[-1].codes)):
        ended.append(start_once(job, len(ended), 2))
    struck = [line["point"] for line in job.lines("fault")]
    hangs = [each.outlived_seconds for each in ended]
    found = {
        "kills": len(struck),
        "points": {point: struck.count(point) for point in POINTS},
        "starts": len(ended),
        "loss_difference": largest_difference(job.losses(), expected),
        "longest_hang_seconds": max(hangs),
        "median_hang_seconds": statistics.median(hangs),
        "most_steps_lost": max(_lost(job), default=0),
        "steps_between_checkpoints": EVERY,
    }
    found["ok"] = (
        not any(ended[-1].codes)
        and found["loss_difference"] <= SAME
        and found["longest_hang_seconds"] <= HANG_SECONDS
        and found["most_steps_lost"] <= EVERY
    )
    return found if found["ok"] else {**found, "said": _said(job)}


def _said(job: Job) -> str:
    return "".join(path.read_text()[-3000:] for path in job.folder.glob(f"{job.name}.*.out"))


def restarts(folder: Path, rng: random.Random, count: int) -> dict[str, Any]:
    """Kill -9 under torchrun, which starts all ranks again: once in each kind of moment."""
    steps = 30
    expected = undisturbed(folder, steps)
    points = ("forward", "collective", "write")
    faults = [{"point": point, "rank": 1, "after": 3} for point in points]
    job = Job(folder, steps, faults=faults)
    job.prepare()
    process = job.start("--standalone", *ONE_NODE, "--max-restarts", "6")
    process.wait(timeout=600)
    gaps = _gaps(job)
    difference = largest_difference(job.losses(), expected)
    ok = process.returncode == 0 and difference <= SAME and len(gaps) == len(points)
    found = {"ok": ok, "kills": len(gaps), "loss_difference": difference}
    found["longest_restart_seconds"] = max(gaps, default=0.0)
    return found if ok else {**found, "said": job.said.read_text()[-3000:]}


def _fault(rng: random.Random) -> dict[str, Any]:
    """One that strikes within the first steps after a start."""
    point = rng.choice(POINTS)
    most = {"forward": 5, "backward": 5, "collective": 60, "write": 20}.get(point, 2)
    # Rank 0 alone writes the index, renames and prunes.
    rank = 0 if point in ("index", "rename", "prune") else rng.randrange(2)
    return {"point": point, "rank": rank, "after": rng.randrange(most)}


def _gaps(job: Job) -> list[float]:
    """After each kill: seconds until all ranks are started again."""
    starts, gaps = job.lines("start"), []
    for fault in job.lines("fault"):
        again = [s["time"] for s in starts if s["start"] == fault["start"] + 1]
        gaps.append(max(again) - fault["time"] if again else float("inf"))
    return gaps


def _lost(job: Job) -> list[int]:
    """After each start but the first: how many steps were taken a second time."""
    steps = [line for line in job.lines("step") if line["rank"] == 0]
    lost, reached = [], 0
    for number in sorted({line["start"] for line in steps}):
        taken = [line["step"] for line in steps if line["start"] == number]
        lost.append(max(0, reached - min(taken)))
        reached = max(reached, max(taken) + 1)
    return lost


def sigterm(folder: Path, rng: random.Random, count: int) -> dict[str, Any]:
    """SIGTERM to torchrun: training is saved where it stands, and goes on from there."""
    job = Job(folder, steps=NEVER_REACHED)
    job.prepare()
    process = job.start("--standalone", *ONE_NODE)
    job.wait_for("step", 41)
    os.kill(process.pid, signal.SIGTERM)
    process.wait(timeout=60)
    taken = max(job.losses()) + 1
    saved = max(int(path.name.split("-")[1]) for path in job.saved.glob("step-*"))
    job.steps = taken + 20
    expected = undisturbed_forks(folder, job.steps)
    again = start_once(job, 1, 2)
    difference = largest_difference(job.losses(), expected)
    ok = not any(again.codes) and difference <= SAME and saved == taken < NEVER_REACHED
    return {"ok": ok, "steps_taken": taken, "step_saved": saved, "loss_difference": difference}


def slow_rank(folder: Path, rng: random.Random, count: int) -> dict[str, Any]:
    """A rank that stands still for some seconds is waited for; nothing starts again."""
    steps = 20
    expected = undisturbed(folder, steps)
    fault = {"point": "collective", "rank": 1, "after": 30, "sleep": 8.0}
    job = Job(folder, steps, faults=[fault])
    job.prepare()
    process = job.start("--standalone", *ONE_NODE)
    process.wait(timeout=600)
    difference = largest_difference(job.losses(), expected)
    starts = {line["start"] for line in job.lines("start")}
    ok = process.returncode == 0 and difference <= SAME and starts == {0}
    return {"ok": ok, "slept_seconds": 8.0, "starts": len(starts), "loss_difference": difference}


def full_disk(folder: Path, rng: random.Random, count: int) -> dict[str, Any]:
    """A disk that fills up: a clear error, the last checkpoint whole; with room, it goes on."""
    if os.geteuid() != 0:
        return {"ok": True, "skipped": "a small file system needs root"}
    steps = 20
    expected = undisturbed(folder, steps)
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], check=True)
    try:
        job = Job(folder, steps, checkpoints=disk / "checkpoints")
        job.prepare()
        filler = disk / "filler"
        filler.write_bytes(b"x" * 250_000)
        process = job.start("--standalone", *ONE_NODE)
        process.wait(timeout=600)
        said = job.said.read_text()
        refused = process.returncode != 0 and "No space left on device" in said
        kept = max((int(p.name.split("-")[1]) for p in job.saved.glob("step-*")), default=0)
        filler.unlink()
        again = job.start("--standalone", *ONE_NODE)
        again.wait(timeout=600)
        difference = largest_difference(job.losses(), expected)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    ok = refused and kept > 0 and again.returncode == 0 and difference <= SAME
    found = {"ok": ok, "refused": refused, "step_kept": kept, "loss_difference": difference}
    return found if ok else {**found, "said": said[-2000:]}


CASES: Mapping[str, Case] = {
    "kills": kills,
    "restarts": restarts,
    "full_disk": full_disk,
    "slow_rank": slow_rank,
    "sigterm": sigterm,
    "link": link,
    "elastic": elastic,
}
