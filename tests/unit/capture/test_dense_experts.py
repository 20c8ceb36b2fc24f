"""Mixtures that send every row through every expert: only the k that count are left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.capture import capture_program
from shardfold.operators import rules_of
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.sharding import find_subdims

EXPERTS, WIDE, INNER, ROUTED = 4, 6, 5, "shardfold.routed_experts"
Way = Callable[["Mixture", Tensor], Tensor]


class Mixture(nn.Module):
    """Rows through experts in one of the ways below; the loss is of rows that differ."""

    def __init__(self, way: Way, k: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.k = way, k
        self.router = nn.Linear(WIDE, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDE, 2 * INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDE))

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        largest = self.router(x).topk(self.k, -1)
        return largest.values, largest.indices

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x.sin()).square().sum()


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def scores(model: Mixture, x: Tensor, off: float = -torch.inf) -> Tensor:
    values, expert = model.chosen(x)
    return torch.full_like(model.router(x), off).scatter_(-1, expert, values)


def repeated(model: Mixture, x: Tensor) -> Tensor:
    """As Llama-4 does it."""
    rows = x.reshape(-1, WIDE)
    share = scores(model, rows).float().sigmoid().to(x.dtype)
    given = rows.repeat(EXPERTS, 1) * share.transpose(0, 1).reshape(-1, 1)
    inner = gated(torch.bmm(given.view(EXPERTS, -1, WIDE), model.up))
    out = torch.bmm(inner, model.down).view(-1, WIDE)
    return out.reshape(EXPERTS, -1, WIDE).sum(dim=0)


def weighted_after(model: Mixture, x: Tensor) -> Tensor:
    """Shares are a softmax over the k; rows are broadcast, and lie in batches."""
    share = scores(model, x).softmax(-1)
    y = torch.matmul(gated(torch.matmul(x.reshape(-1, WIDE), model.up)), model.down)
    y = y.view(EXPERTS, *x.shape).permute(1, 2, 0, 3)
    return (y * share.unsqueeze(-1)).sum(2)


def masked(model: Mixture, x: Tensor) -> Tensor:
    """A softmax over all, what is not chosen is masked, and the rest is one again."""
    _, expert = model.chosen(x)
    own = model.router(x).softmax(-1)
    share = own * torch.zeros_like(own).scatter(-1, expert, 1.0)
    share = (share / share.sum(-1, keepdim=True)).view(-1, EXPERTS)
    first = torch.bmm(x.reshape(1, -1, WIDE).expand(EXPERTS, -1, -1), model.up)
    inner = F.gelu(first[..., :INNER]) * first[..., INNER:]
    return (torch.bmm(inner, model.down) * share.t()[..., None]).sum(0)


def all_count(model: Mixture, x: Tensor) -> Tensor:
    share = model.router(x.reshape(-1, WIDE)).softmax(-1)
    y = torch.matmul(gated(torch.matmul(x.reshape(-1, WIDE), model.up)), model.down)
    return (y * share.t().unsqueeze(-1)).sum(0)


def of_shares(
    share: Callable[[Mixture, Tensor], Tensor], between: Callable[[Tensor], Tensor] = gated
) -> Way:
    """Weighted first, by these shares, with this between the products."""

    def way(model: Mixture, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDE)
        given = rows.unsqueeze(0) * share(model, rows).t().unsqueeze(-1)
        return torch.bmm(between(torch.bmm(given, model.up)), model.down).sum(0)

    return way


def zero_off(model: Mixture, rows: Tensor) -> Tensor:
    return scores(model, rows, 0.0)


def half_off(model: Mixture, rows: Tensor) -> Tensor:
    return scores(model, rows, 0.0).sigmoid()


def twice(model: Mixture, rows: Tensor) -> Tensor:
    """The same expert more than once: a scatter keeps one of them."""
    values, expert = model.chosen(rows)
    return torch.zeros(len(rows), EXPERTS, dtype=rows.dtype).scatter(1, expert // 2, values * 0 + 1)


def across_rows(model: Mixture, rows: Tensor) -> Tensor:
    values, expert = model.chosen(rows)
    ranks = expert % len(rows)
    return torch.zeros(len(rows), EXPERTS, dtype=rows.dtype).scatter(0, ranks, values * 0 + 1)


def written_later(model: Mixture, x: Tensor) -> Tensor:
    rows = x.reshape(-1, WIDE).clone()
    share = scores(model, rows + 0.0).sigmoid()
    given = rows.unsqueeze(0) * share.detach().t().unsqueeze(-1)
    rows.mul_(2.0)
    y = torch.bmm(gated(torch.bmm(given, model.up)), model.down).sum(0)
    return y + rows + share.sum()


def rows_again(model: Mixture, x: Tensor) -> Tensor:
    """The rows of one sample, with the shares of all."""
    share = scores(model, x.reshape(-1, WIDE)).sigmoid()
    given = x[0].repeat(len(x) * EXPERTS, 1) * share.t().reshape(-1, 1)
    inner = gated(torch.bmm(given.view(EXPERTS, -1, WIDE), model.up))
    return torch.bmm(inner, model.down).sum(0)


def one_by_one(model: Mixture, x: Tensor) -> Tensor:
    """A sum over a stack, which is a product of nothing."""
    share = scores(model, x.reshape(-1, WIDE)).sigmoid()
    each = (gated(x @ model.up[e]) @ model.down[e] for e in range(EXPERTS))
    return torch.stack(list(each)).sum(0) * share.sum()


def without_gate(y: Tensor) -> Tensor:
    return F.silu(y[..., :INNER])


def never_zero(y: Tensor) -> Tensor:
    return torch.sigmoid(y[..., :INNER])


def over_experts(y: Tensor) -> Tensor:
    return gated(y) * y[..., INNER:].softmax(0)


def over_rows(y: Tensor) -> Tensor:
    return gated(y) - gated(y).mean(1, keepdim=True)


SENT: dict[str, tuple[Way, int]] = {
    "repeated, one": (repeated, 1),
    "repeated, two": (repeated, 2),
    "weighted after": (weighted_after, 2),
    "masked": (masked, 2),
    "masked, one": (masked, 1),
    "zero from the first": (of_shares(zero_off), 3),
    "half of the features is not read": (of_shares(zero_off, without_gate), 2),
}
WHOLE: dict[str, tuple[Way, int]] = {
    "all experts count": (all_count, 2),
    "what is not chosen is a half": (of_shares(half_off), 2),
    "an expert twice": (of_shares(twice), 2),
    "scattered over rows": (of_shares(across_rows), 1),
    "a zero gives more than zero": (of_shares(zero_off, never_zero), 2),
    "experts see each other": (of_shares(zero_off, over_experts), 2),
    "rows see each other": (of_shares(zero_off, over_rows), 2),
    "rows of another number": (rows_again, 2),
    "rows are written later": (written_later, 2),
    "experts one by one": (one_by_one, 2),
}


@pytest.mark.parametrize("name", [*SENT, *WHOLE])
def test_only_what_is_proven_is_sent_and_the_numbers_are_the_models(name: str) -> None:
    way, k = (SENT | WHOLE)[name]
    model, x = Mixture(way, k).double(), torch.randn(2, 7, WIDE, dtype=torch.float64)
    program = capture_program(model, (x,))
    kinds = [op.kind for op in program.graph.ops]
    assert (ROUTED in kinds) == (name in SENT)
    assert name in WHOLE or not {"aten.bmm", "aten.matmul"} & set(kinds)
    subdims = find_subdims(program.graph, rules_of(program.graph))
    ours = assemble(model, program, alone(program, subdims), Settings())
    found, expected = ours(x), model(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found.backward()
    expected.backward()
    theirs = dict(model.named_parameters())
    for path, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[path].grad, rtol=1e-10, atol=1e-12)
