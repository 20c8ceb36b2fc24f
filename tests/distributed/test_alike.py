"""Ranks that were given different things say so when they start, on every rank, and end."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import nn

from shardfold.errors import RunError
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize

from .choices import Chooser
from .ranks import Launch


class Counting(nn.Module):
    """Weights and two kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.register_buffer("scale", torch.arange(1.0, 9.0))
        self.register_buffer("mask", torch.arange(8) % 3 == 0, persistent=False)
        self.plain = torch.arange(8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x) * self.scale + self.plain
        return h.masked_fill(self.mask, 0).square().mean()


def made() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return Counting(), (torch.randn(8, 6),)


def told(rank: int, plans: list[bytes]) -> dict[str, str]:
    """What this rank is told where it was given something else than the others."""
    said: dict[str, str] = {}

    def tried(what: str, plan: bytes, model: nn.Module, args: Any, **given: Any) -> None:
        said[what] = ""
        try:
            parallelize(model, loads(plan), args, **given)(*args).backward()
        except RunError as error:
            said[what] = str(error)

    tried("nothing", plans[0], *made())
    tried("plan", plans[rank % 2], *made())
    tried("seed", plans[0], *made(), seed=rank)
    tried("dtype", plans[0], *made(), float64=rank == 1)
    said |= calls_told(rank, plans)
    for name in ("up.weight", "scale", "mask", "plain"):
        model, args = made()
        tensor = attrgetter(name)(model).detach()
        if rank == 1:  # another order has the same sum
            tensor.copy_(tensor.flip(0))
        tried(name, plans[0], model, args)
    return said


def calls_told(rank: int, plans: list[bytes]) -> dict[str, str]:
    """What this rank is told where it calls the module otherwise than the others."""
    said: dict[str, str] = {}
    for what, plan in {
        "mode": 0,
        "gradients": 0,
        "shape": 0,
        "type": 0,
        "part": 0,
        "batch": 2,
    }.items():
        model, args = made()
        module = parallelize(model, loads(plans[plan]), args)
        x: Any = args[0]
        if what == "mode":
            module.train(rank == 0)
        elif what == "shape":
            x = x[: 8 - 2 * rank]
        elif what == "type":
            x = "text" if rank else x
        elif what in ("part", "batch"):  # of "part" every rank reads its own numbers
            x = x + rank
        said[what] = ""
        with torch.set_grad_enabled(what != "gradients" or rank == 0):
            try:
                module(x)
            except RunError as error:
                said[what] = str(error)
    return said


def test_ranks_that_differ_are_told_what_differs(on_ranks: Launch) -> None:
    model, args = made()
    chooser = Chooser(model, args, {}, "2xcpu", "2")
    shared = (
        plan for plan in map(chooser.random, range(99)) if plan.inputs[0].layout == ("replicated",)
    )
    plans = [dumps(plan).encode() for plan in (*chooser.baselines(), next(shared))]
    both = on_ranks(told, 2, plans)
    for said in both:
        assert said["nothing"] == said["part"] == ""
        assert "in training, with gradients on rank 0, but in eval mode" in said["mode"]
        assert "but in training, without gradients on rank 1" in said["gradients"]
        assert "x: of shape (8, 6) on rank 0, but of shape (6, 6) on rank 1" in said["shape"]
        assert "The input x is a str, not a tensor." in said["type"]
        assert "Ranks 0, 1 read the same x and were given different numbers." in said["batch"]
        for what, words in {
            "plan": "Give every rank the same plan file",
            "seed": "seed: 0 on rank 0, but 1 on rank 1",
            "dtype": "float64: False on rank 0, but True on rank 1",
            "up.weight": "Seed all ranks alike",
            "scale": "scale: ",
            "mask": "mask: ",
            "plain": "the constant ",
        }.items():
            message = said[what]  # and not that of a rank which waited in vain
            assert message.startswith("The ranks were not started alike. ")
            assert words in message
            assert f"{what}: " in message or what in ("dtype", "plain")
    for said in both:
        del said["type"]  # where it is first said which rank it was
    assert both[0] == both[1]
