"""Cases that need a network: a link that goes down, and nodes that are lost and come back."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from fault_injection.job import Job, largest_difference, started
from slow_network.network import (
    INTERFACE,
    MissingError,
    Topology,
    address,
    check,
    inside,
    namespace,
    network,
    set_link,
)

PORT = 29_500
SAME = 1e-6
HANG_SECONDS = 30.0
RATE = 1e9
# The agents notice after five seconds of silence that one of them is gone; when the fewest that
# can go on have met, they wait three seconds for more. Torchrun's own are 15 and 30.
PATIENCE = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
# torchrun shares one store among all rounds unless told otherwise, with the number of restarts in
# the keys. Agents count restarts differently when a node is lost, and ranks would not meet.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
STARTING_SECONDS = 90.0  # ranks that share few cores reach their first collective far apart


def link(folder: Path, rng: random.Random, count: int) -> dict[str, Any]:
    """A link goes down for some seconds, shorter than a collective may take; nobody is lost."""
    reason = _missing()
    if reason:
        return {"ok": True, "skipped": reason}
    steps, down = 300, 6.0
    expected = _alone(folder, steps)
    job = Job(folder, steps)
    job.prepare()
    with network(Topology(2, RATE)):
        agents = [_agent(job, rank, "2") for rank in range(2)]
        job.wait_for("step", 40)
        set_link(1, up=False)
        time.sleep(down)
        set_link(1, up=True)
        codes = [_ended(agent) for agent in agents]
    difference = largest_difference(job.losses(), expected)
    starts = {line["start"] for line in job.lines("start")}
    ok = codes == [0, 0] and difference <= SAME
    return {
        "ok": ok,
        "down_seconds": down,
        "starts": len(starts),
        "longest_step_seconds": _longest_pause(job),
        "loss_difference": difference,
    }


def elastic(folder: Path, rng: random.Random, count: int) -> dict[str, Any]:
    """A node of four is lost: three go on, planned again; it comes back: four again."""
    reason = _missing()
    if reason:
        return {"ok": True, "skipped": reason}
    steps = 800
    expected = _alone(folder, steps)
    job = Job(folder, steps, cluster="4x1xcpu", timeout_seconds=STARTING_SECONDS)
    job.prepare()
    with network(Topology(4, RATE)):
        agents = [_agent(job, rank, "2:4") for rank in range(4)]
        _wait_for_world(job, 4, 0.0)  # the first to meet may have begun without the others
        lost_at = time.time()
        _lose(3)
        _wait_for_world(job, 3, lost_at)
        joined_at = time.time()
        agents[3] = _agent(job, 3, "2:4")
        _wait_for_world(job, 4, joined_at)
        codes = [_ended(agent) for agent in agents]
    first = {
        (kind, world): min(
            s["time"] for s in job.lines(kind) if s["world"] == world and s["time"] > at
        )
        for kind in ("start", "step")
        for world, at in ((3, lost_at), (4, joined_at))
    }
    difference = largest_difference(job.losses(), expected)
    waits = first["step", 3] - lost_at, first["step", 4] - joined_at
    return {
        "ok": not any(codes) and difference <= SAME and max(waits) <= HANG_SECONDS,
        "worlds": _worlds(job),
        "seconds_to_go_on_with_three": waits[0],
        "seconds_to_go_on_with_four": waits[1],
        "of_which_until_started_again": [
            first["start", 3] - lost_at,
            first["start", 4] - joined_at,
        ],
        "loss_difference": difference,
        "exits": codes,
    }


def _missing() -> str:
    try:
        check()
    except MissingError as reason:
        return str(reason)
    return ""


def _alone(folder: Path, steps: int) -> dict[int, float]:
    job = Job(folder, steps, name="undisturbed")
    job.prepare()
    process = job.start("--standalone", "--nproc-per-node", "1")
    process.wait(timeout=600)
    return job.losses()


def _agent(job: Job, rank: int, nodes: str) -> subprocess.Popen[bytes]:
    """Torchrun in a namespace, as on a machine of its own; the first is where they meet."""
    meeting = f"{PATIENCE},is_host={int(rank == 0)}"
    options = [
        *("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "20"),
        *("--monitor-interval", "0.2", "--local-addr", address(rank)),
        *("--rdzv-backend", "c10d", "--rdzv-id", "faults", "--rdzv-conf", meeting),
        *("--rdzv-endpoint", f"{address(0)}:{PORT}"),
    ]
    command = inside(rank, job.command(*options))
    return started(command, job.said, GLOO_SOCKET_IFNAME=INTERFACE, **OWN_STORE)


def _lose(rank: int) -> None:
    """As if the machine had lost power: all that runs on it is gone at once."""
    found = subprocess.run(
        ["ip", "netns", "pids", namespace(rank)], capture_output=True, text=True, check=True
    )
    for pid in map(int, found.stdout.split()):
        os.kill(pid, signal.SIGKILL)


def _wait_for_world(job: Job, world: int, since: float, seconds: float = 600) -> None:
    """Until some steps were taken with so many ranks."""
    deadline = time.monotonic() + seconds
    while True:
        steps = [s for s in job.lines("step") if s["world"] == world and s["time"] > since]
        if len(steps) > 20 * world:
            return
        if time.monotonic() > deadline:
            said = job.said.read_text()[-3000:]
            raise TimeoutError(f"no steps with {world} ranks in {seconds} s: {said}")
        time.sleep(0.2)


def _ended(agent: subprocess.Popen[bytes]) -> int:
    return agent.wait(timeout=600)


def _worlds(job: Job) -> list[int]:
    """The numbers of ranks, one after the other."""
    found: list[int] = []
    for line in sorted(job.lines("step"), key=lambda line: line["time"]):
        if line["rank"] == 0 and found[-1:] != [line["world"]]:
            found.append(line["world"])
    return found


def _longest_pause(job: Job) -> float:
    times = sorted(line["time"] for line in job.lines("step") if line["rank"] == 0)
    return max(after - before for before, after in pairwise(times))
