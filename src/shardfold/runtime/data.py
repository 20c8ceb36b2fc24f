"""What to train on: the example batch again and again, or the bytes of a text file.

The bytes of a file are its tokens. Every sample of every step is a piece of the text whose place
depends on the seed and the number of the step alone: all ranks draw the same batch, and a run
that was interrupted goes on with the batch it would have had.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardfold.errors import InputError, RunError
from shardfold.runtime.training import Batch, Data

BYTES = 256
IGNORED = -100  # the label that cross-entropy skips
SHIFTED_INSIDE = "input_ids"  # transformers: the model itself compares with the next token


def repeated(example: Batch) -> Data:
    """The example, in every step."""
    return lambda step: example


def text(path: str | Path, model: nn.Module, example: Batch, seed: int = 0) -> Data:
    """Pieces of a text file, as a model of tokens takes them."""
    roles = _Roles.of(model, example)
    try:
        data = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise InputError(f"Cannot read the text {path}: {error.strerror}.") from error
    if len(data) <= roles.length:
        raise RunError(
            f"The text {path} has {len(data)} bytes, a sample of this model needs "
            f"{roles.length + 1}. Give a longer text, or a smaller --seq."
        )
    known = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if max(known, default=0) < BYTES:
        raise RunError(
            f"The model's vocabulary has {max(known, default=0)} tokens; the bytes of a text need "
            f"{BYTES}."
        )

    def batch(step: int) -> Batch:
        starts = np.random.default_rng((seed, step)).integers(
            len(data) - roles.length, size=roles.samples
        )
        rows = data[starts[:, None] + np.arange(roles.length + 1)]
        return roles.filled(torch.from_numpy(rows.astype(np.int64)))

    return batch


@dataclass(frozen=True, slots=True)
class _Roles:
    """Which inputs are tokens, and which are the labels; everything else stays as it is."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: tuple[str, ...]  # of the tokens, in order; the decoder's come second
    samples: int
    seq: int

    @classmethod
    def of(cls, model: nn.Module, example: Batch) -> _Roles:
        args, kwargs = example
        named = {**dict(zip(_parameters(model), args, strict=False)), **kwargs}
        whole = {n: v for n, v in named.items() if isinstance(v, Tensor) and v.dim() == 2}
        tokens = tuple(n for n, v in whole.items() if n != "labels" and not v.is_floating_point())
        labels = whole.get("labels")
        shapes = {tuple(whole[n].shape) for n in (*tokens, "labels") if n in whole}
        if labels is None or not 1 <= len(tokens) <= 2 or len(shapes) != 1:
            raise RunError(
                f"Text is for models of tokens and labels; this one takes {', '.join(named)}. "
                "Leave --data out to train on the example batch."
            )
        return cls(args, dict(kwargs), tokens, *labels.shape)

    @property
    def length(self) -> int:
        """Tokens of the text that a sample needs, less the one that is predicted last."""
        return self.seq * len(self.names)

    def filled(self, rows: Tensor) -> Batch:
        """The batch with these pieces of text in it."""
        first = len(self.names) - 1
        pieces = {n: rows[:, k * self.seq :][:, : self.seq] for k, n in enumerate(self.names)}
        old = self.kwargs.get("labels")
        if isinstance(old, Tensor) and bool((old == IGNORED).any()):
            hidden = old != IGNORED  # a masked model: what is asked for is not shown
            pieces["labels"] = pieces[self.names[0]].masked_fill(~hidden, IGNORED)
            pieces[self.names[0]] = pieces[self.names[0]].masked_fill(hidden, 0)
        elif self.names == (SHIFTED_INSIDE,):
            pieces["labels"] = pieces[SHIFTED_INSIDE]
        else:
            pieces["labels"] = rows[:, first * self.seq + 1 :][:, : self.seq]
        positional = iter(n for n in pieces if n not in self.kwargs)
        args = tuple(
            pieces[next(positional)] if _is_tokens(value, self.samples, self.seq) else value
            for value in self.args
        )
        return args, {**self.kwargs, **{n: v for n, v in pieces.items() if n in self.kwargs}}


def _is_tokens(value: Any, samples: int, seq: int) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == (samples, seq)


def _parameters(model: nn.Module) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
