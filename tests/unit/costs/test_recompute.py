"""Recomputed blocks: which operators run again, what that costs and saves, folded as unfolded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardfold as sf
from shardfold.capture import capture, capture_short
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import optimizer_named, pricing_named, tabulate
from shardfold.costs.recompute import KEEP_ALL, Regions, block_regions, in_model
from shardfold.errors import InputError
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.sharding import find_subdims
from shardfold.simulate.decoded import DecodedChoice
from shardfold.strategies.baselines import batch_factors, data_parallel

ROWS = 65536  # enough for splitting the batch to pay


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            norm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, layers: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(64, norm) for _ in range(layers))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def stack(layers: int, norm: type[nn.Module] = nn.LayerNorm) -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        return Stack(layers, norm), (torch.empty(ROWS, 64),)


def regions_of(graph: Graph) -> Regions:
    return block_regions(graph, find_subdims(graph, rules_of(graph)))


def planned(layers: int = 8, **options: Any) -> sf.Plan:
    model, args = stack(layers)
    return sf.plan(model, args, cluster="4xa100", **options)


def test_a_region_ends_with_the_last_operator_that_keeps_something() -> None:
    model, args = stack(4)
    graph = capture(model, args, fold=False)
    found = regions_of(graph)
    kinds = [[graph.ops[i].kind.rpartition(".")[2] for i in each] for each in found.ranges]
    assert kinds == [["layer_norm", "linear", "gelu", "linear"]] * 4
    assert found.readers == {each[-1] for each in found.ranges}


def test_a_short_graph_has_the_regions_of_the_whole_one() -> None:
    model, args = stack(40)
    short, full = capture_short(model, args), capture(model, args, fold=False)
    assert len(short.ops) < len(full.ops)
    assert in_model(regions_of(short), short) == regions_of(full)


def test_batch_norm_does_not_run_twice() -> None:
    model, args = stack(6, nn.BatchNorm1d)
    assert not regions_of(capture(model, args))


def test_two_blocks_alike_are_not_enough() -> None:
    model, args = stack(2)
    assert not regions_of(capture(model, args))


@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_recomputing_costs_one_more_forward_and_keeps_one_tensor_a_block(mesh: str) -> None:
    model, args = stack(8)
    graph, cluster = capture(model, args), parse("4xa100")
    subdims, on = find_subdims(graph, rules_of(graph)), mesh_from_text(mesh, parse("4xa100"))
    prices, adamw = pricing_named("roofline").model(cluster, on), optimizer_named("adamw")
    keeping, again = (
        tabulate(graph, subdims, on, prices, adamw, regions)
        for regions in (KEEP_ALL, block_regions(graph, subdims))
    )
    by_batch = data_parallel(keeping, batch_factors(graph, subdims))
    # norm's, up's, gelu's and down's operands against the block's own.
    rows, width = ROWS // 4, 64
    dropped = 8 * rows * (width + 4 * width + 4 * width) * 4
    assert keeping.problem.total_bytes(by_batch) - again.problem.total_bytes(by_batch) == dropped
    steps = DecodedChoice(graph, subdims, again, by_batch, prices, adamw).steps.values()
    repeated = [s for each in steps for s in each if s.phase == "recompute"]
    assert len(repeated) == 8 * 3  # norm, up and gelu; nothing moves between them
    cost = again.problem.total(by_batch) - keeping.problem.total(by_batch)
    assert cost == pytest.approx(sum(float(prices.compute_seconds(s)[0]) for s in repeated))


def test_it_is_chosen_where_nothing_else_fits_and_only_there() -> None:
    free = planned()
    assert not free.recompute
    least = planned(recompute="never", memory_limit=1e12).estimate
    tight = 0.0
    for share in (0.5, 0.3, 0.2, 0.1):
        limit = share * least.peak_bytes
        try:
            planned(recompute="never", memory_limit=limit, micro_batches=1)
        except sf.ShardfoldError:
            tight = limit
            break
    assert tight, "some limit must be too small without recomputing"
    found = planned(memory_limit=tight)
    assert found.recompute
    assert found.estimate.peak_bytes <= tight
    assert f"checkpointing: {len(found.recompute)} blocks" in str(found)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_folded_and_unfolded_agree_on_how_many_blocks(share: float) -> None:
    never = planned(12, recompute="never", memory_limit=1e12).estimate.peak_bytes
    always = planned(12, recompute="always", memory_limit=1e12).estimate.peak_bytes
    limit = always + share * (never - always)
    short, full = (planned(12, memory_limit=limit, fold=fold) for fold in (True, False))
    assert 0 < len(short.recompute) < 12
    assert short.recompute == full.recompute
    assert short.estimate.additive_seconds == pytest.approx(
        full.estimate.additive_seconds, rel=1e-9
    )
    assert short.estimate.peak_bytes == full.estimate.peak_bytes


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(InputError, match="recompute 'some'"):
        planned(recompute="some")
