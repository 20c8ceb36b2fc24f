"""Calls of `autograd.Function`s in forward: each becomes one operator, which runs it as it is.

A trace would look into the function's forward and derive a backward of its own. So its operators
are not read, and `stand_in` stands for the call. A function that a graph cannot keep so (it writes
into its argument, draws random numbers, counts, reads a module around it) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils._python_dispatch import TorchDispatchMode

from shardfold.capture.stand_ins import closure_of, stand_in
from shardfold.capture.user_code import PLAIN, State
from shardfold.errors import ModelError

ADVICE = (
    "A function is kept as one operator if its arguments are tensors and plain values, its "
    "results tensors, and it writes into none of them"
)


class Watched(Protocol):
    """The forward that is traced."""

    is_inside: bool
    has_gradients: bool

    def refuse(self, what: str, advice: str) -> ModelError:
        """The error for something that happens where the user's code is now."""

    def traced(self, args: Any, kwargs: Any) -> Any:
        """Arguments with tensors as the trace has them."""

    def checkpointed(self) -> AbstractContextManager[None]:
        """A part that forward wants to be computed again in backward."""


class Functions:
    """Looks on while functions are called."""

    def __init__(self, watch: Watched) -> None:
        self.watch = watch
        self.is_inside = False  # one of them: its own operators are never read

    def call(self, original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
        """A call as one operator."""
        refuse = self.watch.refuse
        args, kwargs = self.watch.traced(args, kwargs)
        if cls is checkpointing.CheckpointFunction:
            with self.watch.checkpointed():
                return args[0](*args[2:])
        name = f"torch.autograd.Function {cls.__qualname__}"
        odd = [
            a for a in (*args, *kwargs.values()) if not isinstance(a, Tensor) and not _is_plain(a)
        ]
        if odd or kwargs:
            kinds = ", ".join(type(each).__name__ for each in odd) or "arguments by name"
            raise refuse(f"gives {name} {kinds}", ADVICE)
        if closure := [c for c in closure_of(cls) if isinstance(c, nn.Module | Tensor)]:
            raise refuse(
                f"calls {name}, which reads a {type(closure[0]).__name__} from around it", ADVICE
            )
        tensors = [a for a in args if isinstance(a, Tensor)]
        versions, around = [t._version for t in tensors], State.around(cls)
        found = self._called_whole(partial(original, *args), name, tensors)
        results = list(found) if isinstance(found, tuple | list) else [found]
        if not tensors or not all(isinstance(r, Tensor) for r in results):
            raise refuse(f"calls {name} without tensors, or for something else", ADVICE)
        if versions != [t._version for t in tensors]:
            raise refuse(f"calls {name}, which writes into its argument", ADVICE)
        if changed := around.changed(State.around(cls)):
            raise refuse(
                f"calls {name}, which changes {changed[0][1]!r} in every call",
                "A captured program has no place for it. Keep it in a buffer, and give its value "
                "to the function as a tensor",
            )
        return stand_in(cls, args, found)

    def call_kept(self, original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
        """A call by a name that was kept before."""
        if self.watch.has_gradients:
            raise self.watch.refuse(
                f"calls torch.autograd.Function {cls.__qualname__} by another name, and asks for "
                "gradients itself",
                f"Call {cls.__name__}.apply itself",
            )
        return self.call(original, cls, args, kwargs)

    def _called_whole(self, call: Callable[[], Any], name: str, tensors: list[Tensor]) -> Any:
        """What a function gives whose own operators are not looked at, but for random ones."""
        self.is_inside = True
        modes = [getattr(tensor, "fake_mode", None) for tensor in tensors]
        shapes = next((mode.shape_env for mode in modes if mode is not None), None)
        free = nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()
        try:
            with disable_proxy_modes_tracing(), free, _Draws() as draws:  # numbers are its own
                found = call()
        finally:
            self.is_inside = False
        if draws.drawn:
            raise self.watch.refuse(
                f"calls {name}, which draws random numbers ({draws.drawn}): they would differ "
                "between devices and from one device",
                "Draw them in forward, and give them to the function as a tensor",
            )
        return found

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """What calls functions: their `apply`, which forward may have under other names.

        Such a name, kept before (`f = Fn.apply`), still asks the class for its forward. Each is
        an object, an attribute, and what is put there.
        """

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            own = _apply.__get__(None, cls)
            if self._leaves_alone(cls):
                return own(*args, **kwargs)
            return self.call(own, cls, args, kwargs)

        base: Any = torch.autograd.Function
        yield base, "apply", classmethod(apply)
        users = {each for each in _subclasses(base) if not each.__module__.startswith("torch._")}
        for cls in users:
            is_apart = cls.setup_context is not base.setup_context
            yield cls, "forward", self._forward_of(cls, cls.forward, 0 if is_apart else 1)
            if is_apart:
                yield cls, "setup_context", self._context_of(cls, cls.setup_context)

    def _leaves_alone(self, cls: Any) -> bool:
        is_whole = self.is_inside or cls.__module__.startswith("torch._")  # as registered
        return not self.watch.is_inside or is_whole

    def _forward_of(self, cls: Any, own: Any, first: int) -> Any:
        @wraps(own)
        def forward(*given: Any, **kwargs: Any) -> Any:
            if self._leaves_alone(cls):
                return own(*given, **kwargs)
            return self.call_kept(_apply.__get__(None, cls), cls, given[first:], kwargs)

        return staticmethod(forward)

    def _context_of(self, cls: Any, own: Any) -> Any:
        @wraps(own)
        def setup_context(*given: Any, **kwargs: Any) -> Any:
            return own(*given, **kwargs) if self._leaves_alone(cls) else None

        return staticmethod(setup_context)


_apply = torch.autograd.Function.__dict__["apply"]  # of a class: _apply.__get__(None, cls)


class _Draws(TorchDispatchMode):
    """Notices operators that draw random numbers."""

    drawn = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = self.drawn or str(func)
        return func(*args, **(kwargs or {}))


def _subclasses(cls: Any) -> Iterator[Any]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _is_plain(value: Any) -> bool:
    """Whether a value is one of Python's own, or a tuple, list or dictionary of them."""
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)
