"""Stated pipelines: stages add up to the model, folded or not, and memory is what is in flight."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn

from shardfold.api import Planner
from shardfold.cluster import parse
from shardfold.errors import ClusterError, InputError
from shardfold.planner.estimated import Estimated, Pipelined
from shardfold.planner.options import Request
from shardfold.planner.staged import stage
from shardfold.strategies.stacks import OWN
from shardfold.strategies.stated import parse_strategy

CLUSTER = "4x2xa100"
BATCH, WIDTH, VOCAB = 32, 32, 96


class Block(nn.Module):
    """A residual block of five operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """An embedding, blocks, and a head that may be the embedding."""

    def __init__(self, layers: int, tied: bool, shared: bool, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, WIDTH)
        blocks = [Block() for _ in range(1 if shared else layers)]
        self.layers = nn.ModuleList(blocks * layers if shared else blocks)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@cache
def planner(
    layers: int,
    tied: bool = False,
    fold: bool = True,
    shared: bool = False,
    vocab: int = VOCAB,
    optimizer: str = "adamw",
) -> Planner:
    tokens = torch.zeros(BATCH, 8, dtype=torch.long)
    model = Stack(layers, tied, shared, vocab)
    return Planner(
        model, (tokens,), cluster=CLUSTER, fold=fold, cost="roofline", optimizer=optimizer
    )


@cache
def estimated(
    strategy: str,
    layers: int = 12,
    tied: bool = False,
    fold: bool = True,
    stack: str = "shardfold",
    optimizer: str = "adamw",
) -> Estimated:
    found = planner(layers, tied, fold, optimizer=optimizer)
    return found.estimate(strategy, beside_plan=False, stack=stack)


def pipelined(found: Estimated) -> Pipelined:
    assert found.pipeline is not None
    return found.pipeline


@pytest.mark.parametrize(
    ("strategy", "tied"),
    [
        ("pp=4 dp=2 micro-batches=8", True),
        ("pp=4 zero=1 recompute=full micro-batches=8 schedule=gpipe", False),
        ("pp=2 fsdp=4 micro-batches=4 schedule=interleaved virtual=2", False),
        ("pp=2 dp=4 micro-batches=8 schedule=zbv", True),
        ("pp=8 micro-batches=16", True),  # one or two layers a stage
    ],
)
def test_a_graph_of_a_few_layers_gives_what_the_whole_gives(strategy: str, tied: bool) -> None:
    short, whole = estimated(strategy, 12, tied), estimated(strategy, 12, tied, fold=False)
    assert short.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
    assert short.peak_by_class == pytest.approx(whole.peak_by_class, rel=1e-9)
    stages = zip(pipelined(short).stages, pipelined(whole).stages, strict=True)
    for one, other in stages:
        assert (one.layers, one.in_flight) == (other.layers, other.in_flight)
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=1e-9)


@cache
def on_one_stage(strategy: str, tied: bool = False) -> Estimated:
    return planner(12, tied).estimate(strategy, cluster="2xa100", beside_plan=False)


def test_the_stages_add_up_to_the_model() -> None:
    found, whole = estimated("pp=4 dp=2 micro-batches=8"), on_one_stage("dp=2 micro-batches=8")
    work = sum(stage.busy_seconds for stage in pipelined(found).stages)
    assert work == pytest.approx(whole.step_seconds, rel=1e-2)  # but for hidden reductions
    assert found.compute_seconds * 4 == pytest.approx(whole.compute_seconds, rel=1e-9)
    assert found.mfu * found.step_seconds * 4 == pytest.approx(whole.mfu * whole.step_seconds)
    idle = 1 - work / (4 * found.step_seconds)
    assert pipelined(found).bubble == pytest.approx(idle)


def test_tied_weights_are_on_both_stages_and_their_gradient_is_summed() -> None:
    plain, tied = (estimated("pp=4 dp=2 micro-batches=8", 12, each) for each in (False, True))
    first, *_, last = pipelined(tied).stages
    assert first.peak_bytes == pipelined(plain).stages[0].peak_bytes
    assert last.peak_bytes == pipelined(plain).stages[-1].peak_bytes
    assert tied.step_seconds > plain.step_seconds


def test_a_stage_holds_what_is_in_flight() -> None:
    sized = partial(estimated, optimizer="momentum")  # whose update is no fuller than a pass
    few, many = (sized(f"pp=4 dp=2 micro-batches={m}") for m in (4, 16))
    assert [stage.in_flight for stage in pipelined(many).stages] == [4, 3, 2, 1]
    second, third = pipelined(many).stages[1:3]
    halves = sized("pp=4 dp=2 micro-batches=16 schedule=gpipe")
    each = second.peak_bytes - third.peak_bytes  # equal but for one micro-batch
    assert each > 0
    assert pipelined(halves).stages[1].peak_bytes - third.peak_bytes == pytest.approx(14 * each)
    assert pipelined(few).stages[1].peak_bytes > second.peak_bytes  # larger micro-batches


def test_recomputation_keeps_what_enters_each_layer() -> None:
    sized = partial(estimated, optimizer="momentum")  # whose update is no fuller than a pass
    kept, again = (sized(f"pp=4 dp=2 micro-batches=8{r}") for r in ("", " recompute=full"))
    assert again.peak_by_class["activations"] < kept.peak_by_class["activations"]
    assert again.hfu > again.mfu
    assert again.step_seconds > kept.step_seconds


def test_sends_are_exposed_where_they_are_waited_for() -> None:
    def sent(stack: str) -> tuple[float, float]:
        found = estimated("pp=4 dp=2 micro-batches=8", stack=stack).communication
        return next((c.seconds, c.exposed_seconds) for c in found if c.kind == "send_recv")

    assert sent("alpa")[0] == pytest.approx(sent("megatron-fp16")[0])
    assert 0 < sent("alpa")[1] < sent("megatron-fp16")[1]


def test_stages_by_work_leave_the_last_one_the_head() -> None:
    words = [
        s.layers for s in pipelined(estimated("pp=2 micro-batches=8 dp=4", stack="nanotron")).stages
    ]
    assert words == [
        "all before, layers.0 to 6",
        "layers.7 to 11, all after",
    ]


def test_a_head_of_more_than_a_stage_leaves_the_loss_for_the_last() -> None:
    large = planner(8, vocab=1024)  # a head of four layers
    found = large.estimate("pp=8 micro-batches=16", stack="nanotron", beside_plan=False)
    *_, head, cast, loss = pipelined(found).stages
    assert (head.layers, cast.layers, loss.layers) == ("no layer", "no layer", "all after")
    assert cast.forward_seconds < head.forward_seconds
    assert cast.peak_bytes < head.peak_bytes
    larger = planner(8, vocab=4096)
    with pytest.raises(InputError, match=r"5 stages come after it.* Try fewer stages"):
        larger.estimate("pp=8 micro-batches=16", stack="nanotron", beside_plan=False)


def test_a_message_is_as_large_as_the_tensor_and_copies_share_it() -> None:
    found = planner(12).estimate("pp=2 micro-batches=4", cluster="2xa100", beside_plan=False)
    link, tensor = parse("2xa100").levels[0], BATCH // 4 * 8 * WIDTH * 4
    sent = next(c.seconds for c in found.communication if c.kind == "send_recv")
    assert sent == pytest.approx(4 * (link.latency_seconds + tensor / link.bandwidth))

    asked = planner(12)._asked(Request(), "2x8xa100", {"cost": "roofline"})
    graph = planner(12)._captured(asked, short=True).graph(4)
    staged = stage(graph, asked.search, parse_strategy("pp=2 micro-batches=4", 16), OWN)
    node, gpu = parse("2x8xa100").levels
    size = 1e9
    whole, parts = staged._sent_seconds(0, (), size), staged._sent_seconds(0, (0,), size)
    assert whole == pytest.approx(node.latency_seconds + size / node.bandwidth)
    gathered = 7 * gpu.latency_seconds + 7 / 8 * size / gpu.bandwidth
    assert parts == pytest.approx(node.latency_seconds + size / 8 / node.bandwidth + gathered)


def test_chunks_of_a_device_are_listed_together() -> None:
    found = estimated("pp=2 fsdp=4 micro-batches=4 schedule=interleaved virtual=2")
    assert [stage.layers for stage in pipelined(found).stages] == [
        "all before, layers.0 to 2, 6 to 8",
        "layers.3 to 5, 9 to 11, all after",
    ]


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("pp=8 micro-batches=3", "cannot be cut into 3"),
        ("pp=8 micro-batches=8 virtual=2", "makes 16 stages, .* 12 layers .* Try virtual=1"),
        ("pp=2 dp=4 micro-batches=16", "cannot be split into dp x fsdp = 4 parts"),
    ],
)
def test_what_the_model_does_not_allow_is_refused(strategy: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        estimated(strategy)


def test_stages_that_the_cluster_does_not_allow_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"pp=3 does not lie along .* Try pp=2"):
        planner(12).estimate("pp=3 micro-batches=4", cluster="2x3xa100", beside_plan=False)


@pytest.mark.parametrize(("layers", "shared"), [(1, False), (4, True)])
def test_a_model_that_cannot_be_cut_is_refused(layers: int, shared: bool) -> None:
    with pytest.raises(InputError, match=r"no list of layers|used again and again"):
        planner(layers, shared=shared).estimate("pp=2 micro-batches=4", beside_plan=False)


def test_the_words_of_a_pipeline_are_kept() -> None:
    found = estimated("pp=4 dp=2 micro-batches=8")
    assert found.strategy == "pp=4 dp=2 micro-batches=8 schedule=1f1b"
    assert found.mesh == "4 stages of 2"
    assert replace(found).as_plain()["pipeline"]["stages"][0]["in_flight"] == 4
