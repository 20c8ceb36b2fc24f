"""`save` and `load`: every rank's parts onto the disk, and into any other plan."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from shardfold.errors import CheckpointError
from shardfold.runtime.checkpoint import folders, state
from shardfold.runtime.checkpoint.index import (
    FILE,
    VERSION,
    Index,
    Stored,
    decode,
    encode,
    encode_index,
    read_index,
)
from shardfold.runtime.checkpoint.state import (
    MODEL,
    State,
    aliases,
    bare,
    check_groups,
    check_model,
    elsewhere,
    is_written_elsewhere,
    make_state,
    model_parts,
    optimizer_entry,
    optimizer_parts,
    restore,
)
from shardfold.runtime.checkpoint.storage import (
    Part,
    PartsToLoad,
    PartsToSave,
    Reader,
    Writer,
    check_chunks,
    part_of,
)
from shardfold.runtime.module import Parallel

KEEP = 3


def save(
    model: nn.Module,
    optimizer: Any,
    path: str | Path,
    *,
    step: int,
    data: Any = None,
    extra: Any = None,
    keep: int = KEEP,
) -> Path:
    """Save a training run in the folder `path`, as `step-00000030`; on every rank.

    Each rank writes what it has; what several have, one of them writes. `optimizer` may be None.
    `data` is where the data stands and `extra` anything else (`scheduler.state_dict()`): numbers,
    texts, small tensors, and lists, tuples, sets or dicts of them with any keys, the same on all
    ranks; they come back exactly, and what could not is refused. The last `keep` checkpoints stay,
    older ones are removed. A crash at any moment leaves the last complete one; an error (a full
    disk) does so, too, and is raised on all ranks. The folder must be one that all ranks see.
    """
    if step < 0 or keep < 1:
        raise CheckpointError(f"A checkpoint needs step >= 0 and keep >= 1: {step}, {keep}.")
    root, module = Path(path), bare(model)
    parts, fields = _state(module, optimizer)
    fields |= {"step": step, "data": encode(data, "data"), "extra": encode(extra, "extra")}
    folder = folders.on_first(lambda: folders.begin(root, step))

    def finish(stored: dict[str, Stored]) -> None:
        _write_index(folder, Index(version=VERSION, tensors=stored, files={}, **fields))

    what = f"Saving step {step} to {root}"
    try:
        with folders.said_plainly(what):
            dcp.save(
                parts,
                storage_writer=Writer(folder, folders.rank(), finish),
                planner=PartsToSave(),
                no_dist=not folders.is_shared(),
            )
        final = folders.on_first(lambda: folders.commit(folder))
    except CheckpointError as error:
        if folders.rank() == 0:
            folders.abandon(folder)
        last = folders.latest(root)
        kept = f"{last} is still the last one" if last else "there is none yet"
        raise CheckpointError(f"{str(error).rstrip('.')}; {kept}.") from None
    folders.on_first(lambda: folders.prune(root, keep))
    return final


def _state(model: nn.Module, optimizer: Any) -> tuple[dict[str, Part], dict[str, Any]]:
    """What is written: tensors, and plain values."""
    fields: dict[str, Any] = {
        "aliases": aliases(model),
        "random": state.generator_values(),
    }
    if isinstance(model, Parallel):
        model.gather_buffers()
        fields["dropout"] = (model.seed, model._run.context.step)
    parts = model_parts(model)
    if optimizer is not None:
        parts |= optimizer_parts(model, optimizer)
        fields["optimizer"] = optimizer_entry(model, optimizer)
    parts = {name: part for name, part in parts.items() if not is_written_elsewhere(model, name)}
    parts |= {name: part_of(value) for name, value in state.generator_tensors().items()}
    return parts, fields


def _write_index(folder: Path, index: Index) -> None:
    """The index, once all files that it names are there."""
    names = {chunk.file for stored in index.tensors.values() for chunk in stored.chunks}
    sizes = {}
    for name in sorted(names):
        file = folder / name
        if not file.is_file():
            raise CheckpointError(
                f"Rank 0 does not see {file}, which another rank wrote: save to a folder that all "
                "ranks share."
            )
        sizes[name] = file.stat().st_size
    with (folder / FILE).open("xb") as out:
        out.write(encode_index(msgspec.structs.replace(index, files=sizes)))
        out.flush()
        os.fsync(out.fileno())


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
    if random and model is not None:
        _restore_random(folder, index)
    return Checkpoint(folder, index.step, data, extra, index)


def restore_random(path: str | Path) -> None:
    """Set the random generators, and nothing else, as a checkpoint has them; on every rank."""
    folder = Path(folders.on_first(lambda: str(folders.resolve(Path(path)))))
    _restore_random(folder, folders.on_all(lambda: read_index(folder)))


def _restore_random(folder: Path, index: Index) -> None:
    if index.random is not None:
        states = folders.on_all(lambda: _whole(folder, index, state.PREFIX))
        state.restore_tensors(states)
        state.restore_values(index.random)


def _fill(model: nn.Module, optimizer: Any, folder: Path, index: Index) -> None:
    """All or nothing: every check is made, on all ranks, before the first tensor is written."""

    def prepared() -> tuple[State, dict[str, Part]]:
        parts, state = model_parts(model), State()
        check_model(parts, index, str(folder), elsewhere(model))
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
