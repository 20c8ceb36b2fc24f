"""A drawn module beside itself: in plain PyTorch, as a captured program, and under random plans."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from fuzzing.drawing import Draw
from fuzzing.threads import on_threads
from shardfold.api import plan
from shardfold.capture import Program, capture_program
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import optimizer_named, pricing_named, tabulate
from shardfold.operators import rules_of
from shardfold.plans import Plan
from shardfold.plans.batch import inputs_of
from shardfold.plans.entries import operator_entries, parameter_entries, tensor_entries
from shardfold.runtime import check
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.runtime.reference import Reference
from shardfold.sharding import Subdims, find_subdims
from shardfold.simulate.decoded import DecodedChoice

CLUSTERS = {"2": "2xcpu", "3": "3xcpu", "2x2": "4xcpu"}
State = dict[str, Tensor]
SETTINGS = Settings(float64=True)


def loss_of(output: Any) -> Tensor:
    """The loss in what forward returns."""
    if isinstance(output, dict):
        return output["loss"]
    found: Tensor = output[0] if isinstance(output, tuple | list) else output
    return found


def state_of(module: Any, loss: Tensor) -> State:
    """What a step leaves."""
    found = {"the loss": loss.detach().clone()}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"the gradient of {name}"] = parameter.grad.clone()
        found[name] = parameter.detach().clone()
    return found | {name: buffer.clone() for name, buffer in module.named_buffers()}


def eager(draw: Draw) -> list[State] | None:
    """What two steps of the plain module leave; None where PyTorch does not run it."""
    try:
        module = draw.module()
        found = []
        for args, kwargs in draw.steps():
            module.zero_grad()
            loss = loss_of(module(*args, **kwargs))
            loss.backward()
            if not torch.isfinite(loss):
                return None
            found.append(state_of(module, loss))
    except Exception:
        return None
    return found


def differences(ours: State, theirs: State) -> list[str]:
    """What is not the same; a gradient that is missing on one side must be zero on the other."""
    found = []
    for key in {**theirs, **ours}:
        here, there = ours.get(key), theirs.get(key)
        if here is None or there is None:
            given = here if there is None else there
            if not key.startswith("the gradient") or bool(given.count_nonzero()):
                found.append(f"{key} is only {'ours' if there is None else 'theirs'}")
        elif here.shape != there.shape or here.dtype != there.dtype:
            found.append(f"{key} is {here.dtype}{[*here.shape]}, not {there.dtype}{[*there.shape]}")
        elif not torch.allclose(here, there, rtol=1e-7, atol=1e-10, equal_nan=True):
            found.append(f"{key} differs by {(here - there).abs().max():.1e}")
    return found


def captured(draw: Draw) -> tuple[Program, Subdims]:
    args, kwargs = draw.steps()[0]
    program = capture_program(draw.module(), args, kwargs)
    return program, find_subdims(program.graph, rules_of(program.graph))


def one_device(draw: Draw, program: Program, subdims: Subdims, expected: list[State]) -> list[str]:
    """What the captured program does otherwise than the module."""
    module = assemble(draw.module(), program, alone(program, subdims), SETTINGS)
    reference = Reference(draw.module(), None) if draw.is_random else None
    for number, (args, kwargs) in enumerate(draw.steps()):
        drawn: list[Tensor] = []
        module.zero_grad()
        module._run.context.drawn = drawn
        loss = module(*args, **kwargs)
        module._run.context.drawn = None
        loss.backward()
        wanted = expected[number]
        if reference is not None:
            outcome = reference.step([(args, kwargs)], drawn)
            wanted = {"the loss": torch.tensor(outcome.loss, dtype=torch.float64), **outcome.state}
            wanted |= {f"the gradient of {k}": v for k, v in outcome.gradients.items()}
        found = differences(state_of(module, loss), wanted)
        if found and not (reference is not None and reference.drew):  # for what nobody reads
            return [f"step {number}: {line}" for line in found]
    return []


@functools.cache
def base_plan(mesh: str) -> Plan:
    """A plan of any model on a mesh, whose decisions are to be replaced."""
    model = nn.Linear(8, 8)
    example = (torch.zeros(4, 8),)
    return plan(model, example, cluster=parse(CLUSTERS[mesh]), mesh=mesh, loss=Tensor.mean)


def random_plans(
    program: Program, subdims: Subdims, mesh: str, rng: random.Random, count: int
) -> Iterator[Plan]:
    """Any configuration for each operator, any layout for each tensor, any storage."""
    cluster = parse(CLUSTERS[mesh])
    shape = mesh_from_text(mesh, cluster)
    prices, optimizer = pricing_named("roofline").model(cluster, shape), optimizer_named("adamw")
    tables = tabulate(program.graph, subdims, shape, prices, optimizer)
    for _ in range(count):
        choice = tuple(rng.randrange(len(costs)) for costs in tables.problem.costs)
        decoded = DecodedChoice(program.graph, subdims, tables, choice, prices, optimizer)
        yield msgspec.structs.replace(
            base_plan(mesh),
            operators=operator_entries(decoded),
            tensors=tensor_entries(decoded),
            parameters=parameter_entries(decoded),
            inputs=inputs_of(decoded),
        )


def on_ranks(draw: Draw, program: Program, subdims: Subdims, chosen: Plan) -> str:
    """What two steps under a plan do otherwise than the captured program; empty if nothing."""
    ranks = math.prod(axis.size for axis in chosen.mesh)
    batches: list[Any] = draw.steps()
    given = (chosen, (program, subdims), batches, None, SETTINGS, None, "not asked for")
    models = [draw.module() for _ in range(ranks)]
    found = on_threads(lambda rank: check._compared(models[rank], *given), ranks)
    return "" if all(each.is_equal for each in found) else str(found[0])
