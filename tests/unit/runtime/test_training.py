"""Text as batches: pieces of the file, the next token as label, the same for a step every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardfold import zoo
from shardfold.errors import InputError, RunError
from shardfold.runtime.training import IGNORED, repeated, text

TEXT = bytes(k * 7 % 251 for k in range(3000))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def place(row: torch.Tensor) -> int:
    """Where a piece of the text is; the bytes of the text repeat after 251."""
    at = TEXT.find(bytes(row.tolist()))
    assert at >= 0
    return at


def test_labels_are_the_next_tokens(file: Path) -> None:
    model, args, kwargs = zoo.build("rnnlm-tiny", device="cpu")
    data = text(file, model, (args, kwargs), seed=1)
    (tokens,), given = data(3)
    assert tokens.shape == given["labels"].shape == (8, 16)
    for row, labels in zip(tokens, given["labels"], strict=True):
        place(row)
        assert torch.equal(row[1:], labels[:-1])
        place(torch.cat([row, labels[-1:]]))
    again, other = data(3), data(4)
    assert torch.equal(again[0][0], tokens)
    assert not torch.equal(other[0][0], tokens)
    assert not torch.equal(text(file, model, (args, kwargs), seed=2)(3)[0][0], tokens)
    assert torch.isfinite(model(tokens, **given))


def test_a_model_that_shifts_by_itself_is_given_its_tokens(file: Path) -> None:
    model, args, kwargs = zoo.build("gpt2-tiny", device="cpu")
    _, given = text(file, model, (args, kwargs))(0)
    assert torch.equal(given["input_ids"], given["labels"])
    assert given["input_ids"].shape == kwargs["input_ids"].shape


def test_a_decoder_goes_on_where_the_encoder_ends(file: Path) -> None:
    model, args, kwargs = zoo.build("transformer-tiny", device="cpu")
    (source, target), given = text(file, model, (args, kwargs))(0)
    for row in torch.cat([source, target, given["labels"][:, -1:]], 1):
        place(row)
    assert torch.equal(target[:, 1:], given["labels"][:, :-1])


def test_a_masked_model_does_not_see_what_it_is_asked_for(file: Path) -> None:
    model, args, kwargs = zoo.build("bert-large-tiny", device="cpu")
    _, given = text(file, model, (args, kwargs))(0)
    asked = given["labels"] != IGNORED
    assert torch.equal(asked, kwargs["labels"] != IGNORED)
    assert (given["input_ids"][asked] == 0).all()
    for row in torch.where(asked, given["labels"], given["input_ids"]):
        place(row)


def test_what_cannot_be_used_is_refused(file: Path, tmp_path: Path) -> None:
    model, args, kwargs = zoo.build("rnnlm-tiny", device="cpu")
    with pytest.raises(InputError, match="Cannot read the text"):
        text(tmp_path / "none.txt", model, (args, kwargs))
    short = tmp_path / "short.txt"
    short.write_bytes(b"abc")
    with pytest.raises(RunError, match="has 3 bytes, a sample of this model needs 17"):
        text(short, model, (args, kwargs))
    images, given, named = zoo.build("alexnet-tiny", device="cpu")
    with pytest.raises(RunError, match="this one takes images, labels"):
        text(file, images, (given, named))


def test_the_example_is_repeated() -> None:
    batch = ((1,), {"a": 2})
    assert repeated(batch)(0) is repeated(batch)(7) is batch
