"""One operator as one device runs it: its call, its configuration, and its operands' parts.

The call is source text: everything about its arguments is decided once.

    aten_softmax(t4, -1, False)

Tensors are expressions; what has no literal (dtypes, devices, infinities) is given a name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardfold.capture import Invocation, Slot
from shardfold.errors import RunError
from shardfold.graph import Op
from shardfold.runtime.process_groups import Axes, Groups
from shardfold.runtime.shards import Bounds, Extent, Place, Row, bounds_of
from shardfold.sharding import SubdimRule

HALVES = (torch.float16, torch.bfloat16)
WIDER = {  # for checking numbers
    **dict.fromkeys((torch.float32, *HALVES), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}


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


def widened(tensor: Tensor) -> Tensor:
    """A tensor in float64, or of complex numbers of that; what has other numbers as it is."""
    return tensor.to(WIDER.get(tensor.dtype, tensor.dtype))


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how calls run: constants among the arguments follow the device and the dtype."""

    device: torch.device
    double: bool = False  # in float64 what was captured in a shorter dtype

    def constant(self, value: Any) -> Any:
        """An argument that is no tensor, as it is here."""
        if isinstance(value, torch.device):
            return self.device
        if self.double and isinstance(value, torch.dtype):
            return WIDER.get(value, value)
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


GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: what positions are multiplied with


class Context:
    """What all operators of a step share.

    Seed, number of the step and a factor of dropout's are kept in a tensor, so that a compiled
    module can count. `traced` says that calls are being recorded by a compiler, for which
    Python's numbers stand still.
    """

    __slots__ = (
        "ahead",
        "clock",
        "drawn",
        "groups",
        "latest",
        "promises",
        "sorted",
        "target",
        "traced",
        "writes",
    )

    def __init__(
        self,
        groups: Groups,
        device: torch.device,
        seed: int = 0,
        step: int = 0,
        double: bool = False,
        ahead: int = 1,
    ) -> None:
        self.groups, self.ahead = groups, ahead
        self.target = Target(device, double)
        self.clock = torch.tensor([seed, step, GOLDEN - (1 << 64)])
        self.traced = False
        self.latest: Any = None  # the latest promise to gather again for backward
        self.promises: dict[int, Any] = {}  # all of them, by the first use that each is for
        self.sorted: dict[tuple[int, ...], Any] = {}  # rows by expert, for all who send them there
        self.drawn: list[Tensor] | None = None  # random numbers of a step, for who asks
        self.writes: dict[int, Tensor] = {}  # what forward leaves in buffers, by tensor

    @property
    def device(self) -> torch.device:
        """Where everything is computed."""
        return self.target.device

    @property
    def double(self) -> bool:
        """Whether what was captured in a shorter dtype is run in float64."""
        return self.target.double

    @property
    def seed(self) -> int:
        """The seed of all dropout masks."""
        return int(self.clock[0])

    @seed.setter
    def seed(self, value: int) -> None:
        self.clock[0] = value

    @property
    def step(self) -> int:
        """The number of the step."""
        return int(self.clock[1])

    @step.setter
    def step(self, number: int) -> None:
        self.clock[1] = number

    def now(self, clock: Tensor | None = None) -> Context:
        """The context of one step, whatever is counted after it began; traced if given a clock."""
        found = copy.copy(self)
        found.traced = clock is not None
        found.clock = self.clock.clone() if clock is None else clock
        found.groups = self.groups if clock is None else self.groups.functional()
        found.latest, found.promises, found.sorted, found.writes = None, {}, {}, {}
        return found


Local: TypeAlias = Callable[[Sequence[Tensor], Context], Any]


@dataclass(frozen=True, slots=True)
class Site:
    """Everything that the local form of an operator may depend on."""

    number: int
    op: Op
    call: Invocation
    rule: SubdimRule
    config: Row  # per axis the factor that is split, NONE or PASS
    place: Place
    inputs: tuple[Extent, ...]
    results: tuple[Extent, ...]
    callers: dict[Any, Callable[..., Any]] = field(default_factory=dict, compare=False, repr=False)

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument of the call that is not a tensor."""
        value = self.call.arguments.get(name)
        return default if value is None else value

    def position(self, name: str) -> int | None:
        """Where the tensor argument `name` is among the operands, if it was given."""
        value = self.call.arguments.get(name)
        return value.position if isinstance(value, Slot) else None

    @property
    def is_split(self) -> bool:
        """Whether any axis splits a factor."""
        return any(factor >= 0 for factor in self.config)

    @property
    def split(self) -> tuple[str, ...]:
        """The rule's factors (not their pieces) that are split, in the order of the axes."""
        return tuple(dict.fromkeys(self.rule.base(f) for f in self.config if f >= 0))

    def axes(self, *bases: str) -> Axes:
        """The axes that split any of these factors."""
        return tuple(a for a, f in enumerate(self.config) if f >= 0 and self.rule.base(f) in bases)

    def is_first(self, *bases: str) -> bool:
        """Whether this device has the first part of each of these factors."""
        return all(self.place.at[axis] == 0 for axis in self.axes(*bases))

    def part(self, base: str, at: Row | None = None) -> Bounds:
        """The range of a factor that this device has, or the one at another place.

        Of several pieces only the first is split.
        """
        first, *others = self._pieces(base, self.place.at if at is None else at)
        inner = 1
        for size, (low, high) in others:
            if high - low < size:
                raise self.unsupported(f"a part of {base} is no range of it")
            inner *= size
        low, high = first[1]
        return low * inner, high * inner

    def points(self, base: str, at: Row | None = None) -> int:
        """How many points of a factor this device has, or the one at another place."""
        pieces = self._pieces(base, self.place.at if at is None else at)
        return math.prod(high - low for _, (low, high) in pieces)

    def _pieces(self, base: str, at: Row) -> list[tuple[int, Bounds]]:
        """The size and the local range of every piece of a factor."""
        bounds = bounds_of(self.rule.sizes, self.config, self.place.shape, at, self.rule.joint)
        found = zip(self.rule.sizes, bounds, strict=True)
        return [piece for f, piece in enumerate(found) if self.rule.base(f) == base]

    def size(self, base: str) -> int:
        """The whole size of a factor."""
        return self.rule.rule.sizes[base]

    def unsupported(self, why: str = "") -> RunError:
        """The error for a split that the runner cannot do."""
        names = [self.rule.factors[f] if f >= 0 else "-" for f in self.config]
        return RunError(
            f"Operator {self.op.name} ({self.op.kind}, {self.op.origin}) cannot be run with the "
            f"split {' '.join(names)} of {self.rule.rule}{': ' + why if why else ''}. "
            "Plan again with a rule that keeps this factor whole."
        )

    def invoke(self, tensors: Sequence[Tensor], context: Context, **changed: Any) -> Any:
        """Call the operator on local tensors, with some arguments changed."""
        key = (context.target, tuple(changed))
        made = self.callers.get(key)
        if made is None:
            made = self.callers[key] = caller(self.call, *key)
        return made(tensors, *changed.values())


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of rows are kept in at least float32."""
    return torch.float32 if dtype in HALVES else dtype


def as_autocast(tensor: Tensor) -> Tensor:
    """In float32 under autocast, as it would do for an operator that must not be in halves."""
    if tensor.dtype in HALVES and torch.is_autocast_enabled(tensor.device.type):
        return tensor.float()
    return tensor


def only(tensor: Tensor, mask: Tensor) -> Tensor:
    """The tensor where the mask says so, zeros elsewhere; its gradient likewise.

    A product would not do: nothing times infinity is not a number.
    """
    return tensor.masked_fill(~mask, 0)


def summed(context: Context, tensor: Tensor, site: Site, bases: Iterable[str]) -> Tensor:
    """All-reduce over the axes of each factor in turn, as the rule's exchanges say."""
    for base in bases:
        axes = site.axes(base)
        if axes:
            tensor = context.groups.all_reduce(tensor, axes)
    return tensor


def plain(site: Site) -> Local:
    """The same call; refused where the rule asks for an exchange of a factor that is split."""
    for exchange in site.rule.rule.exchanges:
        if exchange.factor in site.split:
            raise site.unsupported(f"{exchange.factor} needs a {exchange.kind} inside the operator")
    return site.invoke
