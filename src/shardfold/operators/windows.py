"""Sliding windows: where a spatial split of convolution or pooling aligns, and the halo it needs.

Output row i reads the input rows from `i * stride - padding` on, over `dilation * (kernel - 1) + 1`
rows. Where the input has exactly `stride` rows for each output row, a part of the outputs owns the
input rows of the same part, and reads `padding` rows before them and
`dilation * (kernel - 1) + 1 - stride - padding` rows after them: the halo.

    kernel 3, stride 1, padding 1: one row from each neighbour
    kernel 3, stride 2, padding 1: one row from the neighbour before
    kernel 2, stride 2, padding 0: none
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardfold.operators.call import Call
from shardfold.operators.notation import Exchange, Phase

SPATIAL = ("t", "h", "w")


@dataclass(frozen=True, slots=True)
class Window:
    """One spatial dim of a sliding-window operator: sizes before and after, and its geometry."""

    factor: str
    before: int
    after: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def aligned(self) -> bool:
        """Whether parts of the output own equal parts of the input, and halos reach one part."""
        owns = self.before == self.stride * self.after
        return owns and self.after > 1 and max(self.halo) <= self.before // 2

    @property
    def halo(self) -> tuple[int, int]:
        """Input rows that a part reads from the parts before and after it."""
        reach = self.dilation * (self.kernel - 1) + 1
        return self.padding, max(reach - self.stride - self.padding, 0)

    @property
    def least(self) -> int:
        """The fewest output rows of a part whose neighbours' halo comes from that part alone."""
        return -(-max(self.halo) // self.stride)

    @property
    def input_dim(self) -> str:
        """The notation of the input's dim: none where parts would not align."""
        return self.factor if self.aligned else "."


def windows(call: Call, before: Sequence[int], kernel: Sequence[int]) -> tuple[Window, ...]:
    """The windows of a call, one for each entry of `kernel`; `before` is the input's shape."""
    rank = len(kernel)
    stride = each(call.attribute("stride") or kernel, rank)
    dilation = each(call.attribute("dilation", 1), rank)
    given = call.attribute("padding", 0)
    if isinstance(given, str):
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple(r // 2 if given == "same" else 0 for r in reach)
    else:
        padding = each(given, rank)
    after = call.results[0].shape[-rank:]
    return tuple(
        Window(*values)
        for values in zip(
            SPATIAL[-rank:], before[-rank:], after, kernel, stride, padding, dilation, strict=True
        )
    )


def each(value: Any, rank: int) -> tuple[int, ...]:
    """One number a dim: a single one holds for all."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * rank if len(values) == 1 else values


def halos(
    dims: Sequence[Window], lead: Sequence[str], sizes: Mapping[str, int], item_bytes: int
) -> tuple[Exchange, ...]:
    """The halo exchanges of every dim that can be split; the gradient's go the other way.

    A slab goes to each of two neighbours, so it is priced at half of the rows on both sides. Dims
    follow one another: where an earlier one is split too, the slab is longer by its halo, and so
    carries the corners.
    """
    phases: tuple[Phase, ...] = ("forward", "backward")
    found = []
    for number, dim in enumerate(dims):
        rows = sum(dim.halo)
        if not dim.aligned or not rows:
            continue
        over, words = list(lead), rows / 2
        for other in dims:
            if other is not dim and other.aligned:
                over.append(other.factor)
                words *= other.stride
            elif other is not dim:
                words *= other.before
        points = tuple(f for f in over if sizes.get(f, 1) > 1)
        longer = tuple(
            (other.factor, sum(other.halo) / other.stride)
            for other in dims[:number]
            if other.aligned and any(other.halo)
        )
        found += [
            Exchange(
                "halo",
                dim.factor,
                points,
                words,
                item_bytes,
                phase=phase,
                longer=longer,
                of=None if phase == "forward" else 0,
            )
            for phase in phases
        ]
    return tuple(found)
