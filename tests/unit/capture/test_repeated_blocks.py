"""Short graphs stand for the whole model, or are not made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfold import zoo
from shardfold.capture import capture, capture_short

from .test_replicas import BATCH, Block, Stack, stack


def short(model: nn.Module) -> Any:
    """The short graph of a model, checked against its full one."""
    graph = capture_short(model, BATCH)
    full = capture(model, BATCH, fold=False)
    assert graph.digest() == full.digest()
    assert graph.operator_count == len(full.ops)
    return graph


def test_a_long_run_is_cut_to_five_layers() -> None:
    graph = short(stack(40))
    (repeat,) = graph.repeats
    assert repeat.count == 38
    assert repeat.traced == 3
    layers = {op.origin.module.split(".")[1] for op in graph.ops if "blocks." in op.origin.module}
    assert layers == {"0", "1", "2", "38", "39"}
    assert len(graph.ops) == len(short(stack(60)).ops)


def test_a_short_stack_is_left_alone() -> None:
    assert short(stack(6)).repeats == ()


@pytest.mark.parametrize("period", [2, 6])  # one layer in six has full attention in Gemma-3
def test_layers_of_another_kind_in_between_make_a_longer_period(period: int) -> None:
    model = stack(10 * period)
    for block in list(model.blocks)[::period]:
        block.gated = True
    (repeat,) = short(model).repeats
    assert repeat.count == 8
    assert all(len(paths) == period for paths in repeat.paths)


def test_an_odd_layer_in_the_middle_ends_the_run() -> None:
    model = stack(24)
    model.blocks[12].scale = 0.5
    repeats = short(model).repeats
    assert [repeat.count for repeat in repeats] == [10, 9]


class Glued(Stack):
    at = 9

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.at:
                x = torch.tanh(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def test_glue_at_one_index_is_never_lost() -> None:
    graph = short(Glued([Block(index=i) for i in range(20)]))
    assert [op.kind for op in graph.ops].count("aten.tanh") == 1


def test_glue_between_all_layers_belongs_to_the_period() -> None:
    class Scaled(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x)) * 0.5
            return nn.functional.cross_entropy(self.head(x), labels)

    (repeat,) = short(Scaled([Block(index=i) for i in range(20)])).repeats
    assert repeat.count == 18


def test_a_scale_that_depends_on_the_depth_forbids_cutting() -> None:
    class Deep(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) / len(self.blocks)
            return nn.functional.cross_entropy(self.head(x), labels)

    assert short(Deep([Block(index=i) for i in range(20)])).repeats == ()


def test_layers_by_index_forbid_cutting() -> None:
    class Indexed(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            for i in range(20):
                x = self.blocks[i](x)
            return nn.functional.cross_entropy(self.head(x), labels)

    assert short(Indexed([Block(index=i) for i in range(20)])).repeats == ()


def test_all_layers_outputs_read_at_the_end_forbid_cutting() -> None:
    class Collecting(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            seen = []
            for block in self.blocks:
                x = block(x)
                seen.append(x)
            return nn.functional.cross_entropy(self.head(sum(seen)), labels)

    assert short(Collecting([Block(index=i) for i in range(20)])).repeats == ()


def test_a_skip_over_two_layers_forbids_cutting() -> None:
    class Skipping(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            before = [x, x]
            for block in self.blocks:
                x = block(x) + before[-2]
                before.append(x)
            return nn.functional.cross_entropy(self.head(x), labels)

    assert short(Skipping([Block(index=i) for i in range(20)])).repeats == ()


def test_a_tensor_that_every_layer_reads_is_no_hindrance() -> None:
    class Biased(Block):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return super().forward(x) + bias

    class Model(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            bias = torch.sigmoid(x)
            for block in self.blocks:
                x = block(x, bias)
            return nn.functional.cross_entropy(self.head(x), labels)

    (repeat,) = short(Model([Biased(index=i) for i in range(20)])).repeats
    assert repeat.count == 18


def test_a_block_called_twice_is_traced_in_full() -> None:
    class Twice(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
            return nn.functional.cross_entropy(self.head(x), labels)

    graph = short(Twice([Block(index=i) for i in range(8)]))
    assert any("called more than once" in note for note in graph.notes)
    weights = [t for t in graph.tensors if t.role == "parameter"]
    assert len(weights) == 8 * 6 + 2


def test_the_model_is_whole_again_afterwards() -> None:
    model = stack(20)
    capture_short(model, BATCH)
    assert [name for name, _ in model.blocks.named_children()] == [str(i) for i in range(20)]


@pytest.mark.parametrize(
    ("name", "runs"), [("llama3-8b-tiny", [8]), ("t5-large-tiny", [7, 7]), ("gpt2-tiny", [8])]
)
def test_zoo_models(name: str, runs: list[int]) -> None:
    model, args, kwargs = zoo.build(name, layers=10)
    graph = capture_short(model, args, kwargs)
    assert [repeat.count for repeat in graph.repeats] == runs
    assert graph.digest() == capture(model, args, kwargs, fold=False).digest()
