"""`save`: every rank's parts onto the disk, and at the very end a name for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed.checkpoint as dcp
from torch import nn

from shardfold.errors import CheckpointError
from shardfold.runtime.checkpoint import folders, state
from shardfold.runtime.checkpoint.exact_values import encode
from shardfold.runtime.checkpoint.index import FILE, VERSION, Index, Stored, encode_index
from shardfold.runtime.checkpoint.parts import Part, part_of
from shardfold.runtime.checkpoint.state import (
    aliases,
    bare,
    model_parts,
    optimizer_entry,
    optimizer_parts,
)
from shardfold.runtime.checkpoint.storage import PartsToSave, Writer
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
