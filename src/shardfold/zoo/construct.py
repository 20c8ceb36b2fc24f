"""Example batches: empty on the meta device, random and reproducible elsewhere.

Puts a model and its batch together: recipe, sizes, device and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.errors import ModelError, nearest
from shardfold.zoo import convnets, language
from shardfold.zoo.catalog import ConvShape, Entry, Shape, StackShape

SEED = 0
IGNORED = -100  # the label that cross-entropy skips by default


class Draw:
    """Draws inputs on a device; the same draws in the same order give the same numbers."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_meta = self.device.type == "meta"
        self._generator = torch.Generator("cpu").manual_seed(SEED)

    def integers(self, below: int, *size: int) -> Tensor:
        """Integers in [0, below): tokens or class labels."""
        if self.is_meta:
            return torch.empty(size, dtype=torch.long, device=self.device)
        with torch.device("cpu"):
            drawn = torch.randint(below, size, generator=self._generator)
        return drawn.to(self.device)

    def normal(self, *size: int) -> Tensor:
        """Normally distributed numbers, of the default dtype: images or sound."""
        if self.is_meta:
            return torch.empty(size, device=self.device)
        with torch.device("cpu"):
            drawn = torch.randn(size, generator=self._generator)
        return drawn.to(self.device)

    def uniform(self, *size: int) -> Tensor:
        """Numbers in [0, 1), of the default dtype: how right an answer is."""
        if self.is_meta:
            return torch.empty(size, device=self.device)
        with torch.device("cpu"):
            drawn = torch.rand(size, generator=self._generator)
        return drawn.to(self.device)

    def flags(self, *size: int) -> Tensor:
        """True or false: which patches are masked."""
        return self.integers(2, *size).bool()

    def masked_labels(self, tokens: Tensor, share: float = 0.15) -> Tensor:
        """The tokens at a share of the positions, and `IGNORED` at the others."""
        if self.is_meta:
            return torch.empty_like(tokens)
        with torch.device("cpu"):
            kept = torch.rand(tokens.shape, generator=self._generator) < share
        kept[:, 0] = True  # never a batch without a label: its loss would be nan
        return tokens.masked_fill(~kept.to(self.device), IGNORED)


Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a family: its sizes, and a function of sizes, batch, sequence and draw."""

    make: Callable[[Any, int, int, Draw], Built]
    full: Shape
    tiny: Shape


def build(
    entry: Entry,
    *,
    batch: int | None,
    seq: int | None,
    layers: int | None,
    hidden: int | None,
    device: str,
    dtype: torch.dtype | str | None,
) -> Built:
    """The model of an entry, in training mode, with a batch whose loss it returns."""
    if seq is not None and entry.seq is None:
        raise ModelError(f"{entry.name} takes images, so seq={seq} has no meaning. Leave it out.")
    batch = _positive(entry.name, "batch", batch, entry.batch)
    seq = _positive(entry.name, "seq", seq, entry.seq or 1)
    recipe = RECIPES[entry.family]
    shape = (recipe.tiny if entry.is_tiny else recipe.full).resized(entry.name, layers, hidden)
    with _defaults(device, dtype):
        module, args, kwargs = recipe.make(shape, batch, seq, Draw(device))
    return module.train(), args, kwargs


def from_config(
    path: str,
    *,
    batch: int | None,
    seq: int | None,
    layers: int | None,
    device: str,
    dtype: torch.dtype | str | None,
) -> Built:
    """The model of a Hugging Face `config.json`."""
    from shardfold.zoo import huggingface

    given = None if layers is None else _positive(path, "layers", layers, 1)
    config, kind = huggingface.read(path, given)
    batch = _positive(path, "batch", batch, 64)
    seq = None if seq is None else _positive(path, "seq", seq, 1)
    with _defaults(device, dtype):
        module, args, kwargs = huggingface.build_from(config, kind, batch, seq, Draw(device))
    return module.train(), args, kwargs


def _positive(name: str, what: str, given: int | None, default: int) -> int:
    value = default if given is None else given
    if value < 1:
        raise ModelError(f"{name} needs a positive {what}, got {what}={value}.")
    return value


@contextmanager
def _defaults(device: str, dtype: torch.dtype | str | None) -> Iterator[None]:
    """Make modules on a device, in a dtype and from a fixed seed, and leave no trace of it."""
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ModelError(f"No dtype is called {dtype!r}. {nearest(dtype, DTYPES)}")
        dtype = DTYPES[dtype]
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(SEED)
        torch.set_default_dtype(dtype or torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _classifier(
    module: Callable[[ConvShape], nn.Module], shape: ConvShape, batch: int, seq: int, draw: Draw
) -> Built:
    images = draw.normal(batch, 3, shape.image, shape.image)
    return module(shape), (images,), {"labels": draw.integers(shape.classes, batch)}


def _rnnlm(shape: StackShape, batch: int, seq: int, draw: Draw) -> Built:
    tokens, labels = (draw.integers(shape.vocabulary, batch, seq) for _ in range(2))
    return language.RNNLM(shape), (tokens,), {"labels": labels}


def _transformer(shape: StackShape, batch: int, seq: int, draw: Draw) -> Built:
    source, target, labels = (draw.integers(shape.vocabulary, batch, seq) for _ in range(3))
    return language.Transformer(shape, seq), (source, target), {"labels": labels}


def _from_transformers(
    config: str, kind: str, shape: StackShape, batch: int, seq: int, draw: Draw
) -> Built:
    from shardfold.zoo import huggingface

    made = getattr(huggingface, config)(shape, seq)
    return huggingface.build_from(made, huggingface.named(kind), batch, seq, draw)


def _hf(config: str, kind: str, full: StackShape, tiny: StackShape) -> Recipe:
    """A model of transformers: the function that makes its configuration, and its class."""
    return Recipe(partial(_from_transformers, config, kind), full, tiny)


def _conv(module: Callable[[ConvShape], nn.Module], full: ConvShape, tiny: ConvShape) -> Recipe:
    return Recipe(partial(_classifier, module), full, tiny)


def _llama(full: StackShape, tiny_heads: int, tiny_kv_heads: int) -> Recipe:
    tiny = StackShape(2, 64, 224, 257, tiny_heads, tiny_kv_heads)
    return _hf("llama", "LlamaForCausalLM", full, tiny)


RECIPES = {
    "alexnet": _conv(convnets.AlexNet, convnets.ALEXNET, convnets.ALEXNET_TINY),
    "inceptionv3": _conv(convnets.Inception, convnets.INCEPTION_V3, convnets.INCEPTION_TINY),
    "rnnlm": Recipe(_rnnlm, language.RNNLM_FULL, language.RNNLM_TINY),
    "transformer": Recipe(_transformer, language.BASE, language.TINY),
    "transformer-big": Recipe(_transformer, language.BIG, language.TINY_BIG),
    "resnet50": _conv(convnets.ResNet, convnets.RESNET50, convnets.RESNET_TINY),
    "resnet101": _conv(convnets.ResNet, convnets.RESNET101, convnets.RESNET_TINY_DEEP),
    "resnet50-wide": _conv(convnets.ResNet, convnets.RESNET50_WIDE, convnets.RESNET_TINY_WIDE),
    "densenet121": _conv(convnets.DenseNet, convnets.DENSENET121, convnets.DENSENET_TINY),
    "gpt2": _hf(
        "gpt2",
        "GPT2LMHeadModel",
        StackShape(12, 768, 3072, 50_257, 12, 12),
        StackShape(2, 64, 256, 257, 4, 4),
    ),
    "gpt3-175b": _hf(
        "gpt2",
        "GPT2LMHeadModel",
        StackShape(96, 12_288, 49_152, 50_257, 96, 96),
        StackShape(2, 64, 256, 257, 8, 8),
    ),
    "llama3-8b": _llama(StackShape(32, 4096, 14_336, 128_256, 32, 8), 8, 2),
    "llama3-70b": _llama(StackShape(80, 8192, 28_672, 128_256, 64, 8), 16, 2),
    "llama3-405b": _llama(StackShape(126, 16_384, 53_248, 128_256, 128, 8), 16, 1),
    "t5-large": _hf(
        "t5",
        "T5ForConditionalGeneration",
        StackShape(24, 1024, 4096, 32_128, 16, 16),
        StackShape(2, 64, 256, 257, 4, 4),
    ),
    "bert-large": _hf(
        "bert",
        "BertForMaskedLM",
        StackShape(24, 1024, 4096, 30_522, 16, 16),
        StackShape(2, 64, 256, 257, 4, 4),
    ),
    "vit-large": _hf(
        "vit",
        "ViTForImageClassification",
        StackShape(24, 1024, 4096, 1000, 16, 16, image=224, patch=16),
        StackShape(2, 64, 256, 10, 4, 4, image=32, patch=8),
    ),
    "mixtral-8x7b": _hf(
        "mixtral",
        "MixtralForCausalLM",
        StackShape(32, 4096, 14_336, 32_000, 32, 8, experts=8),
        StackShape(2, 64, 224, 257, 4, 2, experts=4),
    ),
}
