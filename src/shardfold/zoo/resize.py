"""The sizes that make a model: what `layers` and `hidden` change, and what must divide."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from shardfold.errors import ModelError


@dataclass(frozen=True, slots=True)
class ConvShape:
    """A convolutional network: image side, classes, first width, and blocks of each stage."""

    image: int
    classes: int
    width: int
    blocks: tuple[int, ...] = ()
    growth: int = 0

    def resized(self, name: str, layers: int | None, hidden: int | None) -> Self:
        """Itself; a convolutional network has no one depth or width to change."""
        for what, value in (("layers", layers), ("hidden", hidden)):
            if value is not None:
                raise ModelError(
                    f"{name} cannot take {what}={value}: its stages have fixed depths and widths. "
                    f"Leave {what} out, or use {name.removesuffix('-tiny')}-tiny."
                )
        return self


@dataclass(frozen=True, slots=True)
class StackShape:
    """A stack of equal layers; an encoder-decoder has `layers` of each.

    `heads` attend in `hidden / heads` dims each; `kv_heads` of them have their own key and value.
    """

    layers: int
    hidden: int
    feedforward: int
    vocabulary: int
    heads: int = 1
    kv_heads: int = 1
    experts: int = 0
    image: int = 0
    patch: int = 0

    @property
    def head_size(self) -> int:
        """Dims of one head."""
        return self.hidden // self.heads

    def resized(self, name: str, layers: int | None, hidden: int | None) -> Self:
        """The same model with another depth or width; `feedforward` keeps its ratio to `hidden`."""
        shape = self
        if layers is not None:
            if layers < 1:
                raise ModelError(f"{name} needs at least 1 layer, got layers={layers}.")
            shape = replace(shape, layers=layers)
        return shape if hidden is None else shape._widened(name, hidden)

    def _widened(self, name: str, hidden: int) -> Self:
        """More or fewer heads of the same size where that divides, else as many of another size."""
        group = self.heads // self.kv_heads
        by_count, by_size = self.head_size * group, 2 * self.heads
        if hidden >= 1 and hidden % by_count == 0:
            heads = hidden // self.head_size
            kv_heads = heads // group
        elif hidden >= 1 and hidden % by_size == 0:
            heads, kv_heads = self.heads, self.kv_heads
        else:
            raise ModelError(
                f"{name} cannot take hidden={hidden}: it must be a multiple of {by_count} "
                f"(heads of {self.head_size}, {group} for each key head) or of {by_size} "
                f"({self.heads} heads of an even size)."
            )
        feedforward = max(1, round(self.feedforward * hidden / self.hidden))
        return replace(self, hidden=hidden, feedforward=feedforward, heads=heads, kv_heads=kv_heads)


Shape = ConvShape | StackShape
