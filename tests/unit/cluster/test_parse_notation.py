from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold.cluster import mesh_from_text, parse
from shardfold.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "name", "levels"),
    [
        ("4x8xh100", "4x8xh100", [("node", 4), ("gpu", 8)]),
        ("8xa100", "8xa100-80g", [("gpu", 8)]),
        ("2xcpu", "2xcpu", [("process", 2)]),
        ("h100", "1xh100", []),
        ("1xh100", "1xh100", []),
        ("1x1xh100", "1xh100", []),
        ("1x8xh100", "8xh100", [("gpu", 8)]),
        ("4x1xh100", "4x1xh100", [("node", 4)]),
        ("2x4x8xh100", "2x4x8xh100", [("pod", 2), ("node", 4), ("gpu", 8)]),
        ("2x1x8xh100", "2x1x8xh100", [("pod", 2), ("gpu", 8)]),
        (" 4X8X1080Ti ", "4x8x1080ti", [("node", 4), ("gpu", 8)]),
        ("8xmi300x", "8xmi300x", [("gpu", 8)]),
        ("08xh100", "8xh100", [("gpu", 8)]),
    ],
)
def test_what_a_name_means(text: str, name: str, levels: list[tuple[str, int]]) -> None:
    cluster = parse(text)
    assert (cluster.name, [(level.name, level.size) for level in cluster.levels]) == (name, levels)
    assert parse(cluster.name) == cluster


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16xa100", "holds at most 8 devices, got 16. Try 2x8xa100-80g"),
        ("12xa100", "Try 2x6xa100-80g"),
        ("13xh100", "Try 13x1xh100"),
        ("4x16xh100", "Try 8x8xh100"),
        ("2x2x4x8xh100", r"has 4 levels, but h100 gives figures for 3 \(pod, node, gpu\)"),
        ("2x4x8xa100", r"has 3 levels, but a100-80g gives figures for 2 \(node, gpu\)"),
        ("0xh100", "sizes go from 1 to 1,000,000, got 0"),
        ("4x0xh100", "sizes go from 1 to 1,000,000, got 0"),
        ("2000000x8xh100", "got 2,000,000"),
        ("8xh10", "Unknown cluster '8xh10'. Did you mean h100"),
        ("-1xh100", "Unknown cluster '-1xh100'. Did you mean h100"),
        ("9" * 5000 + "xh100", "Unknown cluster"),
        ("8x", "Unknown cluster '8x'. Known: 1080ti, 2080ti, a100"),
        ("", "Unknown cluster ''"),
        ("lab.yaml", "ends in .toml or .json, not in .yaml"),
        ("nowhere.toml", "Cluster file nowhere.toml does not exist"),
        ("some/where", "Cluster file some/where: a cluster file ends in"),
        ("a\x00b.toml", "cannot be read"),
    ],
)
def test_a_name_that_means_nothing(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        parse(text)


def test_a_file_does_not_hide_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "h100").write_text("not a cluster")
    monkeypatch.chdir(tmp_path)
    assert parse("h100").name == "1xh100"


@given(st.text(alphabet="0123456789xahcpu.-/\n ", max_size=12))
def test_any_text_is_a_cluster_or_one_clear_error(text: str) -> None:
    with suppress(ClusterError):
        assert parse(text).size >= 1


@pytest.mark.parametrize(
    ("cluster", "text", "names"),
    [
        ("4x8xh100", "4x8", ("node", "gpu")),
        ("4x8xh100", "2x2x8", ("node0", "node1", "gpu")),
        ("4x8xh100", "4x4x2", ("node", "gpu0", "gpu1")),
        ("4x8xh100", "1x4x8", ("node", "gpu")),
        ("8xh100", "8", ("gpu",)),
        ("8xh100", "2x2x2", ("gpu0", "gpu1", "gpu2")),
        ("h100", "1", ()),
    ],
)
def test_a_mesh_fills_the_levels_in_order(cluster: str, text: str, names: tuple[str, ...]) -> None:
    mesh = mesh_from_text(text, parse(cluster))
    assert mesh.names == names
    assert mesh.size == parse(cluster).size


@pytest.mark.parametrize("cluster", ["8xh100", "4x8xh100", "2x4x8xh100", "6x8xa100", "h100"])
def test_every_candidate_is_its_own_text(cluster: str) -> None:
    for mesh in parse(cluster).meshes():
        assert mesh_from_text(str(mesh), parse(cluster)) == mesh


@pytest.mark.parametrize("text", ["8x4", "32", "3x4", "4x8x2", "4", "2x4x4", "5x8"])
def test_a_mesh_that_does_not_fit_lists_those_that_do(text: str) -> None:
    message = (
        rf"'{text}' does not lie along cluster 4x8xh100, which has 32 devices: "
        rf"4 \(node\) of 8 \(gpu\).*Legal meshes: 4x8, 2x2x8, 4x2x4\."
    )
    with pytest.raises(ClusterError, match=message):
        mesh_from_text(text, parse("4x8xh100"))


@pytest.mark.parametrize("text", ["", "8x", "axb", "4x-8", "0x8", "4.0x8", "9" * 5000])
def test_a_mesh_that_is_no_mesh(text: str) -> None:
    with pytest.raises(ClusterError, match="is not sizes joined by x"):
        mesh_from_text(text, parse("4x8xh100"))


def test_one_device_has_one_mesh() -> None:
    with pytest.raises(ClusterError, match=r"which has 1 devices?;.*Legal meshes: 1\."):
        mesh_from_text("8", parse("h100"))
