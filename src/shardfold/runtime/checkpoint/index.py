"""The index of a checkpoint: strict JSON in which values come back as they were.

Python values come back as they were, with the same types, keys and numbers, or are refused. JSON
has no tuples, sets, infinities or keys that are not texts, which schedulers' states are full of.
What it lacks is written as an object with a tag:

    {1: (0.5, inf)}  ->  {"$": "dict", "of": [[1, {"$": "tuple", "of": [0.5, ...]}]]}

Nothing that is read is ever executed: tags name the few types below, and no other.

The index is checked before a byte of data is used.

    step-00000030/
      checkpoint.json           which tensors there are, and where every chunk of each lies
      part-00000.safetensors    the chunks that rank 0 wrote, and so on

A chunk is a box of a tensor: an offset and a shape in the model's own dims. The chunks of a tensor
cover it once. Each has a CRC-32, and so has the index itself.
"""

from __future__ import annotations

import base64
import math
import re
import stat
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from shardfold.errors import CheckpointError

TAG = "$"
MOST = 65_536  # elements of a tensor or array among plain values
WORD = 2**63  # integers beyond are written as texts
NUMPY = frozenset(np.dtype(code).str for code in "?bBhHiIlLqQefdFD")


def encode(value: Any, where: str) -> Any:
    """A value as JSON can hold it; `where` names it in errors.

    >>> encode({1: (2, float("inf"))}, "extra")["of"]
    [[1, {'$': 'tuple', 'of': [2, {'$': 'float', 'of': 'inf'}]}]]
    """
    try:
        return _encode(value, where)
    except RecursionError:
        raise CheckpointError(
            f"`{where}` contains itself, or is nested too deep for a checkpoint."
        ) from None


def decode(found: Any) -> Any:
    """The value that was encoded."""
    if isinstance(found, list):
        return [decode(each) for each in found]
    if not isinstance(found, dict):
        return found
    if TAG not in found:
        return {key: decode(each) for key, each in found.items()}
    read = READ.get(found[TAG]) if isinstance(found[TAG], str) else None
    if read is None:
        raise CheckpointError(f"The checkpoint has a value of the unknown kind {found[TAG]!r:.80}.")
    try:
        return read(found)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"The checkpoint has a damaged value of the kind {found[TAG]}: {error}."
        ) from None


def _encode(value: Any, where: str) -> Any:
    write = WRITE.get(type(value))
    if write is not None:
        return write(value, where)
    if isinstance(value, np.generic) and value.dtype.str in NUMPY:
        return _tagged("scalar", _encode(value.item(), where), dtype=value.dtype.str)
    raise CheckpointError(
        f"`{where}` is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint "
        "cannot bring back as it was: save numbers, texts, small tensors, and lists, tuples, sets "
        "or dicts of them."
    )


def _tagged(kind: str, of: Any, **more: Any) -> dict[str, Any]:
    return {TAG: kind, "of": of, **more}


def _integer(value: int, where: str) -> Any:
    return value if -WORD <= value < WORD else _tagged("int", hex(value))


def _float(value: float, where: str) -> Any:
    return value if math.isfinite(value) else _tagged("float", repr(value))


def _items(value: Any, where: str) -> list[Any]:
    return [_encode(each, f"{where}[{k}]") for k, each in enumerate(value)]


def _unordered(kind: str) -> Callable[[Any, str], Any]:
    # In an order of their own, so that all ranks and runs write the same.
    return lambda value, where: _tagged(kind, sorted(_items(value, where), key=repr))


def _pairs(value: Any, where: str) -> list[Any]:
    return [
        [_encode(key, f"{where}'s key {key!r:.40}"), _encode(each, f"{where}[{key!r:.40}]")]
        for key, each in value.items()
    ]


def _dict(value: dict[Any, Any], where: str) -> Any:
    if all(type(key) is str and key != TAG for key in value):
        return {key: _encode(each, f"{where}[{key!r:.40}]") for key, each in value.items()}
    return _tagged("dict", _pairs(value, where))


def _tensor(value: Tensor, where: str) -> Any:
    if value.numel() > MOST or value.layout != torch.strided or value.is_quantized:
        raise CheckpointError(
            f"`{where}` is a tensor of {value.numel():,} elements: keep it as a buffer of a module."
        )
    plain = value.detach().cpu()
    numbers = _items(plain.reshape(-1).tolist(), where)
    dtype = str(value.dtype).removeprefix("torch.")
    return _tagged("tensor", numbers, dtype=dtype, shape=list(value.shape))


def _array(value: np.ndarray[Any, Any], where: str) -> Any:
    if value.size > MOST or value.dtype.str not in NUMPY:
        raise CheckpointError(
            f"`{where}` is an array of {value.size:,} elements of {value.dtype}: checkpoints hold "
            "small arrays of numbers."
        )
    numbers = _items(value.reshape(-1).tolist(), where)
    return _tagged("array", numbers, dtype=value.dtype.str, shape=list(value.shape))


def _same(value: Any, where: str) -> Any:
    return value


WRITE: dict[type, Callable[[Any, str], Any]] = {
    type(None): _same,
    bool: _same,
    str: _same,
    int: _integer,
    float: _float,
    complex: lambda value, where: _tagged("complex", repr(value)),
    bytes: lambda value, where: _tagged("bytes", base64.b64encode(value).decode()),
    list: _items,
    tuple: lambda value, where: _tagged("tuple", _items(value, where)),
    set: _unordered("set"),
    frozenset: _unordered("frozenset"),
    dict: _dict,
    OrderedDict: lambda value, where: _tagged("OrderedDict", _pairs(value, where)),
    Counter: lambda value, where: _tagged("Counter", _pairs(value, where)),
    deque: lambda value, where: _tagged("deque", _items(value, where), maxlen=value.maxlen),
    range: lambda value, where: _tagged("range", [value.start, value.stop, value.step]),
    np.ndarray: _array,
    Tensor: _tensor,
    torch.Size: lambda value, where: _tagged("Size", list(value)),
    torch.dtype: lambda value, where: _tagged("dtype", str(value).removeprefix("torch.")),
}


def _of(found: dict[str, Any]) -> Any:
    return decode(found["of"])


def _numpy(found: dict[str, Any]) -> np.dtype[Any]:
    if found["dtype"] not in NUMPY:
        raise ValueError(f"{found['dtype']!r:.40} is not a kind of number")
    dtype: np.dtype[Any] = np.dtype(found["dtype"])
    return dtype


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is not a dtype")
    return dtype


READ: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": lambda found: int(found["of"], 16),
    "float": lambda found: float(found["of"]),
    "complex": lambda found: complex(found["of"]),
    "bytes": lambda found: base64.b64decode(found["of"], validate=True),
    "tuple": lambda found: tuple(_of(found)),
    "set": lambda found: set(_of(found)),
    "frozenset": lambda found: frozenset(_of(found)),
    "dict": lambda found: dict(_of(found)),
    "OrderedDict": lambda found: OrderedDict(_of(found)),
    "Counter": lambda found: Counter(dict(_of(found))),
    "deque": lambda found: deque(_of(found), found["maxlen"]),
    "range": lambda found: range(*found["of"]),
    "scalar": lambda found: _numpy(found).type(_of(found)),
    "array": lambda found: np.array(_of(found), _numpy(found)).reshape(found["shape"]),
    "Size": lambda found: torch.Size(found["of"]),
    "dtype": lambda found: _dtype(found["of"]),
    "tensor": lambda found: torch.tensor(_of(found), dtype=_dtype(found["dtype"])).view(
        found["shape"]
    ),
}


FILE = "checkpoint.json"
VERSION = 2  # 1 held data, extra and options as JSON has them, without tags for what it lacks
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
