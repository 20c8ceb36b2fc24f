"""Captured again: the step as the model computes it in eval mode, or for a batch of other shapes.

The plan is for a training step. In eval mode dropout passes everything on and batch norm uses its
running statistics, but the operators and who reads whom must be the same: the model is traced
once more in eval mode, and its calls take the place of those of training.

A batch of other shapes than the example's is traced like it. The program must have the same
operators, each with the split that the plan has for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardfold.capture import Invocation, Program, capture_program
from shardfold.capture.convert import convert
from shardfold.capture.export import WithLoss, export, on_meta, skeleton
from shardfold.capture.graph_builder import WRITE
from shardfold.errors import RunError
from shardfold.graph import Graph, Op
from shardfold.operators import operator_of

MODES = {"train", "training", "dropout_p", "use_input_stats"}  # what training mode sets


@dataclass(frozen=True, slots=True)
class Original:
    """What a program was captured from: a model without data, and an example without data."""

    model: nn.Module
    example: tuple[tuple[Any, ...], dict[str, Any]]
    dtype: str | None
    loss: Callable[[Any], Any] | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        dtype: str | None,
        loss: Callable[[Any], Any] | None,
    ) -> Original:
        """The model and the batch, on the meta device."""
        example = on_meta((tuple(args), dict(kwargs or {})), dtype)
        return cls(skeleton(model, dtype), example, dtype, loss)

    def taking(self, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> Original:
        """The same, with another example."""
        with torch.inference_mode(False):
            return replace(self, example=on_meta(batch, self.dtype))

    def in_eval(self) -> Program:
        """The program of the model in eval mode."""
        with torch.inference_mode(False):  # of the caller: what is traced may be differentiated
            model = skeleton(self.model, None).eval()
            traced = model if self.loss is None else WithLoss(model, self.loss).eval()
            return convert(export(traced, *self.example).program)

    def like(self, program: Program) -> Program:
        """The program of a training step, if it has the operators of this one."""
        with torch.inference_mode(False):
            found = capture_program(self.model, *self.example, loss=self.loss)
        pairs = zip(program.graph.ops, found.graph.ops, strict=False)
        other = next((op for op, twin in pairs if _wiring(op) != _wiring(twin)), None)
        if other is None and len(program.graph.ops) != len(found.graph.ops):
            other = (program if len(program.calls) > len(found.calls) else found).graph.ops[-1]
        if other is not None:
            raise RunError(
                f"the model computes something else from operator {other.name} ({other.kind}, "
                f"{other.origin}) on."
            )
        return replace(found, graph=replace(found.graph, precision=program.graph.precision))


def evaluating(program: Program, original: Original) -> Program:
    """The program of a training step with the calls of eval mode."""
    other = original.in_eval()
    made, found = _sources(program.graph), _sources(other.graph)
    calls: list[Invocation] = []
    at = 0
    # What only leads to a buffer's new value may be missing in eval mode: then nothing is written.
    is_left = not any(op.kind == WRITE for op in other.graph.ops)
    needed = _needed(program.graph) if is_left else set(range(len(program.graph.ops)))
    for index, (op, call) in enumerate(zip(program.graph.ops, program.calls, strict=True)):
        if index not in needed:
            calls.append(replace(call, arguments={**call.arguments, "is_left": True}))
            continue
        twin = other.graph.ops[at] if at < len(other.graph.ops) else None
        is_dropout = operator_of(op.kind).memory == "dropout"
        if is_dropout and (twin is None or twin.kind != op.kind or _is_off(twin)):
            # What passes everything on is its operand: the trace may name either, or leave it out.
            made[op.results[0]] = made[op.inputs[0]]
            if twin is not None and twin.kind == op.kind:
                found[twin.results[0]] = found[twin.inputs[0]]
                at += 1
            calls.append(replace(call, arguments={**call.arguments, "train": False}))
            continue
        if twin is None or _record(op, made) != _record(twin, found):
            raise _unlike(op)
        for graph_op, names in ((op, made), (twin, found)):
            names.update({t: (at, k) for k, t in enumerate(graph_op.results)})
        calls.append(other.calls[at])
        at += 1
    if at != len(other.graph.ops):
        raise _unlike(program.graph.ops[-1])
    return replace(program, calls=tuple(calls), increments=other.increments)


def _needed(graph: Graph) -> set[int]:
    """The operators that the loss depends on."""
    tensors, found = {graph.loss}, set[int]()
    for index in reversed(range(len(graph.ops))):
        if not tensors.isdisjoint(graph.ops[index].results):
            tensors.update(graph.ops[index].inputs)
            found.add(index)
    return found


def _is_off(dropout: Op) -> bool:
    return not dropout.attributes.get("train", True)


def _sources(graph: Graph) -> dict[int, object]:
    """Tensors that no operator makes, by name."""
    return {
        i: tensor.names for i, tensor in enumerate(graph.tensors) if tensor.role != "activation"
    }


def _wiring(op: Op) -> object:
    return op.kind, op.name, op.operands, op.results


def _record(op: Op, made: Mapping[int, object]) -> object:
    """What an operator does, apart from what training mode sets."""
    attributes = {k: str(v) for k, v in op.attributes.items() if k not in MODES}
    return op.kind, [made[t] for t in op.inputs], attributes


def _unlike(op: Op) -> RunError:
    return RunError(
        f"In eval mode the model computes something else from operator {op.name} ({op.kind}, "
        f"{op.origin}) on: it cannot be evaluated under the plan of its training step. Evaluate "
        "the model itself on one device, with this module's state_dict()."
    )
