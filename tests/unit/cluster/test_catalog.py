from __future__ import annotations

import pytest

from shardfold.cluster import Hardware, catalog, parse
from shardfold.cluster.catalog import find_hardware
from shardfold.errors import ClusterError

EVERY = pytest.mark.parametrize("hardware", catalog(), ids=lambda hardware: hardware.name)


def test_the_promised_hardware_is_there() -> None:
    names = [hardware.name for hardware in catalog()]
    assert names == [
        *("1080ti", "2080ti", "3090", "4090", "a100-40g", "a100-80g", "a10g", "a6000"),
        *("b200", "b300", "cpu", "gb200", "gh200", "h100", "h200", "l4", "l40s"),
        *("mi300x", "mi325x", "mi355x", "t4", "trn2", "v100"),
    ]


@EVERY
def test_every_figure_has_a_source(hardware: Hardware) -> None:
    sources = [hardware.device.source, *(link.source for link in hardware.links)]
    assert all(len(source.split()) > 5 and source == source.strip() for source in sources)


@EVERY
def test_links_get_slower_outwards(hardware: Hardware) -> None:
    cluster = hardware.cluster([2] * (len(hardware.links) - 1) + [hardware.node_size])
    bandwidths = [level.bandwidth for level in cluster.levels]
    latencies = [level.latency_seconds for level in cluster.levels]
    assert bandwidths == sorted(bandwidths)
    # The 2080 Ti stages in host memory, which costs more steps than the network adapter's.
    assert latencies == sorted(latencies, reverse=True) or hardware.name == "2080ti"
    assert cluster.device.memory_bandwidth > bandwidths[-1]


@EVERY
def test_smaller_dtypes_are_not_slower_where_they_have_matrix_units(hardware: Hardware) -> None:
    device = hardware.device
    if "float64" in device.dtypes:
        assert device.peak("float32") >= device.peak("float64")
    if "bfloat16" in device.dtypes:
        assert device.peak("bfloat16") >= device.peak("float32")
    if "tf32" in device.dtypes:
        assert device.peak("float32") < device.peak("tf32") < device.peak("bfloat16")


def test_names_and_aliases_are_distinct() -> None:
    names = [name for hardware in catalog() for name in (hardware.name, *hardware.aliases)]
    assert len(set(names)) == len(names)


def test_plain_a100_is_the_80_gb_one() -> None:
    assert find_hardware("A100") is find_hardware("a100-80g")
    assert parse("a100-40g").device.memory_bytes < parse("a100").device.memory_bytes


def test_the_papers_clusters_share_one_adapter_a_node() -> None:
    eighth, half, whole = (parse(f"4x{n}x1080ti").levels[0].bandwidth for n in (8, 2, 1))
    assert whole == pytest.approx(2 * half) == pytest.approx(8 * eighth)
    assert parse("4x8x1080ti").levels[0].rated_bandwidth == 12.5e9 / 8


def test_without_peer_access_the_2080ti_has_less_bandwidth_per_flop() -> None:
    def balance(name: str) -> float:
        cluster = parse(f"8x{name}")
        return cluster.levels[0].bandwidth / cluster.device.peak("float32")

    assert balance("2080ti") < balance("1080ti") / 3


def test_a_v100_shares_its_adapter_with_at_most_one_other() -> None:
    full, pair, single = (parse(f"2x{n}xv100").levels[0].bandwidth for n in (8, 2, 1))
    assert full == pair == single / 2


def test_unknown_hardware_suggests_near_names() -> None:
    with pytest.raises(ClusterError, match=r"Unknown hardware 'h10'. Did you mean h100"):
        find_hardware("h10")
