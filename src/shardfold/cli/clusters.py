"""`shardfold clusters`: the known hardware, or one cluster with its links and meshes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import click

from shardfold.cluster import Cluster, Hardware, catalog, parse

if TYPE_CHECKING:
    from rich.table import Table


@click.command()
@click.argument("cluster", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print all figures and sources as JSON.")
def clusters(cluster: str | None, as_json: bool) -> None:
    r"""List the known hardware; or show one CLUSTER (4x8xh100, lab.toml), its links and meshes.

    \b
    shardfold clusters
    shardfold clusters 4x8xh100 --json
    """
    if cluster is None:
        _emit([_hardware_plain(hardware) for hardware in catalog()], as_json, _hardware_table)
    else:
        _emit(_cluster_plain(parse(cluster)), as_json, _cluster_table)


def _emit(plain: Any, as_json: bool, table: Any) -> None:
    if as_json:
        click.echo(json.dumps(plain, indent=2))
        return
    from rich.console import Console

    Console().print(table(plain))


def _hardware_plain(hardware: Hardware) -> dict[str, Any]:
    full_node = hardware.cluster([2] * (len(hardware.links) - 1) + [hardware.node_size])
    plain = full_node.as_plain()
    links = [{k: v for k, v in level.items() if k != "size"} for level in plain["levels"]]
    return {
        "name": hardware.name,
        "aliases": list(hardware.aliases),
        "node_size": hardware.node_size,
        "device": plain["device"],
        "levels": links,
    }


def _cluster_plain(cluster: Cluster) -> dict[str, Any]:
    meshes = [{"shape": str(mesh), "axes": list(mesh.names)} for mesh in cluster.meshes()]
    return {**cluster.as_plain(), "size": cluster.size, "meshes": meshes}


def _hardware_table(plain: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        caption="16-bit: bfloat16, or float16 on devices without it; dense. Links: what each "
        "device gets while all communicate.",
    )
    table.add_column("name", no_wrap=True)
    for heading in ("memory\nGiB", "16-bit\nTFLOP/s", "fp32\nTFLOP/s", "memory\nGB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("links\nGB/s", no_wrap=True)
    table.add_column("source")
    for entry in plain:
        table.add_row(*_hardware_row(entry))
    return table


def _hardware_row(entry: dict[str, Any]) -> tuple[str, ...]:
    device = entry["device"]
    peaks = device["peak_flops"]
    links = reversed(entry["levels"])
    return (
        "\n= ".join((entry["name"], *entry["aliases"])),
        f"{device['memory_bytes'] / 2**30:.1f}",
        _tera(peaks.get("bfloat16", peaks.get("float16"))),
        _tera(peaks.get("float32")),
        f"{device['memory_bandwidth'] / 1e9:,.0f}",
        "\n".join(f"{link['name']} {link['bandwidth'] / 1e9:.3g}" for link in links),
        re.split(r"[:;,.] | \(", device["source"])[0],
    )


def _cluster_table(plain: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    shapes = ", ".join(mesh["shape"] for mesh in plain["meshes"])
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{plain['name']}: {plain['size']} x {plain['device']['name']}",
        caption=f"Meshes tried: {shapes}",
    )
    for heading in ("level", "size", "GB/s per device", "latency", "source"):
        table.add_column(heading, no_wrap=heading != "source")
    for level in plain["levels"]:
        bandwidth, latency = level["bandwidth"] / 1e9, level["latency_seconds"] * 1e6
        figures = (str(level["size"]), f"{bandwidth:.3g}", f"{latency:.3g} us")
        table.add_row(level["name"], *figures, level["source"])
    return table


def _tera(flops: float | None) -> str:
    if flops is None:
        return "-"
    return f"{flops / 1e12:,.0f}" if flops >= 1e14 else f"{flops / 1e12:.3g}"
