"""Steps of several micro-batches: the numbers of the whole batch, the collectives of the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
from torch import nn

from shardfold.api import plan as find_plan
from shardfold.capture import capture_program
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import tabulate
from shardfold.operators import rules_of
from shardfold.planner.batch_slices import first_part
from shardfold.plans import Plan
from shardfold.plans.batch import inputs_of
from shardfold.plans.files import dumps, loads
from shardfold.runtime import gradient_reducer, parameter_uses
from shardfold.runtime.check import compare_captured, difference
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import assemble, lowered_here, prepared
from shardfold.sharding import find_subdims
from shardfold.simulate.decoded import DecodedChoice

from .choices import Chooser
from .jobs import FLOAT64, build
from .ranks import Launch
from .recorder import by_member, planned, recorded

CLOSE = 1e-10
FEW_BYTES = 256  # of a bucket
Told = tuple[str, str, float]


def without_dropout(name: str) -> tuple[nn.Module, Any, Any]:
    """A model of the tests, whose masks would be others in every pass."""
    model, args, kwargs = build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, args, kwargs


class Passes(Chooser):
    """Plans of a step in several micro-batches, for any choice."""

    def __init__(self, model: str, passes: int, cluster: str, mesh: str) -> None:
        module, args, kwargs = without_dropout(model)
        target = parse(cluster)
        given = {"cluster": target, "mesh": mesh_from_text(mesh, target), "micro_batches": passes}
        best = find_plan(module, args, kwargs, **given)
        super().__init__(
            module, *first_part(args, kwargs, best.micro_batch_dims, passes), cluster, mesh
        )
        self._best = best
        self.cuts = {e.name: (e.place, e.cut) for e in best.inputs if e.cut is not None}
        self.tables = tabulate(
            self.graph, self.subdims, self.mesh, self.prices, self.optimizer, micro_batches=passes
        )

    def plan(self, choice: tuple[int, ...]) -> Plan:
        at = DecodedChoice(
            self.graph, self.subdims, self.tables, choice, self.prices, self.optimizer
        )
        return msgspec.structs.replace(super().plan(choice), inputs=inputs_of(at, self.cuts))


def stepped(rank: int, cases: list[tuple[str, list[bytes]]]) -> list[tuple[str, Told]]:
    """Of each plan: what differs from one device that takes as many passes, what is sent and not
    planned, and how far loss and gradients are from those of the whole batch at once."""
    told = []
    for name, plans in cases:
        model, args, kwargs = without_dropout(name)
        program = capture_program(model, args, kwargs)
        subdims = find_subdims(program.graph, rules_of(program.graph))
        single = assemble(model, program, alone(program, subdims), FLOAT64)
        expected = single(*args, **kwargs)
        expected.backward()
        captured = prepared(model, loads(plans[0]), args, kwargs, None, None)
        for number, data in enumerate(plans):
            plan = loads(data)
            # Every other plan in many small buckets, so that some are awaited while others start.
            limits = {"limit": FEW_BYTES} if number % 2 else {}
            settings = replace(FLOAT64, passes=plan.micro_batches, cuts=plan.micro_batch_dims)
            given = (captured, args, kwargs, None, settings)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    parameter_uses, "Reducer", partial(gradient_reducer.Reducer, **limits)
                )
                outcome = compare_captured(model, plan, *given)
                split = assemble(model, captured[0], lowered_here(plan, *captured, None), settings)
                sent, apart = _taken(rank, plan, split, (args, kwargs), (single, expected))
            told.append((name, ("" if outcome.is_equal else str(outcome), sent, apart)))
    return told


def _taken(rank: int, plan: Plan, split: Any, batch: Any, whole: Any) -> tuple[str, float]:
    """A step with the whole batch, whose collectives are noted; and one with this rank's part."""
    args, kwargs = batch
    names = tuple(axis.name for axis in plan.mesh)
    with recorded(split._run.context.groups, names, widened=True) as ran:
        loss = split.accumulate(*args, **kwargs)
    held = split._run.uses
    sent = by_member(ran, held.launched, names, widened=True)
    wanted = planned(plan)
    # Rank 0 has the fullest part of everything, which is what a plan counts.
    differs = "" if sent == wanted or rank else f"planned {wanted - sent}, ran {sent - wanted}"
    assert not held.found
    assert not held.reducer.sums
    apart = _apart(split, loss, *whole)
    split.zero_grad(set_to_none=True)
    parts = plan.local_batch((args, kwargs))
    again = _apart(split, split.accumulate(*parts[0], **parts[1]), *whole)
    return differs, max(apart, again)


def _apart(split: Any, loss: Any, single: nn.Module, expected: Any) -> float:
    amounts = [difference(loss, expected.detach())]
    largest = max(float(p.grad.abs().max()) for p in single.parameters() if p.grad is not None)
    named, keepings = dict(single.named_parameters()), split._run.named()
    for name, parameter in split.named_parameters():
        found = keepings[name].whole(parameter.grad)
        amounts.append(difference(found, named[name].grad, 1e-4 * largest))
    return max(amounts)


@pytest.mark.parametrize(
    ("cases", "cluster", "mesh"),
    [
        (
            {"mlp": (5, 4), "tied": (4, 5), "gpt2-tiny": (2, 2), "llama3-8b-tiny": (4, 1)},
            "2xcpu",
            "2",
        ),
        ({"tied": (2, 5)}, "4xcpu", "2x2"),
    ],
    ids=["2", "2x2"],
)
def test_micro_batches_give_the_numbers_of_the_whole_batch_and_send_what_the_plan_says(
    cases: dict[str, tuple[int, int]], cluster: str, mesh: str, on_ranks: Launch
) -> None:
    given = []
    for model, (passes, count) in cases.items():
        chooser = Passes(model, passes, cluster, mesh)
        plans = [chooser.best(), *chooser.baselines(), *chooser.covering(count).values()]
        given.append((model, [dumps(plan).encode() for plan in plans]))
    for told in on_ranks(stepped, int(cluster.partition("x")[0]), given):
        assert len(told) == sum(len(plans) for _, plans in given)
        for model, (said, sent, apart) in told:
            assert said == "", model
            assert sent == "", model
            assert apart < CLOSE, model
