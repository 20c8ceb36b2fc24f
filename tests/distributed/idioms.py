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


# Operators that no rule describes.


@torch.library.custom_op("idioms::scale", mutates_args=())
def scale(x: Tensor, by: Tensor) -> Tensor:
    """An operator of the user's own."""
    return x * by[None, :]


@scale.register_fake
def _(x: Tensor, by: Tensor) -> Tensor:
    return torch.empty_like(x)


scale.register_autograd(
    lambda ctx, g: (g * ctx.kept[1][None, :], (g * ctx.kept[0]).sum(0)),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "kept", inputs),
)


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def _distances(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = functional.glu(x @ m.w, dim=1)
    h = Straight.apply(scale(torch.erfc(h), m.by))
    far = torch.cdist(h, m.centres)
    both = functional.bilinear(h, far, m.b)
    mixed = torch.tensordot(both.unflatten(1, (2, 4)), m.t, 2).tanh()
    near = functional.cosine_similarity(mixed, y, dim=1)
    wide = torch.hstack([mixed, torch.sinc(near)[:, None].tile(1, 4)])
    return (
        functional.poisson_nll_loss(wide, y.abs().repeat_interleave(2, 1))
        + torch.logdet(torch.diag_embed(torch.cosh(mixed))).sum()
    )


def found_by_experiment() -> Built:
    shapes = {"w": (6, 16), "by": (8,), "centres": (6, 8), "b": (8, 8, 6), "t": (2, 4, 4)}
    return Written(_distances, **shapes), (torch.randn(8, 6), torch.randn(8, 4))


def _upscaled(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = functional.interpolate(m.of[0](x), scale_factor=2)
    h = functional.pixel_unshuffle(functional.pixel_shuffle(h, 2), 2)
    h = functional.channel_shuffle(functional.interpolate(h, scale_factor=2, mode="bilinear"), 2)
    h = functional.unfold(h, 2, stride=2).mean(2) + h.diagonal(0, 2, 3).sum(2).repeat(1, 4)
    return functional.multi_margin_loss(h, y)


def images_by_experiment() -> Built:
    return _images(_upscaled, nn.Conv2d(4, 8, 1))


def _grown(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Every row twice, and then windows of three: parts must be rows in a row."""
    h = functional.interpolate(m.of[0](x), scale_factor=2)
    return functional.cross_entropy(m.of[1](torch.tanh(h)).mean((2, 3)), y)


def windows_over_grown_rows() -> Built:
    return _images(_grown, nn.Conv2d(4, 6, 1), nn.Conv2d(6, 4, 3, padding=1))


# What no gradient comes back to, although it is made of parameters.


def _quantised(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The nearest code is passed straight through; a slice is read for its shape alone."""
    h = m.of[0](x)
    code = m.book[torch.cdist(h, m.book).argmin(-1)]
    held = (code - h.detach()).square().mean() + (h - code.detach()).square().mean()
    straight = h + (code - h).detach()
    ones = torch.ones_like(straight[:, :1]) - straight[:, 1:2].sign()
    return functional.cross_entropy(torch.cat([straight[:, 1:], ones], 1), y) + held


def nearest_code() -> Built:
    return _classes(_quantised, nn.Linear(6, 4), book=(12, 4))


def _stepped(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A cell in a loop: its first state and its input need no gradient."""
    h = x.new_zeros(len(x), 4)
    for step in x.split(2, 1):
        h = m.of[0](step, h)
    return functional.cross_entropy(h, y)


def cell_in_a_loop() -> Built:
    return _classes(_stepped, nn.GRUCell(2, 4))


def _turned(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Complex positions, and key heads that are repeated."""
    h = m.of[0](x)
    q, k = (h @ w for w in (m.q, m.k))
    turns = torch.polar(torch.ones(6, 2), torch.arange(12.0).view(6, 2))
    turns = turns.to(torch.complex128 if h.dtype == torch.float64 else torch.complex64)
    q, k = (
        torch.view_as_real(torch.view_as_complex(t.unflatten(2, (-1, 2, 2))) * turns[:, None])
        for t in (q, k)
    )
    q, k = q.flatten(3).type_as(h), k.flatten(3).type_as(h).repeat_interleave(2, dim=2)
    mask = torch.triu(torch.full((6, 6), -INF), diagonal=1).type_as(h)
    scores = q.transpose(1, 2) @ k.transpose(1, 2).mT + mask
    found = (scores.softmax(-1) @ h[:, None]).sum(1) @ m.o.T
    return functional.cross_entropy(found.flatten(0, 1), y.flatten())


def complex_rotary() -> Built:
    return _tokens(_turned, nn.Embedding(12, 8), q=(8, 16), k=(8, 8), o=(12, 8))


def _bagged(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    bags = [functional.embedding_bag(x, m.t, mode=mode) for mode in ("sum", "mean", "max")]
    return (sum(bags) @ m.w).square().mean() + (bags[0] * y[:, :4]).sum()


def bags() -> Built:
    return _tokens(_bagged, t=(12, 4), w=(4, 6))


def _bagged_raggedly(m: Any, x: Tensor, y: Tensor) -> Tensor:
    starts = m.starts[:-1]  # a tensor that is no buffer; the second bag is empty
    bags = functional.embedding_bag(x.flatten(), m.t, starts, mode="sum")
    shares = m.s.exp()[x.flatten()]
    more = functional.embedding_bag(x.flatten(), m.t, starts, mode="sum", per_sample_weights=shares)
    means = functional.embedding_bag(
        x.flatten(), m.t, m.starts, mode="mean", include_last_offset=True
    )
    return ((bags + more + means) @ m.w - y).square().mean()


def ragged_bags() -> Built:
    module, batch = _tokens(_bagged_raggedly, t=(12, 4), s=(12,), w=(4, 6))
    module.starts = torch.tensor([0, 7, 7, 12, 24])
    return module, batch


def _rearranged(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    h = torch.einsum("bsd,dhk->bhsk", m.t[x], m.heads) @ m.mix
    votes = torch.einsum("bhsk,hske->bhe", h, m.votes)
    gate = (1 - m.gate) * votes + m.gate.lerp(votes, 0.5)
    return gate.square().mean() + (y.float().mean() * m.votes.amax(1)).sum()


def weights_in_another_order() -> Built:
    """Products that copy a weight, and sums that do not need it again."""
    heads = {"heads": (6, 2, 4), "mix": (2, 4, 4), "votes": (2, 6, 4, 5)}
    return _tokens(_rearranged, t=(12, 6), gate=(5,), **heads)


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
        found_by_experiment,
        images_by_experiment,
        windows_over_grown_rows,
        nearest_code,
        cell_in_a_loop,
        complex_rotary,
        bags,
        ragged_bags,
        weights_in_another_order,
    )
}
