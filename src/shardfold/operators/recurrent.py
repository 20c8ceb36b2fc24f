"""Recurrent networks: batch splits freely, hidden units with an exchange at every step.

`s b d, (g e) d, (g e) k -> s b e`: each of g gates has e hidden units and reads all k of the step
before. A device with a part of the units therefore gathers the hidden state after each step of
each layer; its gradient goes back as a reduce-scatter. Time is never split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardfold.operators.kernels import Access
from shardfold.operators.notation import Call, Exchange, Rule
from shardfold.operators.operator import Extra, Maker, Operator, factors


def _weights(call: Call, gates: int, group: int) -> dict[str, str]:
    """The notation of every parameter: per layer two matrices, then (if any) two biases."""
    units = "(g e)" if gates > 1 else "e"
    names = [o.name for o in call.op.operands if o.name.startswith("params[")]
    found = {}
    for position, name in enumerate(names):
        within = position % group
        inner = {0: " d" if position == 0 else " k", 1: " k"}.get(within, "")
        found[name] = units + inner
    return found


def _exchanges(call: Call, steps: int) -> tuple[Exchange, ...]:
    """The hidden state of every step of every layer, a part of it from each device.

    Nobody reads all units of the last step of the last layer.
    """
    repeats = steps * call.attribute("num_layers") - 1
    if not repeats:
        return ()
    item_bytes = call.results[0].item_bytes
    return (
        Exchange("all_gather", "e", ("b", "e"), 1.0, item_bytes, repeats),
        Exchange("reduce_scatter", "e", ("b", "e"), 1.0, item_bytes, repeats, "backward"),
    )


def _recurrent(call: Call, gates: int) -> Rule:
    if call.has("batch_sizes"):
        return _packed(call)
    sequence = "b s d" if call.attribute("batch_first", False) else "s b d"
    rows, state = call.shape("params[1]")
    sizes = dict(zip(sequence.split(), call.shape("input"), strict=True))
    sizes |= {"g": gates, "e": rows // gates, "k": state}
    # Both directions share the result's last dim, and a projection reads all units: e is whole.
    split = not call.attribute("bidirectional", False) and state == sizes["e"]
    unit = "e" if split else "."
    weights = _weights(call, gates, 4 if call.attribute("has_biases", True) else 2)
    return call.rule(
        {
            "input": sequence,
            "hx": "l b k",
            "hx[0]": "l b k",
            "hx[1]": f"l b {unit}",
            **(weights if split else {}),
        },
        sequence.replace("d", unit),
        # Some versions of torch give the last states a further dim on meta: then undescribed.
        *[f"l b {unit}" if len(kind.shape) == 3 else None for kind in call.results[1:]],
        sizes={**sizes, "l": call.results[-1].shape[0]},
        engine="matrix",
        flops=_flops(call) / (sizes["e"] if split else 1),
        over=("s", "b", "e") if split else ("s", "b"),
        whole=frozenset({"s", "d", "k", "g", "l"}),
        exchanges=_exchanges(call, sizes["s"]) if split else (),
        saves=tuple(
            operand.name
            for operand, kind in zip(call.op.operands, call.inputs, strict=True)
            if not operand.name.startswith("params[") or len(kind.shape) > 1
        ),
        copied=("input",) if call.attribute("batch_first", False) else (),
        entering=_entering(call),
        saves_results=True,
        backward=2.0,
    )


def _entering(call: Call) -> tuple[str, ...]:
    """The weights that the input meets: of the first layer, in each direction."""
    names = [operand.name for operand in call.op.operands if operand.name.startswith("params[")]
    directions = 2 if call.attribute("bidirectional", False) else 1
    each = len(names) // (directions * call.attribute("num_layers", 1))
    return tuple(f"params[{k * each}]" for k in range(directions))


def _flops(call: Call) -> float:
    """Two operations for each weight of each matrix, at each step of each example."""
    weights = [
        kind.shape
        for operand, kind in zip(call.op.operands, call.inputs, strict=True)
        if operand.name.startswith("params[") and len(kind.shape) == 2
    ]
    return 2.0 * sum(rows * columns for rows, columns in weights)


def _packed(call: Call) -> Rule:
    """Sequences of unequal length, packed: rows of several steps lie together, nothing splits."""
    flops = _flops(call) * call.shape("data")[0]
    return call.undescribed(engine="matrix", flops=flops, saves_results=True, backward=2.0)


def _unsupported(call: Call) -> frozenset[str]:
    """Dropout between layers is drawn by the kernel; of hidden units, only an LSTM's are split."""
    if call.attribute("dropout", 0.0) > 0:
        return frozenset({"b", "e"})
    return frozenset({"e"} if call.op.kind != "aten.lstm" else ())


def _with_gates(gates: int) -> Maker:
    return lambda call: _recurrent(call, gates)


def _described(gates: int) -> Operator:
    def extras(call: Call, access: Access) -> tuple[Extra, ...]:
        """Gates and states of every step, as a fused kernel reserves them."""
        layers = call.attribute("num_layers", 1)
        return (Extra(-1, float((gates + 2) * layers * call.inputs[0].item_bytes)),)

    return Operator(
        _with_gates(gates), "own form", _unsupported, ranges=factors("e"), extras=extras
    )


TABLE: Mapping[str, Operator] = {
    "aten.lstm": replace(_described(4), words={"e": "hidden"}),
    "aten.gru": replace(_described(3), words={"e": "hidden"}),
    "aten.rnn_tanh": _described(1),
    "aten.rnn_relu": _described(1),
}
