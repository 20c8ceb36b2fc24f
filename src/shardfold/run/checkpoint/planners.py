"""Planners of torch.distributed.checkpoint over our parts: which boxes are written and read.

Boxes that several ranks hold are written by one of them, the one with the least to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardfold.run.checkpoint.parts import Box, Part


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
