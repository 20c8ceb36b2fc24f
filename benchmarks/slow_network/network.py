r"""Network namespaces joined by veth pairs and bridges, with rate limits; nothing of the host's.

    rank 0 --veth-- port 0 \                      one tier: every rank on one bridge
    rank 1 --veth-- port 1 - bridge               two tiers: a bridge a node, and one above them
    rank 2 --veth-- port 2 /

Everything, the bridges included, lives in namespaces called sfold<pid>...: the host's own
interfaces are never touched. Both ends of a link are limited by a token bucket (tc tbf). A guard
process removes the namespaces when this process ends, however it ends.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

PREFIX = "sfold"
SUBNET = "10.231.0"
INTERFACE = "eth0"
# A bucket must hold what comes in between two ticks of the kernel's clock, or the rate is not
# reached; four milliseconds are enough for 250 Hz. The queue behind it holds ten.
BUCKET_SECONDS = 0.004
LEAST_BUCKET_BYTES = 65_536
QUEUE = "10ms"


class MissingError(Exception):
    """What is needed to make namespaces is not there."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How many ranks, and the rate of their links, in bits/s; in two tiers, also between nodes."""

    ranks: int
    rate: float
    nodes: int = 1
    between_rate: float | None = None  # of a node's link to the others

    def __str__(self) -> str:
        inner = f"{self.ranks} ranks at {self.rate / 1e6:g} Mbit/s"
        if self.nodes == 1 or self.between_rate is None:
            return inner
        return f"{inner}, {self.nodes} nodes at {self.between_rate / 1e6:g} Mbit/s"


def check() -> None:
    """Say what is missing."""
    if os.geteuid() != 0:
        raise MissingError("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise MissingError(f"`{tool}` is not installed: install iproute2")
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    if probe.returncode:
        raise MissingError(f"`ip netns` does not work here: {probe.stderr.strip()}")


def address(rank: int) -> str:
    """The address of a rank.

    >>> address(0)
    '10.231.0.1'
    """
    return f"{SUBNET}.{rank + 1}"


def namespace(rank: int, owner: int | None = None) -> str:
    """The namespace of a rank."""
    return f"{PREFIX}{owner or os.getpid()}r{rank}"


def inside(rank: int, command: list[str]) -> list[str]:
    """The command, run where a rank is."""
    return ["ip", "netns", "exec", namespace(rank), *command]


@contextmanager
def network(topology: Topology) -> Iterator[None]:
    """Make the namespaces and links; remove them at the end, also of a killed process."""
    sweep()
    guard = subprocess.Popen(
        [sys.executable, __file__, str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    before = {s: signal.signal(s, _interrupted) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        _build(topology)
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()  # the guard sees the end of its input, and removes everything
        guard.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def set_link(rank: int, *, up: bool) -> None:
    """Take a rank's link down at the switch, or bring it up again."""
    _ip("-n", _switch(), "link", "set", f"port{rank}", "up" if up else "down")


def sweep() -> None:
    """Remove what processes that are gone have left."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.split()]
    for owner in {int(m[1]) for name in names if (m := re.match(rf"{PREFIX}(\d+)[rs]", name))}:
        if not os.path.exists(f"/proc/{owner}"):
            remove(owner)


def remove(owner: int) -> None:
    """End what runs in a process's namespaces, and remove them: links and bridges go with them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.split()]
    mine = [name for name in names if re.fullmatch(rf"{PREFIX}{owner}(r\d+|s)", name)]
    for ending in (signal.SIGTERM, signal.SIGKILL):
        left = [pid for name in mine for pid in _pids(name)]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, ending)
        deadline = time.monotonic() + 5
        while any(_pids(name) for name in mine) and time.monotonic() < deadline:
            time.sleep(0.05)
    for name in mine:
        subprocess.run(["ip", "netns", "delete", name], check=False)


def _pids(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def _build(topology: Topology) -> None:
    switch = _switch()
    _ip("netns", "add", switch)
    nodes = topology.nodes if topology.between_rate is not None else 1
    for node in range(nodes):
        _bridge(f"br{node}")
    if nodes > 1:
        _bridge("top")
        for node in range(nodes):
            _uplink(node, topology.between_rate or topology.rate)
    for rank in range(topology.ranks):
        _attach(rank, f"br{rank * nodes // topology.ranks}", topology.rate)


def _bridge(name: str) -> None:
    _ip("-n", _switch(), "link", "add", name, "type", "bridge")
    _ip("-n", _switch(), "link", "set", name, "up")


def _uplink(node: int, rate: float) -> None:
    switch, low, high = _switch(), f"up{node}", f"down{node}"
    _ip("-n", switch, "link", "add", low, "type", "veth", "peer", "name", high)
    for name, bridge in ((low, f"br{node}"), (high, "top")):
        _ip("-n", switch, "link", "set", name, "master", bridge)
        _ip("-n", switch, "link", "set", name, "up")
        _limit(switch, name, rate)


def _attach(rank: int, bridge: str, rate: float) -> None:
    name, switch, port = namespace(rank), _switch(), f"port{rank}"
    _ip("netns", "add", name)
    _ip(
        *("link", "add", INTERFACE, "netns", name, "type", "veth"),
        *("peer", "name", port, "netns", switch),
    )
    _ip("-n", name, "addr", "add", f"{address(rank)}/24", "dev", INTERFACE)
    for link in ("lo", INTERFACE):
        _ip("-n", name, "link", "set", link, "up")
    _ip("-n", switch, "link", "set", port, "master", bridge)
    _ip("-n", switch, "link", "set", port, "up")
    _limit(name, INTERFACE, rate)
    _limit(switch, port, rate)


def _limit(space: str, link: str, rate: float) -> None:
    burst = max(LEAST_BUCKET_BYTES, int(rate / 8 * BUCKET_SECONDS))
    bucket = ["rate", f"{rate:.0f}bit", "burst", str(burst), "latency", QUEUE]
    _run("tc", "-n", space, "qdisc", "add", "dev", link, "root", "tbf", *bucket)


def _switch() -> str:
    return f"{PREFIX}{os.getpid()}s"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    found = subprocess.run(words, capture_output=True, text=True)
    if found.returncode:
        raise MissingError(f"`{' '.join(words)}` failed: {found.stderr.strip()}")


def _interrupted(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _guard(owner: int) -> None:
    """Wait for the end of the input, which is the owner's end at the latest; then clean up."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove(owner)


if __name__ == "__main__":
    _guard(int(sys.argv[1]))
