"""Sixty small modules in the manner of researchers' code, each with a batch; forward is the loss.

Written down before any of them was run. Each is a field's own idiom in a few lines: noise drawn in
forward, teachers and codebooks kept in buffers, scatters over edges, loops over time, Fourier
transforms, gradients taken inside of forward.
"""

# ruff: noqa: D102
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

BATCH = 8
MODULES: dict[str, Module] = {}


@dataclass(frozen=True, slots=True)
class Module:
    """A module and how its batch is made."""

    field: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]


def known(field: str, batch: Callable[[], tuple[Any, ...]]) -> Callable[[Any], Any]:
    """List a class of modules under its name."""

    def listed(made: Any) -> Any:
        MODULES[made.__name__] = Module(field, made, batch)
        return made

    return listed


def normal(*shape: int) -> Tensor:
    """Numbers around zero."""
    return torch.randn(*shape)


def whole(below: int, *shape: int) -> Tensor:
    """Whole numbers from zero."""
    return torch.randint(below, shape)


def mlp(*sizes: int, act: type[nn.Module] = nn.SiLU) -> nn.Sequential:
    """Linear layers with activations between."""
    layers: list[nn.Module] = []
    for k in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[k], sizes[k + 1]), act()]
    return nn.Sequential(*layers[:-1])


def images() -> tuple[Tensor]:
    """A batch of small images."""
    return (normal(BATCH, 3, 16, 16),)


def labelled_images() -> tuple[Tensor, Tensor]:
    """Images with classes."""
    return normal(BATCH, 3, 16, 16), whole(10, BATCH)


def rows() -> tuple[Tensor, Tensor]:
    """Features and targets."""
    return normal(BATCH, 16), normal(BATCH, 4)


def tokens() -> tuple[Tensor, Tensor]:
    """Sequences of features with a class for each step."""
    return normal(BATCH, 12, 16), whole(10, BATCH, 12)


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """Nodes, edges as pairs of nodes, and a class for each node."""
    return normal(24, 16), whole(24, 2, 48), whole(4, 24)


# Diffusion and flows


class TimeEmbedding(nn.Module):
    """Sines and cosines of a time."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("rates", torch.exp(-torch.arange(size // 2) * math.log(1e4) / size))

    def forward(self, time: Tensor) -> Tensor:
        angles = time[:, None].to(self.rates.dtype) * self.rates[None]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ResidualBlock(nn.Module):
    """Two convolutions with group norm, shifted by the time."""

    def __init__(self, channels: int, time: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, channels) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.shift = nn.Linear(time, channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.convs[0](F.silu(self.norms[0](x)))
        h = h + self.shift(F.silu(time))[:, :, None, None]
        return x + self.convs[1](F.silu(self.norms[1](h)))


@known("diffusion", images)
class DenoisingDiffusion(nn.Module):
    """Predicts the noise that forward itself draws, at a random time."""

    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, 100)
        self.register_buffer("kept", torch.cumprod(1 - betas, 0))
        self.time = TimeEmbedding(16)
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.block = ResidualBlock(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        time = torch.randint(0, 100, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        kept = self.kept[time].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.last(self.block(self.first(noisy), self.time(time))), noise)


@known("diffusion", lambda: (normal(BATCH, 3, 16, 16), whole(100, BATCH), normal(BATCH, 3, 16, 16)))
class UNet(nn.Module):
    """Down, up, and skips between."""

    def __init__(self) -> None:
        super().__init__()
        self.time = TimeEmbedding(16)
        self.enter, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 3, 1)
        self.outer, self.inner = ResidualBlock(16, 16), ResidualBlock(16, 16)
        self.down = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(16, 16, 4, stride=2, padding=1)

    def forward(self, x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        t = self.time(time)
        skip = self.outer(self.enter(x), t)
        h = self.up(self.inner(self.down(skip), t))
        return F.l1_loss(self.leave(torch.cat([h, skip], 1)), noise)


@known("diffusion", lambda: (normal(BATCH, 16),))
class FlowMatching(nn.Module):
    """A velocity between noise and data, at a time for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(17, 64, 64, 16)

    def forward(self, x: Tensor) -> Tensor:
        start, time = torch.randn_like(x), torch.rand(x.shape[0], 1)
        at = torch.lerp(start, x, time)
        return (self.net(torch.cat([at, time], -1)) - (x - start)).square().mean()


@known("flows", lambda: (normal(BATCH, 16),))
class CouplingFlow(nn.Module):
    """Affine couplings with an exact likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(8, 32, 16, act=nn.Tanh) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        volume = x.new_zeros(x.shape[0])
        for net in self.nets:
            left, right = x.chunk(2, dim=-1)
            scale, shift = net(left).chunk(2, dim=-1)
            scale = torch.tanh(scale)
            x = torch.cat([right * scale.exp() + shift, left], dim=-1)
            volume = volume + scale.sum(-1)
        return (0.5 * x.square().sum(-1) - volume).mean()


@known("flows", lambda: (normal(BATCH, 8),))
class PlanarFlow(nn.Module):
    """A chain of planar maps."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(normal(3, 8)), nn.Parameter(normal(3, 8) * 0.1)
        self.b = nn.Parameter(torch.zeros(3))

    def forward(self, z: Tensor) -> Tensor:
        volume = torch.zeros(z.shape[0], dtype=z.dtype)
        for w, u, b in zip(self.w, self.u, self.b, strict=True):
            inside = torch.tanh(z @ w + b)
            volume = volume + torch.log1p((1 - inside**2) * (w @ u).exp())
            z = z + inside[:, None] * u
        return (z.pow(2).sum(-1) / 2 - volume).mean()


# Autoencoders and adversaries


@known("generative", images)
class VariationalAutoencoder(nn.Module):
    """Draws a code, and pays for its distance from a normal."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 16))
        self.decode = nn.Sequential(mlp(8, 32, 768), nn.Unflatten(1, (3, 16, 16)))

    def forward(self, x: Tensor) -> Tensor:
        mean, logvar = self.encode(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        kl = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(-1).mean()
        made = torch.sigmoid(self.decode(code))
        return F.binary_cross_entropy(made, torch.sigmoid(x), reduction="sum") / len(x) + kl


@known("generative", lambda: (normal(BATCH, 12, 8),))
class VectorQuantised(nn.Module):
    """Codes from a book, passed straight through; usage is counted in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)
        self.book = nn.Embedding(16, 8)
        self.register_buffer("used", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        z = self.enter(x)
        near = torch.cdist(z.flatten(0, 1), self.book.weight).argmin(-1).view(z.shape[:2])
        code = self.book(near)
        self.used.mul_(0.9).add_(0.1 * F.one_hot(near, 16).sum((0, 1)).to(self.used.dtype))
        held = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        straight = z + (code - z).detach()
        return F.mse_loss(self.leave(straight), x) + held


@known("generative", lambda: (normal(BATCH, 8), normal(BATCH, 3, 16, 16)))
class HingeAdversary(nn.Module):
    """Generator and critic in one step, the critic's side on detached samples."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(
            nn.Linear(8, 64),
            nn.Unflatten(1, (4, 4, 4)),
            nn.Upsample(scale_factor=4),
            nn.Conv2d(4, 3, 3, padding=1),
            nn.Tanh(),
        )
        self.judge = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(512, 1)
        )

    def forward(self, code: Tensor, real: Tensor) -> Tensor:
        fake = self.make(code)
        critic = F.relu(1 - self.judge(real)).mean() + F.relu(1 + self.judge(fake.detach())).mean()
        return critic - self.judge(fake).mean()


@known("generative", lambda: (normal(BATCH, 16), normal(BATCH, 16)))
class GradientPenalty(nn.Module):
    """A critic whose slope is taken inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = mlp(16, 32, 1, act=nn.Tanh)

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        between = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        gap = self.judge(fake).mean() - self.judge(real).mean()
        return gap + 10 * (slope.norm(dim=-1) - 1).square().mean()


@known("generative", images)
class MaskedAutoencoder(nn.Module):
    """Patches are hidden by a fixed order; the loss counts the hidden ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(48, 32), nn.Linear(32, 48)
        self.mask = nn.Parameter(torch.zeros(1, 1, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.register_buffer("hidden", torch.arange(16) % 4 != 0)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 4, stride=4).transpose(1, 2)
        seen = torch.where(self.hidden[None, :, None], self.mask, self.embed(patches))
        error = (self.out(self.layer(seen)) - patches).square().mean(-1)
        return (error * self.hidden).sum() / (self.hidden.sum() * len(x))


# Graphs and points


@known("graphs", graph)
class GraphConvolution(nn.Module):
    """Neighbours are added up and divided by degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def spread(self, x: Tensor, edges: Tensor) -> Tensor:
        degree = torch.zeros(len(x), dtype=x.dtype).index_add(
            0, edges[1], torch.ones_like(edges[1], dtype=x.dtype)
        )
        summed = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        return x + summed / degree.clamp(min=1)[:, None]

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        h = F.relu(self.first(self.spread(x, edges)))
        return F.cross_entropy(self.second(self.spread(h, edges)), labels)


@known("graphs", graph)
class GraphAttention(nn.Module):
    """A softmax over the edges of each node."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score, self.out = nn.Linear(16, 16), nn.Linear(32, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        v, (src, dst) = self.value(x), edges.unbind(0)
        score = F.leaky_relu(self.score(torch.cat([v[src], v[dst]], -1)), 0.2).squeeze(-1).exp()
        total = score.new_zeros(len(x)).scatter_add(0, dst, score)
        weight = score / (total[dst] + 1e-9)
        h = torch.zeros_like(v).scatter_add(
            0, dst[:, None].expand(-1, 16), weight[:, None] * v[src]
        )
        return F.nll_loss(F.log_softmax(self.out(F.elu(h)), -1), labels)


@known("graphs", graph)
class GraphIsomorphism(nn.Module):
    """The largest message wins; batch norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(()))
        self.net, self.norm, self.out = mlp(16, 32, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        index = edges[1][:, None].expand(-1, 16)
        best = torch.zeros_like(x).scatter_reduce(0, index, x[edges[0]], "amax", include_self=True)
        return F.cross_entropy(self.out(self.norm(self.net((1 + self.eps) * x + best))), labels)


@known("points", lambda: (normal(BATCH, 32, 3), whole(10, BATCH)))
class PointNet(nn.Module):
    """Points are mapped alone, and the largest of each feature is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU())
        self.head = mlp(16, 32, 10)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(self.each(points.transpose(1, 2)).max(dim=-1).values), labels
        )


@known("points", lambda: (normal(BATCH, 12, 3), normal(BATCH, 12, 8), normal(BATCH)))
class EquivariantNetwork(nn.Module):
    """Messages by distance; positions move along differences."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.move, self.out = mlp(17, 32, 16), nn.Linear(16, 1), mlp(16, 16, 1)

    def forward(self, at: Tensor, h: Tensor, energy: Tensor) -> Tensor:
        apart = at[:, :, None] - at[:, None]
        far = apart.square().sum(-1, keepdim=True)
        pairs = torch.cat(
            [h[:, :, None].expand(-1, -1, 12, -1), h[:, None].expand(-1, 12, -1, -1)], -1
        )
        m = (
            self.message(torch.cat([pairs, far], -1))
            * (1 - torch.eye(12, dtype=at.dtype))[None, :, :, None]
        )
        at = at + (apart * self.move(m)).mean(2)
        return F.smooth_l1_loss(self.out(m.sum(2)).sum((1, 2)) + at.square().sum((1, 2)), energy)


@known("points", lambda: (normal(BATCH, 6), normal(BATCH, 3)))
class RadianceField(nn.Module):
    """Rays are sampled, encoded in frequencies, and blended front to back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(24, 32, 4, act=nn.ReLU)
        self.register_buffer("depths", torch.linspace(0.1, 2, 8))

    def forward(self, rays: Tensor, colours: Tensor) -> Tensor:
        start, along = rays.split(3, -1)
        points = start[:, None] + along[:, None] * self.depths[None, :, None]
        waves = torch.cat(
            [f(points * 2.0**k) for k in range(4) for f in (torch.sin, torch.cos)], -1
        )
        found = self.net(waves)
        alpha = 1 - torch.exp(-F.softplus(found[..., 3]) * 0.25)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)
        weights = alpha * clear[:, :-1]
        return F.mse_loss((weights[..., None] * torch.sigmoid(found[..., :3])).sum(1), colours)


# Recommenders


@known("recommenders", lambda: (normal(BATCH, 4), whole(50, BATCH, 3), torch.rand(BATCH)))
class DeepRecommender(nn.Module):
    """Tables, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(3))
        self.dense, self.top = mlp(4, 16, 8, act=nn.ReLU), mlp(14, 16, 1, act=nn.ReLU)
        self.register_buffer("pairs", torch.triu_indices(4, 4, 1))

    def forward(self, dense: Tensor, sparse: Tensor, click: Tensor) -> Tensor:
        x = self.dense(dense)
        features = torch.stack([x, *(t(sparse[:, k]) for k, t in enumerate(self.tables))], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([x, products], 1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, click)


@known("recommenders", lambda: (whole(100, BATCH, 6), torch.rand(BATCH)))
class FactorisationMachine(nn.Module):
    """The square of a sum less the sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factors = nn.Embedding(100, 1), nn.Embedding(100, 8)
        self.deep = mlp(48, 16, 1)

    def forward(self, ids: Tensor, click: Tensor) -> Tensor:
        f = self.factors(ids)
        second = 0.5 * (f.sum(1).square() - f.square().sum(1)).sum(-1)
        score = self.linear(ids).sum((1, 2)) + second + self.deep(f.flatten(1)).squeeze(-1)
        return F.binary_cross_entropy(torch.sigmoid(score), click)


@known("recommenders", lambda: (whole(50, BATCH, 5), whole(60, BATCH)))
class TwoTowers(nn.Module):
    """Bags of what was seen against what was taken, all samples being each other's negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.EmbeddingBag(50, 16, mode="mean")
        self.items = nn.Embedding(60, 16)
        self.heat = nn.Parameter(torch.tensor(0.0))

    def forward(self, seen: Tensor, taken: Tensor) -> Tensor:
        users = F.normalize(self.seen(seen), dim=-1)
        items = F.normalize(self.items(taken), dim=-1)
        logits = users @ items.T * self.heat.exp()
        return F.cross_entropy(logits, torch.arange(len(seen)))


@known("recommenders", lambda: (whole(40, BATCH, 8), whole(40, BATCH, 8)))
class SequentialRecommender(nn.Module):
    """Self-attention over a history, with one negative for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.place = nn.Embedding(41, 16, padding_idx=0), nn.Embedding(8, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: Tensor, other: Tensor) -> Tensor:
        x = self.items(ids) * 4 + self.place(torch.arange(ids.shape[1]))
        mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)
        h = self.norm(x + self.attend(x, x, x, attn_mask=mask, need_weights=False)[0])[:, :-1]
        good = (h * self.items(ids[:, 1:])).sum(-1)
        bad = (h * self.items(other[:, 1:])).sum(-1)
        return -(F.logsigmoid(good) + F.logsigmoid(-bad)).mean()


# Speech and sequences


@known("speech", tokens)
class ConformerBlock(nn.Module):
    """Half feed-forwards around attention and a gated depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.forwards = nn.ModuleList(mlp(16, 32, 16) for _ in range(2))
        self.attend = nn.MultiheadAttention(16, 4, batch_first=True)
        self.widen, self.narrow = nn.Conv1d(16, 32, 1), nn.Conv1d(16, 16, 1)
        self.depthwise = nn.Conv1d(16, 16, 5, padding=2, groups=16)
        self.batch, self.out = nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + 0.5 * self.forwards[0](self.norms[0](x))
        y = self.norms[1](x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        y = F.glu(self.widen(self.norms[2](x).transpose(1, 2)), dim=1)
        x = x + self.narrow(F.silu(self.batch(self.depthwise(y)))).transpose(1, 2)
        x = self.norms[3](x + 0.5 * self.forwards[1](x))
        return F.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


@known("speech", lambda: (normal(BATCH, 20, 8), whole(9, BATCH, 5) + 1))
class ConnectionistLoss(nn.Module):
    """A recurrent net under the CTC loss."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 16, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logs = F.log_softmax(self.out(self.rnn(x)[0]), -1).transpose(0, 1)
        length = torch.full((len(x),), 20, dtype=torch.long)
        return F.ctc_loss(logs, targets, length, torch.full_like(length, 5))


@known("speech", lambda: (normal(BATCH, 64), whole(16, BATCH, 64)))
class WaveStack(nn.Module):
    """Dilated causal convolutions with gates, residues and skips."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, 8, 1)
        self.dilated = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**k) for k in range(4))
        self.back = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(4))
        self.out = nn.Conv1d(8, 16, 1)

    def forward(self, wave: Tensor, codes: Tensor) -> Tensor:
        x, skips = self.enter(wave[:, None]), 0
        for k, (conv, back) in enumerate(zip(self.dilated, self.back, strict=True)):
            gate, value = conv(F.pad(x, (2**k, 0))).chunk(2, 1)
            h = torch.sigmoid(gate) * torch.tanh(value)
            skips, x = skips + h, x + back(h)
        return F.cross_entropy(self.out(F.relu(skips)), codes)


@known("speech", lambda: (normal(BATCH, 128), whole(6, BATCH)))
class Spectrogram(nn.Module):
    """Frames, a Fourier transform, a filter bank, and the logarithm of it."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Parameter(torch.rand(17, 8))
        self.register_buffer("window", torch.hann_window(32))
        self.out = nn.Linear(8, 6)

    def forward(self, wave: Tensor, labels: Tensor) -> Tensor:
        frames = wave.unfold(1, 32, 16) * self.window
        power = torch.fft.rfft(frames).abs().square()
        return F.cross_entropy(self.out((power @ self.bank).clamp(min=1e-6).log().mean(1)), labels)


@known("speech", lambda: (normal(BATCH, 6, 8), normal(BATCH, 4, 8), whole(5, BATCH, 6, 4)))
class JointNetwork(nn.Module):
    """Every frame with every label: a lattice of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.heard, self.said, self.out = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, frames: Tensor, labels: Tensor, paths: Tensor) -> Tensor:
        joint = torch.tanh(self.heard(frames)[:, :, None] + self.said(labels)[:, None])
        return F.cross_entropy(self.out(joint).permute(0, 3, 1, 2), paths)


@known("sequences", tokens)
class RecurrentCell(nn.Module):
    """A GRU cell in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(16, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h, found = x.new_zeros(x.shape[0], 24), []
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
            found.append(self.out(h))
        return F.cross_entropy(torch.stack(found, 2), labels)


@known("sequences", tokens)
class StateSpace(nn.Module):
    """A diagonal state space as a long convolution in the Fourier domain."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.read = nn.Parameter(normal(16, 4)), nn.Parameter(normal(16, 4))
        self.step, self.out = nn.Parameter(normal(16)), nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        length = x.shape[1]
        rate = -F.softplus(self.decay) * F.softplus(self.step)[:, None]
        kernel = (self.read[..., None] * (rate[..., None] * torch.arange(length)).exp()).sum(1)
        n = 2 * length
        y = torch.fft.irfft(torch.fft.rfft(x.mT, n=n) * torch.fft.rfft(kernel, n=n), n=n)
        return F.cross_entropy(self.out(F.gelu(y[..., :length].mT)).mT, labels)


@known("sequences", tokens)
class SelectiveScan(nn.Module):
    """A state that forgets as the input tells it to, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.log(torch.arange(1, 5).float()).repeat(16, 1))
        self.gates, self.out = nn.Linear(16, 16 + 4 + 4), nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        step, write, read = self.gates(x).split([16, 4, 4], -1)
        step, h, found = F.softplus(step), x.new_zeros(len(x), 16, 4), []
        for t in range(x.shape[1]):
            forget = torch.exp(-step[:, t, :, None] * self.log.exp())
            h = forget * h + (step[:, t] * x[:, t])[..., None] * write[:, t, None]
            found.append((h * read[:, t, None]).sum(-1))
        return F.cross_entropy(self.out(torch.stack(found, 1)).transpose(1, 2), labels)


@known("sequences", tokens)
class LinearAttention(nn.Module):
    """Attention without a softmax: sums over the past."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bthd,bthe->bthde", k, v).cumsum(1)
        total = torch.einsum("bthd,bthd->bth", q, k.cumsum(1))
        y = torch.einsum("bthd,bthde->bthe", q, state) / total.unsqueeze(-1)
        return F.cross_entropy(self.out(y.flatten(2)).transpose(1, 2), labels)


@known("sequences", tokens)
class BiasedAttention(nn.Module):
    """Written out by hand, with distances as a bias and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 10)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 5))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, 4, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        place = torch.arange(t)
        bias = -(place[:, None] - place[None]).abs() * self.slopes[:, None, None]
        scores = (q @ k.transpose(-1, -2)) / 2 + bias
        scores = scores.masked_fill(place[None, :] > place[:, None], float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, 16)
        return F.cross_entropy(self.out(y).permute(0, 2, 1), labels)


@known("sequences", lambda: (normal(BATCH, 6, 5), whole(5, BATCH, 6)))
class ConditionalField(nn.Module):
    """The forward algorithm of a chain, against the score of the given path."""

    def __init__(self) -> None:
        super().__init__()
        self.emit, self.change = nn.Linear(5, 5), nn.Parameter(normal(5, 5))

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        scores = self.emit(x)
        alpha = scores[:, 0]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.change, 1) + scores[:, t]
        path = scores.gather(2, tags[..., None]).squeeze(-1).sum(1)
        path = path + self.change[tags[:, :-1], tags[:, 1:]].sum(1)
        return (torch.logsumexp(alpha, -1) - path).mean()


# Reinforcement learning


@known("reinforcement", lambda: (normal(BATCH, 8), whole(4, BATCH), normal(BATCH), normal(BATCH)))
class ClippedPolicy(nn.Module):
    """PPO: a clipped ratio, a value, and an entropy bonus."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = mlp(8, 32, 32), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, seen: Tensor, action: Tensor, old: Tensor, gain: Tensor) -> Tensor:
        h = torch.tanh(self.body(seen))
        logs = self.policy(h).log_softmax(-1)
        ratio = (logs.gather(1, action[:, None]).squeeze(1) - old).exp()
        gain_n = (gain - gain.mean()) / (gain.std() + 1e-8)
        actor = -torch.min(ratio * gain_n, ratio.clamp(0.8, 1.2) * gain_n).mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        return actor + 0.5 * F.mse_loss(self.value(h).squeeze(-1), gain) - 0.01 * entropy


@known(
    "reinforcement",
    lambda: (normal(BATCH, 8), whole(4, BATCH), normal(BATCH), normal(BATCH, 8), torch.rand(BATCH)),
)
class DoubleQ(nn.Module):
    """The next action by one net, its value by a frozen other."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = mlp(8, 32, 4), mlp(8, 32, 4)
        self.target.requires_grad_(False)

    def forward(self, s: Tensor, a: Tensor, r: Tensor, later: Tensor, over: Tensor) -> Tensor:
        with torch.no_grad():
            best = self.online(later).argmax(-1, keepdim=True)
            wanted = r + 0.99 * (over < 0.9) * self.target(later).gather(1, best).squeeze(1)
        return F.huber_loss(self.online(s).gather(1, a[:, None]).squeeze(1), wanted)


@known("reinforcement", lambda: (normal(BATCH, 8),))
class SoftActor(nn.Module):
    """An action drawn through a squashed normal, and its log-probability."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(8, 32, 4), mlp(10, 32, 1)

    def forward(self, seen: Tensor) -> Tensor:
        mean, log_std = self.actor(seen).chunk(2, -1)
        std = log_std.clamp(-5, 2).exp()
        raw = mean + std * torch.randn_like(std)
        action = torch.tanh(raw)
        log = -0.5 * ((raw - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
        log = (log - torch.log1p(-action.square() + 1e-6)).sum(-1)
        return (0.2 * log - self.critic(torch.cat([seen, action], -1)).squeeze(-1)).mean()


@known("reinforcement", lambda: (normal(BATCH, 6, 8), normal(BATCH, 6)))
class Advantages(nn.Module):
    """Generalised advantages by a backward loop, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.policy = mlp(8, 16, 1), mlp(8, 16, 3)

    def forward(self, seen: Tensor, reward: Tensor) -> Tensor:
        value = self.value(seen).squeeze(-1)
        with torch.no_grad():
            later = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
            delta = reward + 0.99 * later - value
            gain, found = torch.zeros_like(delta[:, 0]), []
            for t in reversed(range(delta.shape[1])):
                gain = delta[:, t] + 0.95 * 0.99 * gain
                found.insert(0, gain)
            gains = torch.stack(found, 1)
        best = self.policy(seen).log_softmax(-1).max(-1).values
        return -(best * gains).mean() + (value - (gains + value).detach()).square().mean()


@known("reinforcement", lambda: (normal(BATCH, 8), whole(4, BATCH), normal(BATCH, 12)))
class QuantileCritic(nn.Module):
    """Quantiles of the return, under an asymmetric Huber loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 32, 4 * 12)
        self.register_buffer("levels", (torch.arange(12) + 0.5) / 12)

    def forward(self, seen: Tensor, action: Tensor, wanted: Tensor) -> Tensor:
        found = self.net(seen).view(-1, 4, 12)
        taken = found[torch.arange(len(seen)), action]
        gap = wanted[:, None] - taken[..., None]
        huber = torch.where(gap.abs() < 1, 0.5 * gap**2, gap.abs() - 0.5)
        return ((self.levels[:, None] - (gap.detach() < 0).to(gap.dtype)).abs() * huber).mean()


# Physics


@known("physics", lambda: (normal(BATCH, 2, 16), normal(BATCH, 1, 16)))
class FourierOperator(nn.Module):
    """Products of low frequencies with complex weights, beside a local map."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.local, self.drop = (
            nn.Conv1d(2, 8, 1),
            nn.Conv1d(8, 8, 1),
            nn.Conv1d(8, 1, 1),
        )
        self.weight = nn.Parameter(normal(8, 8, 5, 2) / 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.lift(x)
        waves = torch.fft.rfft(h)
        low = torch.einsum("bix,iox->box", waves[..., :5], torch.view_as_complex(self.weight))
        spectral = torch.fft.irfft(F.pad(low, (0, waves.shape[-1] - 5)), n=h.shape[-1])
        return F.mse_loss(self.drop(F.gelu(spectral + self.local(h))), y)


@known("physics", lambda: (torch.rand(BATCH * 2, 2),))
class PhysicsInformed(nn.Module):
    """The heat equation's residue, by derivatives taken in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 32, 32, 1, act=nn.Tanh)

    def forward(self, at: Tensor) -> Tensor:
        at = at.detach().requires_grad_()
        u = self.net(at)
        du = torch.autograd.grad(u.sum(), at, create_graph=True)[0]
        second = torch.autograd.grad(du[:, 0].sum(), at, create_graph=True)[0][:, 0]
        return (du[:, 1] - 0.1 * second).square().mean()


@known("physics", lambda: (normal(BATCH, 4), normal(BATCH, 4)))
class NeuralOde(nn.Module):
    """Four steps of Runge and Kutta."""

    def __init__(self) -> None:
        super().__init__()
        self.field = mlp(4, 32, 4, act=nn.Tanh)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        step = 0.25
        for _ in range(4):
            k1 = self.field(x)
            k2 = self.field(x + step / 2 * k1)
            k3 = self.field(x + step / 2 * k2)
            k4 = self.field(x + step * k3)
            x = x + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return F.mse_loss(x, wanted)


@known("physics", lambda: (normal(BATCH, 10), torch.rand(6, 2), normal(BATCH, 6)))
class OperatorNetwork(nn.Module):
    """A branch for the function, a trunk for the places."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = mlp(10, 32, 16), mlp(2, 32, 16)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, u: Tensor, places: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(
            torch.einsum("bk,pk->bp", self.branch(u), self.trunk(places)) + self.bias, y
        )


@known("physics", lambda: (torch.rand(BATCH * 4, 2), normal(BATCH * 4, 3)))
class SineNetwork(nn.Module):
    """Sines as activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 32), nn.Linear(32, 32), nn.Linear(32, 3)])

    def forward(self, at: Tensor, colours: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            at = torch.sin(30 * layer(at))
        return F.mse_loss(self.layers[-1](at), colours)


@known("physics", lambda: (normal(BATCH, 1, 16, 16), normal(BATCH, 1, 16, 16)))
class Smoother(nn.Module):
    """A fixed stencil with circular edges, and a learned correction, rolled out."""

    def __init__(self) -> None:
        super().__init__()
        stencil = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])
        self.register_buffer("stencil", stencil[None, None])
        self.fix = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")

    def forward(self, u: Tensor, wanted: Tensor) -> Tensor:
        for _ in range(3):
            u = u + 0.1 * F.conv2d(F.pad(u, (1, 1, 1, 1), mode="circular"), self.stencil)
            u = u + 0.01 * self.fix(u) + 0.001 * (torch.roll(u, 1, -1) - u)
        return F.mse_loss(u, wanted)


# Vision


@known("vision", labelled_images)
class Mixer(nn.Module):
    """Patches mixed by one product, channels by another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)
        self.places, self.channels = mlp(16, 32, 16, act=nn.GELU), mlp(16, 32, 16, act=nn.GELU)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.out = nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = x + self.places(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return F.cross_entropy(self.out(self.norms[2](x).mean(1)), labels, label_smoothing=0.1)


@known("vision", labelled_images)
class SqueezeExcite(nn.Module):
    """Channels weighed by their means; depthwise convolutions; a residue dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding="same")
        self.depthwise = nn.Conv2d(16, 16, 5, padding=2, groups=16, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.weigh = nn.Sequential(nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1))
        self.out = nn.Linear(16, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.hardswish(self.enter(x))
        y = self.norm(self.depthwise(x))
        y = y * F.hardsigmoid(self.weigh(F.adaptive_avg_pool2d(y, 1)))
        kept = torch.rand(len(x), 1, 1, 1, dtype=x.dtype) < 0.8
        x = x + y * kept / 0.8
        return F.cross_entropy(self.out(x.mean((2, 3))), labels)


@known("vision", labelled_images)
class SpatialTransformer(nn.Module):
    """The image is turned by what a small net says."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(nn.Flatten(), nn.Linear(768, 6))
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(2))
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        grid = F.affine_grid(self.where(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        turned = F.grid_sample(x, grid, align_corners=False)
        return F.cross_entropy(self.out(self.net(turned).flatten(1)), labels)


@known("vision", lambda: (normal(BATCH, 3, 16, 16), whole(4, BATCH, 16, 16)))
class Segmenter(nn.Module):
    """Two scales joined by interpolation, under a focal and a Dice loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        fine = F.relu(self.fine(x))
        coarse = F.interpolate(
            F.relu(self.coarse(fine)), scale_factor=2, mode="bilinear", align_corners=False
        )
        logits = self.out(torch.cat([fine, coarse], 1))
        plain = F.cross_entropy(logits, labels, reduction="none")
        focal = ((1 - (-plain).exp()) ** 2 * plain).mean()
        p, hot = logits.softmax(1), F.one_hot(labels, 4).movedim(-1, 1).to(logits.dtype)
        dice = 1 - (2 * (p * hot).sum((2, 3)) + 1) / (p.sum((2, 3)) + hot.sum((2, 3)) + 1)
        return focal + dice.mean()


@known("vision", lambda: (normal(BATCH, 3, 16, 16), normal(BATCH, 3, 8, 8)))
class PixelShuffler(nn.Module):
    """A small image made large, with instance norm and a perceptual penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.grow, self.norm = nn.Conv2d(3, 48, 3, padding=1), nn.InstanceNorm2d(12, affine=True)
        self.out = nn.Conv2d(12, 3, 3, padding=1, padding_mode="reflect")

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        made = self.out(
            F.prelu(self.norm(F.pixel_shuffle(self.grow(small), 2)), small.new_tensor(0.2))
        )
        rough = (made[..., 1:, :] - made[..., :-1, :]).abs().mean()
        return F.l1_loss(made, large) + 0.01 * rough


@known("vision", labelled_images)
class Capsules(nn.Module):
    """Routing by agreement, three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 4, 4)
        self.votes = nn.Parameter(normal(32, 10, 8, 6) * 0.1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        u = self.enter(x).view(len(x), 32, 8)
        votes = torch.einsum("bid,ijde->bije", u, self.votes)
        logits = torch.zeros(len(x), 32, 10, dtype=x.dtype)
        for _ in range(3):
            s = (logits.softmax(2)[..., None] * votes).sum(1)
            n = s.square().sum(-1, keepdim=True)
            v = s * n / (1 + n) / (n + 1e-9).sqrt()
            logits = logits + (votes.detach() * v.detach()[:, None]).sum(-1)
        length = v.norm(dim=-1)
        hot = F.one_hot(labels, 10)
        return (
            (hot * F.relu(0.9 - length) ** 2 + 0.5 * (1 - hot) * F.relu(length - 0.1) ** 2)
            .sum(1)
            .mean()
        )


# Representation and adaptation


@known("contrastive", lambda: (normal(BATCH, 16), normal(BATCH, 16)))
class TwoViews(nn.Module):
    """All other samples of both views are negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        z = F.normalize(torch.cat([self.net(one), self.net(two)]), dim=1)
        alike = z @ z.t() / 0.5
        alike = alike.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        n = len(one)
        return F.cross_entropy(alike, torch.cat([torch.arange(n) + n, torch.arange(n)]))


@known("contrastive", lambda: (normal(BATCH, 16), normal(BATCH, 16)))
class MeanTeacher(nn.Module):
    """A teacher in buffers follows the student within forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = nn.Linear(16, 8), mlp(8, 16, 8)
        self.register_buffer("teacher", self.student.weight.detach().clone())

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.lerp_(self.student.weight, 0.01)
            wanted = F.normalize(F.linear(two, self.teacher), dim=-1)
        return (2 - 2 * F.cosine_similarity(self.head(self.student(one)), wanted)).mean()


@known("contrastive", lambda: (normal(BATCH, 16), normal(BATCH, 16)))
class CrossCorrelation(nn.Module):
    """The correlation of two views shall be the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = mlp(16, 32, 12), nn.BatchNorm1d(12, affine=False)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        c = self.norm(self.net(one)).T @ self.norm(self.net(two)) / len(one)
        on = (torch.diagonal(c) - 1).pow(2).sum()
        return on + 5e-3 * (c.pow(2).sum() - torch.diagonal(c).pow(2).sum())


@known("contrastive", lambda: (normal(BATCH, 16), whole(10, BATCH)))
class AngularMargin(nn.Module):
    """A margin is added to the angle of the right class."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.centres = mlp(16, 32, 8), nn.Parameter(normal(10, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.net(x)), F.normalize(self.centres))
        angle = torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))
        hot = F.one_hot(labels, 10).bool()
        return F.cross_entropy(8 * torch.where(hot, torch.cos(angle + 0.3), cosine), labels)


@known("contrastive", lambda: (normal(BATCH, 16), normal(BATCH, 16), normal(BATCH, 16)))
class Triplets(nn.Module):
    """An anchor nearer to its like than to another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(16, 32, 8)

    def forward(self, anchor: Tensor, like: Tensor, other: Tensor) -> Tensor:
        return F.triplet_margin_loss(*map(self.net, (anchor, like, other)), margin=0.5, swap=True)


@known("adaptation", tokens)
class LowRank(nn.Module):
    """A frozen product with a low-rank change, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(16, 16), nn.Linear(16, 10)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(normal(4, 16) * 0.1), nn.Parameter(torch.zeros(16, 4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.base(x) + self.drop(x) @ self.down.T @ self.up.T * 2
        return F.cross_entropy(self.out(F.relu(h)).flatten(0, -2), labels.flatten())


@known("adaptation", rows)
class HyperNetwork(nn.Module):
    """One net makes the weights of another, a set for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = mlp(16, 32, 16 * 4 + 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.maker(x)
        weight, bias = made[:, :64].view(-1, 4, 16), made[:, 64:]
        return F.mse_loss(torch.baddbmm(bias[..., None], weight, x[..., None]).squeeze(-1), y)


@known("adaptation", rows)
class MixtureDensity(nn.Module):
    """A mixture of normals, its likelihood by log-sum-exp."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(16, 32, 3 + 3 * 4 * 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights, rest = self.net(x).split([3, 24], -1)
        mean, log_std = rest.view(-1, 3, 4, 2).unbind(-1)
        log = -0.5 * ((y[:, None] - mean) / log_std.exp()).square() - log_std
        return -torch.logsumexp(weights.log_softmax(-1) + log.sum(-1), -1).mean()


@known("adaptation", lambda: (normal(BATCH, 16), whole(10, BATCH)))
class Distillation(nn.Module):
    """A student learns from a frozen teacher at a high temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = mlp(16, 64, 10), mlp(16, 32, 10)
        for p in self.teacher.parameters():
            p.requires_grad = False

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (self.teacher(x) / 4).softmax(-1)
        own = self.student(x)
        far = F.kl_div((own / 4).log_softmax(-1), soft, reduction="batchmean") * 16
        return 0.7 * far + 0.3 * F.cross_entropy(own, labels)


@known("adaptation", lambda: (normal(BATCH, 8), normal(BATCH, 8)))
class NormalisedCritic(nn.Module):
    """Spectral norm on one layer, weight norm on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 16))
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(16, 1))

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        score = self.second(F.leaky_relu(self.first(torch.cat([real, fake])), 0.1))
        good, bad = score.chunk(2)
        return F.softplus(-good).mean() + F.softplus(bad).mean()


@known("sequences", tokens)
class SoftMemory(nn.Module):
    """A memory that is read and written at soft places."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(normal(6, 8))
        self.keys, self.out = nn.Linear(16, 8 + 8 + 8), nn.Linear(8, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        memory, found = self.start.expand(len(x), -1, -1), []
        for key, new, gone in (self.keys(step).split(8, -1) for step in x.unbind(1)):
            place = F.cosine_similarity(memory, key[:, None], dim=-1).softmax(-1)
            memory = memory * (1 - place[..., None] * torch.sigmoid(gone)[:, None])
            memory = memory + torch.einsum("bp,bd->bpd", place, new)
            found.append(torch.einsum("bp,bpd->bd", place, memory))
        return F.cross_entropy(self.out(torch.stack(found, 1)).transpose(1, 2), labels)


@known("vision", lambda: (normal(BATCH, 3, 16, 16), torch.rand(BATCH, 5, 4), whole(4, BATCH, 5)))
class SetPredictor(nn.Module):
    """Queries find boxes in an image; matched in order, under an IoU loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.queries = nn.Conv2d(3, 16, 4, 4), nn.Parameter(normal(5, 16))
        self.decode = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.boxes, self.kinds = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor, boxes: Tensor, kinds: Tensor) -> Tensor:
        seen = self.embed(x).flatten(2).transpose(1, 2)
        h = self.decode(self.queries.unsqueeze(0).repeat(len(x), 1, 1), seen)
        found = self.boxes(h).sigmoid()
        low = torch.max(found[..., :2], boxes[..., :2])
        high = torch.min(found[..., :2] + found[..., 2:], boxes[..., :2] + boxes[..., 2:])
        both = (high - low).clamp(min=0).prod(-1)
        union = found[..., 2:].prod(-1) + boxes[..., 2:].prod(-1) - both
        return F.cross_entropy(self.kinds(h).mT, kinds) + (1 - both / (union + 1e-6)).mean()
