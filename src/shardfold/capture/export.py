"""`torch.export` of a copy of the model that holds no data.

`copy.deepcopy` asks a memo before it copies an object. With every parameter and buffer already
in the memo as its meta-device twin, no weight is ever copied, and a tensor that was shared in
the original is shared in the copy.

Errors of `torch.export` say which module stopped it and what to change.
"""

from __future__ import annotations

import copy
import io
import logging
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from shardfold.capture.dense_experts import dispatched
from shardfold.capture.experts import one_operator
from shardfold.capture.guards import watching
from shardfold.capture.inner_gradients import GradientAskedError, in_autograds_operators
from shardfold.capture.user_code import State, owner_of
from shardfold.errors import ModelError
from shardfold.graph.precision import precision_named

UNCHANGING = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type)
EMPTY = (dict, list, set, OrderedDict)
HOLDERS = (torch.Tensor, list, tuple, dict)


class WithLoss(nn.Module):
    """A model followed by a function that turns its output into a loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of the model's output."""
        return self.loss(self.model(*args, **kwargs))


SCRIPTED = (torch.jit.ScriptModule, torch.jit.ScriptFunction)


def check_model(model: object) -> None:
    """Refuse what is no module, and modules whose code cannot be read."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"A model must be a torch.nn.Module, got {type(model).__name__}.")
    for path, module in model.named_modules():
        held = [module] if isinstance(module, SCRIPTED) else vars(module).values()
        if any(isinstance(each, SCRIPTED) for each in held):
            raise ModelError(
                f"The part {path or '(model)'} ({type(module).__name__}) is, or holds, what "
                "torch.jit has compiled: give the model the plain module or function instead."
            )


def skeleton(model: nn.Module, dtype: str | None) -> nn.Module:
    """A copy of `model` on the meta device, for training, floating tensors in `dtype`."""
    check_model(model)
    modules = {id(module): module for module in model.modules()}
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers(), *left_behind(model)]}
    twins = Twins({**modules, **tensors, **functions_of(modules.values())}, dtype)
    try:
        if any(map(copies_itself, set(map(type, modules.values())))):
            memo: dict[int, Any] = {key: twins.of(tensor) for key, tensor in tensors.items()}
            return for_training(copy.deepcopy(model, memo))
        return for_training(twins.make(model))
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"The model {type(model).__name__} cannot be copied without its weights ({error}). "
            "Build it under `with torch.device('meta'):` and without handles, locks or "
            "non-leaf tensors as attributes."
        ) from error


def left_behind(model: nn.Module) -> Iterator[torch.Tensor]:
    """Attributes that an earlier forward computed, which deepcopy refuses."""
    for module in model.modules():
        for value in vars(module).values():
            for leaf in pytree.tree_leaves(value) if isinstance(value, HOLDERS) else ():
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    yield leaf


def functions_of(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Functions that are kept in modules (hooks, activations) and see something around them."""
    found: dict[int, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, HOLDERS[1:]) and name not in ("_parameters", "_buffers"):
                leaves = value.values() if isinstance(value, dict) else pytree.tree_leaves(value)
                found |= {id(leaf): leaf for leaf in leaves if _sees_around(leaf)}
            elif _sees_around(value):
                found[id(value)] = value
    return found


def _sees_around(value: Any) -> bool:
    if isinstance(value, MethodType):  # of a class: it is no part of the model
        return isinstance(value.__self__, nn.Module) and _sees_around(value.__func__)
    return isinstance(value, FunctionType) and bool(value.__closure__)


class Rebinding(dict[int, Any]):
    """A memo for `copy.deepcopy` that also copies functions, for what they see around them.

    A hook that keeps a module's result in `self.features` must find the copy's features. Only
    modules, tensors and containers that the model itself has are exchanged.
    """

    def __init__(self, originals: Mapping[int, Any], modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.originals = originals  # what is not left to deepcopy, by identity
        held = (value for module in modules for value in vars(module).values())
        self.held = {id(value) for value in held if isinstance(value, HOLDERS)}

    def get(self, key: int, default: Any = None) -> Any:
        """What deepcopy asks before it copies an object."""
        if key in self:
            return self[key]
        original = self.originals.get(key)
        return default if original is None else self.of(original)

    def of(self, original: Any) -> Any:
        """What is in place of an object in the copy."""
        if id(original) not in self:
            if isinstance(original, torch.Tensor):
                self[id(original)] = original.detach().clone()
            else:
                self.rebind(original)
        return self[id(original)]

    def rebind(self, original: Any) -> Any:
        """A function, or a bound method, that sees the copy."""
        inner = getattr(original, "__func__", original)
        cells = tuple(CellType() for _ in inner.__closure__)
        made = FunctionType(
            inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__, cells
        )
        made.__kwdefaults__, made.__qualname__ = inner.__kwdefaults__, inner.__qualname__
        made.__dict__.update(inner.__dict__)
        found: Any = made
        self[id(original)] = made
        if inner is not original:
            self[id(original)] = found = MethodType(made, copy.deepcopy(original.__self__, self))
        for cell, old in zip(cells, inner.__closure__, strict=True):
            try:
                value = old.cell_contents
            except ValueError:  # not yet filled
                continue
            cell.cell_contents = self._around(value)
        return found

    def _around(self, value: Any) -> Any:
        owner = getattr(value, "__self__", value)  # of a bound method
        if isinstance(owner, nn.Module) or id(value) in self.held or id(value) in self:
            return copy.deepcopy(value, self)
        return self.of(value) if _sees_around(value) or id(value) in self.originals else value


def for_training(module: nn.Module) -> nn.Module:
    """The module in training mode; one that already is keeps the parts that were set to eval.

    A part with its own idea of training mode is asked for it.
    """
    if not module.training:
        return module.train()
    for part in filter(has_own_mode, list(_parts(module))):
        part.train()
    return module


def has_own_mode(part: nn.Module) -> bool:
    """Whether a module has its own idea of training mode."""
    return "train" in vars(part) or type(part).train is not nn.Module.train


def check_mode(model: nn.Module) -> None:
    """Refuse a model in training mode that its own `train()` would put into another one.

    Whether forward is meant as the model is now, or as it is after that call, nobody can say.
    """
    if not model.training or not any(map(has_own_mode, model.modules())):
        return
    copies = skeleton(model, None).modules()
    for (path, part), twin in zip(model.named_modules(), copies, strict=True):
        if _mode(part) != _mode(twin):
            raise ModelError(
                f"{f'module {path!r}' if path else 'The model'} ({type(part).__name__}) is not in "
                "the mode that train() sets, which a class has overridden: it switches parts to "
                "eval mode, or freezes them. Call train() on the model before it is planned."
            )


def _mode(part: nn.Module) -> tuple[bool, ...]:
    """Whether a part alone is in training mode, and which of its parameters are trained."""
    parameters = (p for p in part._parameters.values() if p is not None)
    return part.training, *(p.requires_grad for p in parameters)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """A module and those inside it, except what stands for a block and holds nothing."""
    if "_shell_of" not in vars(module):
        yield module
        for child in module._modules.values():
            if child is not None:
                yield from _parts(child)


def copied(model: nn.Module) -> nn.Module:
    """A copy with its data, whose functions see the copy."""
    modules = list(model.modules())
    left = {id(tensor): tensor for tensor in left_behind(model)}
    return copy.deepcopy(model, Rebinding({**left, **functions_of(modules)}, modules))


class Twins(Rebinding):
    """A memo for `copy.deepcopy` that makes a module's or a tensor's twin when first asked for it.

    Modules are copied as their dictionaries say, which is right unless a class has its own way
    of being copied. Attributes that cannot change are shared, and the others are left to deepcopy.
    """

    def __init__(self, originals: Mapping[int, Any], dtype: str | None) -> None:
        modules = [each for each in originals.values() if isinstance(each, nn.Module)]
        super().__init__(originals, modules)  # modules, tensors and functions
        self.dtype = torch_dtype(dtype)

    def of(self, original: Any) -> Any:
        """The twin of a module or a tensor of the model."""
        key = id(original)
        if key not in self:
            if isinstance(original, torch.Tensor):
                self[key] = _twin(original, self.dtype)
            elif isinstance(original, nn.Module):
                self.make(original)
            else:
                self.rebind(original)
        return self[key]

    def make(self, module: nn.Module) -> nn.Module:
        """A twin of a module, in place of whatever stood for it so far."""
        found = self[id(module)] = object.__new__(type(module))
        twin = vars(found)
        for name, value in vars(module).items():
            if isinstance(value, dict) and name in ("_parameters", "_buffers", "_modules"):
                twin[name] = {k: None if v is None else self.of(v) for k, v in value.items()}
            elif isinstance(value, UNCHANGING):
                twin[name] = value
            elif type(value) in EMPTY and not value and id(value) not in self:
                twin[name] = self[id(value)] = type(value)()
            else:
                twin[name] = copy.deepcopy(value, self)
        return found


def copies_itself(kind: type[nn.Module]) -> bool:
    """Whether a class has its own way of being copied."""
    own = ("__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__")
    return kind.__setstate__ is not nn.Module.__setstate__ or any(
        getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in own
    )


def on_meta(tree: Any, dtype: str | None) -> Any:
    """The same nested arguments with every tensor on the meta device."""
    target = torch_dtype(dtype)
    return pytree.tree_map_only(torch.Tensor, lambda tensor: _twin(tensor, target), tree)


def _twin(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    empty = torch.empty_like(tensor, device="meta", dtype=kept)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def torch_dtype(name: str | None) -> torch.dtype | None:
    """What a step of the named precision computes in; None: the model's own."""
    found = precision_named(name).computes
    return getattr(torch, found) if found else None


ADVICE = (
    (
        r"data.dependent|DataDependent|Could not guard|Could not extract specialized|is_nonzero"
        r"|\.item\(\)|_local_scalar_dense|unbacked|aten\.nonzero|Cannot copy out of meta"
        r"|DynamicOutputShape",
        "A branch or a shape depends on the values of a tensor. Make the choice from shapes or "
        "configuration, or use torch.where, torch.cond or masking instead",
    ),
    (
        r"TorchScript",
        "A part is compiled by torch.jit: give the model the plain module instead",
    ),
    (
        r"same device|DeviceMismatch|two different devices",
        "A tensor is made on a fixed device: make it on the device of the input (device=x.device) "
        "or register it as a buffer",
    ),
    (
        r"Cache|past_key_values|use_cache",
        "The model returns or updates a cache: pass use_cache=False",
    ),
    (
        r"pytree|is an input, but|Unsupported output|type .* is not supported|return_dict",
        "An input or output is of a type that cannot be traced: return tensors, tuples or dicts "
        "(Hugging Face models: pass return_dict=False or use_cache=False)",
    ),
    (
        r"missing .* required|unexpected keyword|takes .* positional|too many positional",
        "The example arguments do not match the signature of forward",
    ),
    (
        r"has no attribute 'constant'|BatchedTensor|GradTrackingTensor",
        "Forward transforms functions (torch.func, torch.vmap): write it with ordinary operators, "
        "and gradients with torch.autograd.grad(..., create_graph=True)",
    ),
    (
        r"Sparse(CPU|CUDA|Meta|Csr)|sparse_(coo|csr)|_sparse_",
        "A sparse tensor has no fixed shape that could be split: use a dense matrix, or add up "
        "over the edges with index_add",
    ),
    (
        r"_sample_dirichlet|_standard_gamma|aten::(poisson|binomial)",
        "Numbers of this distribution are drawn by trial and error, which would differ between "
        "devices: draw them outside of the model, and give them to forward as a tensor",
    ),
    (
        r"Meta device|meta kernel|meta tensor|NotImplementedError.*Meta|fake",
        "An operator has no shape function for tensors without data: register one with "
        "torch.library.register_fake",
    ),
)


FORWARDS_OWN = (TypeError, AttributeError, KeyError, IndexError, UnboundLocalError)


@dataclass(frozen=True, slots=True)
class Traced:
    """An exported program, and what was seen while forward ran."""

    program: ExportedProgram
    notes: tuple[str, ...]
    before: State  # of the modules' Python attributes
    after: State
    has_gradients: bool = False  # that forward asks for itself


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Trace `model` on meta tensors; whole operators stay whole, and what gets lost is refused.

    Forward may ask whether it is being compiled, and then fail: so it is asked once more, without
    knowing. One that asks for a gradient is traced once more, in smaller operators.
    """
    before = State.of(model)
    try:
        return _export(model, args, kwargs)
    except GradientAskedError:
        before.restore(model)
        with in_autograds_operators():
            return _export(model, args, kwargs, has_gradients=True)
    except ModelError as first:
        if not isinstance(first.__cause__, FORWARDS_OWN):
            raise
    before.restore(model)
    with patch.object(torch.compiler, "is_compiling", bool):
        return _export(model, args, kwargs)


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], has_gradients: bool = False
) -> Traced:
    hint = ""
    try:
        # Tensors that forward makes without naming a device must meet the inputs where they are.
        with quiet(), torch.device("meta"), one_operator(), watching(model) as watch:
            watch.has_gradients = has_gradients
            try:
                program = torch.export.export(model, args, kwargs, strict=False)
            finally:
                hint = watch.known.hint
        dispatched(program)
        return Traced(program, tuple(watch.notes), watch.before, watch.after, has_gradients)
    except (ModelError, GradientAskedError):
        raise
    except Exception as error:
        raise ModelError(_explain(model, error, hint)) from error


def _explain(model: nn.Module, error: BaseException, hint: str) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    text = f"{type(error).__name__}: {error}"
    advice = hint or next((hint for pattern, hint in ADVICE if re.search(pattern, text)), None)
    where = _failing_module(model, error)
    return (
        f"The model could not be traced: {where} failed with {type(error).__name__}: "
        f"{first[:300]}\n{advice or 'Check that forward runs on meta tensors by itself'}."
    )


def _failing_module(model: nn.Module, error: BaseException) -> str:
    """The deepest module of `model` whose code was running when the error was raised."""
    paths = {id(vars(module)): path for path, module in model.named_modules()}
    found = f"the model ({type(model).__name__})"
    for frame in _frames(error.__traceback__):
        owner = owner_of(frame.tb_frame)
        path = None if owner is None else paths.get(id(vars(owner)))
        name = frame.tb_frame.f_code.co_filename.rsplit("/", 1)[-1]
        if path is not None and name != "module.py":
            who = f"module {path!r}" if path else "the model"
            found = f"{who} ({type(owner).__name__}, {name}:{frame.tb_lineno})"
    return found


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


@contextmanager
def quiet() -> Iterator[None]:
    """No advice of torch's own on stderr: what fails is explained by our error.

    Where a branch depends on data, torch prints the program that it has so far.
    """
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
