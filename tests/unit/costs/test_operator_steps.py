"""The work of a step counted by hand: three products a layer, two operations a multiply-add."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardfold.capture import capture
from shardfold.cluster import parse
from shardfold.costs.operator_steps import ideal_seconds, model_flops
from shardfold.operators import rules_of
from shardfold.sharding import find_subdims


def test_a_first_layer_has_two_products_and_others_three() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    graph = capture(model, (torch.randn(32, 8),), loss=lambda y: y.square().mean())
    subdims = find_subdims(graph, rules_of(graph))
    first, second = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
    # A bias has a gradient too, which is counted as a product by the rule's own measure.
    found = model_flops(graph, subdims)
    assert found >= 2 * first + 3 * second
    assert found <= 3 * first + 4 * second
    device = parse("a100").device
    assert ideal_seconds(graph, subdims, device) == pytest.approx(found / device.peak("float32"))
