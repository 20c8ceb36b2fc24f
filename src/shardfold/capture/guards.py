"""What forward may do that a graph of operators does not keep, noticed while it is traced.

A trace keeps values, not all meaning. This is the one list of what it would lose:

    a custom backward (autograd.Function)     becomes one operator, run as it is (`functions`)
    a constant made in forward                becomes a constant of the program
    a tensor that is no buffer (an attribute) becomes a constant of the program
    torch.inference_mode                      is traced as torch.no_grad
    torch.utils.checkpoint                    is traced through, with a note: the plan decides
    a coin toss whose outcome is certain      is decided (LayerDrop at probability 0)
    `if tensor: raise`, `assert tensor`       is taken to pass, with a note
    a buffer that is replaced by a tensor     is written to when forward ends
    a parameter in a list, or another name    is that parameter
    requires_grad = True of an activation     is traced as nothing: no parameter's gradient changes
    ctc_loss                                  becomes one operator
    rrelu, cov, adaptive softmax, _foreach_*  are traced as others (`rewrites`)
    a mean, sum or loss of what a mask selects  is taken of the whole (`selection`)
    a loop over the places of a mask          goes over all (`skips`)
    `if rows.numel() == 0: continue`          is answered, and what it passes over watched (`skips`)
    `.data = ...` of what is not trained      is written to, if the new memory is its own
    a dataclass that forward returns          is traced as a dictionary
    torch.autocast("cuda") without CUDA       refused, as what casts is; a decorator, too
    hooks on gradients, nodes, saved tensors  refused
    buffers that change under a checkpoint    refused: they would change twice
    a gradient that forward asks for          is traced, in smaller operators (`inner_gradients`)
    a backward pass inside forward            refused
    a write into a tensor that is no buffer   refused
    packed sequences, flex_attention          refused
    requires_grad switched otherwise          refused
    `module.to(...)` that changes its dtype   refused
    `.data = ...` otherwise                   refused
    Python's and numpy's random numbers       refused
    Python attributes that every call changes refused

Writes into buffers and parameters are in the trace itself; `convert` reads them there. What is
refused is named with the module, the line and the way out, before anything is planned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from inspect import getsource, signature
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardfold.capture.functions import Functions
from shardfold.capture.inner_gradients import GradientAskedError
from shardfold.capture.rewrites import (
    FOREACH,
    adaptive_loss,
    correlation,
    covariance,
    one_by_one,
    random_leaky,
)
from shardfold.capture.skips import Skips
from shardfold.capture.stand_ins import (
    CERTAIN,
    CtcLoss,
    KnownValues,
    has_tensors,
    stand_in,
)
from shardfold.capture.user_code import (
    LIBRARIES,
    State,
    attributes_of,
    check_dice,
    dice,
    frames,
    outcome_without_error,
    place,
)
from shardfold.errors import ModelError

HOOKS = {
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
OWN = ("_parameters", "_buffers", "_modules")  # of a module: what is traced as such
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NUMBERS = {Tensor.__float__: "float", Tensor.__int__: "int", Tensor.__index__: "index"}
HALVES = (torch.float16, torch.bfloat16)
AUTOCAST_ADVICE = (
    "Leave autocast out of forward; plan with dtype='bf16', or call the parallel module itself "
    "under torch.autocast"
)
_GENERATOR = "_checkpoint_without_reentrant_generator"
CHECKPOINTED = next(  # torch's name for what runs a part again in backward: since 2.14 the first
    name for name in (f"{_GENERATOR}_impl", _GENERATOR) if hasattr(checkpointing, name)
)
WAY_OUT_OF_HOOKS = (
    "a captured program has no place for it. Remove the hook, or write what it does to the "
    "gradient as a torch.autograd.Function, which is run as it is"
)


ONCE_BEFORE = "Call the model once before it is planned, if that is done in its first call only"


def check_modules(model: nn.Module) -> None:
    """Refuse what can be seen before forward runs: hooks on gradients, norms that count."""
    for path, module in model.named_modules():
        own = (*module._parameters.values(), *module._buffers.values())
        if any(map(is_lazy, own)):
            raise ModelError(
                f"module {path!r} ({type(module).__name__}) has parameters without a shape (a "
                "lazy module). Call the model once before it is planned."
            )
        for attribute, what in HOOKS.items():
            if vars(module).get(attribute):
                raise ModelError(
                    f"{_named(path)} ({type(module).__name__}) has {what}: {WAY_OUT_OF_HOOKS}."
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


def check_memory(model: nn.Module, written: set[str]) -> None:
    """Refuse two tensors of a model in one memory, if one of them is trained or written to.

    One tensor under two names is well: a tied weight.
    """
    found: dict[int, list[tuple[int, int, str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.numel():
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.storage_offset() * tensor.itemsize
            end = begin + (reach + 1) * tensor.itemsize
            there = found.setdefault(tensor.untyped_storage()._cdata, [])
            for low, high, other, tied in there:
                changes = tensor.requires_grad or tied.requires_grad or {name, other} & written
                if changes and low < end and begin < high:
                    raise ModelError(
                        f"{other} and {name} of the model are two tensors in one memory: a change "
                        "of one is a change of the other, which a plan would lose. Tie them by "
                        "giving the same tensor to both, or copy one (clone())."
                    )
            there.append((begin, end, name, tensor))


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
        self.is_in_checkpoint = False
        self.has_gradients = False  # that forward asks for: it is traced in autograd's operators
        self.known = KnownValues()
        self.skips = Skips(self.known.selections, self.refuse)
        self.functions = Functions(self)
        self.outside: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that are no buffers, traced
        self.places = {  # of buffers and parameters, before the trace puts others in their place
            id(tensor): (table, name)
            for _, table, held in self.held()
            for name, tensor in held.items()
            if tensor is not None
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, unless its meaning would be lost."""
        kwargs = kwargs or {}
        if not self.is_inside:  # around forward, torch handles tensors for its own ends
            return self.known.call(func, args, kwargs)
        args, kwargs = self.traced(args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        versions = [(each, each._version) for each in leaves if isinstance(each, Tensor)]
        self.skips.before(leaves)
        with _left_as_traced(versions):
            found = self._called(func, args, kwargs)
        self.skips.after(func, args, kwargs, versions, found)
        return found

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of forward's."""
        if kwargs.get("generator") is not None and not self.functions.is_inside:
            raise self.refuse(
                "draws random numbers from a torch.Generator of its own, which a plan does not ask",
                "Leave generator= out; what must be the same in every step is a buffer",
            )
        handler = HANDLERS.get(func)
        is_followed, followed = False, None
        if not self.functions.is_inside:
            is_followed, followed = self.known.selections.call(func, args, kwargs)
        if is_followed:
            found = followed
        elif self.functions.is_inside:
            found = func(*args, **kwargs)
        elif handler is not None:
            found = handler(self, func, args, kwargs)
        else:
            found = self.known.call(func, args, kwargs)
        if any(traced._version for _, traced in self.outside.values()):
            raise self.refuse(
                "writes into a tensor that is neither an input nor a buffer, nor made by forward: "
                "a captured program would begin every step with the value of its trace",
                "Make it a buffer (register_buffer)",
            )
        return found

    def traced(self, args: Any, kwargs: Any) -> Any:
        """Tensors that forward is not given as the trace has them.

        Parameters and buffers under other names (in a list, a plain attribute) are those that are
        traced; others from outside of forward are constants.
        """
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(id(leaf) in self.places or _is_untraced(leaf) for leaf in leaves):
            if any(isinstance(leaf, nn.Parameter) and _has_data(leaf) for leaf in leaves):
                raise self.refuse(
                    "reads a parameter that is not the model's: no optimizer would find it",
                    "Keep parameters as attributes of modules, or in nn.ParameterList and "
                    "nn.ParameterDict",
                )
            return args, kwargs

        def found(tensor: Tensor) -> Tensor:
            if id(tensor) in self.places:
                table, name = self.places[id(tensor)]
                return table.get(name, tensor)
            return self._from_outside(tensor) if _is_untraced(tensor) else tensor

        return pytree.tree_map_only(
            Tensor,
            found,
            (args, kwargs),
            is_leaf=lambda each: isinstance(each, torch.Size),  # which is not any tuple
        )

    def attributes(self) -> dict[tuple[str, str], list[int]]:
        """The tensors that are plain attributes of modules, or in lists and dictionaries there."""
        return {
            (path, name): [id(leaf) for leaf in pytree.tree_leaves(value) if _is_untraced(leaf)]
            for path, module in self.model.named_modules()
            for name, value in attributes_of(module).items()
            if isinstance(value, Tensor | list | tuple | dict) and name not in OWN
        }

    def check_attributes(self, before: dict[tuple[str, str], list[int]]) -> None:
        """Refuse a forward that reads such a tensor and leaves another in its place."""
        after = self.attributes()
        for (path, name), tensors in before.items():
            left = after.get((path, name), [])
            if any(tensor in self.outside and tensor not in left for tensor in tensors):
                self.refusal = ModelError(
                    f"Forward reads {name!r} of {f'module {path!r}' if path else 'the model'}, a "
                    "tensor that is no buffer, and leaves another there: a captured program would "
                    "read the value of its trace in every step. Make it a buffer "
                    "(register_buffer)."
                )
                raise self.refusal

    def _from_outside(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.outside:
            self.outside[id(tensor)] = tensor, self.known.kept(tensor)
        return self.outside[id(tensor)][1]

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

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        """A part that forward wants to be computed again in backward."""
        self.notes[
            "torch.utils.checkpoint in forward is traced through: the plan decides itself what is "
            "computed again (recompute=...)."
        ] = None
        before, self.is_in_checkpoint = self.is_in_checkpoint, True
        buffers = list(self.model.buffers())
        versions = [each._version for each in buffers]
        yield
        self.is_in_checkpoint = before
        if versions != [each._version for each in buffers]:
            raise self.changed_twice()

    def changed_twice(self) -> ModelError:
        """The error for a buffer that is changed under a checkpoint."""
        return self.refuse(
            "changes a buffer inside torch.utils.checkpoint, which does so twice in every step: "
            "in forward, and when it computes the part again",
            "Leave torch.utils.checkpoint out: the plan decides itself what is computed again "
            "(recompute=...)",
        )

    def normed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A norm that may keep running statistics, unseen."""
        running = kwargs.get("running_mean", args[3] if len(args) > 3 else None)
        updates = kwargs.get("training", args[5] if len(args) > 5 else False)
        if self.is_in_checkpoint and running is not None and updates:
            raise self.changed_twice()
        return self.known.call(func, args, kwargs)

    def number(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A number taken out of a tensor: known of a constant; what a check asks for is taken."""
        if func is Tensor.__bool__ and self.known.of(args[0]) is None:
            return self.checked(func, args)
        if func in NUMBERS and self.known.of(args[0]) is None:
            raise self.refuse(
                f"takes a number out of a tensor, as a Python {NUMBERS[func]}",
                "What forward computes with, branches on or indexes by must stay a tensor or come "
                "from the configuration; what is only logged can be returned or kept as a "
                "detached tensor, and made a number outside of forward",
            )
        return self.known.number(func, args, kwargs)

    def checked(self, func: Any, args: Any) -> Any:
        """A tensor as a condition: decided where the other outcome would raise an error.

        Or where it is for nothing (`if mask.any()`).
        """
        for frame in frames():
            passes = outcome_without_error(frame)
            if passes is not None:
                self.taken_to_pass(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                return passes
        answer = self.skips.of_tensor(args[0])
        return func(*args) if answer is None else answer

    def each(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A loop over a tensor asks for its rows: over places that a mask has, for all of them."""
        turns = self.turns(args[0], is_plain=False) if args[1:] == (0,) else None
        return func(*args, **kwargs) if turns is None else turns

    def turns(self, tensor: Tensor, *, is_plain: bool) -> Iterator[Any] | None:
        """The turns of a loop over the places of a mask, as tensors or as Python's numbers."""
        places = self.known.selections.at(tensor)
        if places is None or places.mask.dim() != 1:
            return None
        rows: list[Any] = list(range(int(places.mask.shape[0])))
        if places.dim is None:
            rows = [[number] for number in rows]
        if not is_plain:
            rows = [self.known.constant(torch.tensor, (row,), {}) for row in rows]
        return self.skips.over(places.mask.unbind(), rows)

    def taken_to_pass(self, where: str) -> None:
        """Note that a check of values is not made."""
        told = f"The check of values at {where} is taken to pass: a plan does not run it."
        self.notes[told] = None

    def ctc(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`ctc_loss` as one operator, with the mask that selects its targets, if one does.

        Lengths that are numbers are constants.
        """
        given = signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        log_probs, targets, *lengths, blank, reduction, zero_infinity = given.args
        tensors = [
            each
            if isinstance(each, Tensor)
            else self.known.constant(torch.tensor, (each,), {"dtype": torch.long})
            for each in lengths
        ]
        targets, mask = self.known.selection(targets)
        many = log_probs.shape[1:2] if reduction == "none" and log_probs.dim() == 3 else ()
        how = ("none", "mean", "sum").index(reduction)
        passed = (log_probs, targets, mask, *tensors, blank, how, zero_infinity)
        return stand_in(CtcLoss, passed, log_probs.new_empty(many))

    def gaussian(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`gaussian_nll_loss` asks for its variances, and cuts them past autograd, unseen."""
        given = signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        variance, least = given.arguments["var"], given.arguments["eps"]
        if isinstance(variance, Tensor):
            cut = least + (variance - variance.detach())
            given.arguments["var"] = torch.where(variance < least, cut, variance)
            given.arguments["eps"] = least - 1  # leaves them all, and their gradients, as they are
        self.taken_to_pass(func.__name__)
        with patch.object(torch, "any", lambda _: False):
            return func(*given.args, **given.kwargs)

    def drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`torch.normal` of numbers alone: it does not ask for the default device."""
        if not has_tensors((args, kwargs)):
            kwargs = {"device": torch.get_default_device(), **kwargs}
        return func(*args, **kwargs)

    def held(self) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        """The buffers and parameters of all modules as they are now: where, the table, a copy."""
        return [
            (path, table, dict(table))
            for path, module in self.model.named_modules()
            for table in (module._buffers, module._parameters)
        ]

    def settle(self, before: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
        """A buffer that forward has replaced by another tensor is written to instead."""
        own = {id(tensor) for _, _, held in before for tensor in held.values()}
        writes = []
        for path, table, held in before:
            if made := [name for name in table if name not in held]:
                raise self.late(f"{made[0]!r} of {_named(path)}")
            for name, tensor in held.items():
                found = table.get(name)
                if found is tensor:
                    continue
                changes_places = not path and id(found) in own  # which torch writes, too
                is_odd = changes_places or isinstance(tensor, nn.Parameter)
                if found is None or is_odd or not _are_alike(found, tensor):
                    raise self.refuse(
                        f"replaces {name!r} of {_named(path)} by {_told(found)}",
                        "Write into the tensor instead, with copy_() (of a parameter: in the "
                        "training loop)"
                        if tensor is not None
                        else ONCE_BEFORE,
                    )
                writes.append((table, name, tensor, found.clone()))
        for path, module in self.model.named_modules():
            if id(attributes_of(module)) not in self.paths:
                raise self.late(f"the {type(module).__name__} {path!r}")
        for table, name, tensor, value in writes:  # after all are read: two may change places
            tensor.copy_(value)
            table[name] = tensor

    def late(self, what: str) -> ModelError:
        """The error for a part of the model that is not there before forward is called."""
        return self.refuse(f"makes {what}, which is not there before its first call", ONCE_BEFORE)

    def hooked(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A hook on a tensor's gradient."""
        raise self.refuse("registers a hook on a gradient", _sentence(WAY_OUT_OF_HOOKS))

    def differentiated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A gradient that forward asks for: traced, if the trace is in autograd's operators."""
        if func is not torch.autograd.grad:
            raise self.refuse(
                "runs a backward pass inside forward",
                "Ask for the gradients by torch.autograd.grad(..., create_graph=True), which "
                "leaves none in the parameters, or run that pass in the training loop",
            )
        if not self.has_gradients:
            raise GradientAskedError
        found = func(*args, **kwargs)
        if kwargs.get("create_graph", args[4] if len(args) > 4 else False):
            return found
        return tuple(None if gradient is None else gradient.detach() for gradient in found)

    def packed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A padded batch without its padding."""
        raise self.refuse(
            "packs sequences (torch.nn.utils.rnn), whose shape depends on the values of lengths",
            "Give the recurrent module the padded batch, and mask what it gives or gather it at "
            "the last valid step; a bidirectional one also needs its input reversed by lengths",
        )

    def switched(self, func: Any, args: Any, kwargs: Any) -> Any:
        """requires_grad set in forward: a word only where it changes something."""
        wanted = kwargs.get("requires_grad", args[1] if len(args) > 1 else True)
        held = (*self.model.parameters(), *self.model.buffers())
        if wanted and not any(args[0] is tensor for tensor in held):
            return func(*args, **kwargs) if self.has_gradients else args[0]
        if bool(wanted) != args[0].requires_grad and self.doubt is None:
            self.doubt = self.told(
                f"sets requires_grad to {bool(wanted)} inside forward",
                "Set it before the model is planned; to stop a gradient in forward use detach() or "
                "torch.no_grad()",
            )
        return func(*args, **kwargs)

    def node(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What made a tensor."""
        found = func(*args, **kwargs)
        return None if found is None else _Node(self, found)

    def data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`.data` is the same memory without its gradient, and traced as that."""
        return args[0].detach()

    def replaced(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`.data` set to another tensor: a write, where nothing else has the memory of either."""
        tensor, value = args
        held = [each for _, table, _ in self.held() for each in table.values() if each is not None]
        others = {each.untyped_storage()._cdata for each in held}
        is_held = any(tensor is each for each in held)
        if isinstance(value, Tensor) and _has_memory_of(value, tensor):
            return None  # `p.data *= 2` writes in place, and sets what it has written to
        if is_held and _are_alike(value, tensor) and value.untyped_storage()._cdata not in others:
            with torch.no_grad():
                tensor.copy_(value)
            return None
        raise self.refuse(
            "replaces a tensor's memory (`.data = ...`)",
            "Write into the tensor instead: under torch.no_grad(), with copy_()",
        )


@contextmanager
def _left_as_traced(given: list[tuple[Tensor, int]]) -> Iterator[None]:
    """What a function does not write to stays what it was in the trace.

    Some functions give back their very argument (`broadcast_tensors`, dropout in eval mode): torch
    traces that as made by them, and without a gradient under `no_grad`, also where it is read
    later on.
    """
    mode = get_proxy_mode()
    if mode is None:
        yield
        return
    before = [(*each, get_proxy_slot(each[0], mode.tracer, None)) for each in given]
    yield
    for tensor, version, proxy in before:
        if proxy is not None and tensor._version == version:
            set_proxy_slot(tensor, mode.tracer, proxy)


class _Node:
    """What made a tensor, as forward may ask for it; hooks cannot be put there."""

    def __init__(self, watch: Watch, node: Any) -> None:
        self._watch, self._node = watch, node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise self._watch.refuse("registers a hook on a gradient", _sentence(WAY_OUT_OF_HOOKS))
        return getattr(self._node, name)


def _is_untraced(leaf: Any) -> bool:
    """Whether it is a tensor with numbers, which no operator of a trace has made."""
    if type(leaf) is not Tensor:
        return False
    with torch._C.DisableTorchFunction():
        return _has_data(leaf) and not leaf.requires_grad


def _has_data(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return not tensor.is_meta and not isinstance(tensor, FakeTensor)


Handler = Callable[[Watch, Any, Any, Any], Any]


def _of_known(method: Callable[[KnownValues, Any, Any, Any], Any]) -> Handler:
    return lambda watch, *call: method(watch.known, *call)


HANDLERS: dict[Any, Handler] = {
    Tensor.register_hook: Watch.hooked,
    Tensor.register_post_accumulate_grad_hook: Watch.hooked,
    Tensor.backward: Watch.differentiated,
    torch.autograd.backward: Watch.differentiated,
    torch.autograd.grad: Watch.differentiated,
    torch._VF._pack_padded_sequence: Watch.packed,
    Tensor.requires_grad_: Watch.switched,
    Tensor.requires_grad.__set__: Watch.switched,
    Tensor.grad_fn.__get__: Watch.node,
    Tensor.data.__get__: Watch.data,
    Tensor.data.__set__: Watch.replaced,
    **dict.fromkeys(
        (torch.tensor, torch.as_tensor, torch.asarray), _of_known(KnownValues.constant)
    ),
    **dict.fromkeys(
        (
            *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__),
            Tensor.__index__,
        ),
        Watch.number,
    ),
    Tensor.unbind: Watch.each,
    Tensor.__format__: _of_known(KnownValues.number),
    Tensor.new_tensor: _of_known(KnownValues.new_constant),
    **dict.fromkeys((Tensor.__getitem__, Tensor.__setitem__), _of_known(KnownValues.indexed)),
    **dict.fromkeys((torch.masked_select, Tensor.masked_select), _of_known(KnownValues.select)),
    **dict.fromkeys((torch.batch_norm, torch.instance_norm), Watch.normed),
    torch.normal: Watch.drawn,
    **dict.fromkeys(
        (F.rrelu, torch.rrelu), lambda watch, func, args, kw: random_leaky(*args, **kw)
    ),
    **dict.fromkeys((torch.cov, Tensor.cov), lambda watch, func, args, kw: covariance(*args, **kw)),
    **dict.fromkeys(
        (torch.corrcoef, Tensor.corrcoef), lambda w, func, args, kw: correlation(*args)
    ),
    **{
        getattr(torch, name): lambda watch, func, args, kw: one_by_one(func, args, kw)
        for name in dir(torch)
        if name.startswith(FOREACH)
    },
    F.gaussian_nll_loss: Watch.gaussian,
    F.ctc_loss: Watch.ctc,
    **dict.fromkeys((torch.rand, Tensor.uniform_), _of_known(KnownValues.coin)),
    **dict.fromkeys(CERTAIN, _of_known(KnownValues.tossed)),
}


@contextmanager
def watching(model: nn.Module) -> Iterator[Watch]:
    """Look on while `model` is traced; what is refused is raised at the end, if not before."""
    watch = Watch(model)
    before = dice()
    try:
        with ExitStack() as stack:
            for target, name, made in (*_patches(watch), *watch.functions.patches()):
                stack.enter_context(patch.object(target, name, made))
            stack.enter_context(watch)
            yield watch
    except Exception as error:
        if watch.refusal is not None and error is not watch.refusal:
            raise watch.refusal from error
        raise
    for refusal in filter(None, (watch.refusal, watch.doubt)):
        raise refusal
    check_dice(before)


def _patches(watch: Watch) -> Iterator[tuple[Any, str, Any]]:
    """What torch functions do not tell of: (object, attribute, what is put there)."""
    again = getattr(checkpointing, CHECKPOINTED)
    call, root = nn.Module._call_impl, id(attributes_of(watch.model))

    def generated(*args: Any, **kwargs: Any) -> Any:
        with watch.checkpointed():
            yield from again(*args, **kwargs)

    record = PreDispatchTorchFunctionMode.__torch_function__

    def recorded(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if watch.functions.is_inside:  # which may switch gradients on and off, for itself alone
            return func(*args, **(kwargs or {}))
        return record(self, func, types, args, kwargs)

    enter_hooks = torch.autograd.graph.saved_tensors_hooks.__enter__

    def entered_hooks(self: Any) -> None:
        caller = sys._getframe(1).f_code.co_filename  # of torch, for a checkpoint; or our own
        is_users = (
            watch.is_inside and not watch.functions.is_inside and not caller.startswith(LIBRARIES)
        )
        if is_users and type(self) is not torch.autograd.graph.save_on_cpu:
            raise watch.refuse(
                "puts hooks on the tensors that are saved for backward",
                _sentence(WAY_OUT_OF_HOOKS),
            )
        enter_hooks(self)

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(attributes_of(module)) != root or watch.is_inside:
            return call(module, *args, **kwargs)
        watch.is_inside = True
        held, attributes = watch.held(), watch.attributes()
        try:
            found = call(module, *args, **kwargs)
            watch.skips.before(found)
            watch.settle(held)
            watch.check_attributes(attributes)
            return _fields(found) if is_dataclass(found) else found
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

    check_device = flex._validate_device

    def attended(*args: Any) -> None:
        if watch.is_inside:
            raise watch.refuse(
                "calls flex_attention, which computes by a Python function of single scores",
                "Use scaled_dot_product_attention, with what the function adds or hides as its "
                "attn_mask",
            )
        check_device(*args)

    def seeding(seed: Any) -> Callable[..., Any]:
        def seeded(*args: Any) -> Any:
            if watch.is_inside and not sys._getframe(1).f_code.co_filename.startswith(LIBRARIES):
                raise watch.refuse(
                    "seeds torch's random numbers, which a plan does not ask",
                    "Leave the seed out; what must be the same in every step is a buffer",
                )
            return seed(*args)

        return seeded

    for owner, name in ((torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "seed")):
        yield owner, name, seeding(getattr(owner, name))
    draw_again = nn.init._no_grad_trunc_normal_

    def truncated(*args: Any, **kwargs: Any) -> Any:
        if watch.is_inside:
            raise watch.refuse(
                "draws random numbers by trial and error (nn.init.trunc_normal_)",
                "Draw them with torch.rand, and turn them with torch.erfinv; or clamp torch.randn",
            )
        return draw_again(*args, **kwargs)

    adaptive = nn.AdaptiveLogSoftmaxWithLoss.forward

    def adapted(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not watch.is_inside:
            return adaptive(module, *args, **kwargs)
        watch.taken_to_pass("AdaptiveLogSoftmaxWithLoss")
        return adaptive_loss(module, *args, **kwargs)

    yield nn.AdaptiveLogSoftmaxWithLoss, "forward", adapted
    yield nn.init, "_no_grad_trunc_normal_", truncated
    yield flex, "_validate_device", attended
    yield checkpointing, CHECKPOINTED, generated
    yield PreDispatchTorchFunctionMode, "__torch_function__", recorded
    yield torch.autograd.graph.saved_tensors_hooks, "__enter__", entered_hooks
    yield nn.Module, "_call_impl", called
    yield nn.Module, "_apply", converted_module

    def registering(kind: str) -> Callable[..., Any]:
        register = getattr(nn.Module, f"register_{kind}")

        def registered(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
            path = watch.paths.get(id(attributes_of(module)))
            if watch.is_inside and path is not None and not hasattr(module, name):
                raise watch.late(f"the {kind} {name!r} of {_named(path)}")
            register(module, name, *args, **kwargs)

        return registered

    for kind in ("buffer", "parameter"):
        yield nn.Module, f"register_{kind}", registering(kind)

    def listed(owner: Any, name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def taken(tensor: Tensor, *given: Any) -> Any:
            known = watch.known.of(tensor)
            if known is not None:
                return getattr(known, name)(*given)
            turns = watch.turns(tensor, is_plain=True) if name == "tolist" else None
            return original(tensor, *given) if turns is None else turns

        return taken

    from_numpy = torch.from_numpy

    def converted(array: Any) -> Any:
        return (
            watch.known.constant(from_numpy, (array,), {}) if watch.is_inside else from_numpy(array)
        )

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
    enter = torch.autocast.__enter__

    def entered_autocast(self: Any) -> Any:
        caller = sys._getframe(1)
        if watch.is_inside and caller.f_code.co_name == "decorate_autocast":
            _check_decorator(watch, self, caller.f_locals.get("func"))
        return enter(self)

    yield torch.autocast, "__enter__", entered_autocast
    guard_bool = SymNode.guard_bool

    def guarded(self: Any, file: Any, line: Any) -> Any:
        try:
            return guard_bool(self, file, line)
        except GuardOnDataDependentSymNode:
            answer = watch.skips.of_size(self.expr) if watch.is_inside else None
            if answer is None:
                raise
            return answer

    yield SymNode, "guard_bool", guarded
    yield torch.inference_mode, "__enter__", entered
    yield torch.inference_mode, "__exit__", left


def _fields(value: Any) -> Any:
    """A dataclass as a dictionary, unless torch knows it."""
    if type(value) in pytree.SUPPORTED_NODES:
        return value
    return {each.name: getattr(value, each.name) for each in fields(value)}


def _named(path: str) -> str:
    return f"module {path!r}" if path else "the model"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _check_decorator(watch: Watch, autocast: Any, decorated: Any) -> None:
    """Refuse `@torch.autocast("cuda")`: made before the watch, it is off where there is no GPU."""
    is_off = not autocast._enabled and autocast.fast_dtype in HALVES
    if not is_off or (torch.amp.is_autocast_available(autocast.device) and _is_there(autocast)):
        return
    try:
        source = getsource(decorated)
    except (OSError, TypeError):
        source = ""
    if "enabled" not in source.partition("def ")[0]:
        raise watch.refuse(
            f"calls {getattr(decorated, '__qualname__', 'a function')}, decorated by "
            f"torch.autocast({autocast.device!r}), which does nothing on this machine but casts "
            "where there is such a device",
            AUTOCAST_ADVICE,
        )


def _is_there(autocast: Any) -> bool:
    return bool(autocast.device != "cuda" or torch.cuda.is_available())


def _has_memory_of(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in one memory."""
    where = [(t.untyped_storage()._cdata, t.storage_offset(), t.stride()) for t in (one, other)]
    return where[0] == where[1] and _are_alike(one, other)


def _are_alike(one: Any, other: Any) -> bool:
    """Whether both are tensors of one shape and dtype."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return bool((one.shape, one.dtype) == (other.shape, other.dtype))


def _told(value: Any) -> str:
    """A tensor by its shape, or what else it is."""
    if value is None:
        return "None"
    is_tensor = isinstance(value, Tensor)
    return f"a Tensor of shape {tuple(value.shape)}" if is_tensor else f"a {type(value).__name__}"
