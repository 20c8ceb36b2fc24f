"""`load`: a checkpoint into a model and an optimizer, under whatever plan they are in now."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardfold.runtime.checkpoint import folders, state
from shardfold.runtime.checkpoint.exact_values import decode
from shardfold.runtime.checkpoint.index import Index, read_index
from shardfold.runtime.checkpoint.parts import Part, part_of
from shardfold.runtime.checkpoint.state import (
    MODEL,
    State,
    bare,
    check_groups,
    check_model,
    make_state,
    model_parts,
    restore,
)
from shardfold.runtime.checkpoint.storage import PartsToLoad, Reader, check_chunks
from shardfold.runtime.module import Parallel


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on the disk: where it is, and where training stood."""

    path: Path
    step: int
    data: Any
    extra: Any
    index: Index

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model as plain tensors in this process, under all names, tied ones shared."""
        found = _whole(self.path, self.index, MODEL)
        plain = {name.removeprefix(MODEL): tensor for name, tensor in found.items()}
        tied = self.index.aliases.items()
        return {**plain, **{name: plain[first] for name, first in tied if first in plain}}


def load(
    model: nn.Module | None,
    optimizer: Any,
    path: str | Path,
    *,
    random: bool = True,
) -> Checkpoint:
    """Load the last checkpoint in the folder `path`, or the one that `path` is; on every rank.

    `model` may be under any plan, on any mesh and number of ranks, or on one device, and so may
    have been the one that was saved: each rank reads its own parts. `optimizer` may be None, and
    `model`, too: the result's `state_dict()` is then the whole model. `random` restores the random
    generators. Damaged files are refused, by name, before anything is changed; nothing in a
    checkpoint is ever executed.
    """
    # Rank 0 says which is the last one, and all take the same.
    folder = Path(folders.on_first(lambda: str(folders.resolve(Path(path)))))
    index = folders.on_all(lambda: read_index(folder))
    data, extra = index.data, index.extra
    if index.version > 1:
        data, extra = folders.on_all(lambda: (decode(data), decode(extra)))
    if model is not None:
        _fill(bare(model), optimizer, folder, index)
    if random and index.random is not None and model is not None:
        states = folders.on_all(lambda: _whole(folder, index, state.PREFIX))
        state.restore_tensors(states)
        state.restore_values(index.random)
    return Checkpoint(folder, index.step, data, extra, index)


def _fill(model: nn.Module, optimizer: Any, folder: Path, index: Index) -> None:
    """All or nothing: every check is made, on all ranks, before the first tensor is written."""

    def prepared() -> tuple[State, dict[str, Part]]:
        parts, state = model_parts(model), State()
        check_model(parts, index, str(folder))
        if optimizer is not None:
            state, more = make_state(model, optimizer, index, str(folder))
            parts |= more
            assert index.optimizer is not None
            check_groups(model, optimizer, index.optimizer, str(folder))
        return state, {name: part for name, part in parts.items() if name in index.tensors}

    state, parts = folders.on_all(prepared)
    folders.on_all(lambda: check_chunks(folder, index, *folders.rank_of()))
    with folders.said_plainly(f"Loading {folder}"):
        dcp.load(
            dict(parts),
            storage_reader=Reader(folder, index),
            planner=PartsToLoad(),
            no_dist=not folders.is_shared(),
        )
    if optimizer is not None:
        restore(optimizer, state, index)
    if isinstance(model, Parallel) and index.dropout is not None:
        model.seed, model._run.context.step = index.dropout


def _whole(folder: Path, index: Index, prefix: str) -> dict[str, Tensor]:
    """Tensors with these names, whole, in this process alone."""
    tensors = {
        name: torch.zeros(stored.shape, dtype=getattr(torch, stored.dtype))
        for name, stored in index.tensors.items()
        if name.startswith(prefix)
    }
    with folders.said_plainly(f"Reading {folder}"):
        dcp.load(
            {name: part_of(tensor) for name, tensor in tensors.items()},
            storage_reader=Reader(folder, index),
            planner=PartsToLoad(),
            no_dist=True,
        )
    return tensors
