"""`shardfold calibrate`: measure this machine, and write its profile."""

from __future__ import annotations

from pathlib import Path

import click

from shardfold.errors import ProfileError

SHOWN = 8


@click.command()
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="The GPU if left out, if any.")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), metavar="FILE.json")
@click.option("--local", type=click.IntRange(min=2), help="Start so many processes, side by side.")
@click.option(
    "--extend",
    type=click.Path(dir_okay=False),
    metavar="FILE.json",
    help="Measure only what this profile of the same machine lacks.",
)
@click.option("--host", is_flag=True, help="With --extend: measure the host anew, too.")
@click.option("--quick", is_flag=True, help="Two sizes of each kernel: to try it, not to plan.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(
    device: str | None,
    output: str,
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

    Kernels are timed on a grid of sizes, and between them to say how far the profile is off; the
    host is timed launching each kind of operator; with several processes, collectives are timed by
    size and group while every process is busy.
    """
    from shardfold.cli.printing import progress

    target = Path(output)
    if not target.parent.is_dir():
        raise ProfileError(f"Cannot write {target}: the folder {target.parent} does not exist.")
    if host and extend is None:
        raise ProfileError("--host goes with --extend: a calibration measures the host anyway.")
    with progress() as watch:
        from shardfold.calibrate.processes import calibrated

        if extend is None:
            profile = calibrated(device or "", local, quick, watch)
        else:
            profile = _extended(extend, device, local, quick, host, watch)  # type: ignore[no-untyped-call]
    if profile is None:  # another rank of torchrun
        return
    profile.save(target)
    _report(profile, output, as_json)


def _extended(extend, device, local, quick, host, watch):  # type: ignore[no-untyped-def]
    from shardfold.calibrate.calibrate import extended
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
        import json

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
