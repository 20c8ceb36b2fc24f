"""Blocks that run again before backward: the same numbers, and the collectives of the plan."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shardfold.costs import tabulate
from shardfold.costs.activations import Blocks, Regions, block_regions, in_model
from shardfold.plans import Plan
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize
from shardfold.runtime.check import compare

from .choices import Chooser
from .ranks import Launch
from .recorder import by_member, planned, recorded


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def stack() -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    return Stack(), (torch.randn(8, 6, 8),), {}


class Again(Chooser):
    """Plans that recompute some of the operators of every block."""

    def __init__(self, again: Callable[[Blocks], Regions]) -> None:
        super().__init__(*stack(), "2xcpu", "2")
        self.regions = again(Blocks(self.graph, self.subdims))
        self.tables = tabulate(
            self.graph, self.subdims, self.mesh, self.prices, self.optimizer, self.regions
        )

    def plan(self, choice: tuple[int, ...]) -> Plan:
        again = in_model(self.regions, self.graph)
        return msgspec.structs.replace(super().plan(choice), recompute=again)


def stepped(rank: int, cases: list[bytes]) -> list[tuple[str, str, list[int]]]:
    """For each plan: what differs from one device, and from the plan's collectives."""
    told = []
    for data in cases:
        plan = loads(data)
        model, args, kwargs = stack()
        outcome = compare(model, plan, args, kwargs)
        said = "" if outcome.is_equal else str(outcome)
        module = parallelize(model, plan, args, kwargs)
        names = tuple(axis.name for axis in plan.mesh)
        with recorded(module._run.context.groups, names) as ran:
            module(*args, **kwargs).backward()
        sent = by_member(ran, module._run.uses.launched, names)
        wanted = planned(plan)
        differs = "" if sent == wanted else f"planned {wanted - sent}, ran {sent - wanted}"
        told.append((said, differs, [op for r in module._run.lowered.again for op in r.ops]))
    return told


def everything(blocks: Blocks) -> Regions:
    return block_regions(blocks.graph, blocks.subdims)


def at_random(seed: int) -> Callable[[Blocks], Regions]:
    """Every operator of a block by itself: kept, or made again."""

    def choose(blocks: Blocks) -> Regions:
        draw = Random(seed)
        return blocks.regions([i for b in blocks.ranges for i in b if draw.random() < 0.5])

    return choose


def test_recomputed_operators_give_the_same_numbers_and_send_what_the_plan_says(
    on_ranks: Launch,
) -> None:
    full, mixed = Again(everything), [Again(at_random(seed)) for seed in range(6)]
    plans = [*full.baselines(), *full.covering(4).values()]
    regions = [full.regions] * len(plans)
    for chooser in mixed:
        for plan in (next(chooser.baselines()), *list(chooser.covering(4).values())[:3]):
            plans.append(plan)
            regions.append(chooser.regions)
    given = [dumps(plan).encode() for plan in plans]
    for number, (said, differs, again) in enumerate(on_ranks(stepped, 2, given)[0]):
        assert sorted(again) == regions[number].ops
        assert said == "", f"plan {number}"
        assert differs == "", f"plan {number}"
