"""Chains of operators on a few numbers, run as a plan for one device runs them.

On so few numbers the device is done before the host is, so the time of a chain is the host's; two
lengths of a chain tell what one more operator takes, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardfold.calibrate.timers import Times, per_link, times_of
from shardfold.capture import capture_program
from shardfold.operators import rules_of
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.sharding import find_subdims

SHORT, LONG, ROUNDS = 8, 40, 7
SIDE = 8
MIXED = "mixed"
Link = Callable[["Chain", Tensor, int], Tensor]


class Chain(nn.Module):
    """The same operator so many times, on a tensor of 1 x 8 x 8 x 8, and the mean of the result."""

    def __init__(self, link: Link, count: int, makes: str) -> None:
        super().__init__()
        self.link, self.count = link, count
        if makes:
            self.layers = nn.ModuleList(MAKES[makes]() for _ in range(count))
        self.start = nn.Parameter(torch.randn(1, SIDE, SIDE, SIDE))
        self.register_buffer("other", torch.randn(1, SIDE, SIDE, SIDE))

    def forward(self) -> Tensor:
        """The chain's result, as a scalar."""
        x = self.start * self.other
        for number in range(self.count):
            x = self.link(self, x, number)
        return x.float().mean()


def _layer(chain: Chain, x: Tensor, number: int) -> Tensor:
    return chain.layers[number](x)


def _view(chain: Chain, x: Tensor, number: int) -> Tensor:
    return x.view(SIDE * SIDE, SIDE) if number % 2 == 0 else x.view(1, SIDE, SIDE, SIDE)


def _cast(chain: Chain, x: Tensor, number: int) -> Tensor:
    return x.to(torch.float64 if x.dtype != torch.float64 else chain.other.dtype)


def _looked_up(chain: Chain, x: Tensor, number: int) -> Tensor:
    at = torch.zeros(SIDE, dtype=torch.long, device=x.device)
    return x + functional.embedding(at, chain.layers[number].weight)


class Mixed(nn.Module):
    """A block of different operators, as models are: what follows something else takes longer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(SIDE), nn.LayerNorm(SIDE)
        self.into, self.out = nn.Linear(SIDE, 3 * SIDE), nn.Linear(SIDE, SIDE)
        self.up, self.down = nn.Linear(SIDE, 4 * SIDE), nn.Linear(4 * SIDE, SIDE)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a feed-forward network, each added to what came in."""
        query, key, value = self.into(self.norm(x)).split(SIDE, -1)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).contiguous().view(x.shape))
        return x + self.down(functional.gelu(self.up(self.last(x))))


# How often each kind is in a block.
IN_MIXED = {
    "aten.layer_norm": 2,
    "aten.linear": 4,
    "aten.cat": 1,  # the split
    "aten.scaled_dot_product_attention": 1,
    "aten.transpose": 1,
    "aten.mul": 1,  # the copy
    "aten.view": 1,
    "aten.add": 2,
    "aten.gelu": 1,
}
MAKES: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(SIDE, SIDE),
    "plain": lambda: nn.Linear(SIDE, SIDE, bias=False),
    "layer_norm": lambda: nn.LayerNorm(SIDE),
    "batch_norm": lambda: nn.BatchNorm2d(SIDE),
    "conv": lambda: nn.Conv2d(SIDE, SIDE, 3, padding=1, bias=False),
    "table": lambda: nn.Embedding(SIDE, SIDE),
    MIXED: Mixed,
}
# kind of operator: how to apply it once more, and which layers it needs
LINKS: Mapping[str, tuple[Link, str]] = {
    "aten.linear": (_layer, "linear"),
    "aten.matmul": (_layer, "plain"),
    "aten.layer_norm": (_layer, "layer_norm"),
    "aten.batch_norm": (_layer, "batch_norm"),
    "aten.conv2d": (_layer, "conv"),
    "aten.embedding": (_looked_up, "table"),
    "aten.view": (_view, ""),
    "aten.transpose": (lambda c, x, n: x.transpose(1, 2), ""),
    "aten.slice": (lambda c, x, n: x[:, :, :, 0:SIDE] if n < 0 else x.narrow(3, 0, SIDE), ""),
    "aten.cat": (lambda c, x, n: torch.cat(x.split(SIDE // 2, 3), 3), ""),
    "aten.add": (lambda c, x, n: x + c.other, ""),
    "aten.mul": (lambda c, x, n: x * c.other, ""),
    "aten.pow": (lambda c, x, n: x.pow(2), ""),
    "aten.to": (_cast, ""),
    "aten.gelu": (lambda c, x, n: functional.gelu(x), ""),
    "aten.relu": (lambda c, x, n: functional.relu(x), ""),
    "aten.softmax": (lambda c, x, n: torch.softmax(x, -1), ""),
    "aten.mean": (lambda c, x, n: x - x.mean(-1, keepdim=True), ""),
    "aten.max_pool2d": (lambda c, x, n: functional.max_pool2d(x, 3, 1, 1), ""),
    "aten.scaled_dot_product_attention": (
        lambda c, x, n: functional.scaled_dot_product_attention(x, x, x),
        "",
    ),
}


def slope(kind: str, device: str, dtype: torch.dtype) -> Times:
    """The host's seconds for one more operator of a kind, or block of several."""
    short, long = (times(kind, count, device, dtype) for count in (SHORT, LONG))
    return per_link(short, long, LONG - SHORT)


def times(kind: str, count: int, device: str, dtype: torch.dtype) -> Times:
    """The host's seconds of a chain's forward, and of its backward until all is done."""
    with torch.device(device):
        model = chain(kind, count).to(dtype)
    program = capture_program(model, (), {}, fold=False)
    lowered = alone(program, find_subdims(program.graph, rules_of(program.graph)))
    module = assemble(model, program, lowered, Settings())
    return times_of(module, device, ROUNDS, partial(module.zero_grad, set_to_none=True))


def chain(kind: str, count: int) -> Chain:
    """So many operators of a kind, or blocks of several."""
    link, makes = LINKS.get(kind, (_layer, kind))
    return Chain(link, count, makes)
