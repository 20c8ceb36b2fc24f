"""Python values as JSON that comes back as it was: the same types, keys and numbers, or refused.

JSON has no tuples, sets, infinities or keys that are not texts, which schedulers' states are full
of. What it lacks is written as an object with a tag:

    {1: (0.5, inf)}  ->  {"$": "dict", "of": [[1, {"$": "tuple", "of": [0.5, ...]}]]}

Nothing that is read is ever executed: tags name the few types below, and no other.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

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
