"""Master weights on several processes: what is kept, sent and found, against plain PyTorch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import shardfold as sf
from shardfold.graph.precision import precision_named
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import Settings, assemble, prepared

from .choices import Chooser
from .ranks import Launch
from .recorder import by_member, planned, recorded

WIDE, HALVES, STEPS = 64, 2, 3


class Net(nn.Module):
    """Two products and a norm, and the mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDE, 2 * WIDE), nn.LayerNorm(2 * WIDE)
        self.down = nn.Linear(2 * WIDE, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.down(nn.functional.gelu(self.norm(self.up(x)))).square().mean()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(8, WIDE)


def half(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.to(torch.bfloat16) for name, p in parameters.items()}


def plain_steps(parts: int, reduces: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """AdamW on float32 weights: each part of the batch in bf16, gradients added up as they go."""
    model, x = made()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        total: dict[str, Tensor] = {}
        for part in x.to(torch.bfloat16).chunk(parts):
            used = {n: p.detach().requires_grad_() for n, p in half(named).items()}
            loss = functional_call(model, used, (part,)) / parts
            for name, g in zip(used, torch.autograd.grad(loss, list(used.values())), strict=True):
                sent = g.to(reduces)
                total[name] = total[name] + sent if name in total else sent
        for name, parameter in named.items():
            parameter.grad = total[name].to(torch.float32)
        losses.append(torch.stack([g.float().norm() for g in total.values()]))
        optimizer.step()
    return losses, {name: p.detach() for name, p in named.items()}


def mixed(rank: int, cases: list[tuple[str, str, bytes]], folder: str) -> list[Any]:
    """For each plan: norms of gradients, weights, what was sent beside the plan, a checkpoint."""
    found = []
    for number, (precision, _, data) in enumerate(cases):
        plan = loads(data)
        model, x = made()
        module = parallelize(model, plan, (x,))
        assert all(p.dtype == torch.float32 for p in module.parameters())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        names, norms = tuple(axis.name for axis in plan.mesh), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            with recorded(module._run.context.groups, names) as ran:
                module(x).backward()
            sent = by_member(ran, module._run.uses.launched, names)
            assert all(p.grad.dtype == torch.float32 for p in module.parameters())
            norms.append(torch.stack([p.grad.full_tensor().norm() for p in module.parameters()]))
            optimizer.step()
        where = f"{folder}/{number}"
        sf.save(module, optimizer, where, step=STEPS)
        state = {name: p.full_tensor() for name, p in module.state_dict().items()}
        other = parallelize(made()[0], plan, (x,))
        sf.load(other, None, where)
        same = all(torch.equal(p.full_tensor(), state[n]) for n, p in other.state_dict().items())
        wanted = planned(plan)
        beside = dict(wanted - sent), dict(sent - wanted)
        found.append((norms, state, beside, same, precision))
    return found


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-mixed/bf16"])
def test_two_processes_train_as_plain_pytorch_with_master_weights(
    precision: str, on_ranks: Launch, tmp_path: Path
) -> None:
    model, x = made()
    choices = Chooser(model, (x,), {}, "2xcpu", "2", dtype=precision)
    plans = dict(zip(("data parallel", "fully sharded"), choices.baselines(), strict=True))
    cases = [(precision, label, dumps(p).encode()) for label, p in plans.items()]
    sends = getattr(torch, precision_named(precision).reduces)
    norms, state = plain_steps(HALVES, sends)
    for found in on_ranks(mixed, 2, cases, str(tmp_path))[0]:
        assert found[2] == ({}, {})
        assert found[3], "a checkpoint has the float32 weights"
        for step, expected in zip(found[0], norms, strict=True):
            torch.testing.assert_close(step, expected, rtol=2e-6, atol=0)
        for name, value in state.items():
            torch.testing.assert_close(found[1][name], value, rtol=2e-6, atol=1e-7)


def random_plans(rank: int, cases: list[bytes]) -> list[tuple[float, Any]]:
    """For each plan: how far its gradients are from those of one device, and what it sent."""
    found = []
    for data in cases:
        plan = loads(data)
        model, x = made()
        module = parallelize(model, plan, (x,))
        program, subdims = prepared(model, plan, (x,), None, None, None)
        one = assemble(model, program, alone(program, subdims), Settings("bf16-mixed"))
        names = tuple(axis.name for axis in plan.mesh)
        with recorded(module._run.context.groups, names) as ran:
            module(x).backward()
        one(x).backward()
        sent, wanted = by_member(ran, module._run.uses.launched, names), planned(plan)
        pairs = zip(module.parameters(), one.parameters(), strict=True)
        off = max(float((p.grad.full_tensor() - q.grad).norm() / q.grad.norm()) for p, q in pairs)
        found.append((off, (dict(wanted - sent), dict(sent - wanted))))
    return found


def test_any_plan_sends_bf16_parameters_and_float32_gradients(on_ranks: Launch) -> None:
    model, x = made()
    choices = Chooser(model, (x,), {}, "2xcpu", "2", dtype="bf16-mixed")
    plans = [dumps(p).encode() for p in choices.covering(6).values()]
    for off, beside in on_ranks(random_plans, 2, plans)[0]:
        assert beside == ({}, {})
        assert off < 2e-2  # what bf16 rounds


def test_one_device_is_the_plain_step_bit_for_bit() -> None:
    model, x = made()
    plan = sf.plan(model, (x,), cluster="cpu", precision="bf16-mixed")
    module = parallelize(copy.deepcopy(model), plan, (x,))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(x).backward()
        optimizer.step()
    _, state = plain_steps(1, torch.float32)
    for name, value in module.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, state[name]), name
