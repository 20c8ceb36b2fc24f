"""The catalogue is data: names, defaults and suggestions, without torch.

Depth and width can be changed where that has a meaning, and only to what divides.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardfold import zoo
from shardfold.errors import ModelError
from shardfold.zoo.catalog import ConvShape, StackShape

FULL = [name for name in zoo.names() if not zoo.entry(name).is_tiny]


def test_importing_the_zoo_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, shardfold.zoo as zoo; zoo.names(); zoo.entry('gpt2-tiny');"
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_full_model_has_a_tiny_one() -> None:
    assert len(FULL) == 18
    assert [f"{name}-tiny" for name in FULL] == [n for n in zoo.names() if n not in FULL]


@pytest.mark.parametrize("name", zoo.names())
def test_an_entry_says_what_it_is(name: str) -> None:
    entry = zoo.entry(name)
    assert entry.name == name
    assert entry.summary
    assert entry.family in FULL
    assert entry.batch >= 1
    assert entry.seq is None or entry.seq >= 1


@pytest.mark.parametrize("name", ["alexnet", "inceptionv3", "resnet101", "rnnlm", "transformer"])
def test_default_batches_are_the_papers(name: str) -> None:
    entry = zoo.entry(name)
    assert entry.batch == (128 if entry.seq is None else 64)


@pytest.mark.parametrize(("wrong", "right"), [("alexnit", "alexnet"), ("lama3-8b", "llama3-8b")])
def test_an_unknown_name_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ModelError, match=rf"'{wrong}'.*{right}"):
        zoo.build(wrong)


def test_the_reference_page_lists_every_model() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/zoo.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (\d+) \| ?(\d*) ?\|$", page, re.MULTILINE)
    expected = [(e.name, str(e.batch), str(e.seq or "")) for e in map(zoo.entry, FULL)]
    assert rows == expected


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
