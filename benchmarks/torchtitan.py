"""Llama 3 8B as torchtitan measured it, beside what we predict of the same configurations.

Its report of December 2024 (benchmarks/llama3_h100_202412_torchtitan.md in its repository), the
rows of its tables 1 and 3: FSDP in bf16, two sequences of 8,192 tokens a device, selective
recomputation by operator, AdamW with float32 parts; in float8 its linear layers, but for the head,
scaled by tensor where ours are by row. Its machines are Grand Teton: H100s with 96 GB of HBM2e at
2.4 TB/s, held to 500 W. Of the power we have no figure: clocks are taken to follow its cube root
(power goes with the clock and the square of a voltage that goes with it), from the 700 W of the
catalog's H100.

    python benchmarks/torchtitan.py --out benchmarks/results/torchtitan.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from environment import environment

SEQ, LOCAL_BATCH = 8192, 2
CLOCK = (500 / 700) ** (1 / 3)
PAGE = Path(__file__).parent.parent / "docs" / "results" / "torchtitan.md"


@dataclass(frozen=True)
class Case:
    """A published row: devices, what blocks are, tokens/s of a device, and GiB."""

    devices: int
    compiled: bool
    rate: float
    memory_gib: float
    float8: bool = False


CASES = (
    Case(8, False, 5762, 82.4),
    Case(8, True, 6667, 77.0),
    Case(8, True, 8532, 76.8, float8=True),
    Case(128, False, 5605, 67.0),
    Case(128, True, 6514, 62.0),
    Case(128, True, 8380, 61.8, float8=True),
)


def measure(case: Case) -> dict[str, Any]:
    """The published figures of a case and the predicted ones."""
    import shardfold as sf
    from shardfold import zoo

    model, args, kwargs = zoo.build("llama3-8b", batch=LOCAL_BATCH * case.devices, seq=SEQ)
    found = sf.estimate(
        model,
        args,
        kwargs,
        cluster=_grand_teton(case.devices),
        strategy=f"fsdp={case.devices} recompute=products",
        stack="torchtitan",
        precision="fp8" if case.float8 else "bf16",
        compile=case.compiled,
        beside_plan=False,
    )
    rate, memory = found.rate / case.devices, found.peak_bytes / 2**30
    return {
        "devices": case.devices,
        "compiled": case.compiled,
        "float8": case.float8,
        "published_rate": case.rate,
        "predicted_rate": rate,
        "error": case.rate / rate - 1,
        "published_gib": case.memory_gib,
        "predicted_gib": memory,
        "memory_error": memory / case.memory_gib - 1,
        "step_seconds": found.step_seconds,
        "exposed_seconds": found.exposed_seconds,
    }


def _grand_teton(devices: int) -> Any:
    """The cluster of the report."""
    from shardfold.cluster import parse

    found = parse("8xh100" if devices == 8 else f"{devices // 8}x8xh100")
    device = found.device
    forward, backward = device.attention_efficiency
    device = replace(
        device,
        name="H100 96GB HBM2e at 500 W",
        memory_bytes=int(96e9),
        memory_bandwidth=2.4e12,
        matmul_efficiency=device.matmul_efficiency * CLOCK,
        attention_efficiency=(forward * CLOCK, backward * CLOCK),
        clock_hz=device.clock_hz * CLOCK,
    )
    return replace(found, name=f"{devices} of Grand Teton", device=device)


def page(rows: list[dict[str, Any]]) -> str:
    """The results as a page."""
    lines = [
        "# Predictions beside torchtitan's measurements",
        "",
        "Written by `benchmarks/torchtitan.py`. " + " ".join(__doc__.split("\n\n")[1].split()),
        "",
        "An error is of the step (predicted over measured, less one): below 0 it is predicted too "
        "fast. torchtitan's GiB are what the allocator reserved (components/metrics.py), ours what "
        "is in use at the peak.",
        "",
        "| devices | blocks | tokens/s/GPU, published | predicted | error | GiB, published "
        "| predicted | error |",
        "|--:|---|" + "--:|" * 6,
    ]
    for row in rows:
        cells = (
            row["devices"],
            ("compiled" if row["compiled"] else "eager") + ", float8" * row["float8"],
            f"{row['published_rate']:,.0f}",
            f"{row['predicted_rate']:,.0f}",
            f"{row['error']:+.1%}",
            f"{row['published_gib']:.1f}",
            f"{row['predicted_gib']:.1f}",
            f"{row['memory_error']:+.1%}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.option(
    "--out", type=click.Path(dir_okay=False), help="Write the rows as JSON, and the page."
)
def main(out: str | None) -> None:
    """Predict every case, and print one line each."""
    rows = [measure(case) for case in CASES]
    click.echo(page(rows))
    if out is not None:
        whole = {"environment": environment(), "rows": rows}
        Path(out).write_text(json.dumps(whole, indent=1))
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
