"""One operator on one device: its local sizes, and its share of what is not simply local."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfold.graph import Op
from shardfold.sharding import Space
from virtual.interpreter import call
from virtual.movement import Device, chunks

SHAPED = {"view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"}
BIASED = {"linear": "bias", "conv1d": "bias", "conv2d": "bias", "addmm": "self"}
MEANS = {"mean", "mse_loss"}
PARTS = {"split", "split_with_sizes", "chunk"}


@dataclass(frozen=True)
class Place:
    """A device's part of an operator's iteration space."""

    op: Op
    space: Space
    row: int
    shape: tuple[int, ...]  # of the mesh
    device: Device

    def axes(self, factor: int) -> list[int]:
        return [a for a, f in enumerate(self.space.configs[self.row].tolist()) if f == factor]

    def bounds(self, base: str) -> tuple[int, int, int]:
        """Where the part of a factor in one piece begins and ends, and the factor's size."""
        factor = self.space.rule.factors.index(base)
        size = self.space.rule.sizes[factor]
        low, high = 0, size
        for axis in self.axes(factor):
            first, last = chunks(high - low, self.shape[axis])[self.device[axis]]
            low, high = low + first, low + last
        return low, high, size

    @property
    def is_first_of_a_sum(self) -> bool:
        """Whether a summand that every part of a sum would add is to be added here."""
        rule = self.space.rule
        reduced = [f for f in range(len(rule.factors)) if rule.base(f) in rule.rule.reduced]
        return all(self.device[axis] == 0 for f in reduced for axis in self.axes(f))

    @property
    def share(self) -> float:
        """The part of the reduced points that lies here."""
        part = 1.0
        for f, name in enumerate(self.space.rule.factors):
            if self.space.rule.base(f) in self.space.rule.rule.reduced:
                low, high, size = self.bounds(name)
                part *= (high - low) / size
        return part


def local_results(
    place: Place, given: list[Tensor], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """What the operator gives on this device; `shapes` are those of its local results."""
    op, name = place.op, place.op.kind.partition(".")[2]
    if name in SHAPED:
        return [given[0].reshape(list(shapes[0]))]
    if name in ("expand", "expand_as", "broadcast_to"):
        return [given[0].expand(list(shapes[0]))]
    if name in PARTS:
        dim = op.attributes["dim"]
        return list(given[0].split([shape[dim] for shape in shapes], dim))
    if name == "embedding":
        return [_embedding(place, given)]
    if name == "expert_linear":
        return [_expert_linear(place, given)]
    if name == "routed_experts":
        low, _, _ = place.bounds("e")
        return call(
            op, [given[0], given[1] - low, *given[2:]]
        )  # without biases, as in these models
    if name == "scaled_dot_product_attention":
        return [_attention(place, given)]
    if name in BIASED:
        given = [
            t * place.is_first_of_a_sum if o.name == BIASED[name] else t
            for o, t in zip(op.operands, given, strict=True)
        ]
    results = call(op, given)
    return [r * place.share for r in results] if name in MEANS else results


def _embedding(place: Place, given: list[Tensor]) -> Tensor:
    """Rows that lie elsewhere give zero."""
    by_name = {o.name: t for o, t in zip(place.op.operands, given, strict=True)}
    low, high, _ = place.bounds("v")
    index = by_name["indices"]
    inside = (index >= low) & (index < high)
    rows = F.embedding((index - low).clamp(0, high - low - 1), by_name["weight"])
    return rows * inside.unsqueeze(-1)


def _expert_linear(place: Place, given: list[Tensor]) -> Tensor:
    """Rows whose expert lies elsewhere give zero."""
    x, weight, expert = given
    low, high, _ = place.bounds("e")
    inside = (expert >= low) & (expert < high)
    (rows,) = call(place.op, [x, weight, (expert - low).clamp(0, high - low - 1)])
    return rows * inside.unsqueeze(-1)


def _attention(place: Place, given: list[Tensor]) -> Tensor:
    """A part of the queries sees the keys up to its own positions."""
    query, key, value, *mask = given
    options = place.op.attributes
    if options.get("is_causal"):
        low, high, _ = place.bounds("q")
        seen = torch.arange(low, high)[:, None] >= torch.arange(key.shape[-2])
        mask = [seen]
    scale = options.get("scale") or 1 / math.sqrt(query.shape[-1])
    return F.scaled_dot_product_attention(
        query, key, value, *mask, scale=scale, enable_gqa=bool(options.get("enable_gqa"))
    )
