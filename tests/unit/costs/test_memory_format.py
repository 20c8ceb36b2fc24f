import math

import pytest
import torch
from torch import nn

from shardfold.capture import capture
from shardfold.costs.memory_format import _of_view, access_of
from shardfold.graph import Graph, Op, Operand, Tensor, TensorType
from shardfold.operators import Access, rules_of
from shardfold.sharding import find_subdims


def graph(*ops: Op, shapes: dict[int, tuple[int, ...]]) -> Graph:
    written = {t for op in ops for t in op.results}
    tensors = tuple(
        Tensor(
            (f"t{i}",),
            TensorType(shape, "float32"),
            "activation" if i in written else "parameter",
            True,
        )
        for i, shape in sorted(shapes.items())
    )
    return Graph(tensors, ops, max(written))


def accesses(made: Graph) -> list[Access]:
    subdims = find_subdims(made, rules_of(made))
    return [access_of(made, subdims, i) for i in range(len(made.ops))]


def test_a_reshape_of_a_transposed_tensor_copies_and_of_a_plain_one_does_not() -> None:
    turned = Op("a", "aten.transpose", (Operand("self", 0),), (1,), {"dim0": 0, "dim1": 1})
    copied = Op("b", "aten.reshape", (Operand("self", 1),), (2,))
    again = Op("c", "aten.reshape", (Operand("self", 2),), (3,))
    made = graph(turned, copied, again, shapes={0: (4, 8), 1: (8, 4), 2: (32,), 3: (2, 16)})
    assert [access.copies for access in accesses(made)] == [False, True, False]


@pytest.mark.parametrize(
    ("before", "order", "after", "lies"),
    [
        ((2, 12, 8), (0, 2, 1), (2, 3, 4, 8), (0, 3, 1, 2)),  # a dim is split where it lies
        ((2, 3, 4, 8), (0, 3, 1, 2), (2, 12, 8), (0, 2, 1)),  # neighbours in memory are merged
        ((2, 8, 12), (0, 2, 1), (2, 96), None),  # and others are not
        ((2, 3, 4), (0, 2, 1), (2, 1, 3, 4), (1, 0, 3, 2)),
        ((4, 2, 3), (1, 0, 2), (4, 6), None),
        ((4, 6), None, (24,), None),
        ((0, 6), (1, 0), (0, 2, 3), (0, 1, 2)),
    ],
)
def test_a_view_splits_and_merges_dims_as_torch_does(before, order, after, lies) -> None:
    assert _of_view(order, before, after) == lies
    if order is not None and math.prod(before):
        plain = torch.empty([before[dim] for dim in order])
        tensor = plain.permute([order.index(dim) for dim in range(len(before))])
        if lies is None:
            with pytest.raises(RuntimeError):
                tensor.view(after)
        else:
            strides = tensor.view(after).stride()
            wide = [dim for dim in lies if after[dim] > 1]
            assert wide == sorted(wide, key=lambda dim: -strides[dim])


def test_an_operand_with_other_neighbours_is_read_across() -> None:
    turned = Op("a", "aten.transpose", (Operand("self", 0),), (2,), {"dim0": 1, "dim1": 2})
    alone = Op("b", "aten.relu", (Operand("self", 2),), (3,))
    mixed = Op("c", "aten.mul", (Operand("self", 3), Operand("other", 1)), (5,))
    wider = Op("d", "aten.mul", (Operand("self", 4), Operand("other", 1)), (6,))
    shapes = {0: (2, 4, 8), **dict.fromkeys((1, 2, 3, 5), (2, 8, 4)), 4: (1, 2, 8, 4)}
    found = accesses(graph(turned, alone, mixed, wider, shapes={**shapes, 6: (1, 2, 8, 4)}))
    assert [access.is_across for access in found] == [False, False, True, False]


def test_transposed_twice_is_plain_again() -> None:
    swap = {"dim0": 0, "dim1": 1}
    there = Op("a", "aten.transpose", (Operand("self", 0),), (1,), swap)
    back = Op("b", "aten.transpose", (Operand("self", 1),), (2,), swap)
    flat = Op("c", "aten.reshape", (Operand("self", 2),), (3,))
    made = graph(there, back, flat, shapes={0: (4, 8), 1: (8, 4), 2: (4, 8), 3: (32,)})
    assert not accesses(made)[2].copies


def test_a_broadcast_operand_is_read_by_strides() -> None:
    plain = Op("a", "aten.mul", (Operand("self", 0), Operand("other", 1)), (3,))
    broad = Op("b", "aten.mul", (Operand("self", 3), Operand("other", 2)), (4,))
    shapes = {0: (4, 8), 1: (4, 8), 2: (8,), 3: (4, 8), 4: (4, 8)}
    made = graph(plain, broad, shapes=shapes)
    assert [access.is_strided for access in accesses(made)] == [False, True]


@pytest.mark.parametrize("is_last", [False, True])
def test_no_fused_attention_reads_a_mask_whose_last_dim_is_not_the_fastest(is_last: bool) -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.empty(4, 8, 8) if is_last else torch.empty(8, 8, 4))

        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            bias = self.bias if is_last else self.bias.permute(2, 0, 1)
            is_seen = torch.ones(8, 8, dtype=torch.bool).tril()
            mask = torch.where(is_seen, bias.unsqueeze(0), -1e9)
            return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask).sum()

    made = capture(Biased(), (torch.empty(2, 4, 8, 16), torch.empty(2, 4, 8, 16)))
    found = [a for a in accesses(made) if a.kind.endswith("scaled_dot_product_attention")]
    assert [access.is_strided for access in found] == [not is_last]


def test_readers_share_the_additions_of_their_gradients() -> None:
    ops = [Op(f"n{i}", "aten.neg", (Operand("self", 0),), (i,)) for i in (1, 2, 3)]
    made = graph(*ops, shapes=dict.fromkeys(range(4), (4, 8)))
    assert sum(access.adds[0] for access in accesses(made)) == 2.0


def test_a_dropout_of_nothing_is_idle() -> None:
    kept = Op("a", "aten.dropout", (Operand("input", 0),), (1,), {"p": 0.0, "train": True})
    made = graph(kept, shapes={0: (4, 8), 1: (4, 8)})
    assert accesses(made)[0].is_idle


def test_channels_stay_last_through_convolutions_and_sums():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = nn.LayerNorm(8), nn.Conv2d(8, 8, 3, padding=1, groups=8)

        def forward(self, x):
            y = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return (self.conv(self.conv(y)) + self.conv(x)).sum()

    graph = capture(Block(), (torch.zeros(2, 8, 4, 4),))
    subdims = find_subdims(graph, rules_of(graph))
    found = [
        access_of(graph, subdims, i).is_channels_last
        for i, op in enumerate(graph.ops)
        if op.kind == "aten.conv2d"
    ]
    assert found == [True, True, False]


def test_a_gradient_that_was_cut_is_copied_where_its_tensor_was_reshaped():
    def accesses(cuts):
        class Heads(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(8, 8)

            def forward(self, x):
                y = self.linear(x).view(2, 4, 2, 4).transpose(1, 2)
                y = torch.cat((y[..., 2:], y[..., :2]), -1) if cuts else y * 2
                return y.transpose(1, 2).reshape(2, 4, 8).sum()

        graph = capture(Heads(), (torch.zeros(2, 4, 8),))
        subdims = find_subdims(graph, rules_of(graph))
        return {op.kind: access_of(graph, subdims, i) for i, op in enumerate(graph.ops)}

    assert accesses(cuts=True)["aten.view"].copies_gradient
    assert accesses(cuts=True)["aten.cat"].is_strided
    assert not accesses(cuts=False)["aten.view"].copies_gradient
