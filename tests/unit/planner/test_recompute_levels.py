"""The levels of a block against every set of its operators, as tables and the simulator have it."""

from __future__ import annotations

from itertools import chain, combinations, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardfold.capture import capture
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import optimizer_named, pricing_named, tabulate
from shardfold.costs.activations import KEEP_ALL, Blocks, Regions
from shardfold.operators import rules_of
from shardfold.planner.recompute_levels import levels_of
from shardfold.sharding import find_subdims
from shardfold.simulate.decoded import DecodedChoice
from shardfold.simulate.memory import Footprint, MemoryFacts
from shardfold.simulate.parts import Part


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y).view(2, 32, 32).view(64, 32))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


GRAPH = capture(Stack(), (torch.randn(64, 16),))
SUBDIMS = find_subdims(GRAPH, rules_of(GRAPH))
FACTS, BLOCKS = MemoryFacts(GRAPH, SUBDIMS), Blocks(GRAPH, SUBDIMS)
CLUSTER = parse("4xa100")
MESH, ADAMW = mesh_from_text("2x2", CLUSTER), optimizer_named("adamw")
PRICES = pricing_named("roofline").model(CLUSTER, MESH)


def decoded(regions: Regions, choice: tuple[int, ...]) -> DecodedChoice:
    tables = tabulate(GRAPH, SUBDIMS, MESH, PRICES, ADAMW, regions)
    return DecodedChoice(GRAPH, SUBDIMS, tables, choice, PRICES, ADAMW)


@pytest.mark.parametrize("seed", range(3))
def test_no_set_of_operators_is_below_the_hull_of_the_levels(seed: int) -> None:
    sizes = decoded(KEEP_ALL, ()).tables.problem.sizes
    choice = tuple(np.random.default_rng(seed).integers(0, sizes).tolist())
    plain, block = decoded(KEEP_ALL, choice), BLOCKS.ranges[1]
    found = levels_of(plain, FACTS, BLOCKS, block)
    assert len(found) > 2
    worth = [op for op in block if GRAPH.ops[op].kind != "aten.add"]  # which keeps nothing
    sets = chain.from_iterable(combinations(worth, n) for n in range(len(worth) + 1))
    truth = {}
    for again in {tuple(BLOCKS.regions(s).ops) for s in sets}:
        run = decoded(BLOCKS.regions(again), choice)
        seconds = run.tables.problem.total(choice) - plain.tables.problem.total(choice)
        truth[again] = (seconds, Footprint(run, FACTS, Part.whole(GRAPH)).kept_bytes)
    freed = [found[0].bytes - level.bytes for level in found]
    for level, saved in zip(found, freed, strict=True):
        ops = tuple(BLOCKS.regions([block.start + k for k in level.again]).ops)
        assert truth[ops] == pytest.approx((level.seconds, truth[()][1] - saved), abs=1e-12)
    for (low, few), (high, many) in pairwise(zip(found, freed, strict=True)):
        price = (high.seconds - low.seconds) / (many - few)
        least = min(s + price * b for s, b in truth.values())
        assert low.seconds + price * (truth[()][1] - few) == pytest.approx(least, rel=1e-9)
