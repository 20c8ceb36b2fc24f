"""Batches in equal parts, by place and dim.

Which batches may be cut: every sample on its own until a mean.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from shardfold import zoo
from shardfold.capture import capture
from shardfold.errors import InputError
from shardfold.operators import rules_of
from shardfold.planner.batch_slices import cut, first_part, samples_in
from shardfold.sharding import find_subdims


def test_parts_are_cut_where_the_plan_says_and_all_else_is_whole():
    x, mask = np.arange(24).reshape(6, 4), np.ones((6, 6))
    kwargs = {"batch": {"y": x.T, "names": ["a", None]}, "scale": 2.0}
    parts = cut((x, mask), kwargs, {"0": 0, "batch.y": 1}, 3)
    assert len(parts) == 3
    assert np.concatenate([args[0] for args, _ in parts]).tolist() == x.tolist()
    assert np.concatenate([k["batch"]["y"] for _, k in parts], 1).tolist() == x.T.tolist()
    assert all(args[1] is mask for args, _ in parts)
    assert parts[1][1]["scale"] == 2.0
    assert parts[1][1]["batch"]["names"] == ["a", None]
    assert first_part((x, mask), kwargs, {"0": 0}, 3)[0][0].tolist() == x[:2].tolist()


def test_one_part_is_the_batch_itself():
    x = np.ones((5, 2))
    assert cut((x,), {}, {}, 1) == [((x,), {})]


def test_what_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(InputError, match=r"6 samples \(dim 0 of \(6, 2\)\).* into 4 equal"):
        cut((np.ones((6, 2)),), {}, {"0": 0}, 4)
    with pytest.raises(InputError, match="no dim 1"):
        cut((np.ones(6),), {}, {"0": 1}, 2)


class Model(nn.Module):
    """A layer, and whatever makes a loss of its result."""

    def __init__(self, make, *modules):
        super().__init__()
        self.make, self.layer = make, nn.Linear(4, 4)
        self.more = nn.ModuleList(modules)

    def forward(self, x, y):
        return self.make(self.layer(x), y, *self.more)


def found(make, *modules, shape=(6, 4)):
    graph = capture(Model(make, *modules), (torch.randn(shape), torch.randn(shape)))
    return graph, samples_in(graph, find_subdims(graph, rules_of(graph)))


def dims(make, *modules, shape=(6, 4)):
    graph, samples = found(make, *modules, shape=shape)
    assert samples.reason == ""
    return {graph.tensors[t].name: dim for t, dim in samples.dims}


MEANS = {
    "mse": lambda x, y: functional.mse_loss(x, y),
    "mean": lambda x, y: (x * y).mean(),
    "mean of sums": lambda x, y: (x * y).sum(1).mean(),
    "two means": lambda x, y: (x * y).mean() + 0.1 * functional.l1_loss(x, y) / 3,
    "cross-entropy": lambda x, y: functional.cross_entropy(x, torch.softmax(y, -1)),
    "with a fixed term": lambda x, y: (x * y).mean() + torch.ones(3).sum(),
}
MIXED = {
    "a sum": (lambda x, y: (x * y).sum(), "takes samples together"),
    "a product of means": (lambda x, y: x.mean() * (x * y).mean(), "no sum of means"),
    "a root of a mean": (lambda x, y: (x - y).square().mean().sqrt(), "no sum of means"),
    "centred": (lambda x, y: ((x - x.mean(0)) * y).mean(), "read a mean"),
    "contrast": (
        lambda x, y: (torch.softmax(x @ x.transpose(0, 1), -1) @ (x * y)).mean(),
        "compares samples",
    ),
    "over the batch": (lambda x, y: (torch.softmax(x, 0) * y).mean(), "statistics|apart"),
    "order": (lambda x, y: (torch.cumsum(x, 0) * y).mean(), "apart"),
    "shifted": (lambda x, y: (x[1:] * x[:-1] * y[1:]).mean(), "apart|most of"),
    "numbered": (
        lambda x, y: (x * torch.arange(6.0)[:, None] * y).mean(),
        "apart|that the batch does not have",
    ),
    "largest": (lambda x, y: (x * y).max(), "takes samples together"),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_over_samples_may_be_cut(name):
    assert dims(MEANS[name]) == {"x": 0, "y": 0}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_samples_is_not_cut_and_the_operator_is_named(name):
    make, why = MIXED[name]
    _, samples = found(make, shape=(6, 4))
    assert samples.dims == ()
    assert samples.divisors() == []
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(samples.reason)


def test_labels_may_come_in_one_row():
    """Samples and positions in one dim, samples first: cut as the samples are."""
    model, args = Flat(), (torch.randn(6, 3, 4), torch.randint(4, (18,)))
    graph = capture(model, args)
    samples = samples_in(graph, find_subdims(graph, rules_of(graph)))
    assert (samples.reason, samples.count) == ("", 6)
    assert sorted(samples.dims) == [
        (k, 0) for k, t in enumerate(graph.tensors) if t.role == "input"
    ]


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, y):
        return functional.cross_entropy(self.layer(x).flatten(0, 1), y)


def test_half_of_the_input_is_not_a_batch():
    """Every row of one input is compared with all of the other: no dim is that of both."""
    _, samples = found(lambda x, y: torch.softmax(x @ y.T, -1).mean())
    assert samples.reason == "No dim is that of most of the input."


def test_batch_norm_in_training_is_not_cut():
    def make(x, y, norm):
        return functional.mse_loss(norm(x), y)

    assert "statistics over the batch" in found(make, nn.BatchNorm1d(4))[1].reason
    assert dims(make, nn.LayerNorm(4)) == {"x": 0, "y": 0}


def test_weights_of_classes_are_not_cut():
    graph, args = Weighted(), (torch.randn(8, 4), torch.randint(4, (8,)))
    captured = capture(graph, args)
    samples = samples_in(captured, find_subdims(captured, rules_of(captured)))
    assert "cross_entropy" in samples.reason


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("weights", torch.rand(4))

    def forward(self, x, y):
        return functional.cross_entropy(self.layer(x), y, self.weights)


def test_the_batch_need_not_come_first():
    """Attention over the first dim: the second is the samples'."""

    def make(x, y):
        q = x.transpose(0, 1).unflatten(2, (2, 2)).transpose(1, 2)
        z = functional.scaled_dot_product_attention(q, q, q)
        return functional.mse_loss(z.transpose(1, 2).flatten(2).transpose(0, 1), y)

    assert dims(make, shape=(5, 6, 4)) == {"x": 1, "y": 1}


@pytest.mark.parametrize("name", ["gpt2-tiny", "rnnlm-tiny", "vit-large-tiny", "mixtral-8x7b-tiny"])
def test_the_batches_of_the_zoo_are_cut_along_their_first_dim(name):
    graph = capture(*zoo.build(name))
    samples = samples_in(graph, find_subdims(graph, rules_of(graph)))
    assert samples.reason == ""
    assert {dim for _, dim in samples.dims} == {0}
    assert len(samples.dims) == sum(t.role == "input" for t in graph.tensors)
    assert samples.divisors() == [2, 4, 8]
