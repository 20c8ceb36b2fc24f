"""What stands in a trace for what it cannot look into: constants, and `autograd.Function`s.

A tensor that forward makes of Python's numbers becomes the operator `shardfold.constant`, and the
numbers are known from then on, also of what is computed from them alone. A call of an
`autograd.Function` becomes the operator `shardfold.function`, which runs the call as it is.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardfold.capture.selection import LOCATES, Selections, masked_dims

NUMBERS = (bool, int, float, complex, str, list, tuple, dict)
SMALL = 4096  # elements of a constant that is followed


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of an autograd.Function: its class, and its arguments with `None` for tensors."""

    function: type[torch.autograd.Function]
    arguments: tuple[Any, ...]
    is_tensor: tuple[bool, ...]

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Call it, with autograd."""
        given = iter(tensors)
        pairs = zip(self.arguments, self.is_tensor, strict=True)
        return self.function.apply(*(next(given) if t else a for a, t in pairs))

    def __str__(self) -> str:
        plain = [f", {a!r}" for a, t in zip(self.arguments, self.is_tensor, strict=True) if not t]
        own = [value for name, value in vars(self.function).items() if not name.startswith("__")]
        seen = [each for each in (*own, *closure_of(self.function)) if isinstance(each, NUMBERS)]
        around = f" {seen!r}" if seen else ""  # classes made by a function have one name
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        return f"{name}{around}{''.join(plain)}"

    def __hash__(self) -> int:
        return hash(str(self))


# What the opaque operators of a trace stand for, by their text; the latest trace's.
functions: dict[str, FunctionCall] = {}
constants: dict[str, Tensor] = {}
_results: list[Any] = []  # of the function that is being traced: what its fake implementation gives


@torch.library.custom_op("shardfold::function", mutates_args=())
def function(inputs: list[Tensor], name: str) -> list[Tensor]:
    """Stands for a call of an autograd.Function."""
    raise RuntimeError("shardfold::function stands for a call and cannot be run.")


@function.register_fake
def _(inputs: list[Tensor], name: str) -> list[Tensor]:
    return [torch.empty_like(each) for each in _results]


@torch.library.custom_op("shardfold::constant", mutates_args=())
def constant(name: str) -> Tensor:
    """Stands for a tensor whose numbers were known while the model was traced."""
    return constants[name].clone()


@constant.register_fake
def _(name: str) -> Tensor:
    return torch.empty_like(constants[name], device="meta")


def stand_in(cls: Any, args: tuple[Any, ...], found: Any) -> Any:
    """The operator in place of a call of an autograd.Function that gave `found`."""
    is_tensor = tuple(isinstance(a, Tensor) for a in args)
    plain = tuple(None if isinstance(a, Tensor) else a for a in args)
    call = FunctionCall(cls, plain, is_tensor)
    functions[str(call)] = call
    _results[:] = list(found) if isinstance(found, tuple | list) else [found]
    made = torch.ops.shardfold.function([a for a in args if isinstance(a, Tensor)], str(call))
    return type(found)(made) if isinstance(found, tuple | list) else made[0]


class CtcLoss(torch.autograd.Function):
    """`ctc_loss`, whose kernel has no shape function for tensors without data.

    With a mask, the targets are what it selects: so many that only their values say how many.
    """

    @staticmethod
    def forward(
        ctx: Any, log_probs: Tensor, targets: Tensor, mask: Tensor | None, *given: Any
    ) -> Tensor:
        """The loss, with its gradient: each sequence's is its own."""
        leaf = log_probs.detach().requires_grad_()
        chosen = targets if mask is None else targets.masked_select(mask)
        with torch.enable_grad():
            loss: Tensor = torch.ctc_loss(leaf, chosen, *given)
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        ctx.save_for_backward(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the probabilities alone; of many sequences, they are the second dim."""
        (own,) = ctx.saved_tensors
        return (own * (gradient[:, None] if gradient.dim() else gradient), *[None] * 7)


class KnownValues:
    """Tensors whose numbers are known while forward is traced, by identity."""

    def __init__(self) -> None:
        # Constants: traced, and real; and the version at which they are the same.
        self.known: dict[int, tuple[Tensor, Tensor, int]] = {}
        self.selected: dict[int, tuple[Any, ...]] = {}  # by a mask: result, of what, mask, versions
        self.selections = Selections()
        self.coins: dict[int, Tensor] = {}  # uniform random numbers: single ones
        self.hint = ""  # what to say if the trace fails

    def of(self, tensor: Any) -> Tensor | None:
        """The numbers of a tensor, where they are known."""
        found = self.known.get(id(tensor))
        return None if found is None or found[0]._version != found[2] else found[1]

    def _know(self, traced: Tensor, real: Tensor) -> None:
        self.known[id(traced)] = (traced, real, traced._version)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of torch, and follow what it gives."""
        found = func(*args, **kwargs)
        self.selections.note(func, args, kwargs, found)
        if func in LOCATES or (func is torch.where and len(args) == 1 and not kwargs):
            self.selections.locate(args[0], found)
        if self.known and isinstance(found, Tensor):
            return self._follow(func, args, kwargs, found)
        return found

    def _follow(self, func: Any, args: Any, kwargs: Any, found: Tensor) -> Tensor:
        """What is computed from small constants alone is known, too.

        If its very shape depends on them (repeat_interleave, nonzero), it is a constant itself.
        """
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_written = any(x is found for x in given)  # in place
        if is_written or not given or any(self.of(x) is None for x in given):
            return found
        is_open = any(isinstance(size, torch.SymInt) for size in found.shape)
        if not is_open and found.numel() > SMALL:
            return found
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: self.known[id(x)][1], (args, kwargs))
        kwargs = {**kwargs, **({"device": "cpu"} if "device" in kwargs else {})}
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            real = func(*args, **kwargs)
        if is_open:
            return self._constant(real)
        self._know(found, real)
        return found

    def constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor made of Python's numbers keeps them."""
        if kwargs.get("requires_grad") or has_tensors((args, kwargs)):
            return func(*args, **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            real = func(
                *args, **{**kwargs, **({} if func.__name__ == "from_numpy" else {"device": "cpu"})}
            )
        return self._constant(real)

    def kept(self, tensor: Tensor) -> Tensor:
        """A tensor that was there before forward keeps its numbers, too."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            real = tensor.detach().to_dense().cpu().clone()
        return self._constant(real)

    def _constant(self, real: Tensor) -> Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            digest = _digest(real)
        constants[digest] = real
        made: Tensor = torch.ops.shardfold.constant(digest)
        self._know(made, real)
        return made

    def new_constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The same of a tensor that another makes in its own dtype."""
        if len(args) != 2 or has_tensors((args[1], kwargs)):
            return func(*args, **kwargs)
        return self.constant(torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs})

    def indexed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Lists of numbers among indices are constants: torch makes tensors of them unseen."""
        tensor, index, *rest = args
        is_many = isinstance(index, tuple) and index and isinstance(index[0], Tensor)
        if is_many and all(isinstance(each, slice) and each == slice(None) for each in index[1:]):
            index = index[0]  # x[mask, :]
        args = (tensor, index, *rest)

        def kept(each: Any) -> Any:
            if not isinstance(each, list | range | np.ndarray) or len(each) == 0:
                return each
            plain = all(isinstance(x, int | np.generic) for x in pytree.tree_leaves(list(each)))
            if plain and (flags := np.asarray(each)).dtype == bool and flags.ndim == 1:
                each = np.flatnonzero(flags)
            return self.constant(torch.as_tensor, (each,), {}) if plain else each

        if isinstance(index, Tensor) and index.dtype == torch.bool and not rest:
            is_whole = isinstance(tensor, Tensor) and index.shape == tensor.shape
            made = (self.select if is_whole else self.call)(func, args, kwargs)
            return made if is_whole else self.selections.select(tensor, index, made)
        found = tuple(map(kept, index)) if isinstance(index, tuple) else kept(index)
        made = self.call(func, (tensor, found, *rest), kwargs)
        own = None if rest else masked_dims(tensor, index)
        return made if own is None else self.selections.select(tensor, own[0], made, own[1])

    def select(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a mask selects; an operator that takes any number of items can do it by itself."""
        found = self.call(func, args, kwargs)
        if len(args) == 2 and not kwargs:
            self.selected[id(found)] = (found, *args, [each._version for each in args])
            self.selections.select(args[0], args[1], found)
        return found

    def selection(self, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tensor and no mask; or, where a mask selected it, what from, and the mask."""
        if id(tensor) not in self.selected:
            return tensor, None
        _, source, mask, versions = self.selected[id(tensor)]
        is_as_it_was = [source._version, mask._version] == versions
        return (source, mask) if is_as_it_was else (tensor, None)

    def number(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A number taken out of a tensor, if that is a constant out of its numbers."""
        known = self.of(args[0]) if args else None
        if known is None:
            found = func(*args, **kwargs)
            return Toss(self, found) if args and id(args[0]) in self.coins else found
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return func(known, *args[1:], **kwargs)

    def coin(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A uniform random number is remembered, if it is a single one."""
        found = func(*args, **kwargs)
        is_plain = func is torch.rand or (len(args) == 1 and not kwargs)  # between 0 and 1
        if found.numel() == 1 and is_plain:
            self.coins[id(found)] = found
        return found

    def tossed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A comparison of a random number, decided where it is certain."""
        if len(args) == 2 and id(args[0]) in self.coins:
            certain = self.outcome(func, args[1])
            if certain is not None:
                return certain
        return self.call(func, args, kwargs)

    def outcome(self, func: Any, limit: Any) -> bool | None:
        """The outcome of comparing a coin; None where it is open."""
        if not isinstance(limit, int | float):
            return None
        certain = CERTAIN[func](limit)
        if certain is None:
            self.hint = (
                "Forward tosses a coin and branches on it (LayerDrop, stochastic depth?): set its "
                "probability to 0"
            )
        return certain


class Toss:
    """A single uniform random number as Python's (`torch.rand(1).item()`)."""

    def __init__(self, known: KnownValues, number: Any) -> None:
        self.known, self.number = known, number


def _compared(name: str) -> Callable[[Toss, Any], Any]:
    def compare(toss: Toss, limit: Any) -> Any:
        certain = toss.known.outcome(getattr(Tensor, name), limit)
        return getattr(operator, name)(toss.number, limit) if certain is None else certain

    return compare


def _computed(name: str) -> Callable[..., Any]:
    return lambda toss, *others: getattr(toss.number, name)(*others)


for _name in ("__lt__", "__gt__", "__le__", "__ge__"):
    setattr(Toss, _name, _compared(_name))
for _name in "add radd sub rsub mul rmul truediv rtruediv neg pow bool float int".split():
    setattr(Toss, f"__{_name}__", _computed(f"__{_name}__"))


_GREATER = (Tensor.__gt__, Tensor.gt, torch.gt)
_LESS = (Tensor.__lt__, Tensor.lt, torch.lt)
_AT_LEAST = (Tensor.__ge__, Tensor.ge, torch.ge)
_AT_MOST = (Tensor.__le__, Tensor.le, torch.le)
# The outcome of comparing a number in [0, 1) with p, or None where it is open.
CERTAIN: dict[Any, Callable[[float], bool | None]] = {
    **dict.fromkeys(_LESS, lambda p: False if p <= 0 else True if p >= 1 else None),
    **dict.fromkeys(_GREATER, lambda p: True if p < 0 else False if p >= 1 else None),
    **dict.fromkeys(_AT_LEAST, lambda p: True if p <= 0 else False if p >= 1 else None),
    **dict.fromkeys(_AT_MOST, lambda p: False if p < 0 else True if p >= 1 else None),
}


def closure_of(cls: Any) -> list[Any]:
    """What the methods of a function see of the scopes around them."""
    methods = (getattr(cls, name, None) for name in ("forward", "backward", "setup_context"))
    plain = (unwrap(method) for method in methods if method is not None)
    cells = (c for m in plain for c in getattr(m, "__closure__", None) or ())
    return [cell.cell_contents for cell in cells]


def has_tensors(tree: Any) -> bool:
    """Whether there is a tensor anywhere in a structure."""
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(tree))


def _digest(value: Tensor) -> str:
    """A name for a constant that says what it is: the same in every process."""
    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{kind} {hashlib.sha256(data).hexdigest()[:16]}"
