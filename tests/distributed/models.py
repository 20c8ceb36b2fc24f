"""Small models written by hand, each for splits that the zoo does not have."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardfold.runtime.ops.experts  # noqa: F401  registers the operator
from shardfold.capture.experts import described

from .idioms import IDIOMS


class MLP(nn.Module):
    """Two layers with a bias, a mean-squared error; nothing divides evenly by four."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(10))
        self.up = nn.Linear(10, 22)
        self.down = nn.Linear(22, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.down(torch.relu(self.up(x + self.shift))), y)


class Norms(nn.Module):
    """Normalisations whose rows can be split, softmax over a split dim, unequal ignored labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 16, padding_idx=3)
        self.norm = nn.LayerNorm(16)
        self.rms = nn.RMSNorm(16)
        self.groups = nn.GroupNorm(4, 8)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 24)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.table(tokens))
        x = x + torch.softmax(self.mix(x), -1) * self.rms(x)
        x = self.groups(x.transpose(0, 1)).transpose(0, 1)
        logits = self.head(functional.dropout(x, 0.3, self.training))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Planes(nn.Module):
    """Convolutions and pools over space: halos of several widths, groups, padding."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(4, 1, 1))
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.strided = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.strided(torch.tanh(self.first(x + self.shift)))))
        x = functional.max_pool2d(self.grouped(x), 3, 1, 1) + functional.avg_pool2d(x, 3, 1, 1)
        x = functional.avg_pool2d(x, 2)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class Pixels(nn.Module):
    """Layers that read the batch itself: of its gradient nothing is asked, nor sent."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.wide = nn.Conv2d(4, 8, 5, padding=2)
        self.slope = nn.Parameter(torch.rand(4, 16, 16))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.first(x) + self.wide(x) + functional.max_pool2d(self.first(self.norm(x)), 3, 1, 1)
        train = self.training
        y = functional.dropout2d(y, 0.3, train) + functional.alpha_dropout(y, 0.2, train)
        y = y + functional.feature_alpha_dropout(self.wide(x * self.slope), 0.2, train)
        return functional.cross_entropy(self.head(y.mean((2, 3))), labels)


class Losses(nn.Module):
    """Every form of cross-entropy: weights, smoothing, probabilities, planes, sums."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 8)
        self.register_buffer("weights", torch.rand(8) + 0.5)

    def forward(self, x: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
        logits = self.head(x)
        flat, wanted = logits.flatten(0, 1), labels.flatten()
        loss = functional.cross_entropy
        found = loss(flat, wanted, self.weights) + loss(flat, wanted, label_smoothing=0.1)
        found = found + loss(logits.transpose(1, 2), labels) + loss(flat, shares)
        found = found + loss(flat, shares, self.weights, label_smoothing=0.2, reduction="sum")
        found = found + loss(flat, wanted, reduction="none").square().mean()
        found = found + torch.logsumexp(flat, 1).mean() + functional.l1_loss(flat, shares)
        return found + functional.nll_loss(torch.log_softmax(flat, -1), wanted)


class Vocabulary(nn.Module):
    """GPT-2's vocabulary, which nothing divides, in a tied table; and an LSTM between its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50_257, 6)
        self.lstm = nn.LSTM(6, 6, 2, batch_first=True)
        self.head = nn.Linear(6, 50_257, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.table(tokens))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Tied(nn.Module):
    """One table that is read three times, once in a place that gives no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 6)
        self.mix = nn.Linear(6, 6)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            size = self.table.weight.square().sum()
        hidden = torch.tanh(self.mix(self.table(tokens))) / (1 + size)
        again = self.table(labels) * hidden
        logits = functional.linear(hidden + again, self.table.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _mlp() -> tuple[Any, Any, Any]:
    return MLP(), (torch.randn(10, 10), torch.randn(10, 6)), {}


def _norms() -> tuple[Any, Any, Any]:
    tokens, labels = torch.randint(24, (8, 6)), torch.randint(24, (8, 6))
    labels[:3, :4] = -100  # unequal counts in the parts of the batch
    return Norms(), (tokens, labels), {}


def _planes() -> tuple[Any, Any, Any]:
    return Planes(), (torch.randn(4, 4, 16, 16), torch.randint(10, (4,))), {}


def _losses() -> tuple[Any, Any, Any]:
    labels = torch.randint(8, (4, 6))
    labels[0] = -100
    shares = torch.softmax(torch.randn(24, 8), -1)
    return Losses(), (torch.randn(4, 6, 6), labels, shares), {}


def _pixels() -> tuple[Any, Any, Any]:
    return Pixels(), _planes()[1], {}


def _vocabulary() -> tuple[Any, Any, Any]:
    tokens, labels = torch.randint(50_257, (8, 3)), torch.randint(50_257, (8, 3))
    return Vocabulary(), (tokens, labels), {}


def _tied() -> tuple[Any, Any, Any]:
    tokens, labels = torch.randint(24, (8, 4)), torch.randint(24, (8, 4))
    return Tied(), (tokens, labels), {}


class ExpertBlock(nn.Module):
    """A router and a block of experts with biases, interleaved gates and `each` experts a row."""

    def __init__(self, experts: int, each: int, lean: float = 0.0) -> None:
        super().__init__()
        self.each, self.before = each, nn.Linear(10, 10)
        self.router = nn.Linear(10, experts)
        self.router.bias.data[1] += lean
        self.up, self.up_bias = (nn.Parameter(torch.randn(experts, 12, *n)) for n in ((10,), ()))
        self.down = nn.Parameter(torch.randn(experts, 10, 6))
        self.down_bias = nn.Parameter(torch.randn(experts, 10))
        self.between = str(described(self.gate, 12, torch.float32))

    @staticmethod
    def gate(rows: Tensor) -> Tensor:
        return torch.sigmoid(rows[..., ::2]) * (rows[..., 1::2] + 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.before(x).flatten(0, -2)
        share, expert = torch.topk(torch.softmax(self.router(rows), -1), self.each, -1)
        weights = (self.up, self.down, self.between, self.up_bias, self.down_bias)
        made: Tensor = torch.ops.shardfold.routed_experts(rows, expert, share, *weights)
        return made.view(x.shape) + x


class Experts(nn.Module):
    """Blocks of experts in a row, and a mean-squared error."""

    def __init__(self, *sizes: Any, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertBlock(*sizes) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(x, y)


def _experts(rows: tuple[int, ...], *sizes: Any, layers: int = 1) -> tuple[Any, Any, Any]:
    model = Experts(*sizes, layers=layers)
    return model, (torch.randn(*rows, 10), torch.randn(*rows, 10)), {}


class Attention(nn.Module):
    """Attention of one kind between projections, `shared` queries to a head of keys."""

    def __init__(self, kind: str, heads: int, shared: int, features: int = 4) -> None:
        super().__init__()
        self.kind, self.heads, self.shared = kind, heads, shared
        wide = heads * features
        self.query = nn.Linear(wide, wide)
        self.key = nn.Linear(wide, wide // shared)
        self.value = nn.Linear(wide, wide // shared)
        self.out = nn.Linear(wide, wide)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        read = memory if self.kind == "cross" else x
        keys = self.heads // self.shared
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            layer(read).unflatten(-1, (keys, -1)).transpose(1, 2)
            for layer in (self.key, self.value)
        )
        mask = None
        if self.kind == "window":
            place = torch.arange(x.shape[1])
            gap = place[:, None] - place[None, :]
            mask = (gap >= 0) & (gap < 3)
        found = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            is_causal=self.kind == "causal",
            enable_gqa=self.shared > 1,
            scale=0.3,
        )
        return functional.mse_loss(self.out(found.transpose(1, 2).flatten(2)), torch.ones_like(x))


def _attention(kind: str, rows: int = 16, heads: int = 4, shared: int = 1) -> tuple[Any, Any, Any]:
    x, memory = torch.randn(2, rows, heads * 4), torch.randn(2, rows + 8, heads * 4)
    return Attention(kind, heads, shared), (x, memory), {}


def _idiom(name: str) -> tuple[Any, Any, Any]:
    module, batch = IDIOMS[name]()
    return module, batch, {}


HAND_WRITTEN = {
    **{name: partial(_idiom, name) for name in IDIOMS},
    "attention_causal": partial(_attention, "causal"),
    "attention_cross": partial(_attention, "cross"),
    "attention_full": partial(_attention, "full", shared=2),
    "attention_shared": partial(_attention, "causal", shared=2),
    "attention_uneven": partial(_attention, "causal", 13),
    "attention_uneven_full": partial(_attention, "full", 13),
    "attention_window": partial(_attention, "window"),
    "experts": partial(_experts, (4, 3), 4, 2),
    "experts_all_to_one": partial(_experts, (4, 2), 4, 1, 1e3),
    "experts_in_layers": partial(_experts, (4, 3), 4, 2, layers=3),
    "experts_few_rows": partial(_experts, (4,), 8, 2),
    "tied": _tied,
    "losses": _losses,
    "mlp": _mlp,
    "norms": _norms,
    "pixels": _pixels,
    "planes": _planes,
    "vocabulary": _vocabulary,
}
