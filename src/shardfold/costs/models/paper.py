"""PaSE's equation 1 (Elango, IPDPS 2021): arithmetic at peak rate, bytes at one bandwidth.

No latency, no memory traffic, no levels of links, no optimizer. Two operators are counted as the
paper's code counts them, which decides some of its Table II. An embedding is a product with a
one-hot matrix, so splitting its features all-reduces a gradient of that matrix. A convolution is
a product with the unrolled input, so splitting its out channels all-reduces a gradient with an
entry for every tap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from shardfold.cluster import Cluster, Mesh
from shardfold.costs.model import VOLUME
from shardfold.costs.steps import Collective, Compute, Values
from shardfold.operators import REGISTRY, Operator
from shardfold.operators.call import Call
from shardfold.operators.notation import Exchange, Rule


@dataclass(frozen=True, slots=True)
class Paper:
    """Seconds by equation 1: FLOP over the peak rate, bytes over the rate of a device's own link.

    The paper knows no reduce-scatter. A pending sum is all-reduced inside the layer, at
    2(n - 1)/n of its bytes; then the edge is charged what the other side lacks, forward and
    backward alike, at (n - 1)/n where a forward gather undid the split.
    """

    cluster: Cluster
    mesh: Mesh
    sums_gradients: ClassVar[bool] = False  # every layer's weights are its own, tied or not

    def compute_seconds(self, step: Compute) -> Values:
        """FLOP over the float32 rate; memory traffic, launches and updates are free."""
        if step.phase == "update":
            return np.zeros_like(step.flops)
        return step.flops / self.cluster.device.peak("float32")

    def collective_seconds(self, step: Collective) -> Values:
        """Bytes sent over one bandwidth, whatever the axes."""
        size = math.prod(self.mesh.axes[a].size for a in step.axes)
        volume = VOLUME[step.kind](size)
        if step.kind == "reduce_scatter":
            edge = VOLUME["all_gather"](size) if step.phase == "backward" else 0.0
            volume = VOLUME["all_reduce"](size) + edge
        link = self.cluster.levels[-1]
        return volume * step.bytes / (link.rated_bandwidth or link.bandwidth)


def _one_hot(call: Call) -> Rule:
    """A look-up as a product: every row of the table counts for every token."""
    rule = replace(
        _plain(call),
        engine="matrix",
        flops=2.0,
        over=None,
        sparse=(),
        backward=2.0,
    )
    return _with_input_gradient(rule, "d", call)


def _unrolled(call: Call) -> Rule:
    """A convolution whose input gradient has an entry for every tap."""
    return _with_input_gradient(_plain(call), "n", call)


def _with_input_gradient(rule: Rule, out: str, call: Call) -> Rule:
    """Charge an all-reduce of the product's left operand where its out factor is split."""
    over = tuple(f for f in rule.factors if f != out)
    item_bytes = call.inputs[0].item_bytes
    gradient = Exchange("all_reduce", out, over, item_bytes=item_bytes, phase="backward")
    return replace(rule, exchanges=(*rule.exchanges, gradient))


def _plain(call: Call) -> Rule:
    """The rule that everyone else uses."""
    rule = REGISTRY[call.op.kind].rule
    assert rule is not None
    return rule(call)


RULES: Mapping[str, Operator] = {
    "aten.embedding": replace(REGISTRY["aten.embedding"], rule=_one_hot),
    **{
        kind: replace(REGISTRY[kind], rule=_unrolled)
        for kind in (f"aten.conv{n}d" for n in (1, 2, 3))
    },
}
