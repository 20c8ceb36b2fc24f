"""Folding before tracing gives the graph of a full trace, and never folds what differs."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from draws import draws
from shardfold import zoo
from shardfold.capture import capture
from shardfold.capture.repeated_blocks import hollow
from shardfold.capture.replicas import fold


class Block(nn.Module):
    def __init__(self, width: int = 8, index: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)
        self.index = index
        self.scale = 1.0
        self.gated = False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(self.norm(x)))
        if self.gated:
            y = y * torch.sigmoid(y)
        return x + self.drop(self.down(y)) * self.scale


class IndexedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if self.index % 3 == 2 else y


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def stack(count: int = 6, kind: type[Block] = Block) -> Stack:
    return Stack([kind(index=i) for i in range(count)])


BATCH = (torch.empty(4, 8), torch.empty(4, dtype=torch.long))


def distinct(model: nn.Module, batch: tuple[Any, ...] = BATCH) -> int | None:
    """How many distinct blocks are traced; None where nothing is folded."""
    meta = tuple(t.to("meta") for t in batch)
    outer = hollow(model, None)
    folded = None if outer is None else fold(outer, meta, {})
    return None if folded is None else len(folded.blocks)


def same_graph(model: nn.Module, batch: tuple[Any, ...] = BATCH) -> bool:
    folded, full = (capture(model, batch, fold=flag) for flag in (True, False))
    return folded.digest() == full.digest()


def test_replicas_are_traced_once() -> None:
    assert distinct(stack()) == 1
    assert same_graph(stack())


def test_every_operator_names_its_own_layer() -> None:
    graph = capture(stack(), BATCH)
    modules = {op.origin.module for op in graph.ops if op.kind == "aten.linear"}
    assert modules == {f"blocks.{i}.{n}" for i in range(6) for n in ("up", "down")} | {"head"}
    assert len({op.name for op in graph.ops}) == len(graph.ops)
    names = {t.name for t in graph.tensors if t.role == "parameter"}
    assert names == set(dict(stack().named_parameters()))


def change_dropout(model: Stack) -> None:
    model.blocks[3].drop.p = 0.5


def change_eps(model: Stack) -> None:
    model.blocks[3].norm.eps = 1e-3


def change_constant(model: Stack) -> None:
    model.blocks[3].scale = 0.5


def change_control_flow(model: Stack) -> None:
    model.blocks[3].gated = True


def patch_forward(model: Stack) -> None:
    def forward(self: Block, x: Tensor) -> Tensor:
        return torch.tanh(Block.forward(self, x))

    block = model.blocks[3]
    block.forward = types.MethodType(forward, block)


def replace_norm_by_another_class(model: Stack) -> None:
    model.blocks[3].norm = nn.RMSNorm(8)


def freeze(model: Stack) -> None:
    model.blocks[3].up.weight.requires_grad_(False)


def without_bias(model: Stack) -> None:
    model.blocks[3].down = nn.Linear(16, 8, bias=False)


@pytest.mark.parametrize(
    "change",
    [
        change_dropout,
        change_eps,
        change_constant,
        change_control_flow,
        patch_forward,
        replace_norm_by_another_class,
        freeze,
        without_bias,
    ],
)
def test_a_block_that_differs_in_one_hidden_way_is_traced_apart(change: Any) -> None:
    model = stack()
    change(model)
    assert same_graph(model)
    plain = capture(stack(), BATCH)
    assert capture(model, BATCH).digest() != plain.digest()


def test_one_replica_of_another_shape() -> None:
    model = Stack([Block(), Block(), Block(), Block(16), Block()])

    def forward(self: Stack, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            wide = block.index == 1
            x = block(torch.cat([x, x], -1))[..., :8] if wide else block(x)
        return nn.functional.cross_entropy(self.head(x), labels)

    model.blocks[3].index = 1
    model.forward = types.MethodType(forward, model)
    assert same_graph(model)
    assert distinct(model) == 2  # what the wide block leaves is strided


def test_one_replica_of_another_dtype() -> None:
    class Casting(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.up.weight.dtype)).float()

    model = Stack([Casting(index=i) for i in range(6)])
    model.blocks[2].double()
    assert same_graph(model)
    types_ = [t.type.dtype for t in capture(model, BATCH).tensors if t.role == "parameter"]
    assert types_.count("float64") == 6


def test_a_dropout_of_one_inner_module_that_others_have_twice() -> None:
    """Two places with one module in the first block, and with two in another."""

    class Twice(Block):
        def __init__(self, index: int = 0) -> None:
            super().__init__(index=index)
            self.again = self.drop

        def forward(self, x: Tensor) -> Tensor:
            return self.again(super().forward(x))

    model = Stack([Twice(i) for i in range(5)])
    model.blocks[3].again = nn.Dropout(0.5)
    assert same_graph(model)
    rates = [op.attributes["p"] for op in capture(model, BATCH).ops if "dropout" in op.kind]
    assert rates.count(0.5) == 1


def test_attributes_read_through_the_dictionary_count() -> None:
    class Sly(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y * 2 if vars(self)["index"] == 3 else y

    model = Stack([Sly(index=i) for i in range(6)])
    assert same_graph(model)
    assert [op.kind for op in capture(model, BATCH).ops].count("aten.mul") == 6 + 1


def test_an_object_that_blocks_share_and_write_into_is_traced_in_full() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.shared.count += 1
            y = super().forward(x)
            return y * 2 if self.shared.count == 4 else y

    class Resetting(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            self.counter.count = 0
            return super().forward(x, labels)

    model = Resetting([Counting(index=i) for i in range(6)])
    counter = model.counter = Counter()
    for block in model.blocks:
        block.shared = counter
    graph = capture(model, BATCH)
    assert any("write into" in note for note in graph.notes)
    assert [op.kind for op in graph.ops].count("aten.mul") == 6 + 1
    assert counter.count == 0


def test_a_shared_object_that_nobody_writes_into_does_not_matter() -> None:
    model = stack()
    for block in model.blocks:
        block.shared = {"rates": [0.1, 0.2]}
    assert distinct(model) == 1


def freeze_inside(self: nn.Module, mode: bool = True) -> nn.Module:
    """Training mode with the dropout of some blocks left out."""
    nn.Module.train(self, mode)
    for module in list(self.modules()):
        if isinstance(module, Block) and module.index in (1, 4):
            module.drop.eval()
    return self


def keep_off(self: nn.Module, mode: bool = True) -> nn.Module:
    """Never in training mode."""
    return nn.Module.train(self, False)


def own_train_of_the_model(model: Stack) -> None:
    model.train = types.MethodType(freeze_inside, model)


def own_train_of_a_module_in_a_block(model: Stack) -> None:
    for at in (1, 4):
        model.blocks[at].drop.train = types.MethodType(keep_off, model.blocks[at].drop)


@pytest.mark.parametrize("change", [own_train_of_the_model, own_train_of_a_module_in_a_block])
def test_a_module_with_its_own_idea_of_training_mode(change: Any) -> None:
    model = stack()
    change(model)
    model.train()
    assert same_graph(model)
    on = [op for op in capture(model, BATCH).ops if op.attributes.get("train") is True]
    assert len(on) == 4


def test_a_block_that_is_never_called_keeps_its_parameters() -> None:
    class Skipping(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            for block in list(self.blocks)[:-1]:
                x = block(x)
            return nn.functional.cross_entropy(self.head(x), labels)

    model = Skipping([Block(index=i) for i in range(6)])
    graph = capture(model, BATCH)
    names = {name for i in graph.parameters() for name in graph.tensors[i].names}
    assert names == set(dict(model.named_parameters()))


def test_a_forward_hook_keeps_its_block_out() -> None:
    model = stack()
    model.blocks[3].register_forward_hook(lambda module, inputs, output: output * 3)
    assert same_graph(model)
    assert capture(model, BATCH).digest() != capture(stack(), BATCH).digest()


def test_a_hook_deep_inside_a_block_keeps_it_out() -> None:
    model = stack()
    model.blocks[3].up.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,))
    assert same_graph(model)


def test_a_tied_weight_keeps_its_blocks_out() -> None:
    model = stack()
    model.blocks[4].up.weight = model.blocks[1].up.weight
    graph = capture(model, BATCH)
    assert same_graph(model)
    tied = [t for t in graph.tensors if len(t.names) > 1]
    assert [t.names for t in tied] == [("blocks.1.up.weight", "blocks.4.up.weight")]


def test_an_index_that_is_read_splits_the_behaviours() -> None:
    model = stack(6, IndexedBlock)
    assert same_graph(model)
    counted = [op.kind for op in capture(model, BATCH).ops].count("aten.mul")
    assert counted == 6 + 2


def test_an_index_that_nobody_reads_does_not_matter() -> None:
    assert len({block.index for block in stack().blocks}) == 6
    assert distinct(stack()) == 1


def test_glue_between_blocks_that_depends_on_the_index_is_kept() -> None:
    class Glued(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            for i, block in enumerate(self.blocks):
                x = block(x)
                if i == 4:
                    x = torch.tanh(x)
            return nn.functional.cross_entropy(self.head(x), labels)

    model = Glued([Block(index=i) for i in range(6)])
    assert distinct(model) == 1
    assert same_graph(model)
    assert [op.kind for op in capture(model, BATCH).ops].count("aten.tanh") == 1


def test_alternating_blocks_are_two_behaviours() -> None:
    model = stack(8)
    for block in list(model.blocks)[::2]:
        block.gated = True
    assert distinct(model) == 2
    assert same_graph(model)


def test_a_block_called_with_other_arguments_is_another_behaviour() -> None:
    class Optional(Block):
        def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            return y if bias is None else y + bias

    class Model(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            first = x
            for i, block in enumerate(self.blocks):
                x = block(x, first if i > 2 else None)
            return nn.functional.cross_entropy(self.head(x), labels)

    model = Model([Optional(index=i) for i in range(6)])
    assert distinct(model) == 2
    assert same_graph(model)


def test_a_block_that_writes_into_its_input_is_traced_in_full() -> None:
    class Writing(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.down(torch.relu(self.up(self.norm(x))))
            return x.add_(y)

    model = Stack([Writing(index=i) for i in range(5)])
    batch = (torch.empty(4, 8), BATCH[1])

    class Start(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, 8)
            self.stack = model

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.stack(self.embed(x), labels)

    graph = capture(Start(), batch)
    assert any("Traced in full" in note and "writes into its input" in note for note in graph.notes)
    assert graph.digest() == capture(Start(), batch, fold=False).digest()


def test_a_block_given_an_object_with_state_is_traced_in_full() -> None:
    class Store:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    class Storing(Block):
        def forward(self, x: Tensor, store: Store) -> Tensor:
            store.seen.append(x)
            return super().forward(x)

    class Model(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            store = Store()
            for block in self.blocks:
                x = block(x, store)
            return nn.functional.cross_entropy(self.head(x + store.seen[2]), labels)

    model = Model([Storing(index=i) for i in range(5)])
    graph = capture(model, BATCH)
    assert any("is given a Store" in note for note in graph.notes)
    assert graph.digest() == capture(model, BATCH, fold=False).digest()


def test_a_part_of_a_block_used_from_outside_is_traced_in_full() -> None:
    class Model(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) + block.down(block.up(x))
            return nn.functional.cross_entropy(self.head(x), labels)

    model = Model([Block(index=i) for i in range(5)])
    assert same_graph(model)
    assert any("used from outside" in note for note in capture(model, BATCH).notes)


def test_no_grad_around_blocks_stops_their_gradients() -> None:
    class Model(Stack):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                for block in list(self.blocks)[:4]:
                    x = block(x)
            for block in list(self.blocks)[4:]:
                x = block(x)
            return nn.functional.cross_entropy(self.head(x), labels)

    model = Model([Block(index=i) for i in range(8)])
    graph = capture(model, BATCH)
    assert same_graph(model)
    linear = [op for op in graph.ops if op.kind == "aten.linear"]
    flows = [graph.tensors[op.results[0]].requires_grad for op in linear]
    assert flows == [False] * 8 + [True] * 9


def test_the_users_model_is_left_alone() -> None:
    model = stack().eval()
    before = {path: (type(m), set(vars(m))) for path, m in model.named_modules()}
    capture(model, BATCH)
    assert {path: (type(m), set(vars(m))) for path, m in model.named_modules()} == before
    assert not any(module.training for module in model.modules())


@draws(15)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.1])),
        min_size=3,
        max_size=9,
    )
)
def test_random_stacks_fold_to_the_graph_of_a_full_trace(rows: list[Any]) -> None:
    model = stack(len(rows))
    for block, (gated, scale, rate) in zip(model.blocks, rows, strict=True):
        block.gated, block.scale, block.drop.p = gated, scale, rate
    assert same_graph(model)
    folded = distinct(model)
    assert folded is None or folded <= len(set(rows))


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama3-8b-tiny", 5), ("t5-large-tiny", 4), ("mixtral-8x7b-tiny", 4), ("gpt2-tiny", 4)],
)
def test_zoo_models_fold_to_the_graph_of_a_full_trace(name: str, layers: int) -> None:
    model, args, kwargs = zoo.build(name, layers=layers)
    folded, full = (capture(model, args, kwargs, fold=flag) for flag in (True, False))
    assert folded.notes == ()
    assert folded.digest() == full.digest()


@pytest.mark.parametrize("name", ["resnet50-tiny", "inceptionv3-tiny", "transformer-tiny"])
def test_zoo_models_of_fixed_depth(name: str) -> None:
    model, args, kwargs = zoo.build(name)
    folded, full = (capture(model, args, kwargs, fold=flag) for flag in (True, False))
    assert folded.digest() == full.digest()
