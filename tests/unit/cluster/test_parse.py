from __future__ import annotations

import copy
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold.cluster import catalog, from_plain, mesh_from_text, parse
from shardfold.errors import ClusterError

LAB = """
name = "lab"

[device]
name = "toy"
memory_bytes = 24_000_000_000
memory_bandwidth = 1e12
matmul_efficiency = 0.8
memory_efficiency = 0.9
launch_seconds = 5e-6
peak_flops = { float32 = 40e12, bfloat16 = 160e12 }

[[levels]]
name = "site"
size = 2
bandwidth = 1e9
shared_by = 8
latency_seconds = 1e-3

[[levels]]
name = "rack"
size = 3
bandwidth = 10e9
shared_by = 2
latency_seconds = 2e-5

[[levels]]
name = "node"
size = 1
bandwidth = 12e9
latency_seconds = 1e-5

[[levels]]
name = "gpu"
size = 4
bandwidth = 20e9
latency_seconds = 5e-6
source = "measured"
"""


def write(folder: Path, text: str, name: str = "lab.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_file_has_any_number_of_levels(tmp_path: Path) -> None:
    cluster = parse(write(tmp_path, LAB))
    assert (cluster.name, cluster.size) == ("lab", 24)
    assert [(level.name, level.size) for level in cluster.levels] == [
        ("site", 2),
        ("rack", 3),
        ("gpu", 4),
    ]
    assert [str(mesh) for mesh in cluster.meshes()] == ["2x3x4"]


def test_a_shared_link_is_divided_among_the_devices_that_use_it(tmp_path: Path) -> None:
    site, rack, gpu = parse(write(tmp_path, LAB)).levels
    assert site.bandwidth == 1e9 / 8  # 12 devices at a site, 8 to a link
    assert rack.bandwidth == 10e9 / 2  # 4 devices in a rack, 2 to a link
    assert gpu.bandwidth == 20e9


def test_a_file_can_name_known_hardware(tmp_path: Path) -> None:
    text = 'device = "a100"\n[[levels]]\nname="gpu"\nsize=10\nbandwidth=1e9\nlatency_seconds=0\n'
    cluster = parse(write(tmp_path, text, "office.toml"))
    assert (cluster.name, cluster.size) == ("office", 10)
    assert cluster.device == parse("a100-80g").device


def test_a_whole_number_may_be_written_as_a_float(tmp_path: Path) -> None:
    cluster = parse(write(tmp_path, LAB.replace("24_000_000_000", "24e9")))
    assert cluster == parse(write(tmp_path, LAB))
    assert isinstance(cluster.device.memory_bytes, int)


def test_a_path_object_is_a_file(tmp_path: Path) -> None:
    assert parse(Path(write(tmp_path, LAB))).name == "lab"


@pytest.mark.parametrize("hardware", catalog(), ids=lambda hardware: hardware.name)
def test_a_cluster_written_as_json_reads_back_equal(hardware: Any, tmp_path: Path) -> None:
    cluster = hardware.cluster([3, hardware.node_size])
    text = json.dumps(cluster.as_plain(), sort_keys=True)
    assert parse(write(tmp_path, text, "saved.json")) == cluster
    assert from_plain(cluster.as_plain()) == cluster


PLAIN = parse("4x8xh100").as_plain()
OPTIONAL = (
    *("source", "units", "clock_hz", "attention_efficiency", "workspace_bytes"),
    *("grouped_products", "host_pace"),
)
MISSING = [
    *(("device", field) for field in PLAIN["device"] if field not in OPTIONAL),
    *(("levels", field) for field in ("name", "size", "bandwidth", "latency_seconds")),
]


@pytest.mark.parametrize(("table", "field"), MISSING)
def test_a_missing_figure_is_named(table: str, field: str, tmp_path: Path) -> None:
    plain = copy.deepcopy(PLAIN)
    (plain["device"] if table == "device" else plain["levels"][1]).pop(field)
    path = write(tmp_path, json.dumps(plain), "lab.json")
    where = "device" if table == "device" else r"levels\[1\]"
    with pytest.raises(ClusterError, match=rf"lab\.json: {where}: .*missing.*`{field}`"):
        parse(path)


NUMBERS = [
    *(("device", field) for field, value in PLAIN["device"].items() if isinstance(value, float)),
    ("device", "memory_bytes"),
    *(("levels", field) for field in ("size", "bandwidth", "latency_seconds")),
]


@pytest.mark.parametrize(("table", "field"), NUMBERS)
@pytest.mark.parametrize(
    ("value", "complaint"), [(-1, "got -1"), ("fast", "got `str`"), (True, "got `bool`")]
)
def test_a_wrong_figure_is_named(
    table: str, field: str, value: object, complaint: str, tmp_path: Path
) -> None:
    plain = copy.deepcopy(PLAIN)
    (plain["device"] if table == "device" else plain["levels"][1])[field] = value
    path = write(tmp_path, json.dumps(plain), "lab.json")
    with pytest.raises(ClusterError, match=rf"Cluster file .*lab\.json: .*{field}.*{complaint}"):
        parse(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("size = 2", "size = 0", "Level site: size must be from 1"),
        ("size = 2", "size = 2.5", r"levels\[0\]\.size: Expected `int`, got `float`"),
        ("bandwidth = 10e9", "bandwith = 10e9", "unknown field `bandwith`. Did you mean bandwidth"),
        ("24_000_000_000", "inf", "memory_bytes must be finite and positive, got inf"),
        ("memory_bandwidth = 1e12", "memory_bandwidth = inf", "memory_bandwidth must be finite"),
        ("float32 = 40e12", "fp32 = 40e12", "unknown dtype 'fp32'. Did you mean tf32 or float32"),
        ("shared_by = 2", "shared_by = 0", "Level rack: shared_by must be at least 1, got 0"),
        ('source = "measured"', "shared_by = 4", "innermost level are single devices"),
        ('name = "rack"', 'name = "site"', "level names must be unique, got site, site"),
        ('name = "lab"', 'name = "lab"\nrack = 3', r"called rack, write \[\[levels\]\] and name"),
        ('name = "lab"', 'name = "lab', "lab.toml is not valid TOML, or is cut off"),
        ("bandwidth = 10e9", "bandwidth = 300", "rack: bandwidth is in bytes/s, got 300: .*300e9"),
        ("latency_seconds = 2e-5", "latency_seconds = 2", "rack: latency_seconds is in seconds"),
        ("24_000_000_000", "24", "memory_bytes is in bytes, got 24: write 80e9 for 80 GB"),
        ("memory_bandwidth = 1e12", "memory_bandwidth = 900", "memory_bandwidth is in bytes/s"),
        ("float32 = 40e12", "float32 = 40", "peak_flops.float32 is in FLOP/s, got 40: .*312e12"),
        ("launch_seconds = 5e-6", "launch_seconds = 5", "launch_seconds is in seconds, got 5"),
    ],
)
def test_a_spoilt_file_is_explained(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in LAB
    with pytest.raises(ClusterError, match=message):
        parse(write(tmp_path, LAB.replace(old, new, 1)))


def test_all_missing_figures_are_named_at_once(tmp_path: Path) -> None:
    plain = copy.deepcopy(PLAIN)
    for field in ("matmul_efficiency", "memory_efficiency", "launch_seconds"):
        del plain["device"][field]
    del plain["levels"][0]["bandwidth"]
    found = (
        r"lab\.json: device: .*missing required fields `matmul_efficiency`, `memory_efficiency`, "
        r"`launch_seconds`; levels\[0\]: .*missing required field `bandwidth`\."
    )
    with pytest.raises(ClusterError, match=found):
        parse(write(tmp_path, json.dumps(plain), "lab.json"))


def test_several_kinds_of_device_are_refused_in_words(tmp_path: Path) -> None:
    plain = {**PLAIN, "device": [PLAIN["device"], PLAIN["device"]]}
    with pytest.raises(ClusterError, match=r"lab\.json: device is a list.*of one kind"):
        parse(write(tmp_path, json.dumps(plain), "lab.json"))
    levels = [{**level, "device": "h100"} for level in PLAIN["levels"]]
    with pytest.raises(ClusterError, match=r"a level has a device of its own, but .*of one kind"):
        parse(write(tmp_path, json.dumps({**PLAIN, "levels": levels}), "lab.json"))


@pytest.mark.parametrize("text", ["4xh100+4xa100", "8xa100, 8xh100", "2x8xh100 and 4xa100"])
def test_two_clusters_in_one_name_are_refused_in_words(text: str) -> None:
    with pytest.raises(ClusterError, match=r"devices of several kinds, .* of one kind throughout"):
        parse(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("cut.toml", LAB[:200], "cut.toml.* missing required fields? `matmul_efficiency`|cut off"),
        ("cut.json", json.dumps(PLAIN)[:200], "cut.json is not valid JSON, or is cut off"),
        ("empty.toml", "", "empty.toml: Object missing required fields `device`, `levels`"),
        ("empty.json", "", "empty.json is not valid JSON, or is cut off"),
        ("list.json", "[]", "list.json: Expected `object`, got `array`"),
        ("deep.json", "[" * 100_000, "deep.json is not valid JSON"),
        ("deep.toml", "a = " + "[" * 100_000, "deep.toml is not valid TOML"),
        ("huge.json", '{"device": 1e999}', "huge.json is not valid JSON"),
        ("lab.yaml", LAB, "lab.yaml: a cluster file ends in .toml or .json, not in .yaml"),
        ("lab", LAB, "ends in .toml or .json, not in nothing"),
        ("who.toml", 'device = "h10"\nlevels = []', "who.toml: Unknown hardware 'h10'. Did you"),
    ],
)
def test_a_file_that_is_no_cluster(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=message):
        parse(write(tmp_path, text, name))


def test_a_folder_and_a_binary_file_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ClusterError, match=r"folder.toml cannot be read: Is a directory"):
        parse(str(tmp_path / "folder.toml"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match=r"binary.toml is not UTF-8 text"):
        parse(str(tmp_path / "binary.toml"))


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
        ("8x", "Unknown cluster '8x'. Known: 1080ti, 2080ti, 3090, 4090, a100"),
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


LIKE = """
like = "2x4xl40s"
[device]
memory_bytes = 40e9
peak_flops = { bfloat16 = 300e12 }
[[levels]]
name = "node"
bandwidth = 12e9
shared_by = 4
"""


def test_a_file_like_known_hardware_has_only_what_differs(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(LIKE)
    found, known = parse(tmp_path / "lab.toml"), parse("2x4xl40s")
    assert found.name == "lab"
    assert found.device.memory_bytes == 40_000_000_000
    assert found.device.peak("bfloat16") == 300e12
    assert found.device.peak("float32") == known.device.peak("float32")
    assert found.device.source.startswith("memory_bytes, peak_flops: the cluster file. The rest: ")
    assert found.device.units == known.device.units
    node, gpu = found.levels
    assert (node.bandwidth, node.rated_bandwidth, node.size) == (3e9, None, 2)
    assert gpu == known.levels[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('like = "9xnone"', "no known cluster"),
        ('like = "8xl40s"\ndevice = "h100"', "goes without like"),
        ('like = "8xl40s"\nlevels = [{name = "nod"}]', "no level 'nod'"),
        ('like = "8xl40s"\nlevels = [{name = "gpu", shared_by = 2}]', "goes with bandwidth"),
        ('like = "8xl40s"\nlevels = 3', "Expected `array`"),
        ('like = "8xl40s"\ndevice = []', "device is a list"),
        ('like = "8xl40s"\nmemory_bytes = 40e9', r"It goes into \[device\]"),
        ('device = "l40s"\nlevels = []\nbandwidth = 3', r"It goes into \[\[levels\]\]"),
        ('levels = []\n[device]\nname = "l40s"\nmemory_bytes = 4e10', "write like = "),
    ],
)
def test_a_file_like_known_hardware_is_checked(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text(text)
    with pytest.raises(ClusterError, match=says):
        parse(tmp_path / "lab.toml")
