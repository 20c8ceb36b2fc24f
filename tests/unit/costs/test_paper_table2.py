"""The strategies under the paper's costs agree in kind with PaSE's Table II."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

import shardfold as sf
from shardfold import zoo

Splits = dict[str, dict[str, int]]


@cache
def planned(model: str) -> sf.Plan:
    module, args, kwargs = zoo.build(model)
    plan = sf.plan(module, args, kwargs, cluster="4x8x1080ti", cost="paper")
    assert plan.estimate.optimal
    assert plan.estimate.step_seconds < plan.estimate.data_parallel_seconds
    return plan


def splits(model: str, kind: str, module: Callable[[str], bool] = lambda path: True) -> Splits:
    return {
        entry.module: entry.split
        for entry in planned(model).operators
        if entry.kind == f"aten.{kind}" and module(entry.module)
    }


def test_alexnet_convolutions_by_batch_until_the_last() -> None:
    found = splits("alexnet", "conv2d")
    assert list(found) == ["conv1", "conv2", "conv3", "conv4", "conv5"]
    assert all(found[name] == {"batch": 32} for name in ("conv1", "conv2", "conv3"))
    # The paper: 32 for Conv 4, 16 x 2 in-channels for Conv 5; its published code: 16 x 2 for both.
    assert found["conv4"] in ({"batch": 32}, {"batch": 16, "in": 2})
    assert found["conv5"] == {"batch": 16, "in": 2}


def test_alexnet_fully_connected_alternate_without_resharding() -> None:
    first, second, third = splits("alexnet", "linear").values()
    assert first.keys() == second.keys() == {"in", "out"}
    assert first["out"] == second["in"]
    assert second["out"] == third["in"]
    entries = planned("alexnet").operators
    start = next(i for i, entry in enumerate(entries) if entry.module == "fc6")
    moved = {c.kind for entry in entries[start:] for c in entry.collectives}
    assert moved == {"all_reduce"}


def test_inception_by_batch_until_the_last_modules() -> None:
    early = splits("inceptionv3", "conv2d", lambda path: path[:2] in ("a.", "b.", "c.", "d."))
    assert len(early) == 71
    assert all(split == {"batch": 32} for split in early.values())
    late = splits("inceptionv3", "conv2d", lambda path: path.startswith("e."))
    assert len(late) == 18
    assert all(split["batch"] == 16 and len(split) == 2 for split in late.values())
    assert all({"in", "out"} & split.keys() for split in late.values())


def test_rnnlm_by_vocabulary() -> None:
    assert splits("rnnlm", "embedding") == {"embedding": {"vocab": 32}}
    assert splits("rnnlm", "linear") == {"projection": {"classes": 32}}
    assert list(splits("rnnlm", "cross_entropy_loss").values()) == [{"classes": 32}]


@pytest.mark.parametrize("kind", ["embedding", "linear", "cross_entropy_loss"])
def test_transformer_ends_by_vocabulary(kind: str) -> None:
    inner = ("coder", "attention", "feedforward")
    found = splits("transformer", kind, lambda path: not any(word in path for word in inner))
    assert len(found) == 1
    assert all(split["vocab"] >= 8 for split in found.values())


def test_transformer_layers_mix_batch_with_heads_or_width() -> None:
    attention = splits("transformer", "scaled_dot_product_attention")
    assert len(attention) == 18
    assert all(split == {"batch": 16, "heads": 2} for split in attention.values())
    up = splits("transformer", "linear", lambda path: path.endswith("feedforward.up"))
    down = splits("transformer", "linear", lambda path: path.endswith("feedforward.down"))
    assert len(up) == len(down) == 12
    assert all(split == {"batch": 16, "out": 2} for split in up.values())
    assert all(split == {"batch": 16, "in": 2} for split in down.values())
