"""Splits that need an exchange: written out by hand for each kind, and counted.

Each reference does on lists of parts what devices would do, with the exchange as the only thing
that crosses from part to part. It must give torch's result, and exchange as many words as the rule
says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from shardfold.operators import rule_for
from shardfold.operators.notation import Exchange, Rule

from . import cases
from .cases import case, ints, normal
from .oracle import Case, Part, call_of, operand_of, run


@dataclass
class Sums:
    """All-reduces that count the words of a row which they carry."""

    forward: int = 0
    backward: int = 0

    def add(self, pieces: list[Tensor], *, gradient: bool = True) -> Tensor:
        self.forward += 1
        self.backward += gradient
        return torch.stack(pieces).sum(0)

    def largest(self, pieces: list[Tensor]) -> Tensor:
        self.forward += 1
        return torch.stack(pieces).amax(0)


def words(rule: Rule, factor: str, phase: str) -> float:
    return sum(e.words for e in rule.exchanges if (e.factor, e.phase) == (factor, phase))


def check(given: Case, found: Tensor, sums: Sums, factor: str) -> None:
    rule = rule_for(call_of(given))
    torch.testing.assert_close(found, run(given.overload, given.arguments)[0])
    assert words(rule, factor, "forward") == sums.forward
    assert words(rule, factor, "backward") == sums.backward


def test_layer_norm_reduces_two_sums_a_row() -> None:
    x = normal(4, 6)
    given = case("layer_norm", {"input": x, "normalized_shape": [6]})
    sums, parts = Sums(), x.chunk(2, 1)
    mean = sums.add([p.sum(1, keepdim=True) for p in parts]) / 6
    square = sums.add([(p * p).sum(1, keepdim=True) for p in parts]) / 6
    scale = (square - mean * mean + 1e-5).rsqrt()
    check(given, torch.cat([(p - mean) * scale for p in parts], 1), sums, "d0")


def test_rms_norm_reduces_one_sum_a_row() -> None:
    x = normal(4, 6)
    given = case("rms_norm", {"input": x, "normalized_shape": [6], "eps": 1e-5})
    sums, parts = Sums(), x.chunk(2, 1)
    scale = (sums.add([(p * p).sum(1, keepdim=True) for p in parts]) / 6 + 1e-5).rsqrt()
    check(given, torch.cat([p * scale for p in parts], 1), sums, "d0")


@pytest.mark.parametrize(("factor", "dim"), [("b", 0), ("i2", 2)])
def test_batch_norm_reduces_two_sums_a_channel(factor: str, dim: int) -> None:
    x = normal(4, 6, 2, 3)
    flags = {"training": True, "momentum": 0.1, "eps": 1e-5}
    weights = dict.fromkeys(("weight", "bias", "running_mean", "running_var"))
    given = case("native_batch_norm", {"input": x, **weights, **flags})
    sums, parts, count = Sums(), x.chunk(2, dim), x.numel() / 6
    mean = sums.add([p.sum((0, 2, 3), keepdim=True) for p in parts]) / count
    square = sums.add([(p * p).sum((0, 2, 3), keepdim=True) for p in parts]) / count
    scale = (square - mean * mean + 1e-5).rsqrt()
    check(given, torch.cat([(p - mean) * scale for p in parts], dim), sums, factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_means_and_variances_are_sent_in_float64(dtype: torch.dtype) -> None:
    x = normal(4, 6).to(dtype)
    rule = rule_for(call_of(case("layer_norm", {"input": x, "normalized_shape": [6]})))
    sent = {e.phase: e.words * e.item_bytes for e in rule.exchanges}
    assert sent == {"forward": 16, "backward": 2 * max(4, dtype.itemsize)}


@pytest.mark.parametrize("name", ["softmax.int", "log_softmax.int"])
def test_a_softmax_in_a_wider_dtype_sends_that(name: str) -> None:
    given = {"self": normal(4, 6), "dim": 1, "dtype": torch.float64}
    assert {e.item_bytes for e in rule_for(call_of(case(name, given))).exchanges} == {8}


@pytest.mark.parametrize("name", ["softmax.int", "log_softmax.int"])
def test_softmax_reduces_maximum_and_sum(name: str) -> None:
    x = normal(4, 6)
    sums, parts = Sums(), x.chunk(2, 1)
    top = sums.largest([p.amax(1, keepdim=True) for p in parts])
    total = sums.add([(p - top).exp().sum(1, keepdim=True) for p in parts])
    y = torch.cat([(p - top).exp() / total for p in parts], 1)
    check(case(name, {"self": x, "dim": 1}), y.log() if "log" in name else y, sums, "i1")


def test_logsumexp_reduces_maximum_and_sum() -> None:
    x = normal(4, 6)
    sums, parts = Sums(), x.chunk(2, 1)
    top = sums.largest([p.amax(1, keepdim=True) for p in parts])
    # The result is whole everywhere, so its gradient needs no exchange.
    total = sums.add([(p - top).exp().sum(1, keepdim=True) for p in parts], gradient=False)
    check(case("logsumexp", {"self": x, "dim": [1]}), (total.log() + top)[:, 0], sums, "i1")


def _picked(part: Tensor, target: Tensor, low: int) -> Tensor:
    """The logit of each row's target, or zero where another part holds it."""
    inside = (target >= low) & (target < low + part.shape[1])
    rows = part.gather(1, torch.where(inside, target - low, 0)[:, None])[:, 0]
    return torch.where(inside, rows, 0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_reduces_three_words_a_row_for_a_class_split(smoothing: float) -> None:
    x, target = normal(4, 6), ints(6, 4)
    arguments = {"self": x, "target": target, "label_smoothing": smoothing}
    sums, parts = Sums(), x.chunk(2, 1)
    top = sums.largest([p.amax(1) for p in parts])
    total = sums.add([(p - top[:, None]).exp().sum(1) for p in parts], gradient=False)
    picked = sums.add([_picked(p, target, 3 * k) for k, p in enumerate(parts)], gradient=False)
    rows = total.log() + top - picked
    if smoothing:
        every = sums.add([p.sum(1) for p in parts], gradient=False)
        rows = (1 - smoothing) * rows + smoothing * (total.log() + top - every / 6)
    check(case("cross_entropy_loss", arguments), rows.mean(), sums, "c")


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_soft_targets_reduce_four_words_a_row_for_a_class_split(smoothing: float) -> None:
    x, target = normal(4, 6), normal(4, 6).softmax(1)
    arguments = {"self": x, "target": target, "label_smoothing": smoothing}
    sums, parts, shares = Sums(), x.chunk(2, 1), (1 - smoothing) * target + smoothing / 6
    top = sums.largest([p.amax(1) for p in parts])
    less, pairs = [p - top[:, None] for p in parts], shares.chunk(2, 1)
    total = sums.add([p.exp().sum(1) for p in less], gradient=False)
    own = [(p * s).sum(1) for p, s in zip(less, pairs, strict=True)]
    picked = sums.add(own, gradient=False)
    all_of = sums.add([s.sum(1) for s in pairs], gradient=False)
    check(case("cross_entropy_loss", arguments), (total.log() * all_of - picked).mean(), sums, "c")


def test_a_mean_over_rows_that_count_reduces_their_number() -> None:
    x, target = normal(4, 6), torch.tensor([1, -100, 2, 3])
    given = case("cross_entropy_loss", {"self": x, "target": target})
    sums, pairs = Sums(), list(zip(x.chunk(2), target.chunk(2), strict=True))
    count = sums.add([(t != -100).sum() for _, t in pairs], gradient=False)
    losses = [functional.cross_entropy(p, t, reduction="sum") / count for p, t in pairs]
    check(given, torch.stack(losses).sum(), sums, "b")


SLIDING = [
    case("conv2d", {"input": normal(2, 4, 12, 8), "weight": normal(6, 4, 3, 3), "padding": [1, 1]}),
    case(
        "conv2d",
        {
            "input": normal(2, 4, 24, 8),
            "weight": normal(6, 4, 7, 1),
            "padding": [3, 0],
            "stride": [2, 1],
        },
        label="stem",
    ),
    case(
        "conv2d",
        {
            "input": normal(2, 4, 12, 8),
            "weight": normal(4, 1, 3, 3),
            "padding": [2, 1],
            "dilation": [2, 1],
            "groups": 4,
        },
        label="dilated depthwise",
    ),
    case(
        "max_pool2d",
        {"self": normal(2, 4, 12, 7), "kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1]},
    ),
    case(
        "avg_pool2d",
        {"self": normal(2, 4, 12, 6), "kernel_size": [3, 1], "stride": [1, 1], "padding": [1, 0]},
    ),
]


def _padded(given: Case, x: Tensor, rows: int) -> Tensor:
    value = -math.inf if "max" in given.kind else 0.0
    return functional.pad(x, (0, 0, rows, rows), value=value)


@pytest.mark.parametrize("given", SLIDING, ids=str)
def test_rows_are_split_with_a_halo_from_both_neighbours(given: Case) -> None:
    call = call_of(given)
    rule = rule_for(call)
    x = operand_of(given.arguments, call.op.operands[0].name)
    stride = given.arguments.get("stride", [1, 1])[0]
    padding = given.arguments["padding"][0]
    kernel = (given.arguments.get("kernel_size") or given.arguments["weight"].shape[2:])[0]
    reach = given.arguments.get("dilation", [1, 1])[0] * (kernel - 1) + 1
    local = {**given.arguments, "padding": [0, given.arguments["padding"][1]]}
    pieces, received = [], []
    size = rule.sizes["h"]
    for low, high in ((0, size // 3), (size // 3, 2 * size // 3), (2 * size // 3, size)):
        first, last = low * stride - padding, (high - 1) * stride - padding + reach
        window = _padded(given, x, padding)[:, :, first + padding : last + padding]
        pieces.append(run(given.overload, {**local, call.op.operands[0].name: window})[0])
        received.append((low * stride - first) + max(last - high * stride, 0))
    torch.testing.assert_close(torch.cat(pieces, 2), run(given.overload, given.arguments)[0])
    halo = next(e for e in rule.exchanges if (e.factor, e.phase) == ("h", "forward"))
    points = math.prod(rule.sizes[f] for f in halo.over)
    assert 2 * halo.words * points == received[1] * x.numel() / x.shape[2]
    assert [e.words for e in rule.exchanges if (e.factor, e.phase) == ("h", "backward")] == [
        halo.words
    ]


def test_a_halo_that_reaches_past_a_neighbour_forbids_the_split() -> None:
    wide = case(
        "conv2d", {"input": normal(2, 4, 6, 6), "weight": normal(6, 4, 9, 1), "padding": [4, 0]}
    )
    assert "h" in rule_for(call_of(wide)).whole


def _step(name: str, gates: Tensor, inner: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step of one part's units: gates from the input and from the state, (count, b, e)."""
    if name.startswith("rnn"):
        return (torch.tanh if name == "rnn_tanh" else torch.relu)(gates[0] + inner[0]), c
    if name == "gru":
        reset, update = torch.sigmoid(gates[:2] + inner[:2])
        new = torch.tanh(gates[2] + reset * inner[2])
        return (1 - update) * new + update * h, c
    i, f, o = torch.sigmoid((gates + inner)[[0, 1, 3]])
    c = f * c + i * torch.tanh(gates[2] + inner[2])
    return o * torch.tanh(c), c


@pytest.mark.parametrize(
    "given",
    [g for g in cases.recurrent() if g.label in ("1 layers batch first", "2 layers")],
    ids=str,
)
def test_hidden_units_are_split_with_a_gather_at_every_step(given: Case) -> None:
    call = call_of(given)
    rule = rule_for(call)
    name, count, total = given.kind.removeprefix("aten."), 2, rule.sizes["e"]
    size = total // count
    parts = [Part(call, rule, "e", k, k * size, (k + 1) * size) for k in range(count)]
    gates = rule.sizes["g"]
    local = [
        {
            o.name: part.cut(operand_of(given.arguments, o.name), dims)
            for o, dims in zip(call.op.operands, rule.operands, strict=True)
        }
        for part in parts
    ]
    x = given.arguments["input"]
    steps = list((x.transpose(0, 1) if given.arguments["batch_first"] else x).unbind(0))
    gathers = 0
    for layer in range(given.arguments["num_layers"]):
        whole = local[0]["hx[0]" if name == "lstm" else "hx"][layer]
        own = [whole[:, p.low : p.high] for p in parts]
        cells = [m["hx[1]"][layer] if name == "lstm" else own[k] for k, m in enumerate(local)]
        outputs = []
        for step in steps:
            for k, mine in enumerate(local):
                w, u, b, c = (mine[f"params[{4 * layer + i}]"] for i in range(4))
                outer = functional.linear(step, w, b).unflatten(1, (gates, -1)).movedim(1, 0)
                inner = functional.linear(whole, u, c).unflatten(1, (gates, -1)).movedim(1, 0)
                own[k], cells[k] = _step(name, outer, inner, own[k], cells[k])
            whole, gathers = torch.cat(own, 1), gathers + 1
            outputs.append(whole)
        steps = outputs
    found = torch.stack(steps)
    expected = run(given.overload, given.arguments)[0]
    torch.testing.assert_close(
        found.transpose(0, 1) if given.arguments["batch_first"] else found, expected
    )
    gathers -= 1  # the last step of the last layer is read by nobody who needs all units
    gather, scatter = rule.exchanges
    assert gather == Exchange("all_gather", "e", ("b", "e"), item_bytes=8, repeats=gathers)
    assert (scatter.kind, scatter.phase, scatter.repeats) == ("reduce_scatter", "backward", gathers)
