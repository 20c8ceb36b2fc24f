"""The user's own loop: optimizers, clipping, accumulation and state dicts on parallel modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardfold.errors import RunError
from shardfold.plans import Plan
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize
from shardfold.runtime.check import compare
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import Settings, assemble, prepared

from .choices import Chooser, chooser
from .jobs import build
from .ranks import Launch

STEPS = 20


def by_heads(chooser: Chooser) -> Plan:
    """Every operator of attention by heads where it can be: c_attn in three parts at once."""
    choice = []
    subdims = chooser.subdims
    heads = {
        atom
        for op, rule, own in zip(chooser.graph.ops, subdims.rules, subdims.factors, strict=True)
        if "attention" in op.kind
        for factor, atom in enumerate(own)
        if rule.base(factor) == "h"
    }
    for vertex in chooser.tables.vertices:
        row = 0
        if vertex.space is not None:
            own = subdims.factors[vertex.index]
            for k, config in enumerate(vertex.space.configs):
                if config[0] >= 0 and own[config[0]] in heads:
                    row = k
        choice.append(row)
    for v, vertex in enumerate(chooser.tables.vertices):
        if vertex.storage is not None:
            edge = next(e for e in chooser.tables.edges if e.source == v)
            needed = edge.needed[choice[edge.target]]
            same = (vertex.storage.layouts == needed).all(axis=1) & ~vertex.storage.regathers
            choice[v] = int(same.argmax())
    return chooser.plan(tuple(choice))


def _reference(name: str, plan: Plan) -> Any:
    model, args, kwargs = build(name)
    program, subdims = prepared(model, plan, args, kwargs, None, None)
    return assemble(model, program, alone(program, subdims), Settings(float64=True))


def _train(module: Any, args: Any, kwargs: Any, *, accumulate: int = 1) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss = module(*args, **kwargs)
            (loss / accumulate).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        losses += [
            float(loss.detach()),
            float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
        ]
        optimizer.step()
        schedule.step()
    return losses


def trained(rank: int, cases: list[tuple[str, bytes]]) -> list[Any]:
    """For each plan: losses and norms under it and alone, and the state dict's differences."""
    found = []
    for name, data in cases:
        plan = loads(data)
        model, args, kwargs = build(name)
        module = parallelize(model, plan, args, kwargs, float64=True)
        single = _reference(name, plan)
        both = [_train(m, args, kwargs, accumulate=2) for m in (module, single)]
        state, expected = module.state_dict(), single.state_dict()
        assert list(state) == list(expected) == list(model.state_dict())
        worst: dict[str, float] = {}
        for key, value in state.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert whole.shape == expected[key].shape, key
            worst[key] = float((whole - expected[key]).abs().max())
        # A checkpoint of one device goes into the parallel module, and comes out as it was.
        before = {k: v.clone() for k, v in _reference(name, plan).state_dict().items()}
        module.load_state_dict(before)
        for key, value in module.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            assert torch.equal(whole, before[key]), key
        kinds = {type(p).__name__ for p in module.parameters()}
        placed = {n: map(str, k.placements) for n, k in module._run.keepings.items()}
        pieces = [n for n, words in placed.items() if any("_S(" in word for word in words)]
        found.append((*both, worst, kinds, pieces))
    return found


def test_twenty_steps_are_those_of_one_device(on_ranks: Launch) -> None:
    gpt2 = chooser("gpt2-tiny", "2xcpu", "2")
    planes = chooser("planes", "2xcpu", "2")
    plans = [
        ("gpt2-tiny", by_heads(gpt2)),
        ("gpt2-tiny", list(gpt2.baselines())[1]),
        ("planes", planes.random(1)),
        ("planes", planes.random(4)),
    ]
    given = [(name, dumps(plan).encode()) for name, plan in plans]
    for told in on_ranks(trained, 2, given):
        for losses, expected, worst, kinds, _ in told:
            torch.testing.assert_close(losses, expected, rtol=1e-7, atol=1e-9)
            assert losses[-2] < losses[0]
            assert {key: by for key, by in worst.items() if by > 1e-7} == {}
            assert kinds == {"DTensor"} or kinds == {"Parameter"}
        # The packed projection is split by heads: a piece of a dim that is not its first.
        assert any("c_attn" in name for name in told[0][4])


def refused(rank: int, data: bytes) -> list[str]:
    """What is said of weights that differ, and of another batch."""
    plan = loads(data)
    said = []
    model, args, kwargs = build("mlp")
    module = parallelize(model, plan, args, kwargs)
    for call in (
        lambda: module(args[0][:6], args[1]),
        lambda: module(args[0]),
        lambda: module(args[0], 3.0),
    ):
        try:
            call()
        except RunError as error:
            said.append(str(error))
    torch.manual_seed(rank)
    with torch.no_grad():
        model.up.weight.add_(torch.randn_like(model.up.weight))
    try:
        parallelize(model, plan, args, kwargs)
    except RunError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_run_is_refused_on_every_rank(on_ranks: Launch) -> None:
    choices = chooser("mlp", "2xcpu", "2")
    data = dumps(next(choices.baselines())).encode()
    for said in on_ranks(refused, 2, data):
        shape, parts, kind, weights = said
        assert "A batch of 6x10 and 10" in shape
        assert "does not run under the plan for 10x10 and 10" in shape
        assert "gives 1 arguments by position, which is not how the example" in parts
        assert "its tensors are x, y" in parts
        assert "TreeSpec" not in parts
        assert "is a float, not a tensor" in kind
        assert "The ranks were not started alike. up.weight: " in weights
        assert "Seed all ranks alike" in weights


def drawn(rank: int, data: bytes) -> tuple[bool, float]:
    """A model without weights draws them part by part; the same for one device as for two."""
    from shardfold import zoo

    model, _, _ = zoo.build("llama3-8b-tiny")
    _, args, kwargs = build("llama3-8b-tiny")
    found = compare(model, loads(data), args, kwargs)
    return found.is_equal, found.loss


def test_a_model_on_the_meta_device_draws_its_own_weights(on_ranks: Launch) -> None:
    choices = chooser("llama3-8b-tiny", "2xcpu", "2")
    data = dumps(list(choices.baselines())[1]).encode()
    told = on_ranks(drawn, 2, data)
    assert all(is_equal for is_equal, _ in told)
    assert 5.0 < told[0][1] < 6.5  # about log(257): small random weights
    assert told[0][1] == told[1][1]
