"""Splits found by running an operator in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.capture import capture_program
from shardfold.capture.experiment import CACHE, find_splits
from shardfold.capture.program import Invocation, Slot
from shardfold.capture.small_call import shrunk
from shardfold.graph import Graph, TensorType
from shardfold.operators import Rule, rules_of


@torch.library.custom_op("tested::gate", mutates_args=())
def gate(x: Tensor, w: Tensor) -> Tensor:
    return x * w[None, :]


@gate.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


gate.register_autograd(
    lambda ctx, g: (g * ctx.saved[1][None, :], (g * ctx.saved[0]).sum(0)),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "saved", inputs),
)


@torch.library.custom_op("tested::lies", mutates_args=())
def lies(x: Tensor) -> Tensor:
    """Its values could be split by rows, its gradient not."""
    return x * 2


@lies.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


lies.register_autograd(lambda ctx, g: g / g.norm(dim=0))


@torch.library.custom_op("tested::nothing", mutates_args=())
def nothing(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@nothing.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


nothing.register_autograd(lambda ctx, g: g * 0)


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Of(nn.Module):
    """A function of parameters, and its sum."""

    def __init__(self, function: Any, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.given = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)

    def forward(self, *others: Tensor) -> Tensor:
        made = self.function(*self.given, *others)
        return (made.abs() if made.is_complex() else made).sum()


def graph_of(function: Any, *shapes: tuple[int, ...], others: tuple[Tensor, ...] = ()) -> Graph:
    return capture_program(Of(function, *shapes), others).graph


def first_rule(function: Any, *shapes: tuple[int, ...], others: tuple[Tensor, ...] = ()) -> Rule:
    return rules_of(graph_of(function, *shapes, others=others))[0]


FIFTEEN = [
    (torch.erfc, [(64, 48)], "i0 i1 -> i0 i1"),
    (lambda x: x.tile(2, 1), [(64, 48)], "i0 i1 -> (n0 i0) i1"),
    (lambda x: x.repeat_interleave(4, 2), [(8, 128, 16, 64)], "i0 i1 i2 i3 -> i0 i1 (i2 n0) i3"),
    (torch.view_as_complex, [(16, 128, 2)], "i0 i1 . -> i0 i1"),
    (F.glu, [(64, 128)], "i0 (n0 i1) -> i0 i1"),
    (torch.bilinear, [(64, 32), (64, 48), (20, 32, 48)], "i0 i1, i0 i2, i3 i1 i2 -> i0 i3"),
    (
        lambda x, y: torch.tensordot(x, y, 2),
        [(64, 32, 48), (32, 48, 100)],
        "i0 i1 i2, i1 i2 i3 -> i0 i3",
    ),
    (torch.cdist, [(8, 20, 32), (8, 30, 32)], "i0 i1 ., i0 i2 . -> i0 i1 i2"),
    (
        lambda x: F.interpolate(x, scale_factor=2),
        [(16, 8, 32, 24)],
        "i0 i1 i2 i3 -> i0 i1 (i2 n0) (i3 n1)",
    ),
    (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        [(16, 8, 32, 24)],
        "i0 i1 . . -> i0 i1 . .",
    ),
    (
        lambda x: F.pixel_shuffle(x, 2),
        [(16, 64, 32, 24)],
        "i0 (i1 n0) i2 i3 -> i0 i1 (i2 n1) (i3 n2)",
    ),
    (torch.kron, [(16, 64), (20, 30)], "i0 i1, i2 i3 -> (i0 i2) (i1 i3)"),
    (F.triplet_margin_loss, [(64, 128)] * 3, "i0 ., i0 ., i0 . -> "),
    (torch.linalg.cholesky, [(16, 32, 32)], "i0 . . -> i0 . ."),
    (lambda x, w: gate(x, w), [(64, 48), (48,)], "i0 i1, i1 -> i0 i1"),
]


@pytest.mark.parametrize(("function", "shapes", "expected"), FIFTEEN, ids=[e for *_, e in FIFTEEN])
def test_splits_are_those_that_there_are(function: Any, shapes: list[Any], expected: str) -> None:
    rule = first_rule(function, *shapes)
    assert rule.found
    assert str(rule) == expected


def test_a_split_without_its_gradient_does_not_hold() -> None:
    assert str(first_rule(lambda x: lies(x), (64, 48))) == ". i0 -> . i0"


def test_a_mean_counts_each_part_by_its_share() -> None:
    rule = first_rule(F.triplet_margin_loss, *[(64, 128)] * 3)
    assert rule.means == {"i0"}
    assert rule.operator.is_mean(None)  # type: ignore[arg-type]


def test_sums_pass_through_what_is_linear() -> None:
    assert first_rule(lambda x: x.tile(2, 1), (16, 64)).linear == (0,)
    assert first_rule(F.glu, (64, 128)).linear == ()
    assert first_rule(torch.polar, (64, 32), (64, 32)).linear == ()  # backward asks for a sign


def test_what_autograd_keeps_is_seen() -> None:
    assert first_rule(torch.kron, (16, 64), (20, 30)).saves == (0, 1)
    assert first_rule(lambda x: x.tile(2, 1), (16, 64)).saves == ()
    assert first_rule(torch.erfc, (16, 64)).saves == (0,)


def test_a_product_counts_as_matrix_work() -> None:
    rule = first_rule(torch.bilinear, (64, 32), (64, 48), (20, 32, 48))
    assert (rule.engine, rule.flops * rule.points) == ("matrix", 2 * 64 * 20 * 32 * 48)


def test_what_cannot_be_told_has_no_rule() -> None:
    graph = graph_of(lambda x: nothing(x), (64, 48))
    assert graph.ops[0].kind.startswith("tested.")
    assert graph.ops[0].splits is None


def test_a_function_with_its_own_backward_is_tried_too() -> None:
    graph = graph_of(lambda x: Straight.apply(x), (64, 48))
    assert graph.ops[0].kind == "shardfold.function"
    assert str(rules_of(graph)[0]) == "i0 i1 -> i0 i1"


def test_indices_are_drawn_within_the_table() -> None:
    index = torch.zeros(10, 6, dtype=torch.long)
    rule = first_rule(torch.take, (64, 48), others=(index,))
    assert str(rule) == ". ., i0 i1 -> i0 i1"


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x, y: x.double().type_as(y), "aten.to"),
        (lambda x, y: x[:1].expand_as(y), "aten.expand"),
        (lambda x, y: x.flatten().view_as(y), "aten.view"),
        (lambda x, y: y.new_ones(8, 12) * x, "aten.ones"),
    ],
)
def test_a_tensor_is_not_read_for_its_dtype_or_shape(function: Any, kind: str) -> None:
    graph = graph_of(function, (8, 12), (8, 12))
    assert kind in [op.kind for op in graph.ops]
    read = {graph.tensors[t].name for op in graph.ops for t in op.inputs}
    assert "given.1" not in read


def test_every_process_finds_the_same() -> None:
    call = Invocation(torch.ops.aten.glu.default, {"self": Slot(0), "dim": 1})
    kinds = (TensorType((64, 96), "float32"),), (TensorType((64, 48), "float32"),)
    first = find_splits(call, *kinds)
    CACHE.clear()
    assert find_splits(call, *kinds) == first
    assert len(CACHE) == 1
    find_splits(call, (TensorType((128, 192), "float32"),), (TensorType((128, 96), "float32"),))
    assert len(CACHE) == 1, "the same pattern of sizes is tried once"


def test_the_mode_of_the_caller_makes_no_difference() -> None:
    kinds = (TensorType((64, 48), "float32"),), (TensorType((64, 48), "float32"),)
    call = Invocation(torch.ops.tested.lies.default, {"x": Slot(0)})
    torch.manual_seed(3)
    state = torch.get_rng_state()
    CACHE.clear()
    with torch.device("meta"), torch.no_grad():
        found = find_splits(call, *kinds)
    assert found is not None
    assert found.operands == (((), ("i0",)),)
    assert torch.equal(torch.get_rng_state(), state)


def test_shrunk_sizes_keep_what_is_equal_and_what_divides() -> None:
    (a, b), *_ = shrunk([(4096, 1024, 2), (1024, 1)], [4])
    assert a[1] == b[0] != a[0]
    assert a[0] % 4 == a[1] % 4 == 0
    assert (a[2], b[1]) == (2, 1)
