"""Masks in closed form are what torch computes; attention loses only those that say "causal"."""

from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor, nn

from draws import draws
from shardfold.capture import capture
from shardfold.capture.causal_masks import Mask, Positions, forms_of
from shardfold.graph import Graph, Op

MakeMask = Callable[[int, int], Tensor]
COMPARISONS = {"<=": torch.le, "<": torch.lt, ">=": torch.ge, ">": torch.gt, "==": torch.eq}


class Attend(nn.Module):
    """Attention under a mask that is made in forward; keys and values may have few heads."""

    def __init__(self, mask: MakeMask, few: int = 4) -> None:
        super().__init__()
        self.mask, self.few = mask, few
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 4 * few)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k = self.key(x).unflatten(-1, (self.few, 4)).transpose(1, 2)
        if self.few != 4:
            b, h, s, d = k.shape
            k = k[:, :, None].expand(b, h, 4 // h, s, d).reshape(b, 4, s, d)
        mask = self.mask(x.shape[1], x.shape[1])
        return F.scaled_dot_product_attention(q, k, k, mask).square().sum()


def attention(mask: MakeMask, few: int = 4) -> tuple[Graph, Op]:
    graph = capture(Attend(mask, few), (torch.zeros(2, 8, 16),))
    (op,) = (op for op in graph.ops if op.kind.endswith("attention"))
    return graph, op


def positions(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    return torch.arange(rows)[:, None], torch.arange(columns)[None]


def causal_of_positions(rows: int, columns: int) -> Tensor:
    q, k = positions(rows, columns)
    return (k <= q)[None, None]


def packed(rows: int, columns: int) -> Tensor:
    """Causal within packed sequences, of which positions that go on make one."""
    place = torch.arange(rows).unsqueeze(0).expand(2, -1)
    number = (torch.diff(place, prepend=place[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(2)[:, None, None, None]
    q, k = (t[None, None] for t in positions(rows, columns))
    return (k <= q) & (number[batch, q] == number[batch, k])


CAUSAL = {
    "triangle": lambda r, c: torch.ones(r, c, dtype=torch.bool).tril(),
    "positions": causal_of_positions,
    "the other way round": lambda r, c: torch.ge(*positions(r, c)),
    "strict": lambda r, c: positions(r, c)[1] < positions(r, c)[0] + 1,
    "one sequence": packed,
    "minus infinity": lambda r, c: torch.full((r, c), -math.inf).triu(1),
    "minus infinity, cast": lambda r, c: torch.full((r, c), -math.inf).double().triu(1).float(),
    "a window wider than the sequence": lambda r, c: (
        causal_of_positions(r, c) & (positions(r, c)[1] > positions(r, c)[0] - 8)
    ),
}
OTHER = {
    "one more": lambda r, c: torch.ones(r, c, dtype=torch.bool).tril(1),
    "one less": lambda r, c: torch.ones(r, c, dtype=torch.bool).tril(-1),
    "future": lambda r, c: torch.le(*positions(r, c)),
    "minus infinity on the diagonal": lambda r, c: torch.full((r, c), -math.inf).triu(),
    "minus infinity below": lambda r, c: torch.full((r, c), -math.inf).tril(-1),
    "a large number": lambda r, c: torch.full((r, c), -1e9).triu(1),
    "as true and false": lambda r, c: torch.full((r, c), -math.inf).triu(1).bool(),
    "window": lambda r, c: (
        causal_of_positions(r, c) & (positions(r, c)[1] > positions(r, c)[0] - 7)
    ),
    "every second": lambda r, c: 2 * positions(r, c)[1] <= positions(r, c)[0],
    "two sequences": lambda r, c: (
        causal_of_positions(r, c) & (positions(r, c)[0] // 4 == positions(r, c)[1] // 4)
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_said_and_not_made(name: str) -> None:
    graph, op = attention(CAUSAL[name])
    assert op.attributes["is_causal"] is True
    assert [o.name for o in op.operands] == ["query", "key", "value"]
    assert not [t for t in graph.tensors if t.type.dtype == "bool"]


@pytest.mark.parametrize("name", OTHER)
def test_any_other_mask_stays(name: str) -> None:
    _, op = attention(OTHER[name])
    assert op.attributes["is_causal"] is False
    assert "attn_mask" in [o.name for o in op.operands]


def test_a_mask_that_hides_nothing_goes() -> None:
    _, op = attention(lambda r, c: torch.ones(r, c, dtype=torch.bool))
    assert op.attributes["is_causal"] is False
    assert [o.name for o in op.operands] == ["query", "key", "value"]


def test_a_mask_from_the_batch_stays() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            mask = places[:, None, None, :] <= places[:, None, :, None]
            y = x * self.weight
            return F.scaled_dot_product_attention(y, y, y, mask).sum()

    batch = torch.zeros(2, 1, 8, 4), torch.arange(8).expand(2, 8).clone()
    (op,) = (op for op in capture(Padded(), batch).ops if op.kind.endswith("attention"))
    assert "attn_mask" in [o.name for o in op.operands]


def test_shared_heads_are_not_copied_beside_a_mask_that_goes() -> None:
    graph, op = attention(CAUSAL["triangle"], few=2)
    assert op.attributes["enable_gqa"] is True
    assert [graph.tensors[t].type.shape for t in op.inputs] == [
        (2, 4, 8, 4),
        (2, 2, 8, 4),
        (2, 2, 8, 4),
    ]


class Shown(nn.Module):
    """A mask that must be made, since its values are the result."""

    def __init__(self, mask: Callable[[], Tensor]) -> None:
        super().__init__()
        self.mask, self.weight = mask, nn.Parameter(torch.ones(()))

    def forward(self) -> Tensor:
        return (self.mask().float() * self.weight).sum()


def evaluated(form: Positions, shape: tuple[int, ...]) -> Tensor:
    total = torch.full(shape, form.constant)
    for back, coefficient in enumerate(reversed(form.coefficients)):
        sizes = [-1 if d == len(shape) - 1 - back else 1 for d in range(len(shape))]
        total = total + coefficient * torch.arange(shape[-1 - back]).view(sizes)
    return total


@draws(20)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    starts=st.tuples(st.integers(-3, 3), st.integers(-3, 3)),
    skips=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    names=st.lists(st.sampled_from(sorted(COMPARISONS)), min_size=1, max_size=3),
    shifts=st.lists(st.integers(-3, 3), min_size=3, max_size=3),
    diagonal=st.none() | st.integers(-2, 2),
)
def test_closed_forms_are_what_torch_computes(
    rows: int,
    columns: int,
    starts: tuple[int, int],
    skips: tuple[int, int],
    names: list[str],
    shifts: list[int],
    diagonal: int | None,
) -> None:
    def mask() -> Tensor:
        q = torch.arange(starts[0], starts[0] + rows).unsqueeze(1).expand(2, -1, -1)
        k = torch.arange(skips[0] + skips[1] * columns)[skips[0] :: skips[1]] + starts[1]
        found = torch.ones((), dtype=torch.bool)
        for name, shift in zip(names, shifts, strict=False):
            found = found & COMPARISONS[name](q - shift, k)
        return found if diagonal is None else found.tril(diagonal)

    graph = capture(Shown(mask))
    (cast,) = (op for op in graph.ops if op.kind == "aten.to")
    form = forms_of(graph.tensors, graph.ops)[cast.inputs[0]]
    assert isinstance(form, Mask)
    truth, shape = mask(), graph.tensors[cast.inputs[0]].type.shape
    closed = torch.ones(shape, dtype=torch.bool)
    for bound in form.bounds:
        closed &= evaluated(bound, shape) <= 0
    assert torch.equal(closed, truth)
    assert bool(form.binding(shape)) == (not bool(truth.all()))
