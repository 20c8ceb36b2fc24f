"""What the processes of a test do: many cases in one start, each reported in a line."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from shardfold import zoo
from shardfold.capture import Program, capture_program
from shardfold.errors import ShardfoldError
from shardfold.operators import rules_of
from shardfold.plans.files import loads
from shardfold.runtime.check import compare_captured
from shardfold.runtime.parallelize import Settings, assemble, lowered_here
from shardfold.sharding import Subdims, find_subdims

from .models import HAND_WRITTEN
from .recorder import by_member, planned, recorded

Case = tuple[str, str, bytes]  # model, label, plan

FLOAT64 = Settings(float64=True)


def build(name: str) -> tuple[Any, Any, Any]:
    """A model of the zoo or of these tests, with weights and a batch; alike on every rank."""
    if name in HAND_WRITTEN:
        torch.manual_seed(0)
        return HAND_WRITTEN[name]()
    return zoo.build(name, device="cpu")


@cache
def captured(name: str) -> tuple[Any, Any, Any, tuple[Program, Subdims]]:
    """A model as it is built, with its program: made once in each process."""
    model, args, kwargs = build(name)
    program = capture_program(model, args, kwargs)
    return model, args, kwargs, (program, find_subdims(program.graph, rules_of(program.graph)))


def numbers(rank: int, cases: list[Case]) -> list[str]:
    """For each case, what differs from one device; empty if nothing does."""
    _quiet()
    found = []
    for name, label, data in cases:
        model, args, kwargs, pair = captured(name)
        try:
            outcome = compare_captured(model, loads(data), pair, args, kwargs, None, FLOAT64)
        except ShardfoldError as error:
            found.append(f"{name} {label}: {error}")
        else:
            found.append("" if outcome.is_equal else f"{name} {label}: {outcome}")
    return found


def collectives(rank: int, cases: list[Case]) -> list[str]:
    """For each case, how the collectives of a real step differ from the plan's."""
    _quiet()
    found = []
    for name, label, data in cases:
        plan = loads(data)
        model, args, kwargs, (program, subdims) = captured(name)
        module = assemble(model, program, lowered_here(plan, program, subdims, None), Settings())
        names = tuple(axis.name for axis in plan.mesh)
        with recorded(module._run.context.groups, names) as ran:
            module(*args, **kwargs).backward()
        ran = by_member(ran, module._run.uses.launched, names)
        wanted = planned(plan)
        only = dict(wanted - ran), dict(ran - wanted)
        found.append("" if ran == wanted else f"{name} {label}: planned {only[0]}, ran {only[1]}")
    return found


def _quiet() -> None:
    for name in ("torch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
