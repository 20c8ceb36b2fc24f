"""Folded and unfolded, random models made of blocks have the same graph and the same best cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shardfold as sf
from draws import draws
from shardfold import zoo
from shardfold.planner import planner
from shardfold.planner.mesh_search import search_meshes

WIDTH = 8
BATCH = (torch.empty(8, 4, WIDTH, device="meta"), torch.empty(8, 4, dtype=torch.long))


@pytest.fixture(autouse=True, scope="module")
def _search_alone() -> Iterator[None]:
    """What is compared is what the search finds on each mesh: nothing else is proposed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            planner,
            "_select",
            lambda cases, request, watch, shares: search_meshes(cases, request, watch),
        )
        yield


class Block(nn.Module):
    """A feed-forward block with a few settings that change what it does."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 32 if kind == "wide" else 16)
        self.down = nn.Linear(self.up.out_features, WIDTH)
        self.drop = nn.Dropout(0.1 if kind == "noisy" else 0.0)
        self.gated = kind == "gated"
        self.index = index  # nobody reads it

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = self.up(self.norm(x if other is None else x + other))
        y = y * torch.sigmoid(y) if self.gated else torch.relu(y)
        return x + self.drop(self.down(y))


KINDS = ("plain", "wide", "noisy", "gated")


class Stack(nn.Module):
    """An encoder and a decoder of blocks; what the decoder reads of the encoder is a choice."""

    def __init__(self, encoder: list[str], decoder: list[str], reads: str, flat: bool) -> None:
        super().__init__()
        self.reads, self.flat = reads, flat
        parts = (("encoder", encoder), ("decoder", decoder))
        if flat:  # every block under a name of its own, called one by one
            for part, kinds in parts:
                for i, kind in enumerate(kinds):
                    self.add_module(f"{part}_{i}", Block(kind, i))
        else:
            for part, kinds in parts:
                blocks = nn.ModuleList([Block(kind, i) for i, kind in enumerate(kinds)])
                self.add_module(part, blocks)
        self.counts = len(encoder), len(decoder)
        self.head = nn.Linear(WIDTH, 4)

    def part(self, name: str, count: int) -> list[nn.Module]:
        if self.flat:
            return [getattr(self, f"{name}_{i}") for i in range(count)]
        return list(getattr(self, name))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.part("encoder", self.counts[0]):
            x = block(x)
        memory = x
        for i, block in enumerate(self.part("decoder", self.counts[1])):
            is_read = self.reads == "every" or (self.reads == "odd" and i % 2 == 1)
            x = block(x, memory if is_read else None)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """Runs of one kind, patterns of two or three, an odd block among them."""

    def kinds(most: int) -> list[str]:
        pattern = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
        found = (pattern * most)[: draw(st.integers(1, most))]
        if draw(st.booleans()):
            found[draw(st.integers(0, len(found) - 1))] = draw(st.sampled_from(KINDS))
        return found

    reads = draw(st.sampled_from(["never", "every", "odd"]))
    return Stack(kinds(8), kinds(8), reads, draw(st.booleans()))


def both(model: nn.Module, args: Any, kwargs: Any = None, **given: Any) -> list[sf.Plan]:
    return [sf.plan(model, args, kwargs, fold=fold, **given) for fold in (True, False)]


def assert_alike(folded: sf.Plan, full: sf.Plan) -> None:
    """The same model, and the same best cost on every mesh."""
    assert folded.provenance.graph == full.provenance.graph
    assert [m.mesh for m in folded.meshes] == [m.mesh for m in full.meshes]
    for ours, theirs in zip(folded.meshes, full.meshes, strict=True):
        assert ours.step_seconds == pytest.approx(theirs.step_seconds, rel=1e-9)


@draws(6)
@given(stacks())
def test_random_stacks_cost_the_same(model: Stack) -> None:
    assert_alike(*both(model, BATCH, cluster="2xh100", memory_limit=1e18))


@draws(3)
@given(st.integers(7, 12), st.sampled_from(KINDS), st.sampled_from(["never", "every"]))
def test_long_runs_cost_the_same(depth: int, kind: str, reads: str) -> None:
    model = Stack([kind], [kind] * depth, reads, flat=False)
    assert_alike(*both(model, BATCH, cluster="2xh100", memory_limit=1e18))


@pytest.mark.parametrize("name", ["gpt2-tiny", "rnnlm-tiny"])
def test_zoo_models_cost_the_same(name: str) -> None:
    model, args, kwargs = zoo.build(name)
    assert_alike(*both(model, args, kwargs, cluster="2x2xh100", memory_limit=1e18))
