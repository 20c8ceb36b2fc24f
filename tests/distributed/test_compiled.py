"""torch.compile and autocast around a parallel module: the numbers of the eager one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardfold.api import plan as find_plan
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import Settings, assemble, prepared

from .choices import chooser
from .jobs import build
from .ranks import Launch
from .test_context import split_sequences

Case = tuple[str, str, bytes]


def cases(models: dict[str, int]) -> list[Case]:
    """So many random plans of each model, on two processes; both baselines of the first alone.

    Under data parallel the operators are those of one device in every model, and random plans
    shard parameters, too.
    """
    found = []
    for model, count in models.items():
        choices = chooser(model, "2xcpu", "2")
        named = () if found else choices.baselines()
        plans = {
            **dict(zip(("data parallel", "fully sharded"), named, strict=False)),
            **{f"random {seed}": choices.random(seed) for seed in range(count)},
        }
        found += [(model, label, dumps(p).encode()) for label, p in plans.items()]
    return found


def steps(module: Any, args: Any, kwargs: Any, calls: Any = None) -> list[torch.Tensor]:
    """The losses and gradients of two steps; the second one draws other dropout."""
    found = []
    for _ in range(2):
        module.zero_grad()
        loss = (module if calls is None else calls)(*args, **kwargs)
        loss.backward()
        found.append(loss.detach())
        for parameter in module.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                found.append(getattr(gradient, "_local_tensor", gradient).clone())
    return found


def compiled(rank: int, given: list[Case]) -> list[str]:
    """For each plan, how the compiled step differs from the eager one."""
    said = []
    for name, label, data in given:
        model, args, kwargs = build(name)
        eager, other = (
            parallelize(model, loads(data), args, kwargs, float64=True) for _ in range(2)
        )
        torch._dynamo.reset()
        expected = steps(eager, args, kwargs)
        found = steps(
            other, args, kwargs, torch.compile(other, backend="aot_eager", fullgraph=True)
        )
        try:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
            said.append("")
        except AssertionError as error:
            said.append(f"{name} {label}: {error}")
    return said


def test_a_compiled_step_is_the_eager_one_under_any_plan(on_ranks: Launch) -> None:
    given = cases({"mlp": 1, "norms": 2, "planes": 1, "tied": 1})
    for told in on_ranks(compiled, 2, given):
        assert len(told) == len(given)
        assert [line for line in told if line] == []


def test_what_goes_round_is_compiled(on_ranks: Launch) -> None:
    given = [
        (model, label, dumps(plan).encode())
        for model in ("attention_shared", "attention_uneven", "attention_window")
        for label, plan in split_sequences(chooser(model, "2xcpu", "2"), 2).items()
    ]
    for told in on_ranks(compiled, 2, given):
        assert told == [""] * len(given)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.up(x).relu())).square().mean()


def test_one_device_compiled_to_machine_code() -> None:
    """Dropout is counted inside the compiled step: every call draws another mask."""
    model, x = Dropping().double(), torch.randn(6, 8, dtype=torch.float64)
    plan = find_plan(model, (x,), cluster="cpu")
    eager, other = (parallelize(model, plan, (x,)) for _ in range(2))
    torch._dynamo.reset()
    expected = steps(eager, (x,), {})
    found = steps(other, (x,), {}, torch.compile(other, fullgraph=True))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert found[0] != found[len(found) // 2]


def in_halves(rank: int, given: list[Case]) -> list[tuple[float, float, float]]:
    """For each plan: the loss under autocast, that of one device, and the worst gradient."""
    told = []
    for name, _, data in given:
        model, args, kwargs = build(name)
        plan = loads(data)
        program, subdims = prepared(model, plan, args, kwargs, None, None)
        module = parallelize(model, plan, args, kwargs)
        single = assemble(model, program, alone(program, subdims), Settings())
        with torch.autocast("cpu", torch.bfloat16):
            loss, expected = module(*args, **kwargs), single(*args, **kwargs)
        loss.backward()
        expected.backward()
        worst = 0.0
        for parameter, other in zip(module.parameters(), single.parameters(), strict=True):
            whole = parameter.grad.full_tensor().reshape(other.shape)
            size = float(other.grad.abs().max())
            worst = max(worst, float((whole - other.grad).abs().max()) / max(size, 1e-4))
        told.append((float(loss.detach()), float(expected.detach()), worst))
    return told


@pytest.mark.parametrize("model", ["norms"])
def test_autocast_gives_nearly_the_numbers_of_one_device(model: str, on_ranks: Launch) -> None:
    given = cases({model: 3})
    for loss, expected, worst in on_ranks(in_halves, 2, given)[0]:
        assert abs(loss - expected) < 1e-3 * abs(expected)
        assert worst < 0.05
