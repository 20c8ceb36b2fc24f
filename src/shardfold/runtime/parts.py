"""The parts of a parallel module: what the model's own parts are, but for being called.

A user groups parameters by the class of their module, goes over `model.layers`, reads
`model.config`, resets a norm's statistics: so a part is of the class that it stands for, with that
class's methods, and its attributes in Python can be read. What would change nothing, or run on
this rank's pieces as if they were whole, is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from inspect import Signature, signature
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardfold.capture.user_code import Unseen
from shardfold.errors import RunError

OWN = frozenset({*vars(nn.Module()), *dir(nn.Module), "_run"})


@dataclass(frozen=True, slots=True)
class Original:
    """What a part stands for: its class, and its attributes in Python."""

    kind: Any = nn.Module
    attributes: Mapping[str, Any] | None = None
    absent: tuple[tuple[str, str], ...] = ()  # parameters and buffers that are None, and in what
    takes: Signature | None = None  # of the model as a whole: how its forward is called

    def __deepcopy__(self, memo: Any) -> Original:
        """Attributes are shared with the model, as they are only read."""
        return self

    @property
    def names(self) -> Mapping[str, Any]:
        """The attributes, by name."""
        return self.attributes or {}


class Captured(Unseen, nn.Module):
    """In place of a module of the model: tensors can be set, what forward read in Python cannot."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what would change nothing."""
        if name in self._stands_for().names:
            raise RunError(
                f"{name!r} of the model had its value read when forward was captured: setting it "
                "on the parallel module would change nothing. Set it on the model, and plan and "
                "parallelize again, or make it a buffer (register_buffer), which can be set."
            )
        if name in vars(self).get("_parameters", ()) and value is not self._parameters[name]:
            raise RunError(
                f"The parameter {name!r} of the parallel module cannot be replaced: write into it, "
                "with copy_() or load_state_dict(), or replace it in the model, and plan and "
                "parallelize again."
            )
        is_part = "_original" in vars(self) and name in vars(self).get("_modules", ())
        if is_part and value is not self._modules[name]:
            raise RunError(
                f"The part {name!r} of the parallel module cannot be replaced: the plan was made "
                "of the part that was there. Replace it in the model, and plan and parallelize "
                "again."
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse to lose what the plan reads, as parametrizations of a part do."""
        if "_original" in vars(self) and (name in self._parameters or name in self._buffers):
            raise RunError(
                f"{name!r} of the parallel module cannot be taken away: the plan reads it. What "
                "puts something else in the place of a parameter (weight norm, pruning, another "
                "parametrization) must be done to the model, before it is planned."
            )
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse another name for a parameter that is there, as pruning gives it."""
        own = vars(self).get("_parameters", {})
        if param is not None and any(param is p and name != k for k, p in own.items()):
            raise RunError(
                f"A parameter of the parallel module cannot be called {name!r}: the plan reads it "
                "under its name. Prune the model before it is planned, or multiply parameters by "
                "a mask after every step of the optimizer."
            )
        super().register_parameter(name, param)

    def __getattr__(self, name: str) -> Any:
        """What the model's own part has under this name, unless that holds tensors or modules.

        A class may look up names in a way of its own, but not before its parts are there.
        """
        for held in ("_parameters", "_buffers", "_modules"):
            if name in vars(self).get(held, ()):
                if name in vars(self).get("_split", ()):
                    self._complete_buffers()
                return vars(self)[held][name]
        value = self._stands_for().names.get(name, HIDDEN)
        return super().__getattr__(name) if value is HIDDEN else value

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The buffers, each whole."""
        self._complete_buffers()
        yield from super().named_buffers(*args, **kwargs)

    def _complete_buffers(self) -> None:
        """Have statistics whole of which each rank updates a part, before anyone reads them."""
        root = vars(self).get("_root")  # only where there are such
        if root is not None and not torch.compiler.is_compiling():
            root().gather_buffers()

    def _stands_for(self) -> Original:
        found: Original = vars(self).get("_original", NOTHING)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """With tensors of its own."""
        found = memo[id(self)] = type(self).__new__(type(self))
        found.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a call of a part."""
        raise RunError(
            f"A part of the parallel module ({type(self).__name__}) cannot be called by itself: "
            "this rank has pieces of its tensors. Call the whole, and ask for what a part gives "
            'with `module.outputs("its.path")`.'
        )

    def extra_repr(self) -> str:
        """As the model's own part shows itself, where that can be read here."""
        try:
            return str(super().extra_repr())
        except (AttributeError, KeyError):
            return ""

    def train(self, mode: bool = True) -> Self:
        """Switch, together with the whole."""
        if not SWITCHING and mode != self.training:
            raise RunError(
                "A part of the parallel module cannot be set to training or eval mode by itself: "
                "it was captured with the whole. Set it in the model, and plan and parallelize "
                "again."
            )
        nn.Module.train(self, mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As `to(...)` asks: refused where it changes something."""
        for tensor in (*self.parameters(), *self.buffers()):
            found = fn(tensor)
            if (found.dtype, found.device) != (tensor.dtype, tensor.device):
                raise RunError(
                    f"The parallel module cannot be converted from {tensor.dtype} on "
                    f"{tensor.device} to {found.dtype} on {found.device}: convert the model "
                    "before it is parallelized, or plan with dtype=."
                )
        return self

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RunError(
            "A part of the parallel module is never called, and a hook on it neither: register it "
            "on the model before it is planned, or on the parallel module itself."
        )

    register_forward_hook = register_forward_pre_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook


NOTHING = Original()
HIDDEN = object()  # in place of attributes that hold tensors or modules
SWITCHING: list[nn.Module] = []  # the parallel module whose parts are being switched


@cache
def _kind(kind: Any) -> type[Captured]:
    """A class of parts that are of the class of the model's own."""
    if kind is nn.Module or kind.__module__.startswith("torch._dynamo"):  # a compiled part
        return Captured
    return type(kind.__name__, (Captured, kind), {"__module__": kind.__module__})


def grow(module: Captured, originals: Mapping[str, Original]) -> None:
    """Give a module the parts of a model, in its order; a part that it has twice is one."""
    made: dict[int, nn.Module] = {id(originals[""]): module}
    for path, original in originals.items():
        if id(original) not in made:
            kind = _kind(original.kind)
            made[id(original)] = part = kind.__new__(kind)
            nn.Module.__init__(part)
        own = vars(made[id(original)])  # a class may have its own way to look up names
        for held, name in original.absent:
            own[held][name] = None
        if path:
            above, _, name = path.rpartition(".")
            vars(made[id(originals[above])])["_modules"][name] = made[id(original)]


def finish(module: nn.Module, originals: Mapping[str, Original]) -> None:
    """Let all parts know what they stand for: from now on they refuse what would be lost."""
    for path, part in module.named_modules():
        vars(part)["_original"] = originals[path]


def originals_of(model: nn.Module) -> dict[str, Original]:
    """What the parts of a model are, by their paths."""
    found = {
        id(module): Original(type(module), _attributes(module), tuple(_absent(module)))
        for module in model.modules()
    }
    with suppress(TypeError, ValueError):
        found[id(model)] = replace(found[id(model)], takes=signature(model.forward))
    named = model.named_modules(remove_duplicate=False)
    return {path: found[id(module)] for path, module in named}


def _absent(module: nn.Module) -> Iterator[tuple[str, str]]:
    """What a module has no tensor for: `bias` of a layer without one is None, and can be read."""
    for held in ("_parameters", "_buffers"):
        for name, tensor in vars(module)[held].items():
            if tensor is None:
                yield held, name


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes in Python that forward may read; tensors and modules only by name."""
    found = {name: value for name, value in vars(module).items() if name not in OWN}
    for name, value in found.items():
        held = pytree.tree_leaves(value) if isinstance(value, list | tuple | dict) else [value]
        if any(isinstance(each, Tensor | nn.Module) for each in held):
            found[name] = HIDDEN
    return found
