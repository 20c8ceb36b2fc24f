"""Recomputed blocks: which operators run again, what that costs and saves, folded as unfolded.

What autograd keeps, against autograd itself: bytes of distinct memory, on one device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import shardfold as sf
from shardfold.capture import capture, capture_short
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import Roofline, optimizer_named, pricing_named, tabulate
from shardfold.costs.activations import KEEP_ALL, Regions, block_regions, in_model, product_regions
from shardfold.errors import InfeasibleError, InputError
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.sharding import find_subdims
from shardfold.simulate.decoded import DecodedChoice
from shardfold.simulate.memory import Footprint, MemoryFacts
from shardfold.simulate.parts import Part
from shardfold.strategies.baselines import batch_factors, replicated
from shardfold.zoo import build

ROWS = 65536  # enough for splitting the batch to pay


class Block(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            norm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, layers: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(64, norm) for _ in range(layers))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def stack(layers: int, norm: type[nn.Module] = nn.LayerNorm) -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        return Stack(layers, norm), (torch.empty(ROWS, 64),)


def regions_of(graph: Graph) -> Regions:
    return block_regions(graph, find_subdims(graph, rules_of(graph)))


def planned(layers: int = 8, **options: Any) -> sf.Plan:
    model, args = stack(layers)
    return sf.plan(model, args, cluster="4xa100", **options)


def test_a_region_ends_with_the_last_operator_that_keeps_something() -> None:
    model, args = stack(4)
    graph = capture(model, args, fold=False)
    found = regions_of(graph)
    kinds = [[graph.ops[i].kind.rpartition(".")[2] for i in r.visited] for r in found.regions]
    assert kinds == [["layer_norm", "linear", "gelu", "linear"]] * 4
    assert all(region.reads == ((region.end, 0),) for region in found.regions)


def test_a_short_graph_has_the_regions_of_the_whole_one() -> None:
    model, args = stack(40)
    short, full = capture_short(model, args), capture(model, args, fold=False)
    assert len(short.ops) < len(full.ops)
    assert in_model(regions_of(short), short) == in_model(regions_of(full), full)


def test_batch_norm_does_not_run_twice() -> None:
    model, args = stack(6, nn.BatchNorm1d)
    graph = capture(model, args)
    kinds = [
        [graph.ops[i].kind.rpartition(".")[2] for i in r.ops] for r in regions_of(graph).regions
    ]
    assert kinds == [["linear", "gelu"]] * 6


def test_two_blocks_alike_are_not_enough() -> None:
    model, args = stack(2)
    assert not regions_of(capture(model, args))


@pytest.mark.parametrize("mesh", ["4", "2x2"])
def test_recomputing_costs_one_more_forward_and_keeps_one_tensor_a_block(mesh: str) -> None:
    model, args = stack(8)
    graph, cluster = capture(model, args), parse("4xa100")
    subdims, on = find_subdims(graph, rules_of(graph)), mesh_from_text(mesh, parse("4xa100"))
    prices, adamw = pricing_named("roofline").model(cluster, on), optimizer_named("adamw")
    keeping, again = (
        tabulate(graph, subdims, on, prices, adamw, regions)
        for regions in (KEEP_ALL, block_regions(graph, subdims))
    )
    by_batch = replicated(keeping, batch_factors(graph, subdims))
    # norm's, up's, gelu's and down's operands against the block's own.
    rows, width = ROWS // 4, 64
    dropped = 8 * rows * (width + 4 * width + 4 * width) * 4
    assert keeping.problem.total_bytes(by_batch) - again.problem.total_bytes(by_batch) == dropped
    steps = DecodedChoice(graph, subdims, again, by_batch, prices, adamw).steps.values()
    repeated = [s for each in steps for s in each if s.phase == "recompute"]
    assert len(repeated) == 8 * 3  # norm, up and gelu; nothing moves between them
    cost = again.problem.total(by_batch) - keeping.problem.total(by_batch)
    assert cost == pytest.approx(sum(float(prices.compute_seconds(s)[0]) for s in repeated))


def test_it_is_chosen_where_nothing_else_fits_and_only_there() -> None:
    free = planned()
    assert not free.recompute
    least = planned(recompute="never", memory_limit=1e12).estimate
    tight = 0.0
    for share in (0.5, 0.3, 0.2, 0.1):
        limit = share * least.peak_bytes
        try:
            planned(recompute="never", memory_limit=limit, micro_batches=1)
        except sf.ShardfoldError:
            tight = limit
            break
    assert tight, "some limit must be too small without recomputing"
    found = planned(memory_limit=tight)
    assert found.recompute
    assert found.estimate.peak_bytes <= tight
    assert "Activation checkpointing:" in str(found)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_folded_and_unfolded_agree_on_what_runs_again(share: float) -> None:
    never = planned(12, recompute="never", memory_limit=1e12).estimate.peak_bytes
    always = planned(12, recompute="always", memory_limit=1e12).estimate.peak_bytes
    limit = always + share * (never - always)
    short, full = (planned(12, memory_limit=limit, fold=fold) for fold in (True, False))
    assert 0 < sum(end - first for first, end in short.recompute) < 12 * 3
    assert short.recompute == full.recompute
    assert short.estimate.additive_seconds == pytest.approx(
        full.estimate.additive_seconds, rel=1e-9
    )
    assert short.estimate.peak_bytes == full.estimate.peak_bytes


def test_what_people_recompute_is_a_word_and_never_faster() -> None:
    """Attention has a test of its own; here torchtitan's way: of `up` and `down`, `up` is kept."""
    model, args = stack(4)
    graph = capture(model, args, fold=False)
    found = product_regions(graph, find_subdims(graph, rules_of(graph)))
    kinds = [[graph.ops[i].kind.rpartition(".")[2] for i in r.ops] for r in found.regions]
    assert kinds == [["layer_norm"], ["gelu"]] * 4
    never = planned(12, recompute="never", memory_limit=1e12).estimate
    always = planned(12, recompute="always", memory_limit=1e12).estimate
    for share in (0.3, 0.6):
        limit = always.peak_bytes + share * (never.peak_bytes - always.peak_bytes)
        auto = planned(12, memory_limit=limit)
        assert auto.estimate.gib_price_seconds > 0
        assert "The price of memory" in str(auto)
        for word in ("never", "always", "products"):
            try:
                other = planned(12, recompute=word, memory_limit=limit, micro_batches=1)
            except sf.ShardfoldError:
                continue
            assert auto.estimate.step_seconds <= other.estimate.step_seconds * (1 + 1e-9)


def test_a_limit_below_the_smallest_plan_says_what_would_fit() -> None:
    with pytest.raises(InfeasibleError, match=r"try first a batch of about \d+%.*devices") as told:
        planned(4, memory_limit=30e6, micro_batches=1)
    assert planned(4, memory_limit=told.value.needed_bytes, micro_batches=1).fits
    with pytest.raises(InfeasibleError, match=r"alone take .* about \d+ devices instead of 4"):
        planned(4, memory_limit=1e4, micro_batches=1)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(InputError, match="attention: no repeated block"):
        planned(recompute="attention")
    with pytest.raises(InputError, match="recompute 'some'"):
        planned(recompute="some")


def kept_by_autograd(module, args, kwargs):
    """Bytes of the memory that autograd holds after forward, parameters and inputs left out."""
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs))]
    own = {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(*args, **kwargs)
    assert loss.requires_grad
    return sum(size for size, _ in held.values())


def kept_by_our_count(module, args, kwargs):
    graph = capture(module, args, kwargs)
    subdims = find_subdims(graph, rules_of(graph))
    cluster = parse("1xh100")
    mesh = cluster.meshes()[0]
    model, optimizer = Roofline(cluster, mesh), optimizer_named("adamw")
    tables = tabulate(graph, subdims, mesh, model, optimizer)
    alone = (0,) * len(tables.vertices)
    decoded = DecodedChoice(graph, subdims, tables, alone, model, optimizer)
    return Footprint(decoded, MemoryFacts(graph, subdims), Part.whole(graph)).kept_bytes


def zoo_model(name):
    module, args, kwargs = build(name)
    module = module.to_empty(device="cpu")
    for parameter in (*module.parameters(), *module.buffers()):
        nn.init.zeros_(parameter)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), (args, kwargs)
    )
    return module, args, kwargs


@pytest.mark.parametrize(
    "name",
    ["llama3-8b-tiny", "vit-large-tiny", "mixtral-8x7b-tiny", "resnet50-tiny", "densenet121-tiny"],
)
def test_a_model_of_the_zoo_keeps_what_we_count(name):
    module, args, kwargs = zoo_model(name)
    assert kept_by_our_count(module, args, kwargs) == kept_by_autograd(module, args, kwargs)


class Pointwise(nn.Module):
    """Operators that keep an operand, a result, a condition, or nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        y = x * self.weight
        y = torch.where(x > 0, torch.tanh(y), torch.exp(y)) + torch.maximum(y, x)
        y = y.masked_fill(x > 1, 0.0).relu() / (1 + self.weight.abs())
        return y.pow(2).sqrt().mean()


class Views(nn.Module):
    """A transpose is no copy, `contiguous` after it is one, and after attention it is none."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 96)
        self.outer = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        q, k, v = self.inner(x).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.outer(y.transpose(1, 2).contiguous().view(2, 8, 32))
        y = self.norm(y.transpose(0, 1).contiguous())
        return nn.functional.silu(y.reshape(16, 32)).sum()


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 5)

    def forward(self, x, labels):
        y = nn.functional.max_pool2d(self.norm(self.first(x)), 2)
        y = nn.functional.avg_pool2d(y, 2)
        y = nn.functional.adaptive_avg_pool2d(y, 1).flatten(1)
        return nn.functional.cross_entropy(self.last(y), labels)


class Positions(nn.Module):
    """Operators that keep where values were, a size, a factor a channel, or a difference."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.rows = nn.Parameter(torch.ones(6, 8))

    def forward(self, x, index, target):
        y = nn.functional.pad(nn.functional.elu(self.first(x)), (1, 1, 1, 1), mode="reflect")
        y = nn.functional.dropout2d(nn.functional.selu(y), 0.2)
        y = nn.functional.threshold(y, 0.1, 0.0) + nn.functional.celu(y + 1, 0.5)
        y = nn.functional.adaptive_max_pool2d(y, 4).flatten(1) @ torch.ones(128, 8)
        z = (self.rows * 2).gather(0, index) + y.max(0).values + 2.0 ** y.amin()
        loss = nn.functional.l1_loss(z, target) + nn.functional.kl_div(z + 1, target)
        return loss + nn.functional.nll_loss(z * 3, index[:, 0])


class Biased(nn.Module):
    """Attention with a learned bias, as it lies or with its heads last: no fused kernel reads that.

    Nor does any on a CPU give a bias its gradient, so what is kept is the same there.
    """

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.outer = (nn.Linear(32, 32) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(8, 8, 4))

    def heads(self, x):
        return x.view(2, 8, 4, 8).transpose(1, 2)

    def forward(self, x):
        bias = self.bias.permute(2, 0, 1).unsqueeze(0)
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.outer(y.transpose(1, 2).reshape(2, 8, 32)).float().sum()


def test_scores_are_kept_in_float32_where_no_fused_kernel_reads_the_mask():
    module, args = Biased().bfloat16(), (torch.randn(2, 8, 32).bfloat16(),)
    assert kept_by_our_count(module, args, {}) == kept_by_autograd(module, args, {})


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (Biased(), (torch.randn(2, 8, 32),)),
        (Pointwise(), (torch.randn(4, 6),)),
        (Views(), (torch.randn(2, 8, 32),)),
        (Pools(), (torch.randn(2, 3, 18, 18), torch.tensor([1, 2]))),
        (Positions(), (torch.randn(2, 3, 18, 18), torch.ones(2, 8).long(), torch.rand(2, 8))),
    ],
    ids=["biased", "pointwise", "views", "pools", "positions"],
)
def test_small_modules_keep_what_we_count(module, args):
    assert kept_by_our_count(module, args, {}) == kept_by_autograd(module, args, {})
