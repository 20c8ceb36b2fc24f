"""Recurrent networks: the batch in parts, and the hidden units of an LSTM.

A device with a part of the units has their rows of every gate. It needs all units of the step
before, so the hidden state is gathered after each step of each layer; the gradient of the gathered
state is a partial sum on every device, and goes back as a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from shardfold.errors import RunError
from shardfold.runtime.ops.dropout import dropped
from shardfold.runtime.ops.local_op import Context, Local, Site
from shardfold.runtime.process_groups import Axes, Groups


def _recurrent(site: Site) -> Local:
    p = float(site.argument("dropout", 0.0))
    if p and site.argument("train", True) and int(site.argument("num_layers")) > 1:
        return _with_dropout(site, p)
    if not site.axes("e"):
        return site.invoke
    if site.op.kind != "aten.lstm":
        raise site.unsupported("of the hidden units, only an LSTM's are run in parts")
    return _split_units(site)


def _with_dropout(site: Site, p: float) -> Local:
    """One layer after the other, with dropout by global position between them."""
    names = [operand.name for operand in site.op.operands]
    layers, ways = int(site.argument("num_layers")), 1 + bool(site.argument("bidirectional", False))
    weights = [name for name in names if name.startswith("params[")]
    states = [name for name in names if name.startswith("hx")]
    if site.is_split or names[0] != "input":
        raise RunError(
            f"Operator {site.op.name} ({site.op.kind}, {site.op.origin}) draws dropout between "
            "its layers, which is run for whole padded batches only. Set "
            "dropout=0 and put nn.Dropout between single layers."
        )
    each = len(weights) // layers
    run = getattr(torch._VF, site.op.kind.removeprefix("aten."))
    options = (bool(site.argument("has_biases", True)), 1, 0.0, True, ways == 2)
    first = bool(site.argument("batch_first", False))

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        given = dict(zip(names, tensors, strict=True))
        # Steps first, as torch has them inside: its masks have their numbers in that order.
        x = given["input"].transpose(0, 1) if first else given["input"]
        ends: list[list[Tensor]] = []
        for layer in range(layers):
            hidden = [given[s][layer * ways : (layer + 1) * ways].contiguous() for s in states]
            own = [given[name] for name in weights[layer * each : (layer + 1) * each]]
            state = hidden if len(hidden) > 1 else hidden[0]
            x, *end = run(x, state, own, *options, False)
            ends.append(end)
            if layer < layers - 1:
                place = [(n, (0, n)) for n in x.shape]
                pieces = [
                    [(layers, (layer, layer + 1)), place[0]],
                    *([piece] for piece in place[1:]),
                ]
                x = dropped(x, pieces, p, context, site.number)
        x = x.transpose(0, 1) if first else x
        return x, *(torch.cat(end) for end in zip(*ends, strict=True))

    return call


class _Gather(torch.autograd.Function):
    """All units, from the part of each device; `lengths` are the parts' along the last dim."""

    @staticmethod
    def forward(
        ctx: Any, part: Tensor, lengths: Sequence[int], axes: Axes, groups: Groups
    ) -> Tensor:
        ctx.lengths, ctx.axes, ctx.groups = lengths, axes, groups
        longest = max(lengths)
        padded = torch.nn.functional.pad(part, (0, longest - part.shape[-1]))
        found = groups.all_gather(padded, axes, len(lengths))
        return torch.cat([p[..., :n] for p, n in zip(found, lengths, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        longest = max(ctx.lengths)
        parts = [
            torch.nn.functional.pad(p, (0, longest - p.shape[-1]))
            for p in gradient.split(list(ctx.lengths), -1)
        ]
        mine = ctx.groups.reduce_scatter(torch.stack(parts), ctx.axes)
        me = ctx.groups.place.members(ctx.axes).index(ctx.groups.place.at)
        return mine[..., : ctx.lengths[me]], None, None, None


def _split_units(site: Site) -> Local:
    axes = site.axes("e")
    lengths = [site.points("e", at) for at in site.place.members(axes)]
    layers, biased = int(site.argument("num_layers")), bool(site.argument("has_biases", True))
    first = bool(site.argument("batch_first", False))
    names = [operand.name for operand in site.op.operands]
    each = 4 if biased else 2

    def call(tensors: Sequence[Tensor], context: Context) -> Any:
        given = dict(zip(names, tensors, strict=True))
        x = given["input"].transpose(0, 1) if first else given["input"]
        steps: list[Tensor] = list(x.unbind(0))
        last: list[Tensor] = []
        cells: list[Tensor] = []
        for layer in range(layers):
            weights = [given[f"params[{layer * each + k}]"] for k in range(each)]
            state = (given["hx[0]"][layer], given["hx[1]"][layer])
            is_top = layer == layers - 1
            own, steps, cell = _layer(steps, state, weights, lengths, axes, context, is_top)
            last.append(own[-1])
            cells.append(cell)
        y = torch.stack(own)
        return y.transpose(0, 1) if first else y, torch.stack(last), torch.stack(cells)

    return call


def _layer(
    steps: list[Tensor],
    state: tuple[Tensor, Tensor],
    weights: list[Tensor],
    lengths: list[int],
    axes: Axes,
    context: Context,
    is_top: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The device's own units of every step, all units of every step, and the last cell state."""
    hidden, cell = state
    bias = weights[2] + weights[3] if len(weights) > 2 else None
    inputs = linear(torch.stack(steps), weights[0], bias)
    own: list[Tensor] = []
    whole: list[Tensor] = []
    for number in range(len(steps)):
        gates = inputs[number] + linear(hidden, weights[1])
        i, f, g, o = gates.chunk(4, -1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        own.append(torch.sigmoid(o) * torch.tanh(cell))
        if is_top and number == len(steps) - 1:
            break  # nobody reads the last state of the last layer
        hidden = _Gather.apply(own[-1], lengths, axes, context.groups)
        whole.append(hidden)
    return own, whole, cell


TABLE: Mapping[str, Callable[[Site], Local]] = {
    f"aten.{name}": _recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}
