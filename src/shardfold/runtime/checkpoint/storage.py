"""The parts of each rank as boxes of whole tensors, written and read by torch's planners.

What one rank has of a tensor is stated as boxes of the whole in the model's own dims. A shard under
our layouts is a range of every sub-dim. Within a dim, the last sub-dim that is split and all that
follow it are one run; the sub-dims before it are stepped through:

    rows of a packed q-k-v weight, 3 x heads x features, heads 0-3 of 8: three runs of rows.

Planners of torch.distributed.checkpoint over our parts: which boxes are written and read.

Boxes that several ranks hold are written by one of them, the one with the least to write.

Storage of torch.distributed.checkpoint without pickle: safetensors files and a JSON index.

A file of the safetensors format is the length of its header (8 bytes), the header (JSON: for every
tensor its dtype, shape and bytes) and the bytes. The index repeats what is needed to read, so the
header is for other programs.
"""

from __future__ import annotations

import math
import mmap
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from shardfold.errors import CheckpointError
from shardfold.runtime.checkpoint.index import DTYPES, Chunk, Index, Stored, damaged_chunk
from shardfold.runtime.parameters import Keeping
from shardfold.runtime.shards import Bounds, Extent


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the whole, and the local memory that it is."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: Tensor  # a view, of this shape


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's boxes of a tensor."""

    shape: tuple[int, ...]  # of the whole
    dtype: torch.dtype
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of consecutive places of one dim: where it begins, and the outer sub-dims' places."""

    start: int
    length: int
    outer: tuple[int, ...]


def part_of(tensor: Tensor, keeping: Keeping | None = None) -> Part:
    """The boxes of a plain tensor, of a DTensor, or of one that is kept as `keeping` says."""
    local = _local(tensor)
    if keeping is not None:
        return Part(
            keeping.stored.extent.whole, local.dtype, _part_boxes(keeping.stored.extent, local)
        )
    shape = tuple(tensor.shape)
    offset = (0,) * len(shape)
    if isinstance(tensor, DTensor):
        offset = _offset(tensor)
    box = Box(offset, tuple(local.shape), local)
    return Part(shape, local.dtype, (box,) if _has_points(box.shape) else ())


def _local(tensor: Tensor) -> Tensor:
    found: Tensor = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found


def _offset(tensor: Any) -> tuple[int, ...]:
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise CheckpointError(
            f"A DTensor placed as {tensor.placements} has {len(chunks)} pieces on this rank; "
            "checkpoints are written of one piece each."
        )
    return tuple(chunks[0].offsets)


def _part_boxes(extent: Extent, local: Tensor) -> tuple[Box, ...]:
    if not _has_points(extent.lengths):
        return ()
    by_atoms = local.view(extent.lengths)
    runs = [_runs(extent.pieces(dim)) for dim in range(extent.rank)]
    return tuple(_box(extent, by_atoms, chosen) for chosen in product(*runs))


def _box(extent: Extent, by_atoms: Tensor, chosen: tuple[_Run, ...]) -> Box:
    index: list[int | slice] = []
    for run, dim in zip(chosen, range(extent.rank), strict=True):
        index += run.outer
        index += [slice(None)] * (len(extent.pieces(dim)) - len(run.outer))
    shape = tuple(run.length for run in chosen)
    return Box(tuple(run.start for run in chosen), shape, by_atoms[tuple(index)].view(shape))


def _runs(pieces: list[tuple[int, Bounds]]) -> list[_Run]:
    """The runs of one dim, from its sub-dims (size and local range), major first.

    >>> [(run.start, run.length) for run in _runs([(3, (0, 3)), (8, (4, 8)), (2, (0, 2))])]
    [(8, 8), (24, 8), (40, 8)]
    """
    cut = max((k for k, (size, found) in enumerate(pieces) if found != (0, size)), default=0)
    strides = [math.prod(size for size, _ in pieces[k + 1 :]) for k in range(len(pieces))]
    low, high = pieces[cut][1]
    return [
        _Run(
            sum(k * stride for k, stride in zip(places, strides, strict=False))
            + low * strides[cut],
            (high - low) * strides[cut],
            tuple(k - first for k, (_, (first, _)) in zip(places, pieces, strict=False)),
        )
        for places in product(*(range(*bounds) for _, bounds in pieces[:cut]))
    ]


def _has_points(shape: tuple[int, ...]) -> bool:
    return all(shape)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


def _boxes(parts: Mapping[str, Part]) -> dict[MetadataIndex, Tensor]:
    return {
        MetadataIndex(name, box.offset): box.tensor
        for name, part in parts.items()
        for box in part.boxes
    }


class PartsToSave(DefaultSavePlanner):
    """Writes every box of every part."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Take the parts as they are."""
        self.state_dict, self.is_coordinator = state_dict, is_coordinator
        self.flatten_state_dict = False
        self.boxes = _boxes(state_dict)

    def create_local_plan(self) -> SavePlan:
        """One item a box; all are shards, so that a tensor may have several on a rank."""
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, box.offset),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        _chunk(box), TensorProperties(dtype=part.dtype), torch.Size(part.shape)
                    ),
                )
                for name, part in self.state_dict.items()
                for box in part.boxes
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The memory of a box."""
        return self.boxes[write_item.index]


class PartsToLoad(DefaultLoadPlanner):
    """Fills every box of every part from the chunks that it meets."""

    def set_up_planner(
        self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        """Take the parts as they are."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.boxes = _boxes(state_dict)

    def create_local_plan(self) -> LoadPlan:
        """Where chunks and boxes overlap."""
        items: list[ReadItem] = []
        for name, part in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            chunks = [_chunk(box) for box in part.boxes]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The memory of a box."""
        return self.boxes[index]

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """There are none: what is not a tensor is in the index."""
        raise AssertionError(f"{read_item.dest_index.fqn} is not a tensor")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the index.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise CheckpointError(f"Checkpoints hold {', '.join(DTYPES)}; not {name}.")
    return name


class Writer(StorageWriter):
    """Every rank writes one file; `finish`, on rank 0, gets all chunks to make the index of."""

    def __init__(self, folder: Path, rank: int, finish: Callable[[dict[str, Stored]], None]):
        self.folder, self.file = folder, f"part-{rank:05d}.safetensors"
        self._finish = finish

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's chunks, and wait until they are on the disk."""
        found: Future[list[WriteResult]] = Future()
        chunks = write_file(self.folder / self.file, plan.items, planner.resolve_data)
        pairs = zip(plan.items, chunks, strict=True)
        found.set_result([WriteResult(item.index, 0, chunk) for item, chunk in pairs])
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Gather the chunks of every tensor."""
        chunks: dict[str, list[Chunk]] = {}
        for result in (result for each in results for result in each):
            chunks.setdefault(result.index.fqn, []).append(result.storage_data)
        stored = {
            name: Stored(
                dtype_name(tensor.properties.dtype),
                tuple(tensor.size),
                tuple(sorted(chunks.get(name, ()), key=lambda chunk: chunk.offset)),
            )
            for name, tensor in metadata.state_dict_metadata.items()
        }
        self._finish(stored)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path."""
        return True


def write_file(
    path: Path, items: list[WriteItem], resolve: Callable[[WriteItem], Tensor]
) -> list[Chunk]:
    """Write the items' tensors to a new safetensors file; where each of them lies."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for item in items:
        data = item.tensor_data
        assert data is not None
        kind, size = DTYPES[dtype_name(data.properties.dtype)]
        begins.append(end)
        end += math.prod(data.chunk.sizes) * size
        header[_label(item)] = {
            "dtype": kind,
            "shape": list(data.chunk.sizes),
            "data_offsets": [begins[-1], end],
        }
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    chunks = []
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for item, begin in zip(items, begins, strict=True):
            raw = _bytes(resolve(item))
            file.write(raw)
            assert item.tensor_data is not None
            box = item.tensor_data.chunk
            place = (tuple(box.offsets), tuple(box.sizes), path.name, 8 + len(text) + begin)
            chunks.append(Chunk(*place, zlib.crc32(raw)))
        file.flush()
        os.fsync(file.fileno())
    return chunks


def _label(item: WriteItem) -> str:
    """The name of a chunk for other programs: whole tensors keep theirs."""
    data = item.tensor_data
    assert data is not None
    if data.chunk.sizes == data.size:
        return str(item.index.fqn)
    pairs = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
    return f"{item.index.fqn}[{','.join(f'{low}:{low + size}' for low, size in pairs)}]"


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


class Reader(StorageReader):
    """Reads chunks through memory maps; each is held against its checksum before it is used."""

    def __init__(self, folder: Path, found: Index) -> None:
        self.folder, self.index = folder, found

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    def read_metadata(self) -> Metadata:
        """The tensors and chunks of the index, which was checked when it was read."""
        tensors = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, stored.dtype)),
                torch.Size(stored.shape),
                [
                    ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.shape))
                    for chunk in stored.chunks
                ],
            )
            for name, stored in self.index.tensors.items()
        }
        return Metadata(dict(tensors))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Find chunks by the tensor and the offset."""
        self.chunks = {
            MetadataIndex(name, chunk.offset): (stored.dtype, chunk)
            for name, stored in self.index.tensors.items()
            for chunk in stored.chunks
        }

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for."""
        opened = {name: _mapped(self.folder / name) for name in self.index.files}
        whole: dict[MetadataIndex, Tensor] = {}
        for item in plan.items:
            if item.storage_index not in whole:
                dtype, chunk = self.chunks[item.storage_index]
                name = item.storage_index.fqn
                whole[item.storage_index] = self._chunk(name, dtype, chunk, opened[chunk.file])
            source = whole[item.storage_index]
            for dim, (low, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, low, size)
            planner.resolve_tensor(item).copy_(source)
        found: Future[None] = Future()
        found.set_result(None)
        return found

    def _chunk(self, name: str, dtype: str, chunk: Chunk, mapped: memoryview) -> Tensor:
        count = math.prod(chunk.shape)
        raw = mapped[chunk.begin : chunk.begin + count * DTYPES[dtype][1]]
        if zlib.crc32(raw) != chunk.checksum:
            raise damaged_chunk(self.folder, name, chunk)
        # The map is private: a write would change this process's copy alone, and none happens.
        flat = torch.frombuffer(raw, dtype=torch.uint8)
        if flat.data_ptr() % DTYPES[dtype][1]:
            flat = flat.clone()
        return flat.view(getattr(torch, dtype)).view(chunk.shape)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path."""
        return True


def check_chunks(folder: Path, index: Index, rank: int, ranks: int) -> None:
    """Hold the chunks of every file against their checksums; the ranks share the files."""
    mine = set(sorted(index.files)[rank::ranks])
    opened = {name: _mapped(folder / name) for name in mine}
    for name, stored in index.tensors.items():
        for chunk in stored.chunks:
            if chunk.file in mine:
                size = math.prod(chunk.shape) * DTYPES[stored.dtype][1]
                raw = opened[chunk.file][chunk.begin : chunk.begin + size]
                if zlib.crc32(raw) != chunk.checksum:
                    raise damaged_chunk(folder, name, chunk)


def _mapped(path: Path) -> memoryview:
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE))
