"""The planner does not offer what the runner cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardfold.capture import capture
from shardfold.operators import rules_of


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.net = kind(8, 8, num_layers=2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[0].mean()


class Pooled(nn.Module):
    def __init__(self, ceil_mode: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.ceil_mode = ceil_mode

    def forward(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(self.conv(x), 2, ceil_mode=self.ceil_mode).mean()


def whole(model: nn.Module, example: Tensor, kind: str) -> frozenset[str]:
    graph = capture(model, (example,))
    rules = rules_of(graph)
    return next(r.whole for op, r in zip(graph.ops, rules, strict=True) if op.kind == kind)


SEQUENCE, IMAGE = torch.empty(4, 5, 8), torch.empty(2, 3, 8, 8)


def test_hidden_units_of_an_lstm_are_offered() -> None:
    assert not {"b", "e"} & whole(Recurrent(nn.LSTM), SEQUENCE, "aten.lstm")


@pytest.mark.parametrize(("kind", "name"), [(nn.GRU, "aten.gru"), (nn.RNN, "aten.rnn_tanh")])
def test_hidden_units_of_others_are_not(kind: type[nn.RNNBase], name: str) -> None:
    found = whole(Recurrent(kind), SEQUENCE, name)
    assert "e" in found
    assert "b" not in found


def test_recurrent_dropout_stays_whole() -> None:
    assert {"b", "e"} <= whole(Recurrent(nn.LSTM, dropout=0.5), SEQUENCE, "aten.lstm")


def test_space_of_a_pool_that_rounds_up_is_not_offered() -> None:
    assert not {"h", "w"} & whole(Pooled(False), IMAGE, "aten.max_pool2d")
    assert {"h", "w"} <= whole(Pooled(True), IMAGE, "aten.max_pool2d")


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("index", torch.zeros(4, 8, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(16, 8).scatter_add(0, self.index, self.lin(x)).square().mean()


def test_rows_that_are_written_to_stay_whole_and_those_that_are_added_do_not() -> None:
    found = whole(Written(), torch.empty(4, 8), "aten.scatter_add")
    assert "v" in found
    assert "t" not in found
