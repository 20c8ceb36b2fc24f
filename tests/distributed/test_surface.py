"""What a user does with a parallel module besides the plain loop, each beside the model itself."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from shardfold.errors import RunError
from shardfold.plans import Plan
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize

from .choices import Chooser, chooser
from .jobs import build
from .ranks import Launch

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(found: Any, expected: Any, what: str = "") -> None:
    torch.testing.assert_close(whole(found), expected, rtol=1e-7, atol=1e-9, msg=lambda m: what + m)


def own(name: str) -> tuple[nn.Module, Any, Any]:
    """The model itself and its batch, in float64."""
    model, args, kwargs = build(name)
    wide = [a.double() if a.is_floating_point() else a for a in args]
    return model.double(), tuple(wide), kwargs


@cache
def own_choices(name: str) -> Chooser:
    return Chooser(*own(name), "4xcpu", "2x2")


def plans(name: str, seeds: tuple[int, ...]) -> list:
    choices = own_choices(name)
    made = [*choices.baselines(), *(choices.random(seed) for seed in seeds)]
    return [(name, dumps(plan).encode()) for plan in made]


def batches(args: Any, steps: int) -> list[Any]:
    """Other samples in every step."""
    return [tuple(a.roll(step, 0) for a in args) for step in range(steps)]


def trained(module: nn.Module, make: Any, args: Any) -> list[Any]:
    """Losses and norms of a loop with accumulation, clipping and a schedule."""
    optimizer = make(module.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.02, total_steps=4, cycle_momentum=False
    )
    found = []
    for step in range(3):
        optimizer.zero_grad()
        for batch in batches(args, 2):
            loss = module(*(a.roll(step, 0) for a in batch))
            (loss / 2).backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        found += [loss.detach(), whole(norm)]
    return found


def loops(rank: int, cases: list[tuple[str, bytes]], optimizers: list[str]) -> None:
    for name, data in cases:
        model, args, kwargs = own(name)
        module = parallelize(model, loads(data), args, kwargs)
        start = {k: v.clone() for k, v in model.state_dict().items()}
        for kind in optimizers:
            single = copy.deepcopy(model)
            module.load_state_dict(start)
            expected = trained(single, OPTIMIZERS[kind], args)
            for a, b in zip(trained(module, OPTIMIZERS[kind], args), expected, strict=True):
                close(a, b, f"{name} {kind}: ")
            for key, value in module.state_dict().items():
                close(value, single.state_dict()[key], f"{name} {kind} {key}: ")


def test_any_optimizer_with_clipping_accumulation_and_a_schedule(on_ranks: Launch) -> None:
    cases = plans("mlp", (1, 2)) + plans("planes", (3,))
    on_ranks(loops, 4, cases[:4], list(OPTIMIZERS))
    on_ranks(loops, 4, cases[4:], ["adamw"])


def in_parts(rank: int, cases: list[tuple[str, bytes]]) -> list[Any]:
    """The whole batch and this rank's part of it; and what a loader with the sampler gives."""
    found = []
    for name, data in cases:
        plan: Plan = loads(data)
        model, args, kwargs = own(name)
        module = parallelize(model, plan, args, kwargs)
        parts = plan.local_batch(args)
        losses = []
        for batch in (args, parts):
            module.seed, module._run.context.step = 0, 0
            loss = module(*batch)
            module.zero_grad()
            loss.backward()
            losses.append((loss.detach(), {n: whole(p.grad) for n, p in module.named_parameters()}))
        (one, gradients), (other, again) = losses
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, again[key], rtol=1e-9, atol=1e-13)
        many = TensorDataset(
            *(torch.cat([a + k * a.is_floating_point() for k in range(3)]) for a in args)
        )
        sampler = plan.sampler(many, seed=5)
        loader = DataLoader(many, batch_sampler=sampler)
        assert len(loader) == 3
        seen = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen.append([batch[0] for batch in loader])
            assert module(*next(iter(loader))).isfinite()
        found.append((plan.inputs[0].layout, [len(p) for p in parts], seen))
    return found


def test_each_rank_gives_the_whole_batch_or_its_part(on_ranks: Launch) -> None:
    cases = plans("mlp", (1, 2)) + plans("planes", (3, 4)) + plans("norms", (5,))
    told = on_ranks(in_parts, 4, cases)
    layouts = [layout for layout, _, _ in told[0]]
    assert layouts[0] == ("dim 0", "dim 0")  # data parallel on both axes
    sizes = [told[rank][0][1] for rank in range(4)]
    assert sizes == [[3, 3], [2, 2], [3, 3], [2, 2]]  # 10 samples: 5 | 5, then 3, 2 | 3, 2
    for epoch in range(2):
        for step in range(3):  # together the ranks load every sample once
            parts = [told[rank][0][2][epoch][step] for rank in range(4)]
            assert torch.cat(parts).shape == (10, 10)
    everything = [
        torch.cat([told[r][0][2][e][s] for s in range(3) for r in range(4)]) for e in (0, 1)
    ]
    assert not torch.equal(*everything)
    assert torch.equal(*(e[e[:, 0].argsort()] for e in everything))


def _keep(kept: list[Tensor], module: nn.Module, given: Any, result: Tensor) -> None:
    kept.append(result.detach())


def evaluated(rank: int, cases: list[tuple[str, bytes]], path: str) -> list[float]:
    """Eval mode after two steps of training, and results on request in both modes."""
    found = []
    for name, data in cases:
        model, args, kwargs = own(name)
        module = parallelize(model, loads(data), args, kwargs)
        kept: list[Tensor] = []
        model.get_submodule(path).register_forward_hook(partial(_keep, kept))
        is_random = name in ("norms", "pixels")
        for batch in batches(args, 2):
            with module.outputs(path) as results:
                loss = module(*batch)
            expected = model(*batch)
            if not is_random:
                close(loss, expected)
                close(results[path], kept[-1])
        read = {key: buffer.clone() for key, buffer in module.named_buffers()}
        before = module.state_dict()
        for key, buffer in read.items():  # also those of which each rank updates a part
            assert torch.equal(buffer, before[key]), key
        model.eval()
        module.eval()
        with torch.no_grad(), module.outputs(path) as results:
            loss = module(*args, **kwargs)
        expected = model(*args)
        close(loss, expected, f"{name}: ")
        close(results[path], kept[-1])
        assert not loss.requires_grad
        for key, value in module.state_dict().items():
            assert torch.equal(whole(value), whole(before[key])), key
        module.train()
        assert module(*args).requires_grad
        found.append(float(loss))
    return found


def test_eval_mode_is_the_models_own_and_results_are_put_together(on_ranks: Launch) -> None:
    cases = plans("planes", (1, 2)) + plans("norms", (3, 4)) + plans("pixels", (5,))
    told = on_ranks(evaluated, 4, cases, "head")
    assert all(found == told[0] for found in told)


def refused(rank: int, data: bytes) -> list[str]:
    said = []
    plan = loads(data)
    model, args, kwargs = build("mlp")
    module = parallelize(model, plan, args, kwargs)
    for call in (
        lambda: module.outputs("hed").__enter__(),
        lambda: plan.local_batch((args[0][:7], args[1])),
        lambda: plan.sampler(9),
    ):
        with pytest.raises(RunError) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_is_not_there_is_refused(on_ranks: Launch) -> None:
    choices = chooser("mlp", "4xcpu", "2x2")
    data = dumps(next(choices.baselines())).encode()
    for said in on_ranks(refused, 4, data):
        assert "No module and no operator is called 'hed'" in said[0]
        assert "shape (7, 10), the plan is for" in said[1]
        assert "The data has 9 samples, one batch of the plan 10" in said[2]


class Branching(nn.Module):
    """Does something else in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return (torch.relu(y) if self.training else torch.tanh(y)).sum()


def test_a_model_that_is_another_in_eval_mode_is_refused() -> None:
    from shardfold.api import plan

    model, x = Branching(), torch.randn(4, 6)
    module = parallelize(model, plan(model, (x,), cluster="cpu"), (x,))
    module(x).backward()
    with pytest.raises(RunError, match=r"In eval mode the model computes .*relu"):
        module.eval()(x)
