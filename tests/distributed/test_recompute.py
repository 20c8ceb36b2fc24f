"""Blocks that run again before backward: the same numbers, and the collectives of the plan."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shardfold.costs import tabulate
from shardfold.costs.activations import block_regions
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
    """Plans that recompute every block."""

    def __init__(self) -> None:
        super().__init__(*stack(), "2xcpu", "2")
        self.regions = block_regions(self.graph, self.subdims)
        self.tables = tabulate(
            self.graph, self.subdims, self.mesh, self.prices, self.optimizer, self.regions
        )

    def plan(self, choice: tuple[int, ...]) -> Plan:
        ranges = tuple((each.start, each.stop) for each in self.regions.ranges)
        return msgspec.structs.replace(super().plan(choice), recompute=ranges)


def stepped(rank: int, cases: list[bytes]) -> list[tuple[str, str, int]]:
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
        told.append((said, differs, len(module._run.lowered.again)))
    return told


def test_recomputed_blocks_give_the_same_numbers_and_send_what_the_plan_says(
    on_ranks: Launch,
) -> None:
    chooser = Again()
    plans = [*chooser.baselines(), *chooser.covering(4).values()]
    given = [dumps(plan).encode() for plan in plans]
    for number, (said, differs, blocks) in enumerate(on_ranks(stepped, 2, given)[0]):
        assert blocks == 3
        assert said == "", f"plan {number}"
        assert differs == "", f"plan {number}"
