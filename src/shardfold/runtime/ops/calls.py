"""A torch operator's call as source text: everything about its arguments is decided once.

    aten_softmax(t4, -1, False)

Tensors are expressions; what has no literal (dtypes, devices, infinities) is given a name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfold.capture import Invocation, Slot

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)


@dataclass(slots=True)
class Names:
    """The objects that some source text refers to, by name."""

    objects: dict[str, Any] = field(default_factory=dict)
    known: dict[int, str] = field(default_factory=dict)

    def add(self, prefix: str, value: Any) -> str:
        """A name for an object; the same one each time."""
        if id(value) not in self.known:
            name = prefix
            while name in self.objects:
                name = f"{prefix}_{len(self.objects)}"
            self.known[id(value)] = name
            self.objects[name] = value
        return self.known[id(value)]


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how calls run: constants among the arguments follow the device and the dtype."""

    device: torch.device
    double: bool = False  # in float64 what was captured in a shorter dtype

    def constant(self, value: Any) -> Any:
        """An argument that is no tensor, as it is here."""
        if isinstance(value, torch.device):
            return self.device
        if self.double and isinstance(value, torch.dtype) and value in FLOATS:
            return torch.float64
        return value


def call_text(
    call: Invocation,
    operands: Sequence[str],
    target: Target,
    names: Names,
    changed: Mapping[str, str] | None = None,
) -> str:
    """The call with these expressions for its operands, and for the arguments in `changed`."""
    texts = {
        name: changed[name]
        if changed and name in changed
        else _text(value, operands, target, names)
        for name, value in call.arguments.items()
    }
    schema = call.target._schema
    given, in_order = [], True
    for argument in schema.arguments:
        if argument.name not in texts:
            in_order = False
        elif in_order and not argument.kwarg_only:
            given.append(_cloned(texts[argument.name], argument))
        else:
            given.append(f"{argument.name}={_cloned(texts[argument.name], argument)}")
    function = names.add(_word(schema.name), call.target._op)
    return f"{function}({', '.join(given)})"


def caller(call: Invocation, target: Target, changed: tuple[str, ...]) -> Callable[..., Any]:
    """A function of the operands and of the arguments in `changed`, by name."""
    names = Names()
    count = 1 + max((s.position for s in _slots(list(call.arguments.values()))), default=-1)
    text = call_text(
        call, [f"t[{k}]" for k in range(count)], target, names, {name: name for name in changed}
    )
    source = f"lambda t, {', '.join(changed)}: {text}" if changed else f"lambda t: {text}"
    made: Callable[..., Any] = eval(source, names.objects)
    return made


def _slots(value: Any) -> list[Slot]:
    if isinstance(value, Slot):
        return [value]
    if isinstance(value, (list, tuple)):
        return [slot for item in value for slot in _slots(item)]
    return []


def _text(value: Any, operands: Sequence[str], target: Target, names: Names) -> str:
    if isinstance(value, Slot):
        return operands[value.position]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(v, operands, target, names) for v in value)}]"
    value = target.constant(value)
    is_plain = value is None or isinstance(value, (bool, int, str))
    if is_plain or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    return names.add(_word(str(value)), value)


def _cloned(text: str, argument: Any) -> str:
    """An operand that the operator writes to is given as a copy."""
    is_written = argument.alias_info is not None and argument.alias_info.is_write
    return f"{text}.clone()" if is_written else text


def _word(text: str) -> str:
    """Letters only, so that it can be a name."""
    word = "".join(c if c.isalnum() else "_" for c in text.split("::")[-1])
    return f"op_{word}"
