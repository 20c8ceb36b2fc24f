"""`shardfold calibrate` from the command line: what it refuses, and what it says then."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardfold.calibrate.profile import assembled, calibrated, machine_of
from shardfold.cli.hardware import clusters
from shardfold.cluster import catalog, from_plain, parse
from shardfold.costs.profile import HostEntry, Table

H200 = Path(__file__).parents[3] / "benchmarks" / "profiles" / "h200.json"
PROCESSES = sys.modules[calibrated.__module__]


def profile():
    tables = (
        Table("matmul.nt", "float32", ((8.0,), (8.0,), (8.0,)), (1e-6,)),
        Table("vector", "float32", ((1024.0,),), (1e-6,)),
    )
    return assembled(machine_of("cpu"), tables, {}, (HostEntry("update", 1e-6, 1e-6),), ())


@pytest.mark.parametrize("flag", [(), ("--json",)])
def test_processes_side_by_side_leave_one_profile(run, tmp_path, monkeypatch, flag) -> None:
    asked = []

    def launched(function, processes, *given):
        asked.append((processes, *given))
        return [profile(), *[None] * (processes - 1)]

    monkeypatch.setattr(PROCESSES, "launch", launched)
    target = tmp_path / "four.json"
    result = run("calibrate", "--device", "cpu", "--local", 4, "-o", target, *flag)
    assert result.exit_code == 0, result.output
    assert asked == [(4, "cpu", False)]
    assert target.exists()
    if flag:
        assert json.loads(result.stdout)["tables"] == 2
    else:
        assert "2 tables in" in result.stdout


@pytest.mark.parametrize("count", ["1", "0", "two"])
def test_fewer_than_two_processes_are_refused(refused, tmp_path, count) -> None:
    assert "--local" in refused("calibrate", "--local", count, "-o", tmp_path / "x.json")


def test_a_file_that_cannot_be_written_is_refused_before_the_work(refused, tmp_path) -> None:
    target = tmp_path / "nowhere" / "x.json"
    assert "does not exist" in refused("calibrate", "--local", 2, "-o", target)


def test_the_host_is_measured_anew_only_for_a_profile_that_is_there(refused, tmp_path) -> None:
    assert "--extend" in refused("calibrate", "--host", "-o", tmp_path / "x.json")


def test_profiles_that_cannot_be_extended(refused, tmp_path) -> None:
    def extend(known, *more):
        return refused("calibrate", "--extend", known, "-o", tmp_path / "x.json", *more)

    assert "No such file" in extend(tmp_path / "missing.json")
    short = tmp_path / "short.json"
    short.write_text(H200.read_text()[:1000])
    assert "not complete JSON" in extend(short)
    edited = tmp_path / "edited.json"
    edited.write_text(H200.read_text().replace('"units":132', '"units":133'))
    assert "not as it was written" in extend(edited)
    assert "several processes" in extend(H200, "--local", 2)
    assert "of a cuda device" in extend(H200, "--device", "cpu")


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
