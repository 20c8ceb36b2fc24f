"""A profile: what one machine was measured to take, as a versioned file that checks itself.

It holds a table of seconds for each kernel family and dtype on a grid of sizes, what the host
takes to launch each kind of operator, and collectives by size and group; with the environment, and
with how far the tables are off at sizes between the grid's. A digest over the contents tells a
file that was edited by hand.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from shardfold.errors import ProfileError
from shardfold.versioned_json import Document

FORMAT = "shardfold-profile"
VERSION = 1
DOCUMENT = Document(
    "profile", FORMAT, VERSION, ProfileError, "calibrate again", " Calibrate again."
)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all parts of a profile: no field that this version does not know."""


class Machine(Entry, frozen=True):
    """The device: what PyTorch calls it, its kind, its multiprocessors or cores, its memory."""

    name: str
    kind: str  # cuda or cpu
    units: int
    memory_bytes: int
    processes: int = 1  # that were measured side by side, sharing the machine
    workspace_bytes: int = 0  # that matrix products keep for themselves


class Fit(Entry, frozen=True):
    """How far a table is off at sizes that are not in its grid: shares of the measured time."""

    probes: int
    median: float
    worst: float


class Table(Entry, frozen=True):
    """Seconds of a kernel family in one dtype, on a grid of sizes, the last varying fastest.

    A size too large for the machine or for the time given was not measured: None.
    """

    family: str
    dtype: str
    grid: tuple[tuple[float, ...], ...]
    seconds: tuple[float | None, ...]
    fit: Fit | None = None

    def __post_init__(self) -> None:
        from math import prod

        if len(self.seconds) != prod(len(axis) for axis in self.grid):
            raise ValueError(
                f"{self.family} has {len(self.seconds)} times for a grid of "
                f"{'x'.join(str(len(axis)) for axis in self.grid)}"
            )


class HostEntry(Entry, frozen=True):
    """What the host takes to launch one operator of a kind, forward and backward."""

    kind: str
    forward_seconds: float
    backward_seconds: float


class CollectiveEntry(Entry, frozen=True):
    """A collective by bytes, on groups of `size` of which `groups` communicate at once."""

    kind: str
    size: int
    groups: int
    bytes: tuple[float, ...]
    seconds: tuple[float, ...]


class Rates(Entry, frozen=True):
    """The best that was seen: operations of matrix products by dtype, and bytes, per second."""

    flops: dict[str, float]
    bandwidth: float


class Profile(Entry, frozen=True):
    """Everything that was measured of one machine."""

    format: str
    version: int
    machine: Machine
    environment: dict[str, str]
    rates: Rates
    tables: tuple[Table, ...]
    host: tuple[HostEntry, ...]
    collectives: tuple[CollectiveEntry, ...] = ()
    digest: str = ""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes in which matrix products were measured."""
        return tuple(self.rates.flops)

    def table(self, family: str, dtype: str) -> Table | None:
        """The table of a family in a dtype, if it was measured."""
        for table in self.tables:
            if table.family == family and table.dtype == dtype:
                return table
        return None

    def save(self, path: str | Path) -> None:
        """Write the profile; an existing file is replaced only by a complete one."""
        DOCUMENT.save(path, dumps(self))


def sealed(profile: Profile) -> Profile:
    """The profile as it will be read again, with the digest of its contents."""
    profile = msgspec.convert(msgspec.to_builtins(profile), Profile)
    return msgspec.structs.replace(profile, digest=_digest(profile))


def dumps(profile: Profile) -> str:
    """JSON with one table or collective a line."""
    plain = msgspec.to_builtins(profile)
    lines = []
    for key, value in plain.items():
        if isinstance(value, list) and value:
            rows = ",\n".join("    " + _compact(row) for row in value)
            lines.append(f'  "{key}": [\n{rows}\n  ]')
        else:
            lines.append(f'  "{key}": {_compact(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def load(path: str | Path) -> Profile:
    """Read a profile, and check that it is whole and as it was written."""
    return loads(DOCUMENT.read(path), str(path))


def loads(data: bytes, source: str = "profile") -> Profile:
    """Parse a profile, and check its digest."""
    profile = DOCUMENT.decode(data, source, Profile)
    if profile.digest != _digest(profile):
        raise ProfileError(
            f"{source} is not as it was written: its contents do not match its digest. "
            "A profile is measured, not edited: calibrate again, or describe other hardware in a "
            "cluster file."
        )
    return profile


def _digest(profile: Profile) -> str:
    bare = msgspec.structs.replace(profile, digest="")
    return "sha256:" + hashlib.sha256(msgspec.json.encode(bare)).hexdigest()
