"""Cluster files: any cluster, with any number of levels, as TOML or JSON."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from shardfold.cluster.catalog import find_hardware
from shardfold.cluster.cluster import Cluster
from shardfold.cluster.tables import ClusterTable, build_levels, convert
from shardfold.errors import ClusterError

SUFFIXES = (".toml", ".json")


def read_cluster(path: Path) -> Cluster:
    """Read the cluster that a file describes; every error names the file and the field."""
    plain = _load(path)
    try:
        return from_plain(plain, default_name=path.stem)
    except ClusterError as error:
        raise ClusterError(f"Cluster file {path}: {error}") from None


def from_plain(plain: Any, default_name: str = "cluster") -> Cluster:
    """The cluster that JSON values describe: the inverse of `Cluster.as_plain`."""
    table = convert(plain, ClusterTable)
    device = table.device
    built = find_hardware(device).device if isinstance(device, str) else device.build()
    levels = build_levels(table.levels, [level.size for level in table.levels])
    return Cluster(table.name or default_name, built, levels)


def _load(path: Path) -> Any:
    if path.suffix.lower() not in SUFFIXES:
        raise ClusterError(
            f"Cluster file {path}: a cluster file ends in {' or '.join(SUFFIXES)}, "
            f"not in {path.suffix or 'nothing'}."
        )
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ClusterError(f"Cluster file {path} does not exist.") from None
    except UnicodeDecodeError as error:
        raise ClusterError(f"Cluster file {path} is not UTF-8 text: {error.reason}.") from None
    except (OSError, ValueError) as error:  # a ValueError is a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise ClusterError(f"Cluster file {path} cannot be read: {reason}.") from None
    return _decode(path, text)


def _decode(path: Path, text: str) -> Any:
    kind = path.suffix[1:].upper()
    try:
        return tomllib.loads(text) if kind == "TOML" else msgspec.json.decode(text)
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, RecursionError) as error:
        reason = str(error).rstrip(".")
        raise ClusterError(
            f"Cluster file {path} is not valid {kind}, or is cut off: {reason}."
        ) from None
