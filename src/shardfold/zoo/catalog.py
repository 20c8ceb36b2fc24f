"""The names of the zoo, what each is, its default batch and its sizes: plain data, no torch.

A size says what `layers` and `hidden` change, and what must divide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

from shardfold.errors import ModelError, nearest

TINY: Final = "-tiny"


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the zoo; `seq` is none where the input is an image."""

    name: str
    summary: str
    batch: int
    seq: int | None
    source: str

    @property
    def is_tiny(self) -> bool:
        """Whether this is the laptop-sized variant."""
        return self.name.endswith(TINY)

    @property
    def family(self) -> str:
        """The name without the `-tiny` ending: variants of a family have the same structure."""
        return self.name.removesuffix(TINY)


_HERE = "written here"
_HF = "Hugging Face transformers"

# Batches are PaSE's: 128 images, 64 sequences.
_FULL = (
    Entry("alexnet", "AlexNet without groups, 227 px, 62.4M parameters", 128, None, _HERE),
    Entry("inceptionv3", "Inception v3 without auxiliary head, 299 px, 23.8M", 128, None, _HERE),
    Entry("rnnlm", "2-layer LSTM of 2048, 793,472-word vocabulary, 3.3B", 64, 40, _HERE),
    Entry("transformer", "WMT base: 6+6 layers of 512, 60.5M", 64, 256, _HERE),
    Entry("transformer-big", "WMT big: 6+6 layers of 1024, 209M", 64, 256, _HERE),
    Entry("resnet50", "ResNet-50, 224 px, 25.6M", 128, None, _HERE),
    Entry("resnet101", "ResNet-101, 224 px, 44.5M", 128, None, _HERE),
    Entry("resnet50-wide", "ResNet-50 with 100,000 classes, 228M", 128, None, _HERE),
    Entry("densenet121", "DenseNet-121, 224 px, 8.0M", 128, None, _HERE),
    Entry("gpt2", "GPT-2 small: 12 layers of 768, 124M", 64, 1024, _HF),
    Entry("gpt3-175b", "GPT-3 sizes: 96 layers of 12,288, 175B", 64, 2048, _HF),
    Entry("llama3-8b", "Llama 3 8B: 32 layers of 4096, 8.03B", 64, 8192, _HF),
    Entry("llama3-70b", "Llama 3 70B: 80 layers of 8192, 70.6B", 64, 8192, _HF),
    Entry("llama3-405b", "Llama 3 405B: 126 layers of 16,384, 406B", 64, 8192, _HF),
    Entry("t5-large", "T5 large: 24+24 layers of 1024, 738M", 64, 512, _HF),
    Entry("bert-large", "BERT large, masked language model, 335M", 64, 512, _HF),
    Entry("vit-large", "ViT-L/16, 224 px, 1000 classes, 304M", 128, None, _HF),
    Entry("mixtral-8x7b", "Mixtral 8x7B: 32 layers, 8 experts, 2 a token, 46.7B", 64, 4096, _HF),
)


def _tiny(full: Entry) -> Entry:
    return replace(
        full,
        name=full.name + TINY,
        summary=f"{full.name}'s structure, laptop-sized",
        batch=8,
        seq=None if full.seq is None else 16,
    )


_ENTRIES = {known.name: known for known in (*_FULL, *map(_tiny, _FULL))}


def names() -> tuple[str, ...]:
    """Every name of the zoo: the full-size models, then the tiny ones."""
    return tuple(_ENTRIES)


def entry(name: str) -> Entry:
    """The entry called `name`.

    >>> entry("alexnet").batch
    128
    """
    if name not in _ENTRIES:
        raise ModelError(f"No model is called {name!r}. {nearest(name, _ENTRIES)}")
    return _ENTRIES[name]


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
