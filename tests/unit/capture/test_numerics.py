"""The captured graph, run operator by operator, gives the model's own loss and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfold import zoo
from shardfold.capture import capture
from virtual.interpreter import loss_of
from virtual.models import without_dropout

# One of each structure: the others differ in sizes only.
ALIKE = ("gpt3", "llama3-70b", "llama3-405b", "resnet101", "resnet50-wide", "transformer-big")
NAMES = [n for n in zoo.names() if n.endswith("-tiny") and not n.startswith(ALIKE)]


def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    graph = capture(module, args, kwargs)
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    found = loss_of(graph, module, args, kwargs)
    ours = torch.autograd.grad(found, list(parameters.values()), allow_unused=True)
    output = module(*args, **kwargs)
    if isinstance(output, dict):
        output = output["loss"]
    expected = output if isinstance(output, torch.Tensor) else output[0]
    theirs = torch.autograd.grad(expected, list(parameters.values()), allow_unused=True)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or torch.allclose(a, b, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_model_of_the_zoo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if zoo.entry(name).source.startswith("Hugging Face"):
        pytest.importorskip("transformers")
    monkeypatch.setattr("shardfold.zoo.language.DROPOUT", 0.0)
    module, args, kwargs = zoo.build(name, batch=2, device="cpu", dtype=torch.float32)
    check(without_dropout(module), args, kwargs)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_transformers_model_that_builds_its_own_masks(family: str) -> None:
    pytest.importorskip("transformers")
    from shardfold.zoo import huggingface
    from shardfold.zoo.catalog import StackShape
    from shardfold.zoo.construct import Draw

    shape = StackShape(2, 64, 128, 256, 4, 4 if family == "gpt2" else 2, experts=4)
    config = getattr(huggingface, family)(shape, 16)
    config.use_cache, config._experts_implementation = False, "eager"
    if family == "mixtral":
        huggingface.ExpertsInterface.register(huggingface.EXPERTS, huggingface.experts_forward)
        config._experts_implementation = huggingface.EXPERTS
    torch.manual_seed(0)
    kind = huggingface.class_of(config, family)
    module = huggingface.LossOf(kind(config))
    args, kwargs = (), huggingface.example_batch(kind, config, 2, 16, Draw("cpu")).tensors
    assert module.model.config._attn_implementation == "sdpa"
    check(without_dropout(module), args, kwargs)
    ops = [op for op in capture(module, args, kwargs).ops if op.kind.endswith("attention")]
    assert [op.attributes["is_causal"] for op in ops] == [True, True]


class Body(nn.Module):
    """A module whose forward is a given function of itself and x."""

    def __init__(self, body: Callable[[Body, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def no_grad_region(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x)
    with torch.no_grad():
        target = m.linear(x) * 3
    return (y * target).sum()


def detached(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x)
    return (y * y.detach()).sum()


def enabled_within_disabled(m: Body, x: Tensor) -> Tensor:
    with torch.no_grad():
        a = m.linear(x)
        with torch.enable_grad():
            b = m.linear(x)
    return (a * b).sum()


def relu_in_place(m: Body, x: Tensor) -> Tensor:
    return (torch.relu_(m.linear(x)) * x).sum()


def residual_in_place(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x)
    y += m.norm(x)
    y.mul_(m.scale)
    return (y * y).sum()


def through_a_view(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x)
    y.view(-1).add_(1.0)
    return (y * y).sum()


def through_the_base(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x)
    flat = y.view(-1)
    y.add_(1.0)
    return (flat * flat).sum()


def into_a_slice(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x)
    y[:, 0] = 0.0
    y[:, 2:4] *= 2
    return (y * y).sum()


def into_a_mask(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x).masked_fill_(x > 0, 0.5)
    return (y * y).sum()


def read_before_it_is_written(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x)
    before = y * 2
    y.add_(5.0)
    return (before * y).sum()


def of_a_clone(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x)
    z = y.clone()
    z.add_(1.0)
    return (y * z).sum()


def of_a_no_op(m: Body, x: Tensor) -> Tensor:
    """`to` the same dtype returns the tensor itself: both names see what is written."""
    y = m.linear(x)
    z = y.to(torch.float32)
    z.add_(1.0)
    return (y * z).sum()


def of_a_transpose_twice(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x)
    y.t().t().add_(1.0)
    return (y * y).sum()


def into_a_part_of_what_is_read(m: Body, x: Tensor) -> Tensor:
    y = m.linear(x) * 1.0
    y.narrow(1, 0, 3).mul_(3.0)
    return (y * y).sum()


def out_of_a_buffer(m: Body, x: Tensor) -> Tensor:
    running = m.scale.clone()
    running.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return (m.linear(x) * running).sum()


def packed_outputs(m: Body, x: Tensor) -> Tensor:
    values, index = m.linear(x).topk(2, dim=-1)
    mean, variance = torch.var_mean(m.norm(x), dim=-1)
    return (values * x.gather(1, index)).sum() + mean.sum() * variance.sum()


def constant_in_forward(m: Body, x: Tensor) -> Tensor:
    mask = torch.ones(6, 6).tril()
    positions = torch.arange(6, dtype=torch.float32)
    return (m.linear(x) @ mask * positions).sum()


def indexed_with_gaps(m: Body, x: Tensor) -> Tensor:
    index = torch.arange(3)
    return (m.linear(x)[:, index] * 2).sum() + m.linear(x)[index].sum()


def loop_over_steps(m: Body, x: Tensor) -> Tensor:
    y = x
    for step in range(4):
        y = m.linear(y) + step
    return y.pow(2).mean()


BODIES = [
    value
    for value in list(globals().values())
    if getattr(value, "__annotations__", {}).get("m") == "Body"
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_forward_with_a_trap_in_it(body: Callable[[Body, Tensor], Tensor]) -> None:
    torch.manual_seed(1)
    check(Body(body), (torch.randn(4, 6),), {})


def test_the_no_grad_check_can_fail() -> None:
    """A graph that let the gradient through would give another one."""
    module, x = Body(no_grad_region), torch.randn(4, 6)
    graph = capture(module, (x,))
    open_graph = replace(
        graph,
        tensors=tuple(
            replace(t, requires_grad=t.type.is_floating and t.role != "input")
            for t in graph.tensors
        ),
    )
    weight = module.linear.weight
    (ours,) = torch.autograd.grad(loss_of(graph, module, (x,), {}), [weight])
    (theirs,) = torch.autograd.grad(loss_of(open_graph, module, (x,), {}), [weight])
    assert not torch.allclose(ours, theirs)
