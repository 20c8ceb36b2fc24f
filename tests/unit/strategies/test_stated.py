"""Strategies as people state them: parsed, refused, and laid on a cluster."""

from __future__ import annotations

import pytest

from shardfold.cluster import parse
from shardfold.errors import ClusterError, InputError
from shardfold.strategies.stated import Stated, parse_strategy, place


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", Stated(8, 1, 1, 0)),
        ("dp=8", Stated(8, 1, 1, 0)),
        ("fsdp=8", Stated(1, 8, 1, 3)),
        ("dp=2, fsdp=4", Stated(2, 4, 1, 3)),
        ("fsdp=4", Stated(2, 4, 1, 3)),
        ("zero=1", Stated(1, 8, 1, 1)),
        ("dp=4 zero=2 tp=2", Stated(1, 4, 2, 2)),
        ("dp=2 fsdp=4 zero=1", Stated(2, 4, 1, 1)),
        ("dp=8 zero=0", Stated(8, 1, 1, 0)),
        ("tp=8 sp", Stated(1, 1, 8, 0, sequence=True)),
        ("tp=8 sp=off", Stated(1, 1, 8, 0)),
        (
            "fsdp=2 tp=4 sp recompute=full micro-batches=4",
            Stated(1, 2, 4, 3, sequence=True, recompute="full", micro_batches=4),
        ),
        ("fsdp=4 ep=2", Stated(2, 4, 1, 3, experts=2)),
        ("dp=2 fsdp=4 ep=8", Stated(2, 4, 1, 3, experts=8)),
        ("tp=2 ep=4", Stated(4, 1, 2, 0, experts=4)),
        ("pp=2", Stated(4, 1, 1, 0, stages=2)),
        ("pp=4 tp=2", Stated(1, 1, 2, 0, stages=4)),
        (
            "pp=2 micro-batches=4 virtual=3 fsdp=4",
            Stated(1, 4, 1, 3, micro_batches=4, stages=2, schedule="interleaved", chunks=3),
        ),
        ("pp=8 schedule=zbv", Stated(1, 1, 1, 0, stages=8, schedule="zbv", chunks=2)),
        ("dp=2 cp=4", Stated(8, 1, 1, 0, context=4)),
        ("fsdp=2 cp=2 tp=2", Stated(1, 4, 2, 3, context=2)),
        ("dp=4 cp=2 attention=ring", Stated(8, 1, 1, 0, context=2, attention="ring")),
        ("cp=8 zero=1", Stated(1, 8, 1, 1, context=8)),
        ("dp=8 zero=1 ep=2", Stated(1, 8, 1, 1, experts=2)),
        ("pp=8 schedule=gpipe", Stated(1, 1, 1, 0, stages=8, schedule="gpipe")),
    ],
)
def test_words_state_degrees(text: str, found: Stated) -> None:
    assert parse_strategy(text, 8) == found
    assert parse_strategy("" if str(found) == "one device" else str(found), 8) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dp=3", "dp=3 makes 3 devices, and the cluster has 8"),
        ("dp=2 tp=2", "makes 4 devices, and the cluster has 8"),
        ("fsdp=16", "fsdp=16 makes 16 devices"),
        ("fdsp=8", "Unknown word 'fdsp'.*Did you mean fsdp"),
        ("cp=3", "cp=3 makes 3 devices"),
        ("pp=3", "pp=3 makes 3 devices, and the cluster has 8"),
        ("pp=2 schedule=2f2b", "Unknown schedule=2f2b.*Did you mean 1f1b"),
        ("schedule=gpipe", "schedule=gpipe goes with pp=2 or more"),
        ("virtual=2", "virtual=2 goes with pp=2 or more"),
        ("pp=4 micro-batches=10 virtual=2 schedule=1f1b", "Try schedule=interleaved"),
        ("pp=4 micro-batches=11 virtual=2", "Try micro-batches=12"),
        ("tp=4 ep=4", "ep=4 is a part of the devices that split the batch, dp x fsdp = 2 x 1"),
        ("dp=4 fsdp=2 ep=3", "ep=3 is a part of the devices"),
        ("dp=8 attention=ring", "attention=ring goes with cp=2 or more"),
        ("cp=8 attention=rings", "Unknown attention=rings"),
        ("ep=2 cp=2", "ep=2 with cp=2 is not described yet"),
        ("tp=two", "tp=two is no degree"),
        ("tp=0", "tp=0 is no degree"),
        ("tp=-2", "tp=-2 is no degree"),
        ("zero=4", "0, 1, 2 or 3"),
        ("fsdp=8 zero=0", "leave one of them out"),
        ("dp=8 dp=8", "states dp twice"),
        ("sp", "sp goes with tp=2 or more"),
        ("tp=8 sp=maybe", "neither sp nor sp=off"),
        ("recompute=some", "Unknown recompute=some"),
    ],
)
def test_a_strategy_that_makes_no_sense_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse_strategy(text, 8)


@pytest.mark.parametrize(
    ("text", "cluster", "mesh", "axes"),
    [
        ("dp=8", "8xa100", "8", ((0,), (), ())),
        ("fsdp=4 tp=8", "4x8xh100", "4x8", ((), (0,), (1,))),
        ("dp=4 tp=2 fsdp=4", "4x8xh100", "4x4x2", ((0,), (1,), (2,))),
        ("fsdp=16 tp=2", "4x8xh100", "4x4x2", ((), (0, 1), (2,))),
        ("dp=2 fsdp=2 tp=8", "4x8xh100", "2x2x8", ((0,), (1,), (2,))),
        ("dp=2 tp=16", "4x8xh100", "2x2x8", ((0,), (), (1, 2))),
        ("dp=1", "1xa100", "1", ((), (), ())),
    ],
)
def test_tp_lies_innermost_then_fsdp_then_dp(
    text: str, cluster: str, mesh: str, axes: tuple[tuple[int, ...], ...]
) -> None:
    target = parse(cluster)
    placed = place(parse_strategy(text, target.size), target)
    assert str(placed.mesh) == mesh
    assert (placed.replicas, placed.shards, placed.tensor) == axes
    levels = [axis.level for axis in placed.mesh.axes]
    assert levels == sorted(levels)


@pytest.mark.parametrize(
    ("text", "mesh", "axes"),
    [
        ("fsdp=32 ep=8", "4x8", ((), (0, 1), (1,))),
        ("fsdp=32 ep=4", "4x2x4", ((), (0, 1, 2), (2,))),
        ("fsdp=16 tp=2 ep=16", "4x4x2", ((), (0, 1), (0, 1))),
        ("dp=4 fsdp=8 ep=16", "2x2x8", ((0, 1), (2,), (1, 2))),
        ("dp=32 ep=8", "4x8", ((0, 1), (), (1,))),
    ],
)
def test_ep_is_the_innermost_part_of_what_splits_the_batch(
    text: str, mesh: str, axes: tuple[tuple[int, ...], ...]
) -> None:
    placed = place(parse_strategy(text, 32), parse("4x8xh100"))
    assert str(placed.mesh) == mesh
    assert (placed.replicas, placed.shards, placed.experts) == axes


def test_a_degree_that_lies_across_levels_is_refused() -> None:
    target = parse("3x4xa100")
    with pytest.raises(ClusterError, match=r"tp=6 does not lie along the cluster"):
        place(parse_strategy("dp=2 tp=6", 12), target)
