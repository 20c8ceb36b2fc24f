"""Read clusters and meshes: names such as `4x8xh100` and `8x4`, and TOML or JSON files."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from shardfold.cluster.catalog import (
    ClusterTable,
    build_levels,
    convert,
    find_hardware,
    hardware_names,
)
from shardfold.cluster.cluster import Cluster
from shardfold.cluster.mesh import Mesh, all_meshes, mesh_of
from shardfold.errors import ClusterError, nearest

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
    table = convert(_filled(plain), ClusterTable)
    device = table.device
    built = find_hardware(device).device if isinstance(device, str) else device.build()
    levels = build_levels(table.levels, [level.size for level in table.levels])
    return Cluster(table.name or default_name, built, levels)


def _filled(plain: Any) -> Any:
    """With `like`, the named cluster's figures where the file gives none; levels go by name."""
    if not isinstance(plain, dict) or "like" not in plain:
        return plain
    given = {key: value for key, value in plain.items() if key != "like"}
    base, device = _named(str(plain["like"])), given.pop("device", {})
    if base is None:
        raise ClusterError(
            f"like = {plain['like']!r} is no known cluster: write 8xa100 or 4x8xh100. "
            f"Known: {', '.join(hardware_names())}."
        )
    if isinstance(device, str):
        raise ClusterError(f"device = {device!r} goes without like, which names a device, too.")
    found = base.as_plain()
    levels = given.pop("levels", [])
    if isinstance(device, dict):
        found["device"] = _changed_device(found["device"], device)
    else:
        found["device"] = device  # no table: refused as in any file
    found["levels"] = _changed_levels(found["levels"], levels)
    return {**found, "name": given.pop("name", ""), **given}


def _changed_device(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    found = {**base, **given}
    if isinstance(given.get("peak_flops"), dict):
        found["peak_flops"] = {**base["peak_flops"], **given["peak_flops"]}
    changed = ", ".join(key for key in given if key not in ("name", "source"))
    if changed and "source" not in given:
        found["source"] = f"{changed}: the cluster file. The rest: {base['source']}"
    return found


def _changed_levels(base: list[dict[str, Any]], given: Any) -> Any:
    """What a file gives of levels, over the known ones of the same names."""
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        return given
    found = {level["name"]: level for level in base}
    for each in given:
        name = each.get("name")
        if name not in found:
            raise ClusterError(
                f"levels: the cluster that the file is like has no level {name!r}. "
                f"{nearest(str(name), found)} To have other levels, name only the device."
            )
        if "shared_by" in each and "bandwidth" not in each:
            raise ClusterError(f"Level {name}: shared_by goes with bandwidth, that of one link.")
        rest = found[name]
        if "bandwidth" in each:
            rest = {k: v for k, v in rest.items() if k not in ("rated_bandwidth", "source")}
        found[name] = {**rest, **each}
    return list(found.values())


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


_SIZES_THEN_NAME = re.compile(r"((?:[0-9]{1,12}x)*)(.*)", re.DOTALL)
_SHOWN = 8


def parse(text: str | os.PathLike[str]) -> Cluster:
    """The cluster that `text` names, or that the file at `text` describes.

    >>> parse("4x8xh100").size
    32
    >>> parse("1x8xa100").name
    '8xa100-80g'
    """
    if isinstance(text, os.PathLike):
        return read_cluster(Path(text))
    known = _named(text)
    if known is not None:
        return known
    if _looks_like_a_path(text):
        return read_cluster(Path(text))
    if _names_several(text):
        raise ClusterError(
            f"{text[:80]!r} has devices of several kinds, or nodes of several sizes, but a cluster "
            "is of one kind throughout. Plan for each by itself, or for the smaller of them."
        )
    name = _parts(text)[1]
    raise ClusterError(
        f"Unknown cluster {text[:80]!r}. {nearest(name, hardware_names())} "
        f"A cluster is written 8xa100 (one node of 8) or 4x8xh100 (4 nodes of 8), "
        f"or is a .toml or .json file."
    )


def _named(text: str) -> Cluster | None:
    """The cluster of known hardware that a text names, if it names one."""
    numbers, name = _parts(text)
    if name not in hardware_names():
        return None
    return find_hardware(name).cluster([int(size) for size in numbers.split("x") if size])


def _parts(text: str) -> tuple[str, str]:
    match = _SIZES_THEN_NAME.fullmatch(text.strip().lower())
    assert match is not None, "the pattern matches any text"
    return match[1], match[2]


def _names_several(text: str) -> bool:
    """Whether a text is two or more clusters, joined."""
    parts = [part.strip() for part in re.split(r"[+,;&]|\band\b", text.lower())]
    found = [_SIZES_THEN_NAME.fullmatch(part) for part in parts]
    return len(parts) > 1 and all(each and each[2] in hardware_names() for each in found)


def mesh_from_text(text: str, cluster: Cluster) -> Mesh:
    """The mesh of `cluster` whose axes have the sizes in `text`, outermost first.

    The sizes fill the levels in order, each level by the product of one or more of them. There
    is at most one way to do so, as running products only grow.
    """
    sizes = _mesh_sizes(text, cluster)
    groups: list[list[int]] = []
    rest = sizes
    for level in cluster.levels:
        group, rest = _fill(level.size, rest)
        if not group:
            raise _no_mesh(text, cluster)
        groups.append(group)
    if rest:
        raise _no_mesh(text, cluster)
    return mesh_of(cluster.levels, groups)


def _fill(size: int, sizes: list[int]) -> tuple[list[int], list[int]]:
    """Split off the leading sizes that multiply to `size`; none, if they do not."""
    product = 1
    for count, factor in enumerate(sizes, start=1):
        product *= factor
        if product >= size:
            return (sizes[:count], sizes[count:]) if product == size else ([], sizes)
    return [], sizes


def _mesh_sizes(text: str, cluster: Cluster) -> list[int]:
    """The sizes in `text` without the ones: an axis of one device splits nothing."""
    words = text.strip().lower().split("x")
    if not all(re.fullmatch(r"[0-9]{1,12}", word) and int(word) > 0 for word in words):
        raise ClusterError(
            f"Mesh {text[:80]!r} is not sizes joined by x, such as 8x4. {_legal(cluster)}"
        )
    return [int(word) for word in words if int(word) > 1]


def _no_mesh(text: str, cluster: Cluster) -> ClusterError:
    levels = " of ".join(f"{level.size} ({level.name})" for level in cluster.levels)
    return ClusterError(
        f"Mesh {text!r} does not lie along cluster {cluster.name}, which has {cluster.size} "
        f"devices{': ' + levels if levels else ''}; each level is the product of the axes on it, "
        f"outermost first. {_legal(cluster)}"
    )


def _legal(cluster: Cluster) -> str:
    max_axes = max(3, len(cluster.levels) + 1)
    meshes = sorted(all_meshes(cluster.levels, max_axes), key=lambda mesh: len(mesh.axes))
    shown = ", ".join(map(str, meshes[:_SHOWN]))
    return f"Legal meshes{' include' if len(meshes) > _SHOWN else ''}: {shown}."


def _looks_like_a_path(text: str) -> bool:
    suffix = Path(text).suffix
    return "/" in text or os.sep in text or suffix[1:].isalpha() or os.path.isfile(text)
