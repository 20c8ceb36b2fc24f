"""Batches of other shapes than the example's, under the same splits, beside the plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardfold.errors import RunError
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize

from .choices import Chooser
from .ranks import Launch
from .test_faithful import whole

Batch = tuple[Tensor, ...]


class Images(nn.Module):
    """Statistics over the batch, and a mean over it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = functional.relu(self.norm(self.conv(x))).mean((2, 3))
        return functional.cross_entropy(self.out(h), y)


class Tokens(nn.Module):
    """Packed heads, a causal mask, positions by length, and labels of which some do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(12, 8), nn.Embedding(32, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 12)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        b, s = tokens.shape
        h = self.embed(tokens) + self.places(torch.arange(s))
        q, k, v = self.qkv(h).view(b, s, 3, 4, 2).permute(2, 0, 3, 1, 4)
        h = h + functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
            1, 2
        ).reshape(b, s, 8)
        logits = self.out(h)
        return functional.cross_entropy(logits.view(-1, 12), labels.view(-1), ignore_index=0)


class Summed(nn.Module):
    """A loss that grows with the batch, and one by the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = self.layers(x)
        self.seen.mul_(0.9).add_(found.detach().mean(0))
        return (found - y).square().sum() + found.abs().sum() / len(x)


def images(batch: int, side: int = 8) -> Batch:
    return torch.randn(batch, 2, side, side), torch.randint(6, (batch,))


def tokens(batch: int, length: int = 8) -> Batch:
    found = torch.randint(12, (2, batch, length))
    return found[0], found[1] * (torch.rand(batch, length) > 0.3)


def vectors(batch: int) -> Batch:
    return torch.randn(batch, 6), torch.randn(batch, 4)


CASES: dict[str, tuple[type[nn.Module], Callable[..., Batch], list[tuple[int, ...]]]] = {
    "images": (Images, images, [(8,), (5,), (12, 10), (5,)]),
    "tokens": (Tokens, tokens, [(8,), (5, 7), (8, 12), (8,)]),
    "summed": (Summed, vectors, [(8,), (4,), (5,), (12,), (4,)]),  # 4: as many as a part has
}


def built(name: str) -> tuple[nn.Module, Batch]:
    kind, make, sizes = CASES[name]
    torch.manual_seed(0)
    model = kind().double()
    return model, doubled(make(*sizes[0]))


def doubled(batch: Batch) -> Batch:
    return tuple(t.double() if t.is_floating_point() else t for t in batch)


def plans(name: str, cluster: str, mesh: str, count: int) -> list[Any]:
    model, args = built(name)
    chooser = Chooser(model, args, {}, cluster, mesh)
    made = [*chooser.baselines(), *(chooser.random(k) for k in range(count))][1:]
    return [(name, f"plan {k} on {mesh}", dumps(plan).encode()) for k, plan in enumerate(made)]


def trained(module: nn.Module, name: str) -> dict[str, Tensor]:
    """Losses, gradients and state of steps on batches of every shape, some without training."""
    _, make, sizes = CASES[name]
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    found: dict[str, Tensor] = {}
    for step, size in enumerate(sizes):
        batch = doubled(make(*size))
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        for key, parameter in module.named_parameters():
            found[f"gradient {step} {key}"] = whole(parameter.grad).clone()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            found[f"eval {step}"] = module(*batch)
        module.train()
    return found | {f"state {k}": whole(v).clone() for k, v in module.state_dict().items()}


def beside_eager(rank: int, cases: list[Any]) -> list[str]:
    told = []
    for name, label, data in cases:
        model, args = built(name)
        expected = trained(copy.deepcopy(model), name)
        try:
            found = trained(parallelize(model, loads(data), args), name)
        except RunError as error:
            told.append(f"refused: {name} {label}: {error}")
            continue
        apart = {
            key: float((found[key] - value).abs().max())
            for key, value in expected.items()
            if not torch.allclose(found[key], value, rtol=1e-9, atol=1e-11)
        }
        told += [f"{name} {label}: {apart}"] if apart else []
    return told


@pytest.mark.parametrize(("cluster", "mesh"), [("2xcpu", "2"), ("4xcpu", "2x2")])
def test_other_shapes_train_as_the_plain_module(cluster: str, mesh: str, on_ranks: Launch) -> None:
    cases = [case for name in CASES for case in plans(name, cluster, mesh, 2)]
    for told in on_ranks(beside_eager, int(cluster[0]), cases):
        assert told == []


def refusals(rank: int, case: Any) -> list[str]:
    name, _, data = case
    model, args = built(name)
    module = parallelize(model, loads(data), args)
    said = []
    for batch in (vectors(1), (torch.randn(6, 5), torch.randn(6, 4)), vectors(6)):
        torch.manual_seed(rank)
        given = doubled(batch if len(batch[0]) == 1 else (torch.randn(batch[0].shape), batch[1]))
        with pytest.raises(RunError) as error:
            module(*given)
        said.append(str(error.value))
    return said


def test_what_the_splits_do_not_allow_is_refused_on_every_rank(on_ranks: Launch) -> None:
    case = plans("summed", "2xcpu", "2", 0)[0]
    for empty, unlike, apart in on_ranks(refusals, 2, case):
        assert "A batch of 1x6 and 1x4 does not run under the plan for 8x6 and 8x4" in empty
        assert "Pad the batch to the plan's shapes, or plan for this one" in empty
        assert "A batch of 6x5 and 6x4 does not run under the plan for 8x6 and 8x4" in unlike
        assert "is taken as the whole batch: give all ranks the same" in apart
