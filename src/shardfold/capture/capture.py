"""Capture as one function: meta-device copy, export, conversion to a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export._tree_utils import reorder_kwargs
from torch.fx import GraphModule
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from shardfold.capture.convert import convert, convert_folded
from shardfold.capture.experiment import with_experiments
from shardfold.capture.export import (
    Traced,
    WithLoss,
    check_mode,
    check_model,
    export,
    on_meta,
    skeleton,
)
from shardfold.capture.graph_builder import left_by
from shardfold.capture.guards import ONCE_BEFORE, check_memory, check_modules
from shardfold.capture.program import Program, key_of
from shardfold.capture.repeated_blocks import Hollow, Run, UnfoldableError, hollow
from shardfold.capture.replicas import Folded, fold_short, has_global_hooks
from shardfold.capture.replicas import fold as fold_blocks
from shardfold.capture.user_code import Unseen, shown
from shardfold.errors import ModelError
from shardfold.graph import Graph, Op
from shardfold.graph.precision import precision_named

Folding = Callable[[Hollow, tuple[Any, ...], dict[str, Any]], tuple[Folded | None, tuple[Run, ...]]]


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    loss: Callable[[Any], Any] | None = None,
    fold: bool = True,
) -> Graph:
    """Trace one training step's forward pass of `model` into a `Graph`.

    The model itself is never touched or run: a copy whose parameters live on the meta device is
    traced, in `dtype` (a name of `shardfold.graph.precision`) if one is given. `loss` turns the
    model's output into a scalar where the model does not return one itself. With `fold`, repeated
    blocks are traced once, where they are proven to be replicas; the graph is the same.
    """
    return capture_program(model, args, kwargs, dtype=dtype, loss=loss, fold=fold).graph


def capture_short(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    loss: Callable[[Any], Any] | None = None,
) -> Graph:
    """As `capture`, but of a long run of blocks only a few periods are in the graph.

    `Graph.repeats` says what they stand for: a depth of 1,000 costs hardly more than one of 10.
    """
    return _trace(model, args, kwargs, dtype, loss, fold_short).graph


def capture_program(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dtype: str | None = None,
    loss: Callable[[Any], Any] | None = None,
    fold: bool = True,
    short: bool = False,
) -> Program:
    """As `capture`, with what is needed to run the graph's operators; `short` as `capture_short`.

    What a short graph leaves out cannot be run.
    """
    folding = fold_short if short else _fold_all if fold else None
    return _trace(model, args, kwargs, dtype, loss, folding)


def _trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dtype: str | None,
    loss: Callable[[Any], Any] | None,
    folding: Folding | None,
) -> Program:
    check_model(model)
    check_modules(model)
    check_mode(model)
    _register_dataclasses((args, kwargs))
    _check_arguments((tuple(args), dict(kwargs or {})))
    example = on_meta((tuple(args), dict(kwargs or {})), dtype)
    program = with_experiments(_first_of(model, example, dtype, loss, folding))
    check_memory(model, _written(program))
    leaves = pytree.tree_leaves((example[0], reorder_kwargs(example[1], program.in_spec)))
    fixed = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    graph = replace(program.graph, precision=precision_named(dtype))
    return replace(program, graph=graph, fixed=fixed)


def _register_dataclasses(given: Any) -> None:
    """Let torch look into the dataclasses among the arguments."""
    while kinds := {type(x) for x in pytree.tree_leaves(given) if is_dataclass(x)}:
        for kind in kinds:
            pytree.register_dataclass(kind)


def _check_arguments(given: Any) -> None:
    """Refuse functions and what is NumPy's."""
    for path, leaf in pytree.tree_flatten_with_path(given)[0]:
        is_function = callable(leaf) and not isinstance(leaf, Tensor | nn.Module | type)
        is_numpys = isinstance(leaf, np.ndarray | np.generic) and not isinstance(leaf, float | str)
        if not is_function and not is_numpys:
            continue
        name = ".".join(str(key_of(key)) for key in path[1:])
        advice = (
            "give it as a tensor (torch.from_numpy)"
            if is_numpys
            else "give tensors, numbers and text, in lists, dictionaries or dataclasses; keep what "
            "else forward needs as an attribute of the model"
        )
        raise ModelError(
            f"The argument {name} is a {type(leaf).__name__}, which cannot be captured: {advice}."
        )


def _first_of(
    model: nn.Module,
    example: Any,
    dtype: str | None,
    loss: Callable[[Any], Any] | None,
    folding: Folding | None,
) -> Program:
    """The model with its blocks traced once, or else in full."""
    notes: tuple[str, ...] = ()
    if folding is not None and not has_global_hooks():
        outer = hollow(model, dtype, loss)
        try:
            program = None if outer is None else _folded(outer, example, folding)
            if program is not None and not _writes_shared(program, model):
                return program
        except UnfoldableError as error:
            notes = (f"Traced in full: {error}.",)

    def copied() -> nn.Module:
        made = skeleton(model, dtype)
        return made if loss is None else WithLoss(made, loss)

    root = copied()
    traced = export(root, *example)
    try:
        program = convert(traced.program)
    except ModelError as error:
        changed = traced.before.changed(traced.after)
        if not changed:
            raise
        raise ModelError(f"{error} {ONCE_BEFORE} (it changes {changed[0][1]!r}).") from error
    check_steady(root, copied, example, traced, program)
    notes += traced.notes
    return replace(program, graph=replace(program.graph, notes=notes))


def check_steady(
    root: nn.Module,
    copied: Callable[[], nn.Module],
    example: Any,
    traced: Traced,
    program: Program,
) -> None:
    """Refuse Python attributes that every call of forward changes.

    Where the first call changed one, the model is traced once more, as the first call left it: if
    that changes nothing further and computes the same, so will all later ones. What the first call
    has kept as a tensor (a mask, rotary angles) is only there within its trace: then two calls are
    traced as one.
    """
    changed = traced.before.changed(traced.after)
    if not changed:
        return
    traced.after.restore(root)
    again, failure = _tried(root, example)
    if again is not None and _is_same(again, traced, program):
        return
    twice, failed = _tried(_called_twice(copied(), _written(program)), example)
    if twice is not None and _is_same(twice, traced, program, calls=2):
        return
    again = again or twice
    if again is None:
        raise failed or failure  # type: ignore[misc]
    (path, name) = next(iter(traced.after.changed(again.after)), changed[0])
    is_steady = not traced.after.changed(again.after)
    states = (traced.before, traced.after)
    before, after = (shown(state.values.get((path, name)))[:40] for state in states)
    where = f"module {path!r}" if (path, name) in traced.after.objects and path else path
    when = "its first call, and computes something else after it" if is_steady else "every call"
    first = f"{ONCE_BEFORE}. Or make" if is_steady else "Make"
    change = f"from {before} to {after}" if before != after else after
    raise ModelError(
        f"Forward changes the Python attribute {name!r} of {where or 'the model'} in {when} "
        f"({change}): a captured program would keep the value of its trace. {first} it a "
        "buffer (register_buffer, updated in place), or pass it to forward as a tensor."
    )


def _tried(root: nn.Module, example: Any) -> tuple[Traced | None, ModelError | None]:
    try:
        return export(root, *example), None
    except ModelError as error:
        return None, error


def _is_same(again: Traced, traced: Traced, program: Program, calls: int = 1) -> bool:
    """Whether another trace changes no further attribute, and computes the same.

    Random numbers are drawn in each of its calls.
    """
    is_steady = not traced.after.changed(again.after)
    digests = (_as_needed(each).digest() for each in (convert(again.program).graph, program.graph))
    is_alike = is_steady and len({*digests}) == 1
    return is_alike and _draws(again) == calls * _draws(traced)


def _as_needed(graph: Graph) -> Graph:
    """The operators in the order in which the loss needs them: what was kept comes no earlier."""
    makers = {result: op for op in graph.ops for result in op.results}
    order: dict[str, Op] = {}
    open_ = [(op, False) for op in reversed(graph.ops)]
    open_ += [(makers[graph.loss], False)] if graph.loss in makers else []
    while open_:
        op, is_ready = open_.pop()
        if is_ready:
            order[op.name] = op
        elif op.name not in order:
            open_.append((op, True))
            open_ += [(makers[t], False) for t in reversed(op.inputs) if t in makers]
    return replace(graph, ops=tuple(order.values()))


def _draws(traced: Traced) -> int:
    """How many operators of a trace draw random numbers."""
    modules = traced.program.graph_module.modules()
    nodes = (node for each in modules if isinstance(each, GraphModule) for node in each.graph.nodes)
    return sum(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in nodes)


def _called_twice(root: nn.Module, written: set[str]) -> nn.Module:
    """The module, whose forward calls itself once before, with other tensors.

    So what the second call finds of the first is seen in its trace, if it was made of what another
    step has otherwise: the batch, parameters, and buffers that forward writes.
    """
    forward = root.forward

    @wraps(forward)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = {**dict(root.named_parameters()), **dict(root.named_buffers())}
        others = {
            name: tensor.clone()
            for name, tensor in tensors.items()
            if isinstance(tensor, nn.Parameter) or name in written
        }
        before = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        with _reparametrize_module(root, others, tie_weights=True):
            forward(*before[0], **before[1])
        return forward(*args, **kwargs)

    if "forward" in vars(root):
        root.forward = called
    else:
        kind = type(root)
        about = {"forward": lambda self, *args, **kwargs: called(*args, **kwargs)}
        about["forward"] = wraps(kind.forward)(about["forward"])
        root.__class__ = type(kind.__name__, (Unseen, kind), about)
    return root


def _writes_shared(program: Program, model: nn.Module) -> bool:
    """Whether a buffer that several modules share is changed: then one trace must see all."""
    names: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        names.setdefault(id(buffer), []).append(name)
    shared = {name for group in names.values() if len(group) > 1 for name in group}
    return bool(_written(program) & shared)


def _written(program: Program) -> set[str]:
    """The names of what forward writes to, with and without that of a model with a loss."""
    tensors = program.graph.tensors
    written = {tensors[i].name for op in program.graph.ops for i in left_by(op, tensors)}
    written |= set(program.increments)
    return {name.removeprefix(prefix) for name in written for prefix in ("", "model.")}


def _folded(outer: Hollow, example: Any, folding: Folding) -> Program | None:
    """The model with its blocks traced once, in the given way or else with all that repeat."""
    try:
        folded, runs = folding(outer, *example)
        if folded is None:
            return None
        program = convert_folded(folded, runs)
        each = (folded.outer, *(block.traced for block in folded.blocks))
        notes = tuple(dict.fromkeys(note for traced in each for note in traced.notes))
        return replace(program, graph=replace(program.graph, notes=notes))
    except UnfoldableError:
        if folding is _fold_all:
            raise
    return _folded(outer, example, _fold_all)


def _fold_all(
    model: Hollow, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Folded | None, tuple[Run, ...]]:
    return fold_blocks(model, args, kwargs), ()
