"""Small modules in the manner of users' code, each an idiom in which a runner can go wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

INF = math.inf
Built = tuple[nn.Module, tuple[Any, ...]]


class Written(nn.Module):
    """A module of parameters by shape, and a forward that is a function of it and the batch."""

    def __init__(
        self, forward: Callable[..., Tensor], *children: nn.Module, **shapes: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.function = forward
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) / 2))
        self.of = nn.ModuleList(children)

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(self, *given)


def _regression(forward: Callable[..., Tensor], *children: nn.Module, **shapes: Any) -> Built:
    batch = torch.randn(8, 6), torch.randn(8, 4)
    return Written(lambda m, x, y: (forward(m, x) - y).square().mean(), *children, **shapes), batch


def _classes(forward: Callable[..., Tensor], *children: nn.Module, **shapes: Any) -> Built:
    """Eight samples of six features, eight classes."""
    return Written(forward, *children, **shapes), (torch.randn(8, 6), torch.randint(4, (8,)))


def _tokens(forward: Callable[..., Tensor], *children: nn.Module, **shapes: Any) -> Built:
    batch = torch.randint(12, (4, 6)), torch.randint(12, (4, 6))
    return Written(forward, *children, **shapes), batch


def _images(forward: Callable[..., Tensor], *children: nn.Module, channels: int = 4) -> Built:
    batch = torch.randn(4, channels, 8, 8), torch.randint(4, (4,))
    return Written(forward, *children), batch


# Gradients of two parameters that autograd hands out as one tensor, or expanded.


def two_terms() -> Built:
    return _regression(lambda m, x: x @ (m.p + m.q), p=(6, 4), q=(6, 4))


def base_and_delta() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        return functional.linear(x, m.base + m.down @ m.up, m.shift + m.more)

    return _regression(forward, base=(4, 6), down=(4, 2), up=(2, 6), shift=(4,), more=(4,))


def one_term_twice() -> Built:
    return _regression(lambda m, x: x @ (m.p + m.p + m.q.T - m.p), p=(6, 4), q=(4, 6))


def positions_and_segments() -> Built:
    def forward(m: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        h = m.of[0](tokens) + m.positions + m.segments + (m.first + m.second)
        return functional.cross_entropy(m.of[1](h).flatten(0, 1), labels.flatten())

    children = nn.Embedding(12, 8), nn.Linear(8, 12)
    return _tokens(forward, *children, positions=(6, 8), segments=(6, 8), first=(8,), second=(8,))


def expanded_gradient() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.of[0](x) + m.bias.sum() + m.more.mean() + m.scalar

    return _regression(forward, nn.Linear(6, 4), bias=(4,), more=(3, 4), scalar=())


def through_views() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        joined = torch.cat([m.left, m.right], 0)
        both = torch.stack([m.p.view(4, 6), m.q.reshape(4, 6)]).sum(0)
        return x @ joined + x @ (m.p + m.q.view_as(m.p)) + functional.linear(x, both)

    return _regression(forward, left=(3, 4), right=(3, 4), p=(6, 4), q=(24,))


def summed_alone() -> Built:
    return _regression(lambda m, x: x[:, :4] * (m.p.sum(0) + m.q.sum(0)), p=(6, 4), q=(6, 4))


# Values that are masked out and not finite: a mask must select, not multiply.


def masked_logits() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.arange(8) >= 4
        logits = m.of[0](x).masked_fill(hidden, -INF)
        return functional.cross_entropy(logits, labels)

    return _classes(forward, nn.Linear(6, 8))


def masked_logits_with_weights() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        logits = m.of[0](x).masked_fill(torch.arange(8) >= 4, -INF)
        weight = torch.arange(1.0, 9.0, dtype=x.dtype)
        return functional.cross_entropy(logits, labels, weight)

    return _classes(forward, nn.Linear(6, 8))


def masked_soft_targets() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        wanted = functional.one_hot(labels, 8).to(x.dtype) * 0.5 + 0.0625
        return functional.cross_entropy(m.of[0](x).clamp(min=-9.0), wanted, label_smoothing=0.1)

    return _classes(forward, nn.Linear(6, 8))


def gathered_log_shares() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        logits = m.of[0](x).masked_fill(torch.arange(8) >= 4, -INF)
        shares = torch.log_softmax(logits, -1)
        picked = shares.gather(1, labels[:, None]).squeeze(1)
        return functional.nll_loss(shares, labels) - picked.mean()

    return _classes(forward, nn.Linear(6, 8))


def rows_not_finite() -> Built:
    """A table with rows of infinities and NaN that nobody reads."""

    def forward(m: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        rows = torch.arange(12)[:, None]
        table = m.table + torch.where((rows == 0) | (rows == 11), INF, 0.0).to(m.table.dtype)
        inside = tokens.clamp(1, 10)
        h = (
            functional.embedding(inside, table)
            + table[inside]
            + table.index_select(0, inside.flatten()).view(4, 6, 8)
        )
        return functional.cross_entropy(m.of[0](h).flatten(0, 1), labels.flatten())

    return _tokens(forward, nn.Linear(8, 12), table=(12, 8))


def attention_with_walls() -> Built:
    """A mask of minus infinities, by hand and by torch's own attention, causal and not."""

    def forward(m: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        x = m.of[0](tokens)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in m.of[1](x).chunk(3, -1))
        wall = torch.full((6, 6), -INF, dtype=x.dtype).triu(1)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2 + wall, -1)
        h = weights @ v + functional.scaled_dot_product_attention(q, k, v, attn_mask=wall)
        h = h + functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = m.of[2](h.transpose(1, 2).flatten(2))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return _tokens(forward, nn.Embedding(12, 8), nn.Linear(8, 24), nn.Linear(8, 12))


def row_sum_of_infinities() -> Built:
    """An addend that is not finite in places where nothing is picked."""

    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        wall = torch.where(torch.arange(8) < 4, 0.0, -INF).to(x.dtype)
        logits = functional.linear(x, m.weight, m.shift + wall)
        return functional.cross_entropy(logits, labels) + torch.logsumexp(logits, -1).mean()

    return _classes(forward, weight=(8, 6), shift=(8,))


# Parameters whose dims are used in pieces.


def packed_attention() -> Built:
    def forward(m: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        x = m.of[0](tokens)
        packed = m.of[1](x).view(4, 6, 3, 4, 2)
        q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
        h = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return functional.cross_entropy(m.of[2](h).flatten(0, 1), labels.flatten())

    return _tokens(forward, nn.Embedding(12, 8), nn.Linear(8, 24), nn.Linear(8, 12))


def packed_gate() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        gate, up = m.of[0](x).chunk(2, -1)
        return m.of[1](functional.silu(gate) * up)

    return _regression(forward, nn.Linear(6, 16), nn.Linear(8, 4))


def packed_halves() -> Built:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = (m.of[0](x) + m.shift).unflatten(-1, (2, 4)) * m.scale.view(2, 4)
        return h[:, 0] + h[:, 1].tanh()

    return _regression(forward, nn.Linear(6, 8), shift=(8,), scale=(8,))


# Batch norm, convolutions, pools, recurrent networks.


def norm_called_twice() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        one, other = (m.of[1](m.of[0](view)).relu().mean((2, 3)) for view in (x, x.flip(-1) * 2))
        return functional.cross_entropy(m.of[2](one + other), labels)

    return _images(forward, nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4))


def norm_of_all_batches() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        h = m.of[1](m.of[0](x)).relu().mean((2, 3))
        return functional.cross_entropy(m.of[3](m.of[2](h)), labels)

    children = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, momentum=None)
    last = nn.BatchNorm1d(8, momentum=None, affine=False), nn.Linear(8, 4)
    return _images(forward, *children, *last)


def norm_twice_of_all_batches() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        h = m.of[1](m.of[1](m.of[0](x)).relu() + 1).mean((2, 3))
        return functional.cross_entropy(m.of[2](h), labels)

    children = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.Linear(8, 4)
    return _images(forward, *children)


def same_padding() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        h = m.of[2](m.of[1](m.of[0](x)).relu()).relu().mean((2, 3))
        return functional.cross_entropy(m.of[3](h), labels)

    return _images(
        forward,
        nn.Conv2d(4, 8, 3, padding="same"),
        nn.Conv2d(8, 8, 4, padding="same"),
        nn.Conv2d(8, 8, (3, 5), padding="same", dilation=2, groups=2),
        nn.Linear(8, 4),
    )


def depthwise_and_group_norm() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        h = m.of[2](m.of[1](m.of[0](x)))
        return functional.cross_entropy(m.of[3](h.relu().mean((2, 3))), labels)

    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    children = nn.Conv2d(4, 8, 1), depthwise, nn.GroupNorm(2, 8), nn.Linear(8, 4)
    return _images(forward, *children)


def averages() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        h = m.of[0](x)
        a = functional.avg_pool2d(h, 3, 1, 1, count_include_pad=False)
        b = functional.avg_pool2d(h, 3, 2, 1, ceil_mode=True, count_include_pad=False)
        c = functional.avg_pool2d(h, 3, 1, 1, divisor_override=2)
        d = functional.max_pool2d(h, 3, 2, 1, ceil_mode=True)
        found = sum(t.mean((2, 3)) for t in (a, b, c, d))
        return functional.cross_entropy(m.of[1](found), labels)

    return _images(forward, nn.Conv2d(4, 8, 3, padding=1), nn.Linear(8, 4))


def scaled_by_frequency() -> Built:
    def forward(m: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        h = m.of[0](tokens) + m.of[1](labels)
        return functional.cross_entropy(m.of[2](h).flatten(0, 1), labels.flatten())

    one = nn.Embedding(12, 8, scale_grad_by_freq=True)
    other = nn.Embedding(12, 8, padding_idx=0)
    return _tokens(forward, one, other, nn.Linear(8, 12))


def recurrent_dropout() -> Built:
    """What is dropped is random: compared with itself under other plans, and at p = 0."""

    def forward(m: Any, tokens: Tensor, labels: Tensor) -> Tensor:
        h, _ = m.of[1](m.of[0](tokens))
        g, _ = m.of[2](h)
        return functional.cross_entropy(m.of[3](g).flatten(0, 1), labels.flatten())

    lstm = nn.LSTM(8, 6, 2, batch_first=True, dropout=0.3)
    gru = nn.GRU(6, 4, 2, batch_first=True, dropout=0.3, bidirectional=True)
    return _tokens(forward, nn.Embedding(12, 8), lstm, gru, nn.Linear(8, 12))


def grouped_and_instance_norm() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        h = m.of[1](m.of[0](x)).relu() + m.of[2](x)
        return functional.cross_entropy(m.of[3](h.amax((2, 3))), labels)

    norm = nn.InstanceNorm2d(8, affine=True)
    children = nn.Conv2d(4, 8, 3, padding=1, groups=4), norm, nn.Conv2d(4, 8, 1), nn.Linear(8, 4)
    return _images(forward, *children)


def summed_loss() -> Built:
    def forward(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        rows = functional.cross_entropy(m.of[0](x), labels, reduction="none", ignore_index=2)
        return rows.sum() / (labels != 2).sum() + m.of[0].weight.square().sum() * 0.01

    return _classes(forward, nn.Linear(6, 8))


IDIOMS: dict[str, Callable[[], Built]] = {
    make.__name__: make
    for make in (
        two_terms,
        base_and_delta,
        one_term_twice,
        positions_and_segments,
        expanded_gradient,
        through_views,
        summed_alone,
        masked_logits,
        masked_logits_with_weights,
        masked_soft_targets,
        gathered_log_shares,
        rows_not_finite,
        attention_with_walls,
        row_sum_of_infinities,
        packed_attention,
        packed_gate,
        packed_halves,
        norm_called_twice,
        norm_of_all_batches,
        norm_twice_of_all_batches,
        same_padding,
        depthwise_and_group_norm,
        averages,
        scaled_by_frequency,
        recurrent_dropout,
        grouped_and_instance_norm,
        summed_loss,
    )
}
