"""Stretches of a step that run again before backward."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from shardfold.capture import capture_program
from shardfold.costs.activations import Blocks
from shardfold.operators import rules_of
from shardfold.runtime.lower import alone
from shardfold.runtime.module import Parallel
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.sharding import find_subdims


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.drop(torch.sigmoid(self.second(x)))
        return (self.last(x) + self.first(x)).square().mean()


def made(again: Collection[int]) -> tuple[Parallel, Tensor]:
    """The model with these operators recomputed, as if it were one block."""
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(4, 6, dtype=torch.float64)
    program = capture_program(model, (x,))
    subdims = find_subdims(program.graph, rules_of(program.graph))
    blocks = Blocks(program.graph, subdims)
    blocks.ranges = (range(len(program.graph.ops)),)
    lowered = replace(alone(program, subdims), again=blocks.regions(again).regions)
    return assemble(model, program, lowered, Settings()), x


def test_any_operators_may_run_again_with_the_same_gradients() -> None:
    plain, x = made(())
    plain(x).backward()
    count = len(plain._run.lowered.instructions)
    draw = Random(0)
    sets = [{i for i in range(count) if draw.random() < share} for share in (0.2, 0.5, 0.8) * 8]
    for again in [*({i} for i in range(count)), *sets]:
        module, _ = made(again)
        module(x).backward()
        for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found.grad, expected.grad), again


def test_what_runs_again_runs_in_the_dtypes_of_the_first_time() -> None:
    gradients = []
    for again in ((), range(6)):
        module, x = made(again)
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(x)
        loss.backward()
        gradients.append([p.grad for p in module.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_second_backward_finds_what_the_first_made_again() -> None:
    module, x = made(range(6))
    loss = module(x)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in module.parameters()]
    loss.backward()
    for found, first in zip(module.parameters(), once, strict=True):
        assert torch.equal(found.grad, 2 * first)


def test_what_a_stretch_would_keep_is_not_kept() -> None:
    kept = []
    for again in ((), range(6)):
        module, x = made(again)
        saved: list[int] = []

        def keep(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(x)
        kept.append(sum(saved))
    assert kept[1] < kept[0]


def test_a_compiler_keeps_no_more_than_a_plan_does() -> None:
    kept, gradients = [], []
    for again in ((), range(6)):
        module, x = made(again)
        sizes: list[int] = []

        def forward(graph: Any, given: Any, sizes: list[int] = sizes) -> Any:
            outputs = next(n for n in graph.graph.nodes if n.op == "output").args[0]
            sizes.extend(n.meta["val"].numel() for n in outputs if n.op != "placeholder")
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=forward,
            bw_compiler=lambda graph, given: make_boxed_func(graph.forward),
            partition_fn=min_cut_rematerialization_partition,
        )
        torch.compile(module, backend=backend)(x).backward()
        kept.append(sum(sizes))
        gradients.append([p.grad for p in module.parameters()])
    assert kept[1] < kept[0]
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*gradients, strict=True))
