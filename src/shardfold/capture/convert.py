"""From an exported program to a `Graph`: functional, without no-ops, without dead code.

Every operator keeps its module path and source line (`origin_of`).

torch.export keeps in-place operators and wraps `no_grad` regions into subgraphs. Both are undone
here in one pass: an in-place operator yields a new tensor that later readers see (`memory`), and a
subgraph is inlined with its results marked as needing no gradient. Where an in-place operator
writes through a view that `memory` cannot put back, torch's own functionalisation is asked
instead; it would drop the `no_grad` regions, so a program with both is refused.

What forward leaves in its sources, and what of the trace is kept, is up to `graph_builder`.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from shardfold.capture.aliasing import Memory, is_copy, put_back
from shardfold.capture.causal_masks import without_masks
from shardfold.capture.export import quiet
from shardfold.capture.fx_nodes import (
    BAG,
    Ref,
    bags_in_rows,
    check_autocast,
    check_operator,
    idle_nodes,
    invocation_of,
    is_left_out,
    kind_of,
    named_arguments,
    operands_and_attributes,
    origin_of,
    shared_names,
    target_name,
    wants_grad,
)
from shardfold.capture.graph_builder import GraphBuilder, check_random, prune
from shardfold.capture.program import Program, Source, Template
from shardfold.capture.repeated_blocks import KEPT, Run, UnfoldableError
from shardfold.capture.replicas import Block, Folded
from shardfold.capture.stand_ins import constants
from shardfold.errors import ModelError
from shardfold.graph import Graph, Op, Repeat
from shardfold.graph.repeats import are_alike
from shardfold.operators import operator_of

ATEN = torch.ops.aten
FILLS = {
    "aten.new_zeros": ATEN.zeros.default,
    "aten.new_ones": ATEN.ones.default,
    "aten.new_full": ATEN.full.default,
    "aten.new_empty": ATEN.empty.memory_format,
}
# Operators that read a tensor for its dtype or shape alone: what to call instead, and with what.
MADE_LIKE = {
    "aten.type_as": ATEN.to.dtype,
    "aten.view_as": ATEN.view.default,
    "aten.reshape_as": ATEN.reshape.default,
    "aten.expand_as": ATEN.expand.default,
    **FILLS,
}
# Composite region wrappers: (position of the subgraph, whether gradients flow inside).
REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
ROLES = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "buffer",
    InputKind.USER_INPUT: "input",
}


class _AliasWriteError(Exception):
    """An in-place operator changes memory that another name still reads."""


def convert(program: ExportedProgram) -> Program:
    """The graph of everything that the loss depends on, and how to call its operators."""
    try:
        return _Converter(program).convert()
    except _AliasWriteError as alias:
        if any(target_name(node) in REGIONS for node in program.graph.nodes):
            raise ModelError(
                f"{alias} writes in place into a tensor that is read elsewhere, in a model with "
                "torch.no_grad() regions: write it without the in-place operation."
            ) from None
        with quiet():
            functional = program.run_decompositions({})
        return _Converter(functional).convert()


def convert_folded(folded: Folded, runs: tuple[Run, ...] = ()) -> Program:
    """As `convert`, with each distinct block converted once and copied where it stands.

    With runs, the graph holds a few periods of each, and says what they stand for.
    """
    try:
        converter = _Converter(folded.outer.program, folded=folded)
        program = converter.convert()
        repeats = _repeats(program.graph, converter.spans, runs)
        return replace(program, graph=replace(program.graph, repeats=repeats))
    except _AliasWriteError as alias:
        raise UnfoldableError(f"{alias} writes in place into a tensor read elsewhere") from None


def _repeats(
    graph: Graph, spans: list[tuple[int, int]], runs: tuple[Run, ...]
) -> tuple[Repeat, ...]:
    """The runs in terms of the graph's operators.

    The first and the last period of a run stand outside: what is around the run may read or
    write what no other period's neighbours do.
    """
    repeats = []
    removed = 0
    for run in runs:
        first = run.first - removed
        ends = [spans[first + (k + 1) * run.period - 1][1] for k in range(KEPT)]
        removed += (run.count - KEPT) * run.period
        repeat = Repeat(ends[0], ends[1] - ends[0], KEPT - 2, run.count - 2, run.paths[1:-1])
        if repeat.end != ends[-2] or not are_alike(graph, repeat):
            raise UnfoldableError(f"the periods of {run.paths[0][0]} are not alike as traced")
        repeats.append(repeat)
    return tuple(repeats)


@dataclass
class _Converter:
    """One walk over the program; `values` maps each node to a tensor index or a constant."""

    program: ExportedProgram
    graph: GraphBuilder = field(default_factory=GraphBuilder)
    values: dict[fx.Node, Any] = field(default_factory=dict)  # a tensor's index, or a constant
    modes: dict[fx.Node, bool] = field(default_factory=dict)  # whether gradients flow there
    memory: Memory = field(default_factory=Memory)
    outputs: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # of each region
    placed: dict[fx.Node, int] = field(default_factory=dict)  # sources, and their tensors
    folded: Folded | None = None
    templates: dict[Any, Template] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)  # of blocks, among the operators
    idle: set[fx.Node] = field(default_factory=set)  # what nothing but a check reads

    def convert(self) -> Program:
        self._inputs()
        outputs = self._walk(self.program.graph_module, grad=True)
        results, tree = self._results(outputs)
        loss = self.graph.loss(results, tree)
        self._updates(outputs)
        without_masks(self.graph.tensors, self.graph.ops, self.graph.calls)
        graph, number, kept = prune(self.graph.tensors, self.graph.ops, loss)
        for op in graph.ops:
            check_random(op)
        self.spans = [(bisect_left(kept, a), bisect_left(kept, b)) for a, b in self.spans]
        return Program(
            graph,
            tuple(self.graph.calls[i] for i in kept),
            {number[i]: source for i, source in self.graph.sources.items() if i in number},
            self.program.call_spec.in_spec,
            increments=self.graph.increments,
            results=_by_key(tree, graph, number),
        )

    def _inputs(self) -> None:
        names: dict[str, list[str]] = {}
        shared = shared_names(self.program)
        for alias, target in shared.items():
            names.setdefault(target, []).append(alias)
        placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        by_target: dict[str, fx.Node] = {}
        leaf = 0
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            leaf += spec.kind == InputKind.USER_INPUT
            if not isinstance(node.meta.get("val"), torch.Tensor):
                self.values[node] = node.meta.get("val")
                continue
            target = spec.target or spec.arg.name
            target = shared.get(target, target)
            if target in by_target:
                self.memory.link(node, by_target[target], is_same=True)
                self.values[node] = self.values[by_target[target]]
                continue
            role = ROLES.get(spec.kind, "input")
            all_names = (target, *names.get(target, ()))
            grad = spec.kind == InputKind.PARAMETER and wants_grad(self.program, target)
            index = self.graph.add(all_names, node.meta["val"], role, grad)
            by_target[target] = node
            self.graph.sources[index] = self._source(spec.kind, target, leaf - 1)
            self.values[node] = self.placed[node] = index

    def _source(self, kind: InputKind, target: str, leaf: int) -> Source:
        if kind == InputKind.USER_INPUT:
            return Source("input", leaf=leaf)
        if kind == InputKind.CONSTANT_TENSOR:
            return Source("constant", target, value=self.program.constants.get(target))
        return Source("buffer" if kind == InputKind.BUFFER else "parameter", target)

    def _walk(self, module: fx.GraphModule, grad: bool) -> Any:
        self.idle |= idle_nodes(module)
        for node in module.graph.nodes:
            self.memory.done.add(node)
            self.modes[node] = grad
            if node.op == "get_attr":
                self.values[node] = self._attribute(module, node)
            elif node.op == "call_function" and node not in self.idle:
                self.values[node] = self._call(node, grad)
            elif node.op == "output":
                return fx.map_arg(node.args[0], lambda n: self.values[n])
        raise AssertionError("An fx graph always ends in an output node.")

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> Any:
        value = operator.attrgetter(str(node.target))(module)
        if isinstance(value, torch.Tensor):
            return self.graph.constant(str(node.target), value)
        return value

    def _call(self, node: fx.Node, grad: bool) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: Ref(self.values[n], n))
        name = target_name(node)
        if node.target is operator.getitem:
            self._link_item(node, args[0].node, args[1])
            return args[0].value[args[1]]
        if name in REGIONS:
            return self._region(node, name, args, grad)
        kind = kind_of(node)
        if kind == "shardfold.block":
            return self._inline([ref.value for ref in args[0]], args[1], grad)
        if kind == "shardfold.constant":
            return self.graph.constant(node.name, constants[args[0]])
        described = operator_of(kind)
        if described.left_out == "check":
            return None
        if is_left_out(described, node):
            self.memory.link(node, args[0].node, is_same=True)
            is_view = described.left_out in ("same shape", "always")  # the others give it back
            is_stopped = is_view and not grad and self.graph.tensors[args[0].value].requires_grad
            if is_stopped:
                return self._emit(node, ATEN.detach.default, [args[0].value], [])
            return args[0].value
        if kind in ("aten.broadcast_tensors", "aten.meshgrid"):
            return [self._expanded(node, a, position) for position, a in enumerate(args[0])]
        if kind == "aten.embedding_bag":
            bags = bags_in_rows(node)
            if bags is not None:
                made = self._emit(node, BAG, [self.values[n] for n in bags[0]], bags[1])
                return [made, None, None, None]  # nobody reads what torch keeps for backward
        if kind in MADE_LIKE:
            return self._made_like(node, kind, args[0])
        return self._operator(node, kind, args, kwargs, grad)

    def _made_like(self, node: fx.Node, kind: str, source: Ref) -> int:
        """A call that reads a tensor for its dtype or shape alone, without that tensor."""
        target, made = MADE_LIKE[kind], node.meta["val"]
        if kind in FILLS:
            value = named_arguments(node, node.args, dict(node.kwargs)).get("fill_value")
            filled = [list(made.shape), *([] if value is None else [value])]
            return self._emit(
                node, target, [], filled, {"dtype": made.dtype, "device": made.device}
            )
        if kind == "aten.type_as":
            return self._emit(node, target, [source.value], [made.dtype])
        if not is_copy(node, source.node):
            self.memory.link(node, source.node, is_same=False)
        return self._emit(node, target, [source.value], [list(made.shape)])

    def _expanded(self, node: fx.Node, given: Ref, position: int) -> int:
        """One of several tensors that a call broadcasts: each has its gradient from its own alone.

        A result of `meshgrid` has one dim that is not expanded.
        """
        made, value = node.meta["val"][position], given.value
        before = self.graph.tensors[value].type.shape
        if kind_of(node) == "aten.meshgrid":
            swapped = named_arguments(node, node.args, dict(node.kwargs)).get("indexing") == "xy"
            at = 1 - position if swapped and position < 2 else position
            before = tuple(n if k == at else 1 for k, n in enumerate(made.shape))
            value = self._emit(node, ATEN.view.default, [value], [list(before)])
        if before == tuple(made.shape):
            return int(value)
        return self._emit(node, ATEN.expand.default, [value], [list(made.shape)])

    def _link_item(self, node: fx.Node, source: fx.Node, position: Any) -> None:
        """What is taken out of a region's results is that result; out of views, a view."""
        if source in self.outputs:
            self.memory.link(node, self.outputs[source][position], is_same=True)
        elif source in self.memory.parents:
            self.memory.link(node, source, is_same=False)

    def _region(self, node: fx.Node, name: str, args: tuple[Any, ...], grad: bool) -> Any:
        position = REGIONS[name]
        inner = args[position].value
        if name == "wrap_with_autocast":
            check_autocast(inner, *args[:3])
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        for placeholder, given in zip(placeholders, args[position + 1 :], strict=True):
            self.values[placeholder] = given.value if isinstance(given, Ref) else given
            if isinstance(given, Ref):
                self.memory.link(placeholder, given.node, is_same=True)
        enabled = grad and (name != "wrap_with_set_grad_enabled" or bool(args[0]))
        found = self._walk(inner, enabled)
        self.outputs[node] = list(next(n for n in inner.graph.nodes if n.op == "output").args[0])
        return found

    def _operator(
        self,
        node: fx.Node,
        kind: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad: bool,
    ) -> Any:
        check_operator(node, kind)
        operands, attributes = operands_and_attributes(node, args, kwargs)
        self.graph.calls.append(invocation_of(node, args, kwargs))
        flows = grad and not operator_of(kind).stops_gradient
        flows = flows and any(self.graph.tensors[o.tensor].requires_grad for o in operands)
        outputs, spec = pytree.tree_flatten(node.meta["val"])
        name = self.graph.unused(str(node.name))
        indices: list[int | None] = []
        for position, output in enumerate(outputs):
            if isinstance(output, torch.Tensor):
                suffix = f".{position}" if len(outputs) > 1 else ""
                indices.append(self.graph.add((name + suffix,), output, "activation", flows))
            else:
                indices.append(None)
        results = tuple(i for i in indices if i is not None)
        self.graph.ops.append(Op(name, kind, operands, results, attributes, origin_of(node)))
        found = pytree.tree_unflatten(indices, spec)
        self.values[node] = found
        self._link_and_write(node, results)
        return self.values[node]

    def _inline(self, given: list[int], number: int, grad: bool) -> list[int]:
        """Put a traced block in place of the opaque operator that stands for it."""
        assert self.folded is not None
        call = self.folded.calls[number]
        flows = tuple(self.graph.tensors[i].requires_grad for i in given)
        key = (call.behaviour, flows, grad)
        if key not in self.templates:
            block = self.folded.blocks[call.behaviour]
            self.templates[key] = _Converter(block.traced.program).template(block, flows, grad)
        lists = (self.graph.tensors, self.graph.ops, self.graph.calls, self.graph.sources)
        before, template = len(self.graph.ops), self.templates[key]
        outputs = template.copy(given, call.path, *lists)
        added = template.increments.items()
        self.graph.increments |= {f"{call.path}.{name}": by for name, by in added}
        self.spans.append((before, len(self.graph.ops)))
        return outputs

    def template(self, block: Block, flows: tuple[bool, ...], grad: bool) -> Template:
        """The program as a block with open inputs; `flows` says which of them have gradients."""
        self._inputs()
        user = [
            node
            for node, spec in zip(
                (n for n in self.program.graph.nodes if n.op == "placeholder"),
                self.program.graph_signature.input_specs,
                strict=True,
            )
            if spec.kind == InputKind.USER_INPUT and isinstance(self.values[node], int)
            if isinstance(node.meta.get("val"), torch.Tensor)
        ]
        inputs = [self.values[node] for node in user]
        for index, flow in zip(inputs, flows, strict=True):
            self.graph.tensors[index] = replace(self.graph.tensors[index], requires_grad=flow)
        found = self._walk(self.program.graph_module, grad)
        outputs, _ = pytree.tree_flatten(found)
        if [self.values[node] for node in user] != inputs:
            raise UnfoldableError(f"{block.path} writes into its input")
        self._updates(found)
        specs = self.program.graph_signature.output_specs
        made = [v for v, s in zip(outputs, specs, strict=True) if s.kind == OutputKind.USER_OUTPUT]
        return Template(
            tuple(self.graph.tensors),
            tuple(self.graph.ops),
            tuple(self.graph.calls),
            self.graph.sources,
            tuple(inputs),
            tuple(made[k] for k in block.made),
            self.graph.increments,
        )

    # -- writes

    def _link_and_write(self, node: fx.Node, results: tuple[int, ...]) -> None:
        """Note views; let later readers of a tensor written in place see the new one."""
        given = named_arguments(node, node.args, dict(node.kwargs))
        written = []
        for argument in node.target._schema.arguments:
            info, value = argument.alias_info, given[argument.name]
            if info is None or value is None:
                continue
            if info.is_write:
                written.append(value)
            elif isinstance(value, fx.Node) and not is_copy(node, value):
                self.memory.link(node, value, is_same=False)
        if not written:
            return
        if len(written) > 1 or not isinstance(written[0], fx.Node) or len(results) != 1:
            raise ModelError(
                f"Operator {node.name} ({kind_of(node)}, {origin_of(node)}) writes into several "
                "tensors at once: write into them one by one."
            )
        self.memory.link(node, written[0], is_same=True)
        self._write(node, written[0], results[0])

    def _write(self, node: fx.Node, written: fx.Node, result: int) -> None:
        """A new value for a tensor, for all that is the same memory and still to be read."""
        family = self.memory.family(written)
        self._check_gradient(node, family[0], self.values[written], result)
        tensor = self.memory.tensor(written)
        self._set(family, tensor, result)
        wanted = self.memory.pending(family)
        if family[0] in self.placed:
            wanted.add(self.memory.tensor(family[0]))
        if wanted <= {tensor}:
            return
        fresh = {tensor}
        while tensor in self.memory.parents:
            parent = self.memory.parents[tensor]
            value = self._put_back(node, tensor, parent)
            self._check_gradient(node, family[0], self.values[parent], value)
            tensor = self.memory.tensor(parent)
            self._set(family, tensor, value)
            fresh.add(tensor)
        for other in family:
            if self.memory.tensor(other) is other and other in wanted - fresh:
                self.memory.done.add(other)
                self._set(family, other, self._call(other, self.modes[other]))

    def _set(self, family: list[fx.Node], tensor: fx.Node, value: Any) -> None:
        for node in family:
            if self.memory.tensor(node) is tensor:
                self.values[node] = value

    def _put_back(self, node: fx.Node, view: fx.Node, parent: fx.Node) -> int:
        """The parent's new value, from that of its view."""
        old, new = self.values[parent], self.values[view]
        found = put_back(view, self.graph.tensors[old].type.shape) if isinstance(old, int) else None
        if found is None:
            raise _AliasWriteError(f"{node.name} ({origin_of(node)})")
        how, (target, given) = found
        if how == "same":
            return int(new)
        return self._emit(node, target, [new] if how == "of" else [old, new], given)

    def _emit(
        self,
        after: fx.Node,
        target: Any,
        tensors: list[int],
        given: list[Any],
        options: Mapping[str, Any] | None = None,
    ) -> int:
        """An operator that the trace does not have, where `after` stands."""
        named = dict(options or {})
        graph = fx.Graph()
        nodes = [graph.placeholder(f"t{k}") for k in range(len(tensors))]
        for node, index in zip(nodes, tensors, strict=True):
            kind = self.graph.tensors[index].type
            dtype = getattr(torch, kind.dtype)
            node.meta["val"] = torch.empty(kind.shape, dtype=dtype, device="meta")
            self.values[node] = index
        made = graph.call_function(target, (*nodes, *given), named)
        made.name = f"{after.name}_{kind_of(made).split('.')[-1]}"
        made.meta.update(after.meta)
        made.meta["val"] = target(*(n.meta["val"] for n in nodes), *given, **named)
        refs = (*(Ref(i, n) for i, n in zip(tensors, nodes, strict=True)), *given)
        return int(self._operator(made, kind_of(made), refs, named, self.modes[after]))

    def _check_gradient(self, node: fx.Node, base: fx.Node, old: Any, new: int) -> None:
        """Refuse to write past autograd into something that has a gradient."""
        if not isinstance(old, int) or not self.graph.tensors[old].requires_grad:
            return
        if self.graph.tensors[new].requires_grad:
            return
        where = f"{node.name} ({origin_of(node)})"
        source = self.graph.sources.get(self.placed.get(base, -1))
        if source is not None and source.role == "parameter":
            raise ModelError(
                f"{where} changes the parameter {source.name} inside forward, past autograd. "
                "Change it in the training loop, before or after the optimizer's step (an "
                "embedding with max_norm does this, too: leave max_norm out)."
            )
        raise ModelError(
            f"{where} writes, without autograd, into a tensor that has a gradient: write into a "
            "copy (clone()), or let autograd see it."
        )

    def _updates(self, outputs: Any) -> None:
        """What forward leaves in its sources: an operator that writes, or an increment."""
        left = {index: self.values[node] for node, index in self.placed.items()}
        by_name = {source.name: index for index, source in self.graph.sources.items()}
        flat, _ = pytree.tree_flatten(outputs)
        for value, spec in zip(flat, self.program.graph_signature.output_specs, strict=True):
            if spec.kind != OutputKind.USER_OUTPUT and spec.target is not None:
                left[by_name.get(spec.target, -1)] = value  # of torch's own functional form
        makers = {result: op for op in self.graph.ops for result in op.results}
        for index, value in left.items():
            if value != index:
                self.graph.leave(index, value, makers)

    def _results(self, outputs: Any) -> tuple[list[Any], Any]:
        """What forward returns: flat, and as it returns it."""
        flat, _ = pytree.tree_flatten(outputs)
        specs = self.program.graph_signature.output_specs
        user = [v for v, s in zip(flat, specs, strict=True) if s.kind == OutputKind.USER_OUTPUT]
        return user, pytree.tree_unflatten(user, self.program.call_spec.out_spec)


def _by_key(tree: Any, graph: Graph, number: Mapping[int, int]) -> dict[str, int]:
    """What forward returns in a dict and an operator of the graph makes: what the loss needs."""
    made = {tensor for op in graph.ops for tensor in op.results}
    items = tree.items() if isinstance(tree, dict) else ()
    found = {k: number.get(v, -1) for k, v in items if isinstance(v, int)}
    return {k: v for k, v in found.items() if v in made}
