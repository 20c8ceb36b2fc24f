"""Optimizers and utilities of torch on a parallel module, beside the same on a plain one."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardfold as sf
from shardfold.errors import RunError
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize
from shardfold.runtime.lower import Stored
from shardfold.runtime.parameters import keeping
from shardfold.runtime.shards import Place, extent
from shardfold.sharding.layouts import storable

from .choices import Chooser
from .idioms import IDIOMS
from .ranks import Launch
from .test_faithful import built, plans, whole

MODULES = ("packed_gate", "base_and_delta")  # no gradient is zero but for rounding


class LayerScaled(torch.optim.Optimizer):
    """In the manner of LARS: steps of the size of each whole parameter, by numbers on the host."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad / (p.grad.norm().item() + 1e-6))
                p.add_(momentum, alpha=-group["lr"] * float(p.norm()))
        return loss


class Signed(torch.optim.Optimizer):
    """In the manner of Lion, with a state that is there before the first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p]["mean"]
                p.sub_(torch.sign(mean * 0.9 + p.grad * 0.1), alpha=group["lr"])
                mean.lerp_(p.grad, 0.01)
        return loss


class Cautious(torch.optim.AdamW):
    """A step of its base's, of which only what goes against the gradient is kept."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in parameters]
        loss = super().step(closure)
        for p, old in zip(parameters, before, strict=True):
            kept = ((p - old) * p.grad < 0).to(p.dtype)
            p.copy_(old + (p - old) * kept / kept.mean().clamp(min=0.1))
        return loss


def cautious(module: nn.Module) -> Cautious:
    """Its base's step is torch's own, and watched, once its base has been used."""
    torch.optim.AdamW([torch.zeros(1)])
    return Cautious(module.parameters(), lr=0.05)


class Sharpened(torch.optim.Optimizer):
    """In the manner of SAM: around another optimizer, whose groups are its own."""

    def __init__(self, params: Any, base: Any, **given: Any) -> None:
        super().__init__(params, given)
        self.base = base(self.param_groups, **given)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [0.05 * p.grad / norm for p in parameters]
        for p, move in zip(parameters, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(parameters, moves, strict=True):
            p.sub_(move)
        self.base.step()
        return loss


def matrices(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.ndim == 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    "lbfgs": lambda m: torch.optim.LBFGS(
        m.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe"
    ),
    "muon": lambda m: torch.optim.Muon(matrices(m), lr=0.05),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "layer scaled": lambda m: LayerScaled(m.parameters()),
    "adamw, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True),
    "adamw, foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, foreach=True),
    "adamw, one by one": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, foreach=False),
    "sgd, fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True),
    "adagrad, fused": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, fused=True),
    "cautious": cautious,
    "sharpened": lambda m: Sharpened(m.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9),
    "signed": lambda m: Signed(m.parameters()),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
}

UNSAVED = ("lbfgs", "sharpened")  # whose state is lists of tensors, or another optimizer's


def _closure(module: nn.Module, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = module(*batch)
    loss.backward()
    return loss


def stepped(module: nn.Module, optimizer: Any, args: Any, steps: range) -> list[Any]:
    found = []
    for step in steps:
        batch = tuple(a.roll(step, 0) for a in args)
        loss = optimizer.step(partial(_closure, module, optimizer, batch))
        found.append(loss.detach())
    return [*found, *(whole(v).clone() for v in module.state_dict().values())]


def compared(found: list[Any], expected: list[Any], label: str) -> list[str]:
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        if not torch.allclose(a, b, rtol=1e-7, atol=1e-9):
            return [f"{label}: value {k} differs by {float((a - b).abs().max())}"]
    return []


def optimized(rank: int, cases: list[Any], folder: str) -> list[str]:
    """What differs, also after the run was saved and resumed halfway."""
    told = []
    for name, label, data in cases:
        model, args = built(name)
        module = parallelize(model, loads(data), args)
        start = copy.deepcopy(model.state_dict())
        for kind, make in OPTIMIZERS.items():
            single = copy.deepcopy(model)
            expected = stepped(single, make(single), args, range(4))
            module.load_state_dict(start)
            first = make(module)
            stepped(module, first, args, range(2))
            where = Path(folder) / f"{name} {label} {kind}"
            if kind not in UNSAVED:
                sf.save(module, first, where, step=2)
            again = first if kind in UNSAVED else make(module)
            if kind not in UNSAVED:
                module.load_state_dict(start)
                sf.load(module, again, where)
            found = stepped(module, again, args, range(2, 4))
            told += compared(found[2:], expected[4:], f"{name} {label} {kind}")
            assert all(isinstance(p, DTensor) for p in module.parameters())
    return told


@pytest.mark.parametrize("name", MODULES)
def test_any_optimizer_steps_as_on_the_plain_module(
    name: str, tmp_path: Path, on_ranks: Launch
) -> None:
    cases = plans(name, "2xcpu", "2", 1)[2:]
    for told in on_ranks(optimized, 2, cases, str(tmp_path)):
        assert told == []


def averaged(rank: int, cases: list[Any]) -> list[str]:
    """An average of the weights, and a copy that trains on by itself."""
    told = []
    for name, label, data in cases:
        model, args = built(name)
        found = []
        for module in (parallelize(model, loads(data), args), copy.deepcopy(model)):
            mean = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
            for step in range(3):
                _closure(module, optimizer, tuple(a.roll(step, 0) for a in args))
                optimizer.step()
                mean.update_parameters(module)
            twin = copy.deepcopy(module)
            assert all(
                a is not b for a, b in zip(twin.parameters(), module.parameters(), strict=True)
            )
            before = [whole(p).detach().clone() for p in module.parameters()]
            other = torch.optim.SGD(twin.parameters(), lr=0.1)
            loss = _closure(twin, other, args)
            other.step()
            assert all(
                torch.equal(whole(p), b) for p, b in zip(module.parameters(), before, strict=True)
            )
            mean.eval()
            with torch.no_grad():
                judged = mean(*args)
            values = [loss.detach(), judged, *(whole(v) for v in mean.module.state_dict().values())]
            found.append([*values, *(whole(v) for v in twin.state_dict().values())])
        told += compared(*found, f"{name} {label}")
    return told


def test_averages_and_copies_of_the_module(on_ranks: Launch) -> None:
    cases = [case for name in MODULES for case in plans(name, "2xcpu", "2", 1)[1:]]
    cases += plans("summed_loss", "2xcpu", "2", 1)[1:]
    for told in on_ranks(averaged, 2, cases):
        assert told == []


def scaled(rank: int, cases: list[Any]) -> list[str]:
    """A gradient scaler: a step with an infinity anywhere is left out on every rank."""
    told = []
    for name, label, data in cases:
        model, args = built(name)
        found = []
        for module in (parallelize(model, loads(data), args), copy.deepcopy(model)):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            scales = []
            for step in range(5):
                batch = [a.roll(step, 0) for a in args]
                optimizer.zero_grad()
                loss = module(*batch)
                scaler.scale(loss * (torch.inf if step == 2 else 1.0)).backward()
                if step == 3:  # an infinity in one place, which one rank alone may hold
                    last = list(module.parameters())[-1].grad
                    local = last.to_local() if isinstance(last, DTensor) else last
                    if local.numel() and (rank == 1 or local is last):
                        local.view(-1)[-1] = torch.inf
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scales.append(torch.tensor(scaler.get_scale()))
            found.append([*scales, *(whole(v) for v in module.state_dict().values())])
        told += compared(*found, f"{name} {label}")
    return told


def test_a_gradient_scaler(on_ranks: Launch) -> None:
    cases = [case for name in MODULES for case in plans(name, "2xcpu", "2", 1)[2:]]
    for told in on_ranks(scaled, 2, cases):
        assert told == []


def differentiated(rank: int, cases: list[Any]) -> list[str]:
    """`torch.autograd.grad` and `backward(inputs=...)` beside an ordinary backward."""
    told = []
    for name, label, data in cases:
        model, args = built(name)
        found = []
        for module in (parallelize(model, loads(data), args), copy.deepcopy(model)):
            first, *others = module.parameters()
            loss = module(*args)
            twice = [torch.autograd.grad(loss, [first], retain_graph=True)[0] for _ in range(2)]
            (loss * 3).backward(inputs=[first], retain_graph=True)
            assert all(p.grad is None for p in others)
            twice += [first.grad.clone(), *torch.autograd.grad(loss * 2, [*others, first])]
            module(*args).backward()
            decay = sum(p.square().sum() for p in module.parameters())
            (module(*args) + 0.1 * decay + first[1].square().sum()).backward()  # type: ignore[operator]
            found.append([whole(v) for v in (*twice, *(p.grad for p in (first, *others)))])
            again = torch.zeros_like(first)
            first.register_hook(again.copy_)
            module.zero_grad()
            module(*args).backward()
            found[-1].append(whole(again))
        told += compared(*found, f"{name} {label}")
    return told


def test_gradients_that_are_asked_for(on_ranks: Launch) -> None:
    cases = [case for name in MODULES for case in plans(name, "2xcpu", "2", 1)[1:]]
    for told in on_ranks(differentiated, 2, cases):
        assert told == []


def refusals(rank: int, case: Any) -> list[str]:
    name, _, data = case
    model, args = built(name)
    module = parallelize(model, loads(data), args)
    said = []
    x = args[0].clone().requires_grad_()
    for call in (
        lambda: module(x, *args[1:]),
        lambda: module.eval()(x, *args[1:]),
        lambda: module(args[0]),
        lambda: module(*args, *args),
        lambda: module(args[0], y=args[1], more=3),
        lambda: pickle.dumps(module),
        lambda: torch.autograd.grad(
            module.train()(*args), list(module.parameters()), create_graph=True
        ),
        lambda: module(*args).backward(create_graph=True),
    ):
        with pytest.raises(RunError) as error:
            call()
        said.append(str(error.value))
    module.train()
    with torch.no_grad():
        assert module(x, *args[1:]).isfinite()
    return said


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).square().mean()


def lost(rank: int, data: bytes) -> list[str]:
    """What is done to a parallel module and would be lost in silence."""
    x, said = torch.ones(4, 6), []
    for change in (
        lambda m: m.a.eval(),
        lambda m: m.a.register_forward_hook(print),
        lambda m: setattr(m.a, "weight", nn.Parameter(torch.zeros(6, 6))),
        lambda m: m.double(),
        lambda m: m.b.requires_grad_(True),
        lambda m: m.load_state_dict(m.state_dict(), assign=True),
        lambda m: nn.utils.prune.l1_unstructured(m.a, "weight", 0.5),
        lambda m: nn.utils.parametrizations.weight_norm(m.a),
        lambda m: m._modules["a"]._parameters.pop("weight"),
        lambda m: setattr(m, "a", nn.Linear(6, 6)),
    ):
        torch.manual_seed(0)
        module = parallelize(Parts(), loads(data), (x,))
        assert module.float() is module
        assert module.b.bias is None
        with pytest.raises(RunError) as error:
            change(module), module(x)
        said.append(str(error.value))
    return said


def test_what_would_be_lost_is_refused(on_ranks: Launch) -> None:
    model = Parts()
    _, plan = Chooser(model, (torch.ones(4, 6),), {}, "2xcpu", "2").baselines()
    data = dumps(plan).encode()
    for said in on_ranks(lost, 2, data):
        assert "cannot be set to training or eval mode by itself" in said[0]
        assert "register it on the model before it is planned" in said[1]
        assert "'weight' of the parallel module cannot be replaced" in said[2]
        assert "cannot be converted from torch.float32 on cpu to torch.float64" in said[3]
        assert "b.weight requires a gradient now, but was frozen" in said[4]
        assert "leave assign out, and they take the values" in said[5]
        assert "cannot be called 'weight_orig'" in said[6]
        assert "'weight' of the parallel module cannot be taken away" in said[7]
        assert "a.weight was taken out of the parallel module" in said[8]
        assert "The part 'a' of the parallel module cannot be replaced" in said[9]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(
        self, x: Tensor, y: Tensor, scale: float = 2.0, *, weight: Tensor | None = None
    ) -> Tensor:
        self.calls += 1
        loss = (self.a(x) - y).square() * scale
        return (loss if weight is None else loss * weight).mean()


def called(rank: int, data: bytes) -> list[Any]:
    """The losses of calls whose arguments are given otherwise, and what is refused."""
    x, y, weight = torch.ones(4, 6), torch.zeros(4, 6), torch.full((6,), 0.5)
    torch.manual_seed(0)
    module = parallelize(Named(), loads(data), (x, y), {"weight": weight}, float64=True)
    found: list[Any] = [
        float(call())
        for call in (
            lambda: module(x, y, weight=weight),
            lambda: module(x, weight=weight, y=y),
            lambda: module(weight=weight, y=y, x=x),
            lambda: module(x, y, 2.0, weight=weight),
            lambda: module.eval()(x, scale=2.0, y=y, weight=weight),
        )
    ]
    calls = float(module.calls)
    for refused in (
        lambda: module(x, y),
        lambda: module(x, y=y, scale=3.0, weight=weight),
        lambda: module(x, y, wait=weight),
    ):
        with pytest.raises(RunError) as error:
            refused()
        found.append(str(error.value))
    compiled = torch.compile(module.train(), backend="aot_eager")
    compiled(x, y, weight=weight).backward()
    return [*found, float(module.calls) - calls]


def test_arguments_by_position_or_by_name(on_ranks: Launch) -> None:
    given = (torch.ones(4, 6), torch.zeros(4, 6)), {"weight": torch.full((6,), 0.5)}
    _, plan = Chooser(Named(), *given, "2xcpu", "2").baselines()
    for found in on_ranks(called, 2, dumps(plan).encode()):
        assert len(set(found[:5])) == 1
        assert all("not how the example of the plan was given" in said for said in found[5:8])
        assert found[8] == 1


def test_what_is_not_right_is_refused(on_ranks: Launch) -> None:
    assert "two_terms" in IDIOMS
    case = plans("two_terms", "2xcpu", "2", 0)[1]
    for said in on_ranks(refusals, 2, case):
        assert "requires a gradient, which a plan does not reduce" in said[0]
        assert "requires a gradient" in said[1]
        for message in said[2:5]:
            assert "Call the module with all of them, labels included" in message
            assert "TreeSpec" not in message
        assert "cannot be pickled: save it with sf.save" in said[5]
        for message in said[6:]:
            assert "a penalty on gradients must be part of the model" in message


SUBDIMS = {  # of parameters: sizes, and the dim of each
    "packed": ((3, 8, 4, 6), (0, 0, 0, 1)),
    "packed bias": ((3, 8, 16), (0, 0, 0)),
    "heads": ((8, 4, 12), (0, 0, 1)),
    "uneven": ((10, 5, 9), (0, 0, 1)),
}


def put_together(rank: int, shape: tuple[int, ...]) -> list[str]:
    """Of all storages that can be planned, those that torch gathers or reduces wrongly."""
    mesh = init_device_mesh("cpu", shape)
    place = Place.of_rank(rank, shape)
    told, count = [], 0
    for name, (subdims, dims) in SUBDIMS.items():
        sizes = [
            math.prod(n for n, d in zip(subdims, dims, strict=True) if d == k) for k in {*dims}
        ]
        full = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).double()
        for row in product(range(-1, len(subdims)), repeat=len(shape)):
            if storable(row, subdims, dims, shape) != row:
                continue
            kept = keeping(Stored(0, row, extent(subdims, dims, len(sizes), row, place), shape))
            part = kept.parameter(kept.part(full), mesh, False)
            count += 1
            found = (
                part.full_tensor(),
                (part * 2).full_tensor() / 2,
                torch.zeros_like(part) + part,
            )
            same = all(torch.equal(whole(f), full) for f in found)
            norm = float(whole(nn.utils.get_total_norm([part])))
            if not same or abs(norm - float(full.norm())) > 1e-9:
                told.append(f"{name} {row} {kept.placements}: {same}, {norm}")
    assert count > 40
    return told


def test_every_storage_that_is_planned_is_put_together_rightly(on_ranks: Launch) -> None:
    for told in on_ranks(put_together, 4, (2, 2)):
        assert told == []
