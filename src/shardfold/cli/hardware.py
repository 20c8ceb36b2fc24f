"""`shardfold clusters`: the known hardware, or one cluster with its links and meshes.

`shardfold calibrate`: measure this machine, and write its profile.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardfold.cluster import Cluster, Hardware, catalog, parse
from shardfold.errors import ProfileError

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


SHOWN = 8


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="The GPU if left out, if any.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), metavar="FILE.json")
@click.option("--local", type=click.IntRange(min=2), help="Start so many processes, side by side.")
@click.option(
    "--extend",
    type=click.Path(dir_okay=False),
    metavar="FILE.json",
    help="Measure only what this profile of the same machine lacks.",
)
@click.option(
    "--host",
    is_flag=True,
    help="Alone: print the pace of a GPU's host, for --host-pace. With --extend: measure it anew.",
)
@click.option("--quick", is_flag=True, help="Two sizes of each kernel: to try it, not to plan.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(
    device: str | None,
    output: str | None,
    local: int | None,
    extend: str | None,
    host: bool,
    quick: bool,
    as_json: bool,
) -> None:
    r"""Measure this machine, so that plans are priced by it.

    \b
    shardfold calibrate -o machine.json
    shardfold calibrate --device cpu --local 4 -o four.json
    torchrun --nproc-per-node 8 -m shardfold calibrate -o node.json
    shardfold plan gpt2 --cluster 8xh200 --profile machine.json
    shardfold calibrate --host

    Kernels are timed on a grid of sizes, and between them to say how far the profile is off; the
    host is timed launching each kind of operator; with several processes, collectives are timed by
    size and group while every process is busy.
    """
    from shardfold.cli.printing import progress

    if host and extend is None and output is None:
        _print_pace(as_json)
        return
    if output is None:
        raise ProfileError("Say where the profile goes: -o machine.json.")
    target = Path(output)
    if not target.parent.is_dir():
        raise ProfileError(f"Cannot write {target}: the folder {target.parent} does not exist.")
    if host and extend is None:
        raise ProfileError(
            "--host goes alone, or with --extend: a calibration measures the host anyway."
        )
    with progress() as watch:
        from shardfold.calibrate.profile import calibrated

        if extend is None:
            profile = calibrated(device or "", local, quick, watch)
        else:
            profile = _extended(extend, device, local, quick, host, watch)  # type: ignore[no-untyped-call]
    if profile is None:  # another rank of torchrun
        return
    profile.save(target)
    _report(profile, output, as_json)


def _print_pace(as_json: bool) -> None:
    """The pace of this machine's host, in seconds."""
    import torch

    if not torch.cuda.is_available():
        raise ProfileError("The pace is that of a host beside a GPU, and there is none here.")
    from shardfold.calibrate.host import pace_of_host

    pace = pace_of_host()
    click.echo(
        json.dumps({"host_pace": pace})
        if as_json
        else f"host_pace = {pace:.2f}: times as long as the default host takes to ask for kernels. "
        f"Plan with --host-pace {pace:.2f}, or write it into the [device] of a cluster file."
    )


def _extended(extend, device, local, quick, host, watch):  # type: ignore[no-untyped-def]
    from shardfold.calibrate.profile import extended
    from shardfold.costs.profile import load

    known = load(extend)
    if local is not None or known.machine.processes > 1:
        raise ProfileError("A profile of several processes cannot be extended: calibrate anew.")
    if device is not None and device != known.machine.kind:
        raise ProfileError(f"{extend} is of a {known.machine.kind} device, not of {device}.")
    return extended(known, quick=quick, host_anew=host, watch=watch)


def _report(profile, output: str, as_json: bool) -> None:  # type: ignore[no-untyped-def]
    fits = [(t.fit.median, t.fit.worst, t) for t in profile.tables if t.fit is not None]
    fits.sort(key=lambda fit: -fit[0])
    if as_json:
        plain = {
            "output": output,
            "machine": profile.machine.name,
            "tables": len(profile.tables),
            "flops": profile.rates.flops,
            "bandwidth": profile.rates.bandwidth,
            "fits": [
                {"family": t.family, "dtype": t.dtype, "median": median, "worst": worst}
                for median, worst, t in fits
            ],
        }
        click.echo(json.dumps(plain))
        return
    click.echo(f"{profile.machine.name}: {len(profile.tables)} tables in {output}.")
    for dtype, rate in profile.rates.flops.items():
        click.echo(f"  matrix products in {dtype}: {rate / 1e12:.4g} TFLOP/s at best")
    click.echo(f"  memory: {profile.rates.bandwidth / 1e9:.4g} GB/s")
    click.echo("Off at sizes between the measured ones (median, worst):")
    for median, worst, table in fits[:SHOWN]:
        click.echo(f"  {table.family} in {table.dtype}: {median:.1%}, {worst:.1%}")
    if len(fits) > SHOWN:
        click.echo(f"  {len(fits) - SHOWN} more, each below {fits[SHOWN - 1][0]:.1%}")
