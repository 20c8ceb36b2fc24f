"""Compiled steps: what is one kernel, what is in memory, and what backward keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.capture import capture
from shardfold.costs.fusion import BY_ELEMENTS, BY_ROWS, Fusion
from shardfold.costs.memory_format import fusion_of
from shardfold.errors import InputError
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.sharding import find_subdims

ROWS, WIDE = 256, 64


class Block(nn.Module):
    """A norm, a gated product, and what came in added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up = nn.Linear(WIDE, 8 * WIDE, bias=False)
        self.down = nn.Linear(4 * WIDE, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares of the result."""
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        x = x + self.down(nn.functional.silu(gate.float()).to(x.dtype) * value)
        return x.square().mean()


@pytest.fixture(scope="module")
def compiled() -> tuple[Graph, Fusion]:
    graph = replace(capture(Block(), (torch.randn(ROWS, WIDE),), dtype="bf16"), is_compiled=True)
    found = fusion_of(graph, find_subdims(graph, rules_of(graph)))
    assert found is not None
    return graph, found


def names(graph: Graph, tensors: frozenset[int]) -> set[str]:
    return {graph.tensors[t].name for t in tensors}


def test_products_stay_and_what_stands_between_them_is_one_kernel(
    compiled: tuple[Graph, Fusion],
) -> None:
    graph, found = compiled
    own = {op.kind for op, fused in zip(graph.ops, found.ops, strict=True) if fused is None}
    assert own == {"aten.linear"}
    calls = [fused.forward_kernels for fused in found.ops if fused and fused.forward_bytes]
    assert calls == [1.0, 1.0, 1.0]  # before, between and after the products


def test_a_kernel_reads_once_and_writes_what_others_need(compiled: tuple[Graph, Fusion]) -> None:
    _, found = compiled
    row = 2.0 * ROWS * WIDE
    moved = [fused.forward_bytes for fused in found.ops if fused and fused.forward_bytes]
    parameters = 2 * 2.0 * WIDE
    assert moved[0] == pytest.approx(BY_ROWS * (2 * row + parameters))  # x, and the norm
    assert moved[1] == pytest.approx(BY_ELEMENTS * 12 * row)  # both halves, and their product
    assert moved[2] == pytest.approx(BY_ROWS * (3 * row + 2), rel=0.01)  # x, the product, the sum


def test_backward_makes_cheap_results_again(compiled: tuple[Graph, Fusion]) -> None:
    """Kept: what products read, and what they left; no cast, no gate, no square."""
    graph, found = compiled
    kept = {(graph.tensors[t].type.dtype, graph.tensors[t].type.shape[-1]) for t in found.kept}
    assert kept == {("bfloat16", WIDE), ("bfloat16", 4 * WIDE), ("bfloat16", 8 * WIDE)}
    inside = {graph.tensors[t].type.dtype for t in found.absent}
    assert "float32" in inside
    assert not found.absent & found.kept


def test_a_compiled_step_takes_less_time_and_memory() -> None:
    x = torch.randn(64 * ROWS, WIDE)
    both = [
        sf.Planner(Block(), (x,), cluster="1xh200", precision="bf16", compile=compiled)
        for compiled in (False, True)
    ]
    eager, compiled = (each.estimate("dp=1", beside_plan=False) for each in both)
    assert compiled.step_seconds < eager.step_seconds
    assert compiled.peak_bytes < eager.peak_bytes


class Counting(nn.Linear):
    """A layer that leaves something in a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDE, WIDE)
        self.register_buffer("seen", torch.zeros(WIDE))

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares."""
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        return super().forward(x).square().mean()


def test_what_is_not_compiled_is_refused() -> None:
    x = torch.randn(ROWS, WIDE)
    with pytest.raises(InputError, match="Forward updates seen"):
        sf.plan(Counting(), (x,), cluster="2xcpu", compile=True)
    with pytest.raises(InputError, match="cannot add micro-batches up"):
        sf.plan(Block(), (x,), cluster="2xcpu", compile=True, micro_batches=2)


def test_a_plan_says_that_it_is_compiled_and_is_run_so() -> None:
    x = torch.randn(ROWS, WIDE)
    plan = sf.plan(Block(), (x,), cluster="2xh200", compile=True)
    assert "Compiled: priced as torch.compile" in str(plan)
    again = sf.Planner(Block(), (x,)).replan(plan, cluster="1xh200")
    assert again.provenance.request.compile
    for plan, is_compiled in ((again, True), (sf.plan(Block(), (x,), cluster="cpu"), False)):
        module = sf.parallelize(Block(), plan, (x,))
        assert (module._compiled_call_impl is not None) == is_compiled
