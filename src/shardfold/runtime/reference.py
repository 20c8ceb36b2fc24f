"""The model itself, in plain PyTorch and float64: what every other way to run it must agree with.

The module is copied and called as its user would call it. Everything is in float64: what forward
makes or casts in a shorter dtype is made in float64, too. Random numbers are not drawn but taken
from the captured program's step, in the order in which they were drawn there, so that both see
the same dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as functional
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardfold.capture.export import copied, for_training
from shardfold.capture.guards import CHECKPOINTED
from shardfold.capture.rewrites import random_leaky
from shardfold.runtime.ops.local_op import WIDER, widened

Batch = tuple[tuple[Any, ...], dict[str, Any]]
SHORTER = dict.fromkeys((Tensor.float, Tensor.half, Tensor.bfloat16), torch.float64) | (
    dict.fromkeys((Tensor.cfloat, Tensor.chalf), torch.complex128)
)
OTHER = 0.75  # of a sample's numbers in the second batch, the rest being its neighbour's


class UnlikeError(Exception):
    """The model cannot be compared with; the message says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step leaves: the loss, gradients, and the state of parameters and buffers."""

    loss: float
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


class Reference:
    """A copy of a model that is run eagerly."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any] | None) -> None:
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            raise UnlikeError("it has no data (it was built on the meta device)")
        self.loss = loss
        self.drew = False  # numbers of its own: none that the loss depends on, if all is the same
        with _told("it cannot be copied"):
            self.module = for_training(copied(model))._apply(_once(widened))

    def takes(self, batch: Batch) -> bool:
        """Whether the model runs on a batch at all; nothing is left of the trial."""
        trial = copied(self.module)
        args, kwargs = _widened(batch)
        try:
            with torch.no_grad(), _in_float64():
                trial(*args, **kwargs)
        except Exception:
            return False
        return True

    def step(self, parts: Iterable[Batch], drawn: list[Tensor]) -> Outcome:
        """Forward and backward of the parts of a batch, with random numbers that were drawn."""
        self.module.zero_grad()
        losses = []
        given = list(parts)
        with (
            _told("it does not run in float64"),
            _computed_once(),
            _Drawn(drawn) as draws,
            _in_float64(),
        ):
            for part in given:
                args, kwargs = _widened(part)
                loss = self._loss(self.module(*args, **kwargs)) / len(given)
                loss.backward()
                losses.append(float(loss.detach()))
        if draws.left:
            raise UnlikeError("it draws fewer random numbers than its captured program")
        self.drew = draws.drew
        named = dict(self.module.named_parameters())
        gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        both = (*named.items(), *self.module.named_buffers())
        return Outcome(sum(losses), gradients, {n: t.detach().clone() for n, t in both})

    def _loss(self, output: Any) -> Tensor:
        if self.loss is not None:
            output = self.loss(output)
        if isinstance(output, Mapping) and "loss" in output:
            output = output["loss"]
        elif not isinstance(output, Tensor) and getattr(output, "loss", None) is not None:
            output = output.loss
        leaves = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        found = next((leaf for leaf in leaves if leaf.numel() == 1 and leaf.requires_grad), None)
        if found is None:
            raise UnlikeError("it returns no loss")
        return found.reshape(())


def _once(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same tensor for the same: a buffer that two modules share stays one."""
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def changed(tensor: Tensor) -> Tensor:
        return known.setdefault(id(tensor), (tensor, change(tensor)))[1]

    return changed


def other_batch(batch: Batch) -> Batch:
    """Another batch that is as legal as the first: samples in another order, other numbers.

    Numbers lie between those of two samples: what were probabilities before still are.
    """

    def moved(tensor: Tensor) -> Tensor:
        found = tensor.roll(1, 0) if tensor.dim() else tensor
        if not tensor.is_floating_point():
            return found
        if tensor.dim() == 0 or len(tensor) == 1:
            return found * OTHER
        return OTHER * found + (1 - OTHER) * tensor

    args, kwargs = pytree.tree_map_only(Tensor, moved, batch)
    return tuple(args), dict(kwargs)


def _widened(batch: Batch) -> Batch:
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: widened(t).clone(), batch)
    return tuple(args), dict(kwargs)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever goes wrong in the user's code is a reason not to compare."""
    try:
        yield
    except UnlikeError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise UnlikeError(f"{what}: {type(error).__name__}: {first[:200]}") from error


@contextmanager
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _computed_once() -> Iterator[None]:
    """No `torch.utils.checkpoint`, which would draw its random numbers once more.

    Nor an operator that draws what cannot be given to it.
    """

    def once(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    def called(run: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return run(*args)

    with (
        patch.object(checkpointing, CHECKPOINTED, once),
        patch.object(checkpointing.CheckpointFunction, "apply", called),
        patch.object(functional, "rrelu", random_leaky),  # whose numbers can be repeated
    ):
        yield


class _Wide(TorchFunctionMode):
    """Shorter floats become float64 wherever a function is told of them."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function with float64 for every shorter dtype."""
        if function in SHORTER:
            return args[0].to(SHORTER[function])
        args, kwargs = pytree.tree_map_only(
            torch.dtype,
            lambda d: WIDER.get(d, d),
            (args, kwargs or {}),
            is_leaf=lambda each: isinstance(each, torch.Size),  # which is not any tuple
        )
        return function(*args, **kwargs)


class _Drawn(TorchDispatchMode):
    """Random numbers that were drawn before, in order, instead of new ones."""

    def __init__(self, drawn: list[Tensor]) -> None:
        super().__init__()
        self.left = list(drawn)
        self.drew = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer for random operators."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags or is_certain(function, args):
            return function(*args, **kwargs)
        like = args[0] if args and isinstance(args[0], Tensor) else None
        made = function(*args, **kwargs)
        if isinstance(made, Tensor) and made is like:
            return like.copy_(self._next(like))
        if isinstance(made, Tensor):
            # A single number whose outcome was certain is not in the program.
            is_single = made.numel() == 1 and not (self.left and self.left[0].numel() == 1)
            return made if is_single else self._next(made).to(made.dtype)
        raise UnlikeError(f"it draws random numbers by {function}, which cannot be repeated")

    def _next(self, made: Tensor) -> Tensor:
        """The next numbers; what is not in the program is what nobody reads, and stays."""
        if not self.left or self.left[0].numel() != made.numel():
            self.drew = True
            return made
        return self.left.pop(0).reshape(made.shape)


def is_certain(function: Any, args: Any) -> bool:
    """Whether a random operator leaves nothing to chance: attention without dropout."""
    names = [a.name for a in function._schema.arguments]
    if "dropout_p" not in names:
        return False
    at = names.index("dropout_p")
    return not (len(args) > at and args[at])
