from __future__ import annotations

import json

from click.testing import CliRunner

from shardfold.cli.hardware import clusters
from shardfold.cluster import catalog, from_plain, parse


def test_the_table_lists_all_hardware_with_its_figures() -> None:
    result = CliRunner().invoke(clusters, [])
    assert result.exit_code == 0
    assert all(hardware.name in result.output for hardware in catalog())
    row = next(line for line in result.output.splitlines() if line.strip().startswith("h100"))
    assert row.split()[:7] == ["h100", "79.1", "989", "66.9", "3,352", "gpu", "370"]


def test_json_has_every_figure_and_source() -> None:
    entries = json.loads(CliRunner().invoke(clusters, ["--json"]).output)
    assert [entry["name"] for entry in entries] == [hardware.name for hardware in catalog()]
    assert all(entry["device"]["source"] for entry in entries)
    assert all(link["source"] for entry in entries for link in entry["levels"])


def test_one_cluster_shows_its_levels_and_meshes() -> None:
    result = CliRunner().invoke(clusters, ["4x8xh100"])
    assert "32 x H100" in result.output
    assert "Meshes tried: 2x2x8, 4x2x4" in result.output


def test_one_cluster_as_json_is_a_cluster_file_and_its_meshes() -> None:
    plain = json.loads(CliRunner().invoke(clusters, ["4x8xh100", "--json"]).output)
    assert plain.pop("size") == 32
    assert [mesh["shape"] for mesh in plain.pop("meshes")] == ["2x2x8", "4x2x4"]
    assert from_plain(plain) == parse("4x8xh100")
