"""Compiled steps: what is one kernel, what is in memory, and what backward keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V

import shardfold as sf
from shardfold.capture import capture
from shardfold.costs.activations import extras
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
    assert moved[2] == pytest.approx(BY_ROWS * (2 * row + 2), rel=0.01)  # x, and the product


def test_backward_makes_cheap_results_again(compiled: tuple[Graph, Fusion]) -> None:
    """Kept: what products read, and what they left; no cast, no gate, no square."""
    graph, found = compiled
    kept = {(graph.tensors[t].type.dtype, graph.tensors[t].type.shape[-1]) for t in found.kept}
    assert kept == {("bfloat16", WIDE), ("bfloat16", 4 * WIDE), ("bfloat16", 8 * WIDE)}
    inside = {graph.tensors[t].type.dtype for t in found.absent}
    assert "float32" in inside
    assert not found.absent & found.kept


class Gated(nn.Module):
    """Residuals around norms, gates, dropouts, a concatenation and explicit attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.RMSNorm(WIDE), nn.LayerNorm(WIDE)
        self.inner, self.outer = nn.Linear(WIDE, 3 * WIDE), nn.Linear(2 * WIDE, WIDE)
        self.up, self.down = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        """The mean of squares of the result."""
        for _ in range(2):
            q, k, v = self.inner(self.norm(x)).chunk(3, -1)
            weights = (q @ k.transpose(-2, -1) / 8).softmax(-1, dtype=torch.float32).to(x.dtype)
            read = nn.functional.dropout(weights, 0.1) @ v
            x = x + self.outer(torch.cat((read, torch.sin(read)), -1))
            x = x + nn.functional.dropout(self.down(self.up(self.last(x)).relu()), 0.1)
            x = x * torch.sigmoid(x.mean(1, keepdim=True))
        return x.float().square().mean()


class Pooled(nn.Module):
    """Convolutions with gates around a sum, a squeeze, and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 5, 2, 2), nn.Conv2d(16, 16, 3, 1, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.squeeze, self.head = nn.Conv2d(16, 16, 1), nn.Linear(16, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of the classes."""
        x = nn.functional.max_pool2d(nn.functional.silu(self.norms[0](self.first(x))), 3, 2, 1)
        x = nn.functional.leaky_relu(x + self.norms[1](self.second(nn.functional.elu(x))))
        x = x * torch.sigmoid(self.squeeze(x.mean((2, 3), keepdim=True)))
        x = nn.functional.hardtanh(nn.functional.avg_pool2d(x, 2)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(x), labels)


def kept_by_torch(module: nn.Module, args: tuple[Tensor, ...]) -> float:
    """Bytes that the partitioner keeps, as inductor calls it: of memory, however often viewed."""
    found: dict[str, float] = {}

    def partition(joint: Any, inputs: Any, **given: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            compile_fx._recursive_joint_graph_passes(joint)
        ahead, back = min_cut_rematerialization_partition(
            joint, inputs, compiler="inductor", **given
        )
        nodes = {node.name: node for node in ahead.graph.nodes}
        for name in (node.name for node in back.graph.nodes if node.op == "placeholder"):
            if name in nodes:
                base = memory_of(nodes[name])
                value = base.meta["val"]
                if base.op != "placeholder" and isinstance(value, Tensor):
                    found[base.name] = value.numel() * value.element_size()
        return ahead, back

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        bw_compiler=lambda graph, _: graph,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    torch.compile(module.train(), backend=backend)(*args).backward()
    return sum(found.values())


VIEWS = ("view", "permute", "t", "transpose", "slice", "split", "expand", "squeeze", "unsqueeze")


def memory_of(node: Any) -> Any:
    """The node whose memory a view shares."""
    while node.op == "call_function":
        called = node.args[0] if getattr(node.target, "__name__", "") == "getitem" else node
        if getattr(called.target, "_overloadpacket", None) is None:
            return node
        if called.target._overloadpacket.__name__ not in VIEWS:
            return node
        node = called.args[0]
    return node


def kept_by_us(module: nn.Module, args: tuple[Tensor, ...]) -> float:
    """Bytes of activations, and of what is kept beside them."""
    graph = replace(capture(module, args), is_compiled=True)
    subdims = find_subdims(graph, rules_of(graph))
    found = fusion_of(graph, subdims)
    assert found is not None
    total = float(sum(graph.tensors[t].type.bytes for t in found.kept))
    for index, op in enumerate(graph.ops):
        for extra in extras(graph, subdims, index):
            of = op.results[0] if extra.of < 0 else op.inputs[extra.of]
            shape = graph.tensors[of].type.shape
            if extra.life == "kept":
                total += math.prod(shape[: len(shape) - extra.over]) * extra.per_item
    return total


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (Gated().bfloat16(), (torch.randn(4, 64, WIDE).bfloat16(),)),
        (Gated(), (torch.randn(4, 64, WIDE),)),
        (Pooled(), (torch.randn(4, 3, 64, 64), torch.tensor([1, 2, 0, 4]))),
    ],
    ids=["gated bf16", "gated", "pooled"],
)
def test_what_is_kept_is_what_the_partitioner_keeps(
    module: nn.Module, args: tuple[Tensor, ...]
) -> None:
    assert kept_by_us(module, args) == pytest.approx(kept_by_torch(module, args), rel=0.02)


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
