"""Depth and width can be changed where that has a meaning, and only to what divides."""

from __future__ import annotations

import pytest

from shardfold.errors import ModelError
from shardfold.zoo.resize import ConvShape, StackShape

LLAMA = StackShape(32, 4096, 14_336, 128_256, heads=32, kv_heads=8)


def test_width_keeps_the_size_of_a_head_where_it_divides() -> None:
    shape = LLAMA.resized("llama", 2, 1024)
    assert (shape.layers, shape.hidden, shape.feedforward) == (2, 1024, 3584)
    assert (shape.heads, shape.kv_heads, shape.head_size) == (8, 2, 128)


def test_width_keeps_the_number_of_heads_where_their_size_does_not_divide() -> None:
    shape = LLAMA.resized("llama", None, 256)
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_size) == (32, 32, 8, 8)


@pytest.mark.parametrize("hidden", [100, 1000, 0, -64])
def test_a_width_that_does_not_divide_is_refused_with_what_would(hidden: int) -> None:
    with pytest.raises(ModelError, match=rf"hidden={hidden}.*multiple of 512 .* or of 64"):
        LLAMA.resized("llama", None, hidden)


def test_a_model_has_at_least_one_layer() -> None:
    with pytest.raises(ModelError, match="at least 1 layer, got layers=0"):
        LLAMA.resized("llama", 0, None)


@pytest.mark.parametrize(("what", "layers", "hidden"), [("layers", 2, None), ("hidden", None, 64)])
def test_a_convolutional_network_cannot_be_resized(
    what: str, layers: int | None, hidden: int | None
) -> None:
    with pytest.raises(ModelError, match=f"cannot take {what}=.*alexnet-tiny"):
        ConvShape(224, 1000, 64).resized("alexnet", layers, hidden)
