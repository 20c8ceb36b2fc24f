"""Data parallel and fully sharded are what their names say, collective by collective.

Strategies by hand are what their papers say, collective by collective, and price as chosen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold import zoo
from shardfold.capture import capture
from shardfold.errors import InputError
from shardfold.graph import Graph
from shardfold.plans.entries import operator_entries, parameter_entries
from shardfold.search import solve
from shardfold.simulate.decoded import DecodedChoice
from shardfold.strategies.baselines import (
    STRATEGIES,
    Choice,
    Setting,
    Unfit,
    batch_factors,
    every,
    fully_sharded,
    replicated,
    strategy_named,
)
from shardfold.strategies.split_preferences import Roles
from virtual.choosing import Desk, collectives
from virtual.sketch import Sketch

B, M, N = 16, 64, 128


def mlp(batch: int = B) -> Graph:
    sketch = Sketch()
    x = sketch.linear(sketch.input(batch, M), sketch.parameter(M, M))
    h = sketch.relu(sketch.linear(x, sketch.parameter(N, M)))
    y = sketch.linear(h, sketch.parameter(M, N), sketch.parameter(M))
    return sketch.graph(sketch.cross_entropy(y, sketch.input(batch, dtype="int64")))


def baselines(desk: Desk) -> tuple[DecodedChoice, DecodedChoice]:
    batch = batch_factors(desk.graph, desk.subdims)
    return tuple(desk.decoded(c(desk.tables, batch)) for c in (replicated, fully_sharded))  # type: ignore[return-value]


PARAMETERS = sorted([M * M * 4, M * N * 4, M * N * 4, M * 4])


def test_data_parallel_is_one_all_reduce_a_gradient() -> None:
    desk = Desk.of(mlp(), "4xa100", "2x2", "adamw")
    plain, _ = baselines(desk)
    large = [c for c in collectives(plain) if c[3] > 4]
    assert large == [("backward", "all_reduce", (0, 1), size) for size in PARAMETERS]
    assert all(set(e.layout) == {"replicated"} for e in parameter_entries(plain))


def test_fully_sharded_gathers_twice_and_scatters_once() -> None:
    desk = Desk.of(mlp(), "4xa100", "4", "adamw")
    _, sharded = baselines(desk)
    large = [c for c in collectives(sharded) if c[3] > 4]
    # Backward needs no bias again, nor the weight of the layer that reads the batch.
    matrices = [M * N * 4, M * N * 4]
    assert large == [
        *(("backward", "all_gather", (0,), size) for size in matrices),
        *(("backward", "reduce_scatter", (0,), size) for size in PARAMETERS),
        *(("forward", "all_gather", (0,), size) for size in PARAMETERS),
    ]
    assert all(e.regather for e in parameter_entries(sharded))


@pytest.mark.parametrize("mesh", ["8", "2x4", "2x2x2"])
def test_every_operator_is_split_by_batch_over_all_devices(mesh: str) -> None:
    desk = Desk.of(mlp(), "8xa100", mesh, "adamw")
    for decoded in baselines(desk):
        assert {tuple(entry.split.items()) for entry in operator_entries(decoded)} == {
            (("batch", 8),)
        }


def test_fully_sharded_holds_an_eighth_of_the_parameters() -> None:
    desk = Desk.of(mlp(), "8xa100", "2x2x2", "adamw")
    plain, sharded = (desk.tables.problem.total_bytes(a.choice) for a in baselines(desk))
    state = 4 * sum(PARAMETERS)
    assert plain - sharded == pytest.approx(state * 7 / 8)


def test_a_batch_smaller_than_the_devices_uses_fewer_axes() -> None:
    desk = Desk.of(mlp(batch=4), "8xa100", "2x2x2", "adamw")
    for decoded in baselines(desk):
        splits = {entry.split["batch"] for entry in operator_entries(decoded)}
        assert splits == {4}


def test_a_batch_of_one_is_not_split() -> None:
    desk = Desk.of(mlp(batch=1), "8xa100", "2x4", "adamw")
    plain, _ = baselines(desk)
    assert all(entry.split == {} for entry in operator_entries(plain))


@pytest.mark.parametrize("mesh", ["8", "2x4", "2x2x2"])
def test_no_baseline_beats_the_plan(mesh: str) -> None:
    desk = Desk.of(mlp(), "8xa100", mesh, "adamw")
    best = solve(desk.tables.problem).cost
    for decoded in baselines(desk):
        assert best <= desk.tables.problem.total(decoded.choice) * (1 + 1e-9)
        assert np.isfinite(desk.tables.problem.total(decoded.choice))


CLUSTERS = {"8xa100": "2x2x2", "4x8x1080ti": "4x2x4", "2x8xh100": "2x2x4"}
MODELS = ("resnet50-tiny", "llama3-8b-tiny", "mixtral-8x7b-tiny", "vit-large-tiny")
COMPARED = ("alexnet-tiny", "rnnlm-tiny", "transformer-tiny", "gpt2-tiny")
# What tests of `compare` plan on all three clusters is priced on one mesh only here.
CASES = [(name, cluster) for name in MODELS for cluster in CLUSTERS]
CASES += [(name, "4x8x1080ti") for name in COMPARED]
LAYERS, BATCH, SEQ, HIDDEN = 2, 8, 16, 64
STREAM = BATCH * SEQ * HIDDEN * 4  # bytes of the residual stream of a tiny Llama


@cache
def graph_of(name: str) -> Graph:
    if zoo.entry(name).source.startswith("Hugging"):
        pytest.importorskip("transformers")
    module, args, kwargs = zoo.build(name)
    return capture(module, args, kwargs)


@dataclass(frozen=True)
class Made:
    """A strategy's choice with all that it means."""

    desk: Desk
    choice: Choice

    @property
    def decoded(self) -> DecodedChoice:
        return self.desk.decoded(self.choice)

    def splits(self, kind: str) -> Counter[tuple[tuple[str, int], ...]]:
        entries = operator_entries(self.decoded)
        return Counter(tuple(e.split.items()) for e in entries if e.kind == kind)


@cache
def desk_of(name: str, cluster: str, mesh: str) -> Desk:
    return Desk.of(graph_of(name), cluster, mesh, "adamw")


def made(strategy: str, name: str, cluster: str, mesh: str) -> Made:
    desk = desk_of(name, cluster, mesh)
    choice = STRATEGIES[strategy](Setting(desk.graph, desk.subdims, desk.tables))
    assert not isinstance(choice, Unfit), choice.reason
    return Made(desk, choice)


def reason(strategy: str, name: str, cluster: str = "2x4xh100", mesh: str = "2x4") -> str:
    desk = desk_of(name, cluster, mesh)
    found = STRATEGIES[strategy](Setting(desk.graph, desk.subdims, desk.tables))
    assert isinstance(found, Unfit)
    return found.reason


@pytest.mark.parametrize(("name", "cluster"), CASES)
def test_exact_is_never_slower_than_a_strategy_by_hand(name: str, cluster: str) -> None:
    desk = desk_of(name, cluster, CLUSTERS[cluster])
    problem = desk.tables.problem
    best = solve(problem)
    assert best.is_optimal
    applied = 0
    for strategy in STRATEGIES.values():
        choice = strategy(Setting(desk.graph, desk.subdims, desk.tables))
        if not isinstance(choice, Unfit):
            applied += 1
            assert best.cost <= problem.total(choice) * (1 + 1e-9)
    assert applied >= 3


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["alexnet-tiny", "mixtral-8x7b-tiny"])
def test_a_step_is_the_sum_of_its_parts(strategy: str, name: str) -> None:
    desk = desk_of(name, "2x4xh100", "2x4")
    choice = STRATEGIES[strategy](Setting(desk.graph, desk.subdims, desk.tables))
    if isinstance(choice, Unfit):
        assert choice.reason
        return
    parts = sum(desk.decoded(choice).totals().values())
    assert desk.tables.problem.total(choice) == pytest.approx(parts, rel=1e-9)


def test_every_strategy_applies_to_some_model() -> None:
    applied = set()
    for name in ("alexnet-tiny", "mixtral-8x7b-tiny"):
        desk = desk_of(name, "2x4xh100", "2x2x2")
        for strategy, function in STRATEGIES.items():
            choice = function(Setting(desk.graph, desk.subdims, desk.tables))
            if not isinstance(choice, Unfit):
                applied.add(strategy)
    assert applied == set(STRATEGIES)


# Roles


def test_roles_of_a_llama_are_read_off_the_graph() -> None:
    desk = desk_of("llama3-8b-tiny", "2x2xh100", "2x2")
    roles = Roles.of(desk.graph, desk.subdims)
    assert len(roles.inner) == LAYERS  # one set of features between up and down in each layer
    assert len(roles.heads) == 2 * LAYERS  # key heads, and the queries that share one
    kinds = Counter()
    for product in roles.products:
        module = desk.graph.ops[product.op].origin.module.rpartition(".")[2]
        column, row = product.out & roles.tensor_parallel, product.reduced & roles.tensor_parallel
        assert not (column and row)
        kinds[module, "column" if column else "row" if row else "neither"] += 1
    names = {"column": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]}
    names["row"] = ["o_proj", "down_proj"]
    expected = {(name, how): LAYERS for how, found in names.items() for name in found}
    assert kinds == {**expected, ("lm_head", "column"): 1}


@pytest.mark.parametrize("name", ["alexnet-tiny", "resnet50-tiny", "rnnlm-tiny"])
def test_models_without_attention_have_no_inner_features(name: str) -> None:
    desk = desk_of(name, "2x4xh100", "2x4")
    roles = Roles.of(desk.graph, desk.subdims)
    assert not roles.heads
    assert not roles.inner


def test_positions_and_relative_biases_are_no_vocabulary() -> None:
    for name in ("gpt2-tiny", "t5-large-tiny"):
        graph = graph_of(name)
        desk = desk_of(name, "2x2xh100", "2x2")
        roles = Roles.of(desk.graph, desk.subdims)
        split = {
            graph.tensors[op.inputs[0]].type.shape[0]
            for op, factors in zip(graph.ops, desk.subdims.factors, strict=True)
            if op.kind == "aten.embedding" and set(factors) & roles.vocabulary
        }
        assert split == {257}


# Megatron-LM


def test_megatron_reduces_twice_a_layer_in_each_direction() -> None:
    """Shoeybi et al. 2019, figure 4: one all-reduce after attention, one after the MLP; and the
    same in backward, before them. The embedding adds one forward, the head one backward."""
    found = collectives(made("megatron", "llama3-8b-tiny", "2xh100", "2").decoded)
    stream = Counter((phase, kind) for phase, kind, _, size in found if size == STREAM)
    assert stream == {
        ("forward", "all_reduce"): 2 * LAYERS + 1,
        ("backward", "all_reduce"): 2 * LAYERS + 1,
    }
    # What is left is the loss over a split vocabulary: a few words a token.
    rest = [c for c in found if c[3] != STREAM]
    assert {kind for _, kind, _, _ in rest} == {"all_reduce"}
    assert max(size for *_, size in rest) <= BATCH * SEQ * 2 * 4


def test_sequence_parallelism_gathers_and_scatters_instead() -> None:
    """Korthikanti et al. 2022: each all-reduce becomes an all-gather and a reduce-scatter."""
    found = collectives(made("megatron+sp", "llama3-8b-tiny", "2xh100", "2").decoded)
    stream = Counter((phase, kind) for phase, kind, _, size in found if size == STREAM)
    assert not any(kind == "all_reduce" for _, kind in stream)
    assert stream["forward", "reduce_scatter"] == 2 * LAYERS + 1
    assert stream["forward", "all_gather"] == 2 * LAYERS + 1


def test_megatron_splits_tensors_within_a_node_and_the_batch_between() -> None:
    found = made("megatron", "llama3-8b-tiny", "4x2xh100", "4x2")
    attention = "aten.scaled_dot_product_attention"
    assert found.splits(attention) == {(("batch", 4), ("heads", 2)): LAYERS}
    products = found.splits("aten.linear")
    assert products[("batch", 4), ("heads", 2)] == 4 * LAYERS
    assert products[("batch", 4), ("out", 2)] == 2 * LAYERS
    assert products[("batch", 4), ("in", 2)] == LAYERS
    norms = [e for e in operator_entries(found.decoded) if e.kind == "aten.rsqrt"]
    assert {tuple(e.split.items()) for e in norms} == {(("batch", 4),)}


def test_mesh_tensorflow_may_leave_the_node() -> None:
    inside = made("megatron", "llama3-8b-tiny", "2x2xh100", "2x2")
    anywhere = made("mesh-tensorflow", "llama3-8b-tiny", "2x2xh100", "2x2")
    total = inside.desk.tables.problem.total
    assert total(anywhere.choice) <= total(inside.choice) * (1 + 1e-9)


# The others


def test_one_weird_trick_splits_alexnet_as_the_paper_says() -> None:
    found = made("krizhevsky-2014", "alexnet", "4x8x1080ti", "4x8")
    assert found.splits("aten.conv2d") == {(("batch", 32),): 5}
    linear = found.splits("aten.linear")
    assert linear == {(("out", 32),): 2, (("classes", 32),): 1}
    loss = found.splits("aten.cross_entropy_loss")
    assert loss == {(("classes", 32),): 1}


def test_experts_are_split_within_a_node() -> None:
    found = made("expert-parallel", "mixtral-8x7b-tiny", "2x4xh100", "2x4")
    experts = found.splits("shardfold.routed_experts")
    assert experts == {(("batch", 2), ("dispatch", 4)): LAYERS}
    sent = [
        (phase, axes) for phase, kind, axes, _ in collectives(found.decoded) if kind == "all_to_all"
    ]
    assert Counter(sent) == {("forward", (1,)): 3 * LAYERS, ("backward", (1,)): 2 * LAYERS}
    attention = found.splits("aten.scaled_dot_product_attention")
    assert attention == {(("batch", 8),): LAYERS}


@pytest.mark.parametrize(("name", "degrees"), [("expert-parallel", {2, 4}), ("fsdp+ep", {2, 4})])
def test_experts_are_split_over_every_part_of_the_mesh_that_they_allow(
    name: str, degrees: set[int]
) -> None:
    desk = desk_of("mixtral-8x7b-tiny", "4x2xh100", "2x2x2")
    found = every(name, Setting(desk.graph, desk.subdims, desk.tables))
    parts = [Made(desk, choice).splits("shardfold.routed_experts") for choice in found]
    assert {dict(split)["dispatch"] for each in parts for split in each} == degrees


@pytest.mark.parametrize(
    ("way", "split", "sent"),
    [
        ("ulysses", (("batch", 2), ("heads", 2)), {("all_to_all", 3 * LAYERS)}),
        ("gather", (("batch", 2), ("seq", 2)), {("all_gather", 2 * LAYERS)}),
        ("ring", (("batch", 2), ("ring", 2)), {("all_to_all", 3 * LAYERS), ("ring", LAYERS)}),
    ],
)
def test_a_sequence_is_split_within_a_node_and_the_batch_between(
    way: str, split: tuple[tuple[str, int], ...], sent: set[tuple[str, int]]
) -> None:
    """What is sent of activations in forward, along the devices of a sequence."""
    desk = desk_of("llama3-8b-tiny", "2x2xh100", "2x2")
    setting = Setting(desk.graph, desk.subdims, desk.tables)
    made_of = [Made(desk, choice) for choice in every(f"cp-{way}", setting)]
    found = next(f for f in made_of if split in f.splits("aten.scaled_dot_product_attention"))
    assert found.splits("aten.scaled_dot_product_attention") == {split: LAYERS}
    assert set(found.splits("aten.linear")) == {(("batch", 2), ("seq", 2))}
    entries = [e for e in operator_entries(found.decoded) if e.kind.endswith("attention")]
    moved = Counter(
        c.kind
        for e in entries
        for c in e.collectives
        for _ in range(c.count)
        if c.phase == "forward"
    )
    assert set(moved.items()) == sent
    assert all("replicated" not in e.layout for e in parameter_entries(found.decoded))


class WrittenOut(nn.Module):
    """Attention in products, as those with caps and sinks are: no fused kernel knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.packed = nn.Embedding(32, 32), nn.Linear(32, 96)
        self.out, self.sinks = nn.Linear(32, 32), nn.Parameter(torch.zeros(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.packed(x).chunk(3, -1))
        scores = 5.0 * torch.tanh(torch.matmul(q, k.transpose(2, 3)) / 5.0)
        scores = scores + torch.full((16, 16), -torch.inf, device=x.device).triu(1)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(len(x), -1, 16, -1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        x = x + self.out(torch.matmul(weights, v).transpose(1, 2).flatten(2))
        return F.cross_entropy(F.linear(x, self.table.weight).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(
    ("name", "word", "sent"),
    [
        ("megatron", "dim1", {}),
        ("cp-ulysses", "dim1", {"all_to_all": 4}),  # queries, keys, values, and the sinks
        ("cp-gather", "seq", {"all_gather": 2}),
    ],
)
def test_attention_that_is_written_out_has_heads_and_positions(
    name: str, word: str, sent: dict[str, int]
) -> None:
    """All between its products is split over four devices, and nothing is sent there."""
    graph = capture(WrittenOut(), (torch.randint(32, (1, 16)),))
    desk = Desk.of(graph, "4xh100", "4", "adamw")
    (choice, *_) = every(name, Setting(desk.graph, desk.subdims, desk.tables))
    decoded = desk.decoded(choice)
    entries = {e.name: e for e in operator_entries(decoded)}
    inside = ("matmul", "tanh", "cat", "softmax", "matmul_1")
    assert {tuple(entries[each].split) for each in inside[1:-1]} == {(word,)}
    assert {tuple(entries[each].split.values()) for each in inside} == {(4,)}
    moved = Counter(
        c.kind
        for each in inside
        for c in entries[each].collectives
        for _ in range(c.count)
        if c.phase == "forward"
    )
    assert moved == sent


def test_keys_of_attention_that_is_written_out_do_not_go_round() -> None:
    graph = capture(WrittenOut(), (torch.randint(32, (1, 16)),))
    desk = Desk.of(graph, "4xh100", "4", "adamw")
    assert every("cp-ring", Setting(desk.graph, desk.subdims, desk.tables)) == []


def test_zero_2_gathers_once_and_zero_3_twice() -> None:
    weights = 7  # backward needs these again, and no bias; conv1's is too small to be sharded
    for strategy, again in (("zero-2", 0), ("fsdp", weights)):
        found = made(strategy, "alexnet-tiny", "8xa100", "8")
        moved = [(phase, kind) for phase, kind, _, size in collectives(found.decoded) if size > 64]
        counts = Counter(moved)
        assert counts["forward", "all_gather"] == counts["backward", "reduce_scatter"] > weights
        assert counts["backward", "all_gather"] == again


def test_hybrid_sharding_gathers_within_a_node_only() -> None:
    found = collectives(made("hsdp", "alexnet-tiny", "2x4xh100", "2x4").decoded)
    assert {axes for _, kind, axes, _ in found if kind == "all_gather"} == {(1,)}
    assert (0,) in {axes for _, kind, axes, _ in found if kind == "all_reduce"}


@pytest.mark.parametrize(
    ("strategy", "name", "why"),
    [
        ("krizhevsky-2014", "vit-large-tiny", "convolutional networks"),
        ("krizhevsky-2014", "rnnlm-tiny", "convolutional networks"),
        ("megatron", "resnet50-tiny", "no attention"),
        ("megatron+sp", "alexnet-tiny", "no sequence of tokens"),
        ("expert-parallel", "gpt2-tiny", "no experts"),
        ("cp-ring", "resnet50-tiny", "no attention"),
    ],
)
def test_a_strategy_that_does_not_apply_says_why(strategy: str, name: str, why: str) -> None:
    assert why in reason(strategy, name)


def test_one_level_makes_hybrids_the_same_as_the_plain_ones() -> None:
    assert "same as fsdp" in reason("hsdp", "alexnet-tiny", "8xa100", "2x4")
    assert "same as megatron" in reason("mesh-tensorflow", "gpt2-tiny", "8xa100", "2x4")


def test_heads_that_do_not_divide_are_refused() -> None:
    assert "do not divide" in reason("megatron", "transformer-tiny", "8xa100", "8")


def test_an_unknown_strategy_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match="Did you mean megatron"):
        strategy_named("megatorn")
