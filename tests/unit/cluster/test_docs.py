"""The pages on clusters say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardfold.cluster import Hardware, catalog, parse

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE = (DOCS / "reference" / "clusters.md").read_text("utf-8")
ROWS = [line for line in REFERENCE.splitlines() if line.count("|") == 8]
HOW_TO = (DOCS / "how-to" / "describe-a-cluster.md").read_text("utf-8")


@pytest.mark.parametrize("hardware", catalog(), ids=lambda hardware: hardware.name)
def test_the_table_of_hardware_has_the_files_figures(hardware: Hardware) -> None:
    device = hardware.device
    row = next(line for line in ROWS if line.startswith(f"| `{hardware.name}` "))
    _, memory, half, single, bandwidth, node, links = (
        cell.strip() for cell in row[1:-1].split("|")
    )
    half_dtype = "bfloat16" if "bfloat16" in device.dtypes else "float16"
    full = hardware.cluster([2] * (len(hardware.links) - 1) + [hardware.node_size])
    assert float(memory) == round(device.memory_bytes / 2**30, 1)
    assert float(half) == pytest.approx(device.peak(half_dtype) / 1e12, rel=1e-3)
    assert float(single) == pytest.approx(device.peak("float32") / 1e12, rel=1e-3)
    assert float(bandwidth) == device.memory_bandwidth / 1e9
    assert int(node) == hardware.node_size
    assert links == ", ".join(
        f"{level.name} {level.bandwidth / 1e9:.3g}" for level in reversed(full.levels)
    )


def test_the_table_of_meshes_is_what_is_searched() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([0-9x, ]+) \|$", REFERENCE, flags=re.MULTILINE)
    assert len(rows) == 6
    for cluster, meshes in rows:
        assert [str(mesh) for mesh in parse(cluster).meshes()] == meshes.split(", ")


def test_the_example_files_are_read(tmp_path: Path) -> None:
    lab, like, workstation = re.findall(r"```toml\n(.*?)```", HOW_TO, flags=re.DOTALL)
    (tmp_path / "lab.toml").write_text(lab)
    (tmp_path / "workstation.toml").write_text(workstation)
    (tmp_path / "like.toml").write_text(like)
    assert parse(tmp_path / "like.toml").levels[0].bandwidth == 11e9 / 8
    cluster = parse(tmp_path / "lab.toml")
    assert [level.bandwidth for level in cluster.levels] == [2.5e9 / 16, 11e9 / 4, 230e9]
    assert cluster.size == 32
    assert parse(tmp_path / "workstation.toml").size == 4
