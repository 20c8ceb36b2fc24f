"""Ever more nodes: the clusters that are meant, rates over the first row's, costs, a figure."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shardfold import zoo
from shardfold.api import Planner
from shardfold.errors import ClusterError, InputError
from shardfold.planner.scaling import ScaleRow, Scaling, of_nodes
from shardfold.report.scaling import scaling_figure, scaling_lines, scaling_page

ROWS = (
    ScaleRow(1, 8, "mesh 8", 0.2, 1000.0, "tokens", 2.0**30),
    ScaleRow(2, 16, "mesh 2x8", 0.125, 1600.0, "tokens", 2.0**29),
    ScaleRow(3, 24, reason="nothing fits"),
)


def test_clusters_of_nodes() -> None:
    assert [c.name for c in of_nodes("H100", [1, 4])] == ["8xh100", "4x8xh100"]
    assert [c.name for c in of_nodes("4xa100-80g", [2])] == ["2x4xa100-80g"]
    assert [c.size for c in of_nodes("2x8xh100", [1, 3])] == [8, 24]
    with pytest.raises(InputError, match="whole and positive"):
        of_nodes("h100", [0])


def test_a_file_with_one_level_has_no_nodes(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(
        'device = "a100"\n[[levels]]\nname = "gpu"\nsize = 4\nbandwidth = 2e9\n'
        "latency_seconds = 1e-6\n"
    )
    with pytest.raises(ClusterError, match="between nodes in a cluster file"):
        of_nodes(str(path), [2])


def test_efficiency_and_cost() -> None:
    found = Scaling("2x8xh100", ROWS, price=2.0)
    assert found.efficiency(ROWS[1]) == pytest.approx(0.8)
    assert found.cost_per_hour(ROWS[1]) == 32.0
    assert found.cost_per_billion(ROWS[0]) == pytest.approx(16 / 3600 / 1000 * 1e9)
    assert found.cost_per_billion(ROWS[2]) is None
    assert Scaling("x", ROWS).cost_per_hour(ROWS[0]) is None
    assert found.as_plain()["rows"][2]["reason"] == "nothing fits"


def test_the_table_and_the_figure() -> None:
    found = Scaling("2x8xh100", ROWS, price=2.0)
    lines = list(scaling_lines(found, "gpt2"))
    assert lines[2:5] == [
        "  nodes  devices    step  tokens/s  efficiency     peak  cost/h   per 1e9  how",
        "      1        8  200 ms     1,000        100%  1.0 GiB   16.00  4,444.44  mesh 8",
        "      2       16  125 ms     1,600         80%  512 MiB   32.00  5,555.56  mesh 2x8",
    ]
    assert lines[5].endswith("nothing fits")
    drawn = ElementTree.fromstring(scaling_figure(found, "gpt2 <on> h100"))
    assert len(drawn.findall(".//{*}circle")) == 2
    assert "<svg" in scaling_page(found, "gpt2")


def test_a_model_on_more_nodes() -> None:
    module, args, kwargs = zoo.build("gpt2-tiny", batch=8)
    own = Planner(module, args, kwargs, cost="roofline")
    clusters = of_nodes("2xa100", [1, 2])
    found = own.scale(clusters, [1, 2])
    assert [row.devices for row in found.rows] == [2, 4]
    for row, cluster in zip(found.rows, clusters, strict=True):
        plan = own.plan(cluster=cluster)
        assert row.step_seconds == pytest.approx(plan.estimate.step_seconds, rel=1e-9)
        assert row.peak_bytes == pytest.approx(plan.estimate.peak_bytes, rel=1e-9)
    weak = own.scale(clusters, [1, 2], per_node=True)
    assert weak.rows[0] == found.rows[0]
    items = [row.rate * row.step_seconds for row in weak.rows]
    assert items[1] == pytest.approx(2 * items[0])
    refused = own.scale(clusters[:1], [1], memory_limit="1KiB", micro_batches=1)
    assert all(row.step_seconds is None and row.reason for row in refused.rows)
