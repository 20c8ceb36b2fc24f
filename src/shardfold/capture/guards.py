"""What forward may do that a graph of operators does not keep, noticed while it is traced.

A trace keeps values, not all meaning. This is the one list of what it would lose:

    a custom backward (autograd.Function)     becomes one operator, run as it is
    a constant made in forward                becomes a constant of the program
    torch.inference_mode                      is traced as torch.no_grad
    torch.utils.checkpoint                    is traced through, with a note: the plan decides
    a coin toss whose outcome is certain      is decided (LayerDrop at probability 0)
    `if tensor: raise`, `assert tensor`       is taken to pass, with a note
    requires_grad = True of an activation     is traced as nothing: no parameter's gradient changes
    torch.autocast("cuda") without CUDA       refused, as autocast that casts is
    hooks on gradients                        refused
    a gradient that forward asks for          refused
    requires_grad switched otherwise          refused
    `module.to(...)` that changes its dtype   refused
    `.data = ...`                             refused
    Python's and numpy's random numbers       refused
    Python attributes that every call changes refused

Writes into buffers and parameters are in the trace itself; `convert` reads them there. What is
refused is named with the module, the line and the way out, before anything is planned.
"""

from __future__ import annotations

import ast
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from shardfold.errors import ModelError

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
SMALL = 4096  # elements of a constant that is followed
DEPTH = 4  # of objects within objects that are looked into
VALUES = (bool, int, float, list, dict, set)  # of classes and globals, where they may change
STRUCTURE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
# Most of what a module has, and nearly always empty.
HOOK_TABLES = {k for k, v in vars(nn.Module()).items() if isinstance(v, dict)} - STRUCTURE
HOOKS = {
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
HALVES = (torch.float16, torch.bfloat16)
AUTOCAST_ADVICE = (
    "Leave autocast out of forward; plan with dtype='bf16', or call the parallel module itself "
    "under torch.autocast"
)
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
# Operators that draw random numbers without saying which is for which element.
UNREPEATABLE = frozenset(
    f"aten.{name}"
    for name in (
        *("randperm", "multinomial", "poisson", "binomial", "native_dropout", "rrelu", "geometric"),
        *("rrelu_with_noise", "cauchy", "log_normal", "random", "_fused_dropout"),
        *("_standard_gamma", "_sample_dirichlet", "fractional_max_pool2d", "fractional_max_pool3d"),
    )
)
WAY_OUT_OF_HOOKS = (
    "a captured program has no place for it. Remove the hook, or write what it does to the "
    "gradient as a torch.autograd.Function, which is run as it is"
)


def check_modules(model: nn.Module) -> None:
    """Refuse what can be seen before forward runs: hooks on gradients, norms that count."""
    for path, module in model.named_modules():
        for attribute, what in HOOKS.items():
            if vars(module).get(attribute):
                name = f"module {path!r}" if path else "the model"
                raise ModelError(
                    f"{name} ({type(module).__name__}) has {what}: {WAY_OUT_OF_HOOKS}."
                )
    for name, tensor in model.named_parameters():
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise ModelError(
                f"The parameter {name} has a hook on its gradient: {WAY_OUT_OF_HOOKS}; or change "
                "the gradients in the training loop, between backward and the optimizer's step."
            )
    for path, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.momentum is None:
            raise ModelError(
                f"module {path!r} ({type(module).__name__}) averages its statistics over all "
                "batches (momentum=None), by a number that is counted while it runs. Give "
                "momentum a number."
            )
    everywhere = torch.nn.modules.module
    if everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks:
        raise ModelError(f"All modules have a global backward hook: {WAY_OUT_OF_HOOKS}.")


# -- constants and functions: operators that stand for what a trace cannot look into


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
        return f"{self.function.__module__}.{self.function.__qualname__}{''.join(plain)}"


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


# -- the watch


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """As `vars`, unseen: while a block is recorded, that counts as reading all its attributes."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


@dataclass(slots=True)
class State:
    """Python attributes of a model's modules: comparable values, and the objects themselves."""

    values: dict[tuple[str, str], Any] = field(default_factory=dict)
    objects: dict[tuple[str, str], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> State:
        """Of every module; tensors, parameters and children apart."""
        found, modules = cls(), list(model.named_modules())
        known = _named_tensors(modules)
        for path, module in modules:
            for name, value in attributes_of(module).items():
                if name not in STRUCTURE and (name not in HOOK_TABLES or value):
                    found.values[path, name] = _frozen(value, DEPTH, known)
                    found.objects[path, name] = value
        for kind in {kind: None for _, module in modules for kind in type(module).__mro__}:
            for name, value in _around(kind):
                found.values[kind.__name__, name] = _frozen(value, DEPTH, known)
        return found

    def changed(self, later: State) -> list[tuple[str, str]]:
        """The attributes with another value, or that were not there before."""
        missing = object()
        keys = {**self.values, **later.values}
        return [
            key for key in keys if self.values.get(key, missing) != later.values.get(key, missing)
        ]

    def restore(self, model: nn.Module) -> None:
        """Give the modules these attributes."""
        for (path, name), value in self.objects.items():
            vars(model.get_submodule(path))[name] = value


def _named_tensors(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, Any]:
    """Parameters and buffers by identity, frozen as their names: a trace puts others in place."""
    known: dict[int, Any] = {}
    for path, module in modules:
        for group in ("_parameters", "_buffers"):
            for name, tensor in attributes_of(module)[group].items():
                known.setdefault(id(tensor), ("tensor", f"{path}.{name}"))
    known.pop(id(None), None)
    return known


def _around(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class of modules, and the globals that its methods name, hold in Python's values."""
    if kind.__module__.split(".")[0] in ("torch", "builtins", "typing", "abc"):
        return
    for name, value in tuple(vars(kind).items()):
        if isinstance(value, VALUES) and not name.startswith("__"):
            yield name, value
        code = getattr(value, "__code__", None)
        around = getattr(value, "__globals__", {})
        for used in code.co_names if code is not None else ():
            if isinstance(around.get(used), VALUES):
                yield f"{around.get('__name__')}.{used}", around[used]


def shown(frozen: Any) -> str:
    """A frozen value as Python writes it, as far as that is known."""
    if frozen is None:
        return "nothing"
    kind, inner = frozen
    if kind == "list":
        return f"[{', '.join(map(shown, inner))}]" if isinstance(inner, tuple) else "a list"
    if kind == "dict" and isinstance(inner, tuple):
        return "{" + ", ".join(f"{key}: {shown(each)}" for key, each in inner) + "}"
    is_plain = isinstance(inner, PLAIN) and kind == type(inner).__name__
    return repr(inner) if is_plain else f"a {kind}"


def _frozen(value: Any, depth: int, known: dict[int, Any]) -> Any:
    """A value in a form that can be compared after the object has changed."""
    if isinstance(value, PLAIN):
        return (type(value).__name__, value)
    key = id(value)
    if key in known:
        return known[key]
    known[key] = ("itself", None)
    inner: Any = None
    if isinstance(value, nn.Module):
        inner = key
    elif isinstance(value, Tensor):
        inner = tuple(value.shape)
    elif callable(value):  # functions, weak references
        inner = getattr(value, "__qualname__", None)
    elif depth and isinstance(value, list | tuple):
        inner = tuple(_frozen(each, depth - 1, known) for each in value)
    elif depth and isinstance(value, set | frozenset):
        inner = frozenset(repr(each) for each in value)
    elif depth and isinstance(value, dict):
        inner = tuple((repr(k), _frozen(v, depth - 1, known)) for k, v in value.items())
    elif depth and hasattr(value, "__dict__"):
        items = vars(value).items()
        inner = tuple((name, _frozen(each, depth - 1, known)) for name, each in items)
    known[key] = (type(value).__name__, inner)
    return known[key]


class Watch(TorchFunctionMode):
    """Looks on while a model's forward is traced, and refuses what the trace would lose."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.paths = {id(attributes_of(module)): path for path, module in model.named_modules()}
        self.refusal: ModelError | None = None
        self.doubt: ModelError | None = None  # refused if nothing else is
        self.notes: dict[str, None] = {}
        self.before, self.after = State.of(model), State()
        self.is_inside = False  # forward
        self.hint = ""  # what to say if the trace fails
        self.known: dict[int, tuple[Tensor, Tensor]] = {}  # constants: traced, and real
        self.coins: dict[int, Tensor] = {}  # uniform random numbers: single ones

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, unless its meaning would be lost."""
        kwargs = kwargs or {}
        # Around forward, torch handles tensors for its own ends.
        handler = HANDLERS.get(func) if self.is_inside else None
        if handler is not None:
            return handler(self, func, args, kwargs)
        return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        if self.known and isinstance(found, Tensor):
            return self._follow(func, args, kwargs, found)
        return found

    def _follow(self, func: Any, args: Any, kwargs: Any, found: Tensor) -> Tensor:
        """What is computed from small constants alone is known, too.

        If its very shape depends on them (repeat_interleave, nonzero), it is a constant itself.
        """
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = str(getattr(func, "__name__", ""))
        if name.endswith("_") and not name.endswith("__"):
            for tensor in given[:1]:
                self.known.pop(id(tensor), None)
            return found
        if not given or not all(id(x) in self.known for x in given):
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
        self.known[id(found)] = (found, real)
        return found

    # -- what is refused

    def refuse(self, what: str, advice: str) -> ModelError:
        """The error for something that happens where the user's code is now."""
        error = self.told(what, advice)
        self.refusal = self.refusal or error
        return error

    def told(self, what: str, advice: str) -> ModelError:
        """What is said of it."""
        return ModelError(f"{place(self.paths)} {what}. {advice}.")

    # -- what is put in place of something else

    def function(self, original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
        """A call of an autograd.Function, as one operator; its own operators are never read."""
        if cls is checkpointing.CheckpointFunction:
            self.checkpointed()
            return args[0](*args[2:])
        name = f"torch.autograd.Function {cls.__qualname__}"
        advice = (
            "A function is kept as one operator if its arguments are tensors and plain values, its "
            "results tensors, and it writes into none of them"
        )
        leaves = pytree.tree_leaves((args, kwargs))
        odd = [a for a in (*args, *kwargs.values()) if not isinstance(a, (Tensor, *PLAIN))]
        if odd or kwargs or len(leaves) != len(args):
            kinds = ", ".join(type(each).__name__ for each in odd) or "arguments by name"
            raise self.refuse(f"gives {name} {kinds}", advice)
        if closure := [c for c in _closure(cls) if isinstance(c, nn.Module | Tensor)]:
            raise self.refuse(
                f"calls {name}, which reads a {type(closure[0]).__name__} from around it", advice
            )
        tensors = [a for a in args if isinstance(a, Tensor)]
        versions = [t._version for t in tensors]
        found = original(*args)
        results = list(found) if isinstance(found, tuple | list) else [found]
        if not tensors or not all(isinstance(r, Tensor) for r in results):
            raise self.refuse(f"calls {name} without tensors, or for something else", advice)
        if versions != [t._version for t in tensors]:
            raise self.refuse(f"calls {name}, which writes into its argument", advice)
        is_tensor = tuple(isinstance(a, Tensor) for a in args)
        plain = tuple(None if isinstance(a, Tensor) else a for a in args)
        call = FunctionCall(cls, plain, is_tensor)
        functions[str(call)] = call
        _results[:] = results
        made = torch.ops.shardfold.function(tensors, str(call))
        return type(found)(made) if isinstance(found, tuple | list) else made[0]

    def checkpointed(self) -> None:
        """Note that forward asks for recomputation."""
        self.notes[
            "torch.utils.checkpoint in forward is traced through: the plan decides itself what is "
            "computed again (recompute=...)."
        ] = None

    def constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A tensor made of Python's numbers keeps them."""
        if kwargs.get("requires_grad") or _has_tensors((args, kwargs)):
            return func(*args, **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            real = func(
                *args, **{**kwargs, **({} if func.__name__ == "from_numpy" else {"device": "cpu"})}
            )
        return self._constant(real)

    def _constant(self, real: Tensor) -> Tensor:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            digest = _digest(real)
        constants[digest] = real
        made: Tensor = torch.ops.shardfold.constant(digest)
        self.known[id(made)] = (made, real)
        return made

    def new_constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The same of a tensor that another makes in its own dtype."""
        if len(args) != 2 or _has_tensors((args[1], kwargs)):
            return func(*args, **kwargs)
        return self.constant(torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs})

    def indexed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Lists of numbers among indices are constants: torch makes tensors of them unseen."""
        tensor, index, *rest = args

        def kept(each: Any) -> Any:
            if not isinstance(each, list | np.ndarray) or len(each) == 0:
                return each
            plain = all(isinstance(x, int | np.generic) for x in pytree.tree_leaves(list(each)))
            return self.constant(torch.as_tensor, (each,), {}) if plain else each

        found = tuple(map(kept, index)) if isinstance(index, tuple) else kept(index)
        return self._call(func, (tensor, found, *rest), kwargs)

    def of_constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A number taken out of a constant."""
        known = self.known.get(id(args[0])) if args else None
        if known is None and func is Tensor.__bool__:
            return self.checked(func, args)
        if known is None:
            return func(*args, **kwargs)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return func(known[1], *args[1:], **kwargs)

    def checked(self, func: Any, args: Any) -> Any:
        """A tensor as a condition: decided where the other outcome would raise an error."""
        frame = user_frame()
        passes = None if frame is None else outcome_without_error(frame)
        if frame is None or passes is None:
            return func(*args)
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.notes[f"The check of values at {line} is taken to pass: a plan does not run it."] = (
            None
        )
        return passes

    def coin(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A uniform random number is remembered, if it is a single one."""
        found = func(*args, **kwargs)
        if found.numel() == 1:
            self.coins[id(found)] = found
        return found

    def tossed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A comparison of a random number, decided where it is certain."""
        if len(args) == 2 and id(args[0]) in self.coins and isinstance(args[1], int | float):
            certain = CERTAIN[func](args[1])
            if certain is not None:
                return certain
            self.hint = (
                "Forward tosses a coin and branches on it (LayerDrop, stochastic depth?): set its "
                "probability to 0"
            )
        return func(*args, **kwargs)

    def hooked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A hook on a tensor's gradient."""
        raise self.refuse("registers a hook on a gradient", _sentence(WAY_OUT_OF_HOOKS))

    def differentiated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A backward pass inside forward."""
        raise self.refuse(
            "asks for a gradient inside forward (a gradient penalty?)",
            "The backward pass of a captured program runs after forward, once. Compute that term "
            "on one device, or leave it out",
        )

    def switched(self, func: Any, args: Any, kwargs: Any) -> Any:
        """requires_grad set in forward: a word only where it changes something."""
        wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
        held = (*self.model.parameters(), *self.model.buffers())
        if wanted and not any(args[0] is tensor for tensor in held):
            return args[0]
        if bool(wanted) != args[0].requires_grad and self.doubt is None:
            self.doubt = self.told(
                f"sets requires_grad to {bool(wanted)} inside forward",
                "Set it before the model is planned; to stop a gradient in forward use detach() or "
                "torch.no_grad()",
            )
        return func(*args, **kwargs)

    def data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`.data` is the same memory without its gradient, and traced as that."""
        return args[0].detach()

    def replaced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`.data` set to another tensor."""
        raise self.refuse(
            "replaces a tensor's memory (`.data = ...`)",
            "Write into the tensor instead: under torch.no_grad(), with copy_()",
        )


Handler = Callable[[Watch, Any, Any, Any], Any]
_GREATER = (Tensor.__gt__, Tensor.gt, torch.gt)
_LESS = (Tensor.__lt__, Tensor.lt, torch.lt)
# The outcome of comparing a number in [0, 1) with p, or None where it is open.
CERTAIN: dict[Any, Callable[[float], bool | None]] = {
    **dict.fromkeys(_LESS, lambda p: False if p <= 0 else True if p >= 1 else None),
    **dict.fromkeys(_GREATER, lambda p: True if p < 0 else False if p >= 1 else None),
    **dict.fromkeys((Tensor.__ge__, Tensor.ge, torch.ge), lambda p: True if p <= 0 else None),
    **dict.fromkeys((Tensor.__le__, Tensor.le, torch.le), lambda p: False if p < 0 else None),
}
HANDLERS: dict[Any, Handler] = {
    Tensor.register_hook: Watch.hooked,
    Tensor.register_post_accumulate_grad_hook: Watch.hooked,
    Tensor.backward: Watch.differentiated,
    torch.autograd.backward: Watch.differentiated,
    torch.autograd.grad: Watch.differentiated,
    Tensor.requires_grad_: Watch.switched,
    Tensor.requires_grad.__set__: Watch.switched,
    Tensor.data.__get__: Watch.data,
    Tensor.data.__set__: Watch.replaced,
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), Watch.constant),
    **dict.fromkeys(
        (
            *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__),
            Tensor.__index__,
        ),
        Watch.of_constant,
    ),
    Tensor.new_tensor: Watch.new_constant,
    **dict.fromkeys((Tensor.__getitem__, Tensor.__setitem__), Watch.indexed),
    torch.rand: Watch.coin,
    **dict.fromkeys(CERTAIN, Watch.tossed),
}


@contextmanager
def watching(model: nn.Module) -> Iterator[Watch]:
    """Look on while `model` is traced; what is refused is raised at the end, if not before."""
    watch = Watch(model)
    dice = _dice()
    try:
        with ExitStack() as stack:
            for target, name, made in _patches(watch):
                stack.enter_context(patch.object(target, name, made))
            stack.enter_context(_redirecting(watch))
            stack.enter_context(watch)
            yield watch
    except Exception as error:
        if watch.refusal is not None and error is not watch.refusal:
            raise watch.refusal from error
        raise
    for refusal in filter(None, (watch.refusal, watch.doubt)):
        raise refusal
    _check_dice(dice)


_APPLY = torch.autograd.Function.__dict__["apply"].__func__
_original = FunctionType(_APPLY.__code__, _APPLY.__globals__, "apply", None, _APPLY.__closure__)
_watches: list[Watch] = []  # that look on, the last of them now


class _Redirected:
    """The code that stands in for that of `autograd.Function.apply` while a model is traced.

    The code, not the attribute: `Fn.apply` may have been kept under another name before.
    """

    def apply(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Leave it to the watch."""
        __class__  # type: ignore[name-defined]  # noqa: B018  # the other code has this cell, too
        from shardfold.capture import guards

        return guards.applied(cls, *args, **kwargs)


def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of an `autograd.Function`, of whatever name."""
    watch = _watches[-1]
    if not watch.is_inside or cls.__module__.startswith("torch._"):  # of a registered operator
        return _original(cls, *args, **kwargs)
    return watch.function(partial(_original, cls), cls, args, kwargs)


@contextmanager
def _redirecting(watch: Watch) -> Iterator[None]:
    """Let the watch see calls of `autograd.Function`s."""
    before = _APPLY.__code__
    _watches.append(watch)
    _APPLY.__code__ = _Redirected.apply.__code__
    try:
        yield
    finally:
        _APPLY.__code__ = before
        _watches.pop()


def _patches(watch: Watch) -> Iterator[tuple[Any, str, Any]]:
    """What torch functions do not tell of: (object, attribute, what is put there)."""
    again = checkpointing._checkpoint_without_reentrant_generator
    call, root = nn.Module._call_impl, id(attributes_of(watch.model))

    def generated(*args: Any, **kwargs: Any) -> Any:
        watch.checkpointed()
        return again(*args, **kwargs)

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(attributes_of(module)) != root or watch.is_inside:
            return call(module, *args, **kwargs)
        watch.is_inside = True
        try:
            return call(module, *args, **kwargs)
        finally:
            watch.is_inside, watch.after = False, State.of(watch.model)

    apply_to_all = nn.Module._apply

    def converted_module(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
        if not watch.is_inside:
            return apply_to_all(module, change, recurse)
        for tensor in (*module.parameters(), *module.buffers()):
            changed = change(tensor)
            if changed.dtype != tensor.dtype or changed.device != tensor.device:
                raise watch.refuse(
                    f"converts the parameters of a module in forward (from {tensor.dtype} to "
                    f"{changed.dtype})",
                    "Convert the module before it is planned, or cast its input and result",
                )
        return module

    def entered(self: Any) -> None:
        self._shardfold_mode = torch.no_grad()
        self._shardfold_mode.__enter__()

    def left(self: Any, *error: Any) -> None:
        self._shardfold_mode.__exit__(*error)

    yield checkpointing, "_checkpoint_without_reentrant_generator", generated
    yield nn.Module, "_call_impl", called
    yield nn.Module, "_apply", converted_module

    def listed(owner: Any, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def taken(tensor: Tensor, *given: Any) -> Any:
            known = watch.known.get(id(tensor))
            return original(tensor, *given) if known is None else getattr(known[1], name)(*given)

        return taken

    from_numpy = torch.from_numpy

    def converted(array: Any) -> Any:
        return watch.constant(from_numpy, (array,), {}) if watch.is_inside else from_numpy(array)

    yield torch, "from_numpy", converted
    yield FakeTensor, "tolist", listed(FakeTensor, "tolist")
    yield Tensor, "numpy", listed(Tensor, "numpy")
    begin = torch.autocast.__init__

    def begun(
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        *more: Any,
        **named: Any,
    ) -> None:
        begin(self, device_type, dtype, enabled, *more, **named)
        if watch.is_inside and enabled and not self._enabled and self.fast_dtype in HALVES:
            raise watch.refuse(
                f"runs under torch.autocast({device_type!r}, {self.fast_dtype}), which does "
                "nothing on this machine but casts where there is such a device",
                AUTOCAST_ADVICE,
            )

    yield torch.autocast, "__init__", begun
    yield torch.inference_mode, "__enter__", entered
    yield torch.inference_mode, "__exit__", left


def _dice() -> dict[str, Any]:
    """The state of the random numbers that are not torch's."""
    return {
        "Python's random": random.getstate(),
        "numpy.random": pickle.dumps(np.random.get_state()),
    }


def _check_dice(before: dict[str, Any]) -> None:
    drawn = next((name for name, now in _dice().items() if now != before[name]), None)
    if drawn:
        raise ModelError(
            f"The model's forward draws from {drawn}: a captured program would repeat the "
            "numbers of its trace in every step, and ranks would differ. Draw outside the model "
            "and pass the numbers in as tensors, or use nn.Dropout."
        )


def place(paths: dict[int, str]) -> str:
    """The module and the line of the user's code that is running: `module 'a.b' (file.py:12)`."""
    frame: FrameType | None = sys._getframe(1)
    line, found = "", None
    while frame is not None and (found is None or not line):
        file = frame.f_code.co_filename
        if not line and not file.startswith(LIBRARIES):
            line = f"{Path(file).name}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and found is None:
            found = paths.get(id(attributes_of(owner)))
        frame = frame.f_back
    name = f"module {found!r}" if found else "The model's forward"
    return f"{name} ({line})" if line else name


def user_frame() -> FrameType | None:
    """Where the code that is traced is now: the innermost frame that is not torch's or ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return frame


def outcome_without_error(frame: FrameType) -> bool | None:
    """What a condition must be for `if condition: raise ...` or `assert condition` to go on.

    None where the running expression is no such condition.
    """
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    line, _, column, _ = positions
    if line is None or column is None:
        return None
    try:
        tree = ast.parse(Path(frame.f_code.co_filename).read_text())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.Assert) and _asks(node, line, column):
            if isinstance(node, ast.Assert):
                return _needed(node.test, True, line, column)
            raises = all(isinstance(each, ast.Raise) for each in node.body)
            return _needed(node.test, False, line, column) if raises and not node.orelse else None
    return None


def _asks(node: ast.If | ast.Assert, line: int, column: int) -> bool:
    """Whether the condition of a statement is at a place; `if not x` is at that of the `if`."""
    return (node.lineno, node.col_offset) == (line, column) or _holds(node.test, line, column)


def _holds(node: ast.expr, line: int, column: int) -> bool:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= (line, column) < end


def _needed(test: ast.expr, wanted: bool, line: int, column: int) -> bool | None:
    """What the part of a condition at a place must be for the whole to be as wanted."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _needed(test.operand, not wanted, line, column)
    if isinstance(test, ast.BoolOp):
        parts = [part for part in test.values if _holds(part, line, column)]
        return _needed(parts[0], wanted, line, column) if parts else None
    return wanted


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _closure(cls: Any) -> list[Any]:
    """What the methods of a function see of the scopes around them."""
    methods = (getattr(cls, name, None) for name in ("forward", "backward", "setup_context"))
    cells = (c for m in methods for c in getattr(m, "__closure__", None) or ())
    return [cell.cell_contents for cell in cells]


def _has_tensors(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(tree))


def _digest(value: Tensor) -> str:
    """A name for a constant that says what it is: the same in every process."""
    import hashlib

    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{kind} {hashlib.sha256(data).hexdigest()[:16]}"
