"""The index of a checkpoint: plain JSON, read strictly, checked before a byte of data is used.

    step-00000030/
      checkpoint.json           which tensors there are, and where every chunk of each lies
      part-00000.safetensors    the chunks that rank 0 wrote, and so on

A chunk is a box of a tensor: an offset and a shape in the model's own dims. The chunks of a tensor
cover it once. Each has a CRC-32, and so has the index itself.
"""

from __future__ import annotations

import math
import re
import stat
import zlib
from pathlib import Path
from typing import Any

import msgspec

from shardfold.errors import CheckpointError

FILE = "checkpoint.json"
VERSION = 2  # 1 held data, extra and options as JSON has them, without exact_values
PART = re.compile(r"part-[0-9]{5}\.safetensors")

# Name, its name in safetensors, bytes of an element.
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the index's parts."""


class Chunk(Value, frozen=True):
    """A box of a tensor, and where its bytes are."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    begin: int  # in the file
    checksum: int


class Stored(Value, frozen=True):
    """A whole tensor: its dtype, its shape, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Group(Value, frozen=True):
    """A parameter group of the optimizer: whose, and with which options."""

    parameters: tuple[str, ...]
    options: dict[str, Any]


class OptimizerEntry(Value, frozen=True):
    """What of an optimizer is not a tensor."""

    kind: str
    groups: tuple[Group, ...]
    values: dict[str, dict[str, Any]]  # by parameter: state that is not a tensor


class Index(Value, frozen=True):
    """All of a checkpoint but the bytes of its tensors."""

    version: int
    step: int
    tensors: dict[str, Stored]
    files: dict[str, int]  # name: bytes
    aliases: dict[str, str]  # further names of a tied parameter or buffer: its first name
    optimizer: OptimizerEntry | None = None
    dropout: tuple[int, int] | None = None  # seed and step of the masks
    random: dict[str, Any] | None = None
    data: Any = None
    extra: Any = None


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    checksum: int
    index: msgspec.Raw


def encode_index(index: Index) -> bytes:
    """The index as the bytes of its file."""
    body = msgspec.json.encode(index)
    return msgspec.json.encode(_Envelope(zlib.crc32(body), msgspec.Raw(body)))


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in `folder`; one that is damaged or hostile is refused."""
    path = folder / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a checkpoint: it has no {FILE}.") from None
    except OSError as error:
        raise CheckpointError(f"Checkpoint {folder} cannot be read: {error.strerror}.") from None
    index = _decode(data, folder)
    for name, length in index.files.items():
        _check_file(folder, name, length)
    for name, stored in index.tensors.items():
        _check_tensor(folder, name, stored, index.files)
    _check_overlaps(folder, index)
    return index


def _decode(data: bytes, folder: Path) -> Index:
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if zlib.crc32(bytes(envelope.index)) != envelope.checksum:
            raise _damaged(folder, f"{FILE} does not have its own checksum")
        version = msgspec.json.decode(envelope.index, type=dict[str, Any]).get("version")
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(
                f"Checkpoint {folder} has version {version}, newer than {VERSION}: "
                "update shardfold to read it."
            )
        return msgspec.json.decode(envelope.index, type=Index)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(folder, f"{FILE} is not its index ({error})") from None


def _check_file(folder: Path, name: str, length: int) -> None:
    if not PART.fullmatch(name):
        raise _damaged(folder, f"its index names the file {name[:80]!r}")
    try:
        found = (folder / name).lstat()
    except OSError:
        raise _damaged(folder, f"{name} is missing") from None
    if not stat.S_ISREG(found.st_mode):
        raise _damaged(folder, f"{name} is not a plain file")
    if found.st_size != length:
        raise _damaged(folder, f"{name} has {found.st_size:,} bytes of {length:,}")


def _check_tensor(folder: Path, name: str, stored: Stored, files: dict[str, int]) -> None:
    if stored.dtype not in DTYPES:
        raise _damaged(folder, f"{name} has the unknown dtype {stored.dtype[:80]!r}")
    covered = 0
    for chunk in stored.chunks:
        length = math.prod(chunk.shape)
        inside = len(chunk.offset) == len(chunk.shape) == len(stored.shape) and all(
            low >= 0 and size >= 0 and low + size <= whole
            for low, size, whole in zip(chunk.offset, chunk.shape, stored.shape, strict=True)
        )
        end = chunk.begin + length * DTYPES[stored.dtype][1]
        if not inside or chunk.begin < 0 or end > files.get(chunk.file, -1):
            raise _damaged(folder, f"a part of {name} lies outside of it, or of {chunk.file[:80]}")
        covered += length
    if covered != math.prod(stored.shape) or any(size < 0 for size in stored.shape):
        raise _damaged(folder, f"{name} has {covered:,} of {math.prod(stored.shape):,} elements")


def _check_overlaps(folder: Path, index: Index) -> None:
    """No byte of a file belongs to two chunks: a small file cannot claim to hold a large tensor."""
    taken: dict[str, list[tuple[int, int]]] = {}
    for stored in index.tensors.values():
        for chunk in stored.chunks:
            end = chunk.begin + math.prod(chunk.shape) * DTYPES[stored.dtype][1]
            taken.setdefault(chunk.file, []).append((chunk.begin, end))
    for name, ranges in taken.items():
        last = 0
        for begin, end in sorted(ranges):
            if begin < last:
                raise _damaged(folder, f"two tensors share bytes of {name}")
            last = end


def _damaged(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"Checkpoint {folder} is damaged: {reason}. Load an older one by its name."
    )


def damaged_chunk(folder: Path, name: str, chunk: Chunk) -> CheckpointError:
    """The error for bytes that do not have their checksum."""
    return _damaged(folder, f"the bytes of {name} in {chunk.file} do not have their checksum")
