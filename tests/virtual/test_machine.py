"""Random legal plans of small models, run on virtual devices, give one device's step."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from draws import covering, draws
from shardfold import zoo
from shardfold.capture import capture
from shardfold.graph import Graph
from shardfold.search import solve
from virtual.choosing import Desk
from virtual.drawing import graphs
from virtual.interpreter import leaves
from virtual.machine import Machine
from virtual.models import Language, tokens, without_dropout


class Uneven(nn.Module):
    """Sizes that few devices divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 10), nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 9)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.norm(x + self.down(F.relu(self.up(x))))
        return F.cross_entropy(self.head(y), labels)


class Grouped(nn.Module):
    """Attention with two key heads for four query heads, each projected on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = (w(x).unflatten(-1, (2, 4)).transpose(1, 2) for w in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return (self.out(y.transpose(1, 2).flatten(2)) + x).pow(2).mean()


class Pictures(nn.Module):
    """Convolutions with padding, stride and bias, a norm, pooling, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 2, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = self.conv2(F.max_pool2d(x, 2)) + 1.0
        return F.cross_entropy(self.head(x.flatten(1)), labels)


def language(**options: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    model = Language(layers=1, hidden=16, heads=4, vocabulary=16, **options)
    given = tokens(4, 8, 16)
    return model, (given,), {"labels": tokens(4, 8, 16)}


def labels(count: int, classes: int) -> Tensor:
    return torch.arange(count) * 3 % classes


MODELS = {
    "language": lambda: language(),
    "tied": lambda: language(tied=True),
    "uneven": lambda: (Uneven(), (torch.randn(10, 7),), {"labels": labels(10, 9)}),
    "grouped": lambda: (Grouped(), (torch.randn(4, 8, 16),), {}),
    "pictures": lambda: (Pictures(), (torch.randn(4, 4, 8, 8),), {"labels": labels(4, 8)}),
}
MESHES = {"2": "2xa100", "4": "4xa100", "2x2": "4xa100", "2x2x2": "8xa100"}


ZOO = [
    f"{name}-tiny"
    for name in ("llama3-8b", "t5-large", "vit-large", "mixtral-8x7b", "resnet50", "rnnlm")
]


@cache
def known(name: str) -> tuple[Graph, dict[int, Tensor]]:
    """A model of these tests, captured once for all meshes."""
    torch.manual_seed(0)
    return prepared(*MODELS[name]())


def prepared(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Graph, dict[int, Tensor]]:
    """The captured graph in double precision, and values for what no operator writes."""
    model = model.double()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    graph = capture(model, args, kwargs)
    values = leaves(graph, model, args, kwargs)
    return graph, {t: v.detach().clone() for t, v in values.items()}


def check_random_plans(graph: Graph, values: dict[int, Tensor], mesh: str, count: int) -> None:
    """The best choice and `count` random ones."""
    desk = Desk.of(graph, MESHES[mesh], mesh)
    problem = desk.tables.problem
    drawn = (covering(problem.sizes.tolist(), number) for number in range(count))
    choices = [solve(problem).choice, *drawn]
    for choice in choices:
        Machine(desk.decoded(tuple(int(c) for c in choice)), dict(values)).check()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_random_plans_give_one_devices_step(name: str, mesh: str) -> None:
    check_random_plans(*known(name), mesh, {"2": 5, "4": 5, "2x2": 10, "2x2x2": 4}[mesh])


@pytest.mark.parametrize("name", ZOO)
def test_random_plans_of_the_zoos_structures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if zoo.entry(name).source.startswith("Hugging Face"):
        pytest.importorskip("transformers")
    monkeypatch.setattr("shardfold.zoo.language.DROPOUT", 0.0)
    model, args, kwargs = zoo.build(name, batch=4, device="cpu", dtype=torch.float32)
    check_random_plans(*prepared(without_dropout(model), args, kwargs), "2x2", 2)


@given(graphs(max_ops=7), st.sampled_from(["2", "2x2"]), st.integers(0, 1000))
@draws(80)
def test_random_graphs_under_random_plans(graph: Graph, mesh: str, seed: int) -> None:
    desk = Desk.of(graph, MESHES[mesh], mesh)
    rng = np.random.default_rng(seed)
    values = {
        i: torch.from_numpy(rng.standard_normal(t.type.shape))
        for i, t in enumerate(graph.tensors)
        if t.role != "activation"
    }
    for _ in range(3):
        choice = tuple(int(c) for c in rng.integers(0, desk.tables.problem.sizes))
        Machine(desk.decoded(choice), dict(values)).check()
