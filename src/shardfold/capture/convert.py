"""From an exported program to a `Graph`: functional, without no-ops, without dead code.

Every operator keeps its module path and source line (`origin_of`).

torch.export keeps in-place operators and wraps `no_grad` regions into subgraphs. Both are undone
here in one pass: an in-place operator yields a new tensor that later readers see (`memory`), and a
subgraph is inlined with its results marked as needing no gradient. Where an in-place operator
writes through a view that `memory` cannot put back, torch's own functionalisation is asked
instead; it would drop the `no_grad` regions, so a program with both is refused.

What forward leaves in a buffer or in a frozen parameter ends in an operator of its own,
`shardfold.write`, which the runner carries out after the step. A buffer that only counts up by a
fixed number is an increment of the program instead, and costs nothing.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from shardfold.capture.aliasing import Memory, functional, is_copy, put_back
from shardfold.capture.causal_masks import without_masks
from shardfold.capture.export import quiet
from shardfold.capture.guards import AUTOCAST_ADVICE, UNREPEATABLE, constants, functions
from shardfold.capture.program import Invocation, Program, Slot, Source, Template
from shardfold.capture.repeated_blocks import KEPT, Run, UnfoldableError
from shardfold.capture.replicas import Block, Folded
from shardfold.errors import ModelError
from shardfold.graph import Graph, Op, Operand, Origin, Repeat, Tensor, TensorType
from shardfold.graph.repeats import are_alike
from shardfold.operators import Operator, operator_of

FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def origin_of(node: fx.Node) -> Origin:
    """Module path and source line of a node; the line is that of the innermost user frame."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    source = f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""
    return Origin(stack[-1][0] if stack else "", source)


WRITE = "shardfold.write"
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
NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)
ROLES = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "buffer",
    InputKind.USER_INPUT: "input",
}


@torch.library.custom_op("shardfold::write", mutates_args=())
def write(buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What forward leaves in a buffer, or in a parameter that is not trained."""
    return value.clone()


def _look_up(
    weight: torch.Tensor,
    indices: torch.Tensor,
    per_sample_weights: torch.Tensor | None,
    mode: int,
    padding_idx: int,
) -> torch.Tensor:
    return F.embedding_bag(
        indices,
        weight,
        mode=("sum", "mean", "max")[mode],
        per_sample_weights=per_sample_weights,
        padding_idx=None if padding_idx < 0 else padding_idx,
    )


LIBRARY = torch.library.Library("shardfold", "FRAGMENT")
LIBRARY.define(
    "embedding_bag(Tensor weight, Tensor indices, Tensor? per_sample_weights, int mode, "
    "int padding_idx) -> Tensor"
)
LIBRARY.impl("embedding_bag", _look_up, "CompositeImplicitAutograd")
BAG = torch.ops.shardfold.embedding_bag.default


def _bags(node: fx.Node) -> tuple[list[fx.Node], list[Any]] | None:
    """Bags that are the rows of a matrix, which torch has flattened: the table and that matrix."""
    given = _named(node, node.args, dict(node.kwargs))
    flat, starts = given["indices"], given["offsets"]
    if given["scale_grad_by_freq"] or given["sparse"] or given["per_sample_weights"] is not None:
        return None
    if _target_name(flat).split(".")[0] not in ("reshape", "view"):
        return None
    if _target_name(starts).split(".")[0] != "arange":
        return None
    matrix = flat.args[0]
    shape = tuple(matrix.meta["val"].shape)
    first, last, step = (*starts.args, 1)[:3] if len(starts.args) > 1 else (0, *starts.args, 1)
    if len(shape) != 2 or (first, last, step) != (0, shape[0] * shape[1], shape[1]):
        return None
    padding = -1 if given["padding_idx"] is None else given["padding_idx"]
    return [given["weight"], matrix], [None, given["mode"], padding]


class _AliasWriteError(Exception):
    """An in-place operator changes memory that another name still reads."""


def convert(program: ExportedProgram) -> Program:
    """The graph of everything that the loss depends on, and how to call its operators."""
    try:
        return _Converter(program).convert()
    except _AliasWriteError as alias:
        if any(_target_name(node) in REGIONS for node in program.graph.nodes):
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
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    calls: list[Invocation] = field(default_factory=list)
    sources: dict[int, Source] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)  # a tensor's index, or a constant
    modes: dict[fx.Node, bool] = field(default_factory=dict)  # whether gradients flow there
    memory: Memory = field(default_factory=Memory)
    outputs: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # of each region
    placed: dict[fx.Node, int] = field(default_factory=dict)  # sources, and their tensors
    increments: dict[str, float] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # names of operators
    folded: Folded | None = None
    templates: dict[Any, Template] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)  # of blocks, among the operators
    idle: set[fx.Node] = field(default_factory=set)  # what nothing but a check reads

    def convert(self) -> Program:
        self._inputs()
        outputs = self._walk(self.program.graph_module, grad=True)
        loss = self._loss(outputs)
        self._updates(outputs)
        without_masks(self.tensors, self.ops, self.calls)
        graph, number, kept = _prune(self.tensors, self.ops, loss)
        for op in graph.ops:
            _check_random(op)
        self.spans = [(bisect_left(kept, a), bisect_left(kept, b)) for a, b in self.spans]
        return Program(
            graph,
            tuple(self.calls[i] for i in kept),
            {number[i]: source for i, source in self.sources.items() if i in number},
            self.program.call_spec.in_spec,
            increments=self.increments,
        )

    def _inputs(self) -> None:
        names: dict[str, list[str]] = {}
        shared = _shared_names(self.program)
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
            grad = spec.kind == InputKind.PARAMETER and _wants_grad(self.program, target)
            index = self._add(all_names, node.meta["val"], role, grad)
            by_target[target] = node
            self.sources[index] = self._source(spec.kind, target, leaf - 1)
            self.values[node] = self.placed[node] = index

    def _source(self, kind: InputKind, target: str, leaf: int) -> Source:
        if kind == InputKind.USER_INPUT:
            return Source("input", leaf=leaf)
        if kind == InputKind.CONSTANT_TENSOR:
            return Source("constant", target, value=self.program.constants.get(target))
        return Source("buffer" if kind == InputKind.BUFFER else "parameter", target)

    def _add(self, names: tuple[str, ...], value: torch.Tensor, role: Any, grad: bool) -> int:
        kind = TensorType(tuple(int(n) for n in value.shape), str(value.dtype).split(".")[-1])
        self.tensors.append(Tensor(names, kind, role, grad and kind.is_floating))
        return len(self.tensors) - 1

    def _walk(self, module: fx.GraphModule, grad: bool) -> Any:
        self.idle |= _idle(module)
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
            return self._constant(str(node.target), value)
        return value

    def _constant(self, name: str, value: torch.Tensor) -> int:
        index = self._add((name,), value, "buffer", False)
        self.sources[index] = Source("constant", name, value=value)
        return index

    def _call(self, node: fx.Node, grad: bool) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Ref(self.values[n], n))
        name = _target_name(node)
        if node.target is operator.getitem:
            self._link_item(node, args[0].node, args[1])
            return args[0].value[args[1]]
        if name in REGIONS:
            return self._region(node, name, args, grad)
        kind = _kind(node)
        if kind == "shardfold.block":
            return self._inline([ref.value for ref in args[0]], args[1], grad)
        if kind == "shardfold.constant":
            return self._constant(node.name, constants[args[0]])
        described = operator_of(kind)
        if described.left_out == "check":
            return None
        if _is_left_out(described, node):
            self.memory.link(node, args[0].node, is_same=True)
            return args[0].value
        if kind == "aten.broadcast_tensors" and _are_alike([a.node for a in args[0]]):
            return [a.value for a in args[0]]
        if kind == "aten.embedding_bag":
            bags = _bags(node)
            if bags is not None:
                made = self._emit(node, BAG, [self.values[n] for n in bags[0]], bags[1])
                return [made, None, None, None]  # nobody reads what torch keeps for backward
        if kind in MADE_LIKE:
            return self._made_like(node, kind, args[0])
        return self._operator(node, kind, args, kwargs, grad)

    def _made_like(self, node: fx.Node, kind: str, source: _Ref) -> int:
        """A call that reads a tensor for its dtype or shape alone, without that tensor."""
        target, made = MADE_LIKE[kind], node.meta["val"]
        if kind in FILLS:
            value = _named(node, node.args, dict(node.kwargs)).get("fill_value")
            filled = [list(made.shape), *([] if value is None else [value])]
            return self._emit(
                node, target, [], filled, {"dtype": made.dtype, "device": made.device}
            )
        if kind == "aten.type_as":
            return self._emit(node, target, [source.value], [made.dtype])
        if not is_copy(node, source.node):
            self.memory.link(node, source.node, is_same=False)
        return self._emit(node, target, [source.value], [list(made.shape)])

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
            _check_autocast(inner, *args[:3])
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        for placeholder, given in zip(placeholders, args[position + 1 :], strict=True):
            self.values[placeholder] = given.value if isinstance(given, _Ref) else given
            if isinstance(given, _Ref):
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
        _check_operator(node, kind)
        operands, attributes = _arguments(node, args, kwargs)
        self.calls.append(_invocation(node, args, kwargs))
        flows = grad and not operator_of(kind).stops_gradient
        flows = flows and any(self.tensors[o.tensor].requires_grad for o in operands)
        outputs, spec = pytree.tree_flatten(node.meta["val"])
        name = self._name(node)
        indices: list[int | None] = []
        for position, output in enumerate(outputs):
            if isinstance(output, torch.Tensor):
                suffix = f".{position}" if len(outputs) > 1 else ""
                indices.append(self._add((name + suffix,), output, "activation", flows))
            else:
                indices.append(None)
        results = tuple(i for i in indices if i is not None)
        self.ops.append(Op(name, kind, operands, results, attributes, origin_of(node)))
        found = pytree.tree_unflatten(indices, spec)
        self.values[node] = found
        self._link_and_write(node, results)
        return self.values[node]

    def _name(self, node: fx.Node) -> str:
        """The node's own, or, if it is walked again, one beside it."""
        name, count = str(node.name), 1
        while name in self.used:
            count += 1
            name = f"{node.name}_again{count}"
        self.used.add(name)
        return name

    def _inline(self, given: list[int], number: int, grad: bool) -> list[int]:
        """Put a traced block in place of the opaque operator that stands for it."""
        assert self.folded is not None
        call = self.folded.calls[number]
        flows = tuple(self.tensors[i].requires_grad for i in given)
        key = (call.behaviour, flows, grad)
        if key not in self.templates:
            block = self.folded.blocks[call.behaviour]
            self.templates[key] = _Converter(block.traced.program).template(block, flows, grad)
        lists = (self.tensors, self.ops, self.calls, self.sources)
        before, template = len(self.ops), self.templates[key]
        outputs = template.copy(given, call.path, *lists)
        added = template.increments.items()
        self.increments |= {f"{call.path}.{name}": by for name, by in added}
        self.spans.append((before, len(self.ops)))
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
            self.tensors[index] = replace(self.tensors[index], requires_grad=flow)
        found = self._walk(self.program.graph_module, grad)
        outputs, _ = pytree.tree_flatten(found)
        if [self.values[node] for node in user] != inputs:
            raise UnfoldableError(f"{block.path} writes into its input")
        self._updates(found)
        specs = self.program.graph_signature.output_specs
        made = [v for v, s in zip(outputs, specs, strict=True) if s.kind == OutputKind.USER_OUTPUT]
        return Template(
            tuple(self.tensors),
            tuple(self.ops),
            tuple(self.calls),
            self.sources,
            tuple(inputs),
            tuple(made[k] for k in block.made),
            self.increments,
        )

    # -- writes

    def _link_and_write(self, node: fx.Node, results: tuple[int, ...]) -> None:
        """Note views; let later readers of a tensor written in place see the new one."""
        given = _named(node, node.args, dict(node.kwargs))
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
                f"Operator {node.name} ({_kind(node)}, {origin_of(node)}) writes into several "
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
        found = put_back(view, self.tensors[old].type.shape) if isinstance(old, int) else None
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
            kind = self.tensors[index].type
            dtype = getattr(torch, kind.dtype)
            node.meta["val"] = torch.empty(kind.shape, dtype=dtype, device="meta")
            self.values[node] = index
        made = graph.call_function(target, (*nodes, *given), named)
        made.name = f"{after.name}_{_kind(made).split('.')[-1]}"
        made.meta.update(after.meta)
        made.meta["val"] = target(*(n.meta["val"] for n in nodes), *given, **named)
        refs = (*(_Ref(i, n) for i, n in zip(tensors, nodes, strict=True)), *given)
        return int(self._operator(made, _kind(made), refs, named, self.modes[after]))

    def _check_gradient(self, node: fx.Node, base: fx.Node, old: Any, new: int) -> None:
        """Refuse to write past autograd into something that has a gradient."""
        if not isinstance(old, int) or not self.tensors[old].requires_grad:
            return
        if self.tensors[new].requires_grad:
            return
        where = f"{node.name} ({origin_of(node)})"
        source = self.sources.get(self.placed.get(base, -1))
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
        by_name = {source.name: index for index, source in self.sources.items()}
        flat, _ = pytree.tree_flatten(outputs)
        for value, spec in zip(flat, self.program.graph_signature.output_specs, strict=True):
            if spec.kind != OutputKind.USER_OUTPUT and spec.target is not None:
                left[by_name.get(spec.target, -1)] = value  # of torch's own functional form
        makers = {result: op for op in self.ops for result in op.results}
        for index, value in left.items():
            if value != index:
                self._update(index, value, makers)

    def _update(self, index: int, value: int, makers: dict[int, Op]) -> None:
        source = self.sources.get(index)
        if source is None or source.role == "input":
            name = "an input" if source is None else f"the input {self.tensors[index].name}"
            at = makers.get(value)
            raise ModelError(
                f"Forward writes into {name}{f' ({at.origin})' if at else ''}: whoever gave it "
                "would see it changed. Write into a copy: x = x.clone()."
            )
        if source.role == "constant":
            return
        copied = makers.get(value)
        while copied is not None and copied.kind == "aten.copy":
            new = copied.operands[-1].tensor
            if (
                self.tensors[new].type != self.tensors[index].type
                or self.tensors[new].requires_grad
            ):
                break
            value, copied = new, makers.get(new)
        if self.tensors[value].requires_grad:
            raise ModelError(
                f"Forward leaves a tensor with a gradient in {source.name}: the next step would "
                "go back into this one. Use detach(), or torch.no_grad()."
            )
        added = _added(index, value, makers)
        if added is not None:
            self.increments[source.name] = added
            return
        origin = makers[value].origin if value in makers else Origin()
        name = f"write_{source.name.replace('.', '_')}"
        result = self._add_like(name, value)
        operands = (Operand("buffer", index), Operand("value", value))
        self.ops.append(Op(name, WRITE, operands, (result,), {}, origin))
        arguments = {"buffer": Slot(0), "value": Slot(1)}
        self.calls.append(Invocation(torch.ops.shardfold.write.default, arguments))

    def _add_like(self, name: str, tensor: int) -> int:
        kind = self.tensors[tensor].type
        self.tensors.append(Tensor((name,), kind, "activation", False))
        return len(self.tensors) - 1

    def _loss(self, outputs: Any) -> int:
        flat, _ = pytree.tree_flatten(outputs)
        specs = self.program.graph_signature.output_specs
        user = [v for v, s in zip(flat, specs, strict=True) if s.kind == OutputKind.USER_OUTPUT]
        tree = pytree.tree_unflatten(user, self.program.call_spec.out_spec)
        named = tree.get("loss") if isinstance(tree, dict) else getattr(tree, "loss", None)
        scalars = [v for v in user if isinstance(v, int) and self._is_loss(v)]
        if isinstance(named, int) and named in scalars:
            return named
        if scalars and (len(scalars) == 1 or scalars[0] == user[0]):
            self._check_only(scalars, isinstance(tree, tuple))
            return scalars[0]
        shapes = [str(self.tensors[v].type) for v in user if isinstance(v, int)]
        raise ModelError(
            f"The model returns no loss: its outputs are {', '.join(shapes) or 'empty'}, and "
            "training needs one scalar that depends on the parameters. Return the loss from "
            "forward (Hugging Face models: pass labels=...), or give one: "
            "plan(..., loss=lambda output: ...); in a model file, wrap the module."
        )

    def _check_only(self, scalars: list[int], may_follow: bool) -> None:
        """Refuse further losses that the first one does not contain.

        What a tuple returns after its loss may also be computed from it.
        """
        part_of = self._ancestors(scalars[0])
        for other in scalars[1:]:
            follows = may_follow and scalars[0] in self._ancestors(other)
            if other not in part_of and not follows:
                raise ModelError(
                    f"The model returns {len(scalars)} scalars with a gradient, and the first "
                    f"({self._maker(scalars[0])}) does not contain another ({self._maker(other)}): "
                    "which of them, or which sum, is trained? Return one loss first, or give it: "
                    "plan(..., loss=lambda output: sum(output)); in a model file, wrap the module."
                )

    def _ancestors(self, tensor: int) -> set[int]:
        """A tensor, and all that it is computed from."""
        found = {tensor}
        for op in reversed(self.ops):
            if not found.isdisjoint(op.results):
                found.update(op.inputs)
        return found

    def _maker(self, tensor: int) -> str:
        op = next((op for op in self.ops if tensor in op.results), None)
        return self.tensors[tensor].name if op is None else f"{op.name}, {op.origin}"

    def _is_loss(self, index: int) -> bool:
        tensor = self.tensors[index]
        return tensor.requires_grad and all(n == 1 for n in tensor.type.shape)


def _idle(module: fx.GraphModule) -> set[fx.Node]:
    """What is computed for nothing, or only to be checked: numbers taken out of tensors, mostly."""
    found: set[fx.Node] = set()
    for node in reversed(module.graph.nodes):
        if node.op != "call_function" or not all(user in found for user in node.users):
            continue
        schema = getattr(node.target, "_schema", None)
        is_number = schema is None and isinstance(node.meta.get("val"), NUMBERS)
        is_pure = schema is not None and not schema.is_mutable
        if is_number or (is_pure and _kind(node).startswith("aten.")):
            found.add(node)
    return found


@dataclass(frozen=True, slots=True)
class _Ref:
    """The value that a node stands for."""

    value: Any
    node: fx.Node


def _prune(
    tensors: list[Tensor], ops: list[Op], loss: int
) -> tuple[Graph, dict[int, int], list[int]]:
    """Keep what the loss and written buffers depend on; parameters that are never used stay listed.

    Returns the graph, the new number of each tensor that is kept, and the operators kept.
    """
    needed = {loss, *(r for op in ops if op.kind == WRITE for r in op.results)}
    kept: list[int] = []
    for i, op in reversed(list(enumerate(ops))):
        if needed.intersection(op.results):
            needed.update(op.inputs)
            kept.append(i)
    kept.reverse()
    needed.update(r for i in kept for r in ops[i].results)
    needed.update(i for i, t in enumerate(tensors) if t.role == "parameter")
    order = _canonical(tensors, ops, kept, needed)
    number = {old: new for new, old in enumerate(order)}
    renumbered = tuple(
        Op(
            op.name,
            op.kind,
            tuple(Operand(o.name, number[o.tensor]) for o in op.operands),
            tuple(number[r] for r in op.results),
            op.attributes,
            op.origin,
        )
        for op in (ops[i] for i in kept)
    )
    graph = Graph(tuple(tensors[i] for i in order), renumbered, number[loss])
    return _without_dead_ends(graph), number, kept


def _without_dead_ends(graph: Graph) -> Graph:
    """The graph in which a gradient comes back to an activation only if the loss depends on it.

    What only an index, a comparison or a buffer is made of has none, whatever it is made of.
    """
    reached = {graph.loss}
    for op in reversed(graph.ops):
        if any(r in reached and graph.tensors[r].requires_grad for r in op.results):
            reached.update(op.inputs)
    dead = {
        index
        for index, tensor in enumerate(graph.tensors)
        if tensor.role == "activation" and tensor.requires_grad and index not in reached
    }
    tensors = (
        replace(tensor, requires_grad=False) if index in dead else tensor
        for index, tensor in enumerate(graph.tensors)
    )
    return replace(graph, tensors=tuple(tensors)) if dead else graph


def _canonical(
    tensors: list[Tensor], ops: list[Op], kept: list[int], needed: set[int]
) -> list[int]:
    """One order of tensors however the model was traced.

    Parameters and inputs by name, then the others as they are first read or written.
    """
    named = [i for i in needed if tensors[i].role in ("parameter", "input")]
    order = dict.fromkeys(sorted(named, key=lambda i: (tensors[i].role, tensors[i].names)))
    for i in kept:
        order.update(dict.fromkeys((*ops[i].inputs, *ops[i].results)))
    order.update(dict.fromkeys(sorted(needed)))
    return list(order)


def _added(index: int, value: int, makers: dict[int, Op]) -> float | None:
    """The number by which `value` is more than the tensor at `index`, if it is a fixed one."""
    total: float = 0
    while value != index:
        op = makers.get(value)
        if op is None or op.kind != "aten.add" or len(op.operands) != 1:
            return None
        other, alpha = op.attributes.get("other"), op.attributes.get("alpha", 1)
        if isinstance(other, bool) or not isinstance(other, int | float):
            return None
        total += other * alpha
        value = op.operands[0].tensor
    return total


def _check_operator(node: fx.Node, kind: str) -> None:
    """Refuse what cannot be called outside its trace, or has no fixed shape."""
    where = f"Operator {node.name} ({kind}, {origin_of(node)})"
    if getattr(node.target, "_schema", None) is None:
        raise ModelError(
            f"{where} is no operator of tensors but a transformation or control flow (torch.cond, "
            "vmap, flex_attention): write it with ordinary operators."
        )
    if kind == "aten._has_compatible_shallow_copy_type":
        raise ModelError(
            f"{where} replaces a tensor's memory (`.data = ...`). Write into the tensor instead: "
            "under torch.no_grad(), with copy_()."
        )
    for value in pytree.tree_leaves(node.meta.get("val")):
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        if any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in sizes):
            raise ModelError(
                f"{where} gives {value if isinstance(value, torch.SymInt) else tuple(sizes)}: a "
                "size or a number that depends on the values of a tensor (a boolean index, "
                "nonzero, unique, .item()?), and plans are for fixed shapes. Use torch.where or a "
                "mask, or a fixed capacity."
            )
    if kind.startswith("aten.embedding") and _named(node, node.args, {}).get("sparse"):
        raise ModelError(f"{where} gives sparse gradients: use sparse=False.")


def _check_random(op: Op) -> None:
    """Refuse what would draw other random numbers on every device."""
    is_tensor_normal = op.kind == "aten.normal" and "std" in {o.name for o in op.operands}
    if op.kind in UNREPEATABLE or is_tensor_normal:
        raise ModelError(
            f"Operator {op.name} ({op.kind}, {op.origin}) draws random numbers, which would differ "
            "between devices and from one device. Use torch.rand, randn, randint, bernoulli or "
            "nn.Dropout, or draw outside the model and pass the numbers in."
        )


def _check_autocast(inner: fx.GraphModule, device: str, dtype: Any, enabled: bool) -> None:
    """Refuse an autocast region that would cast: the trace does not have its casts."""
    if not enabled or dtype in (None, torch.float32):
        return
    first = next((n for n in inner.graph.nodes if n.op == "call_function"), None)
    where = f" ({origin_of(first)})" if first is not None else ""
    raise ModelError(
        f"Forward runs under torch.autocast({device!r}, {dtype}){where}: its casts would be lost. "
        f"{AUTOCAST_ADVICE}."
    )


def _named(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by schema name, with defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): value for i, value in enumerate(args)} | kwargs
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def _passed(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, without those that are only written (`out=`)."""
    named = _named(node, args, kwargs)
    if functional(node.target) is node.target:
        return named
    outs = {a.name for a in node.target._schema.arguments if a.is_out}
    return {name: value for name, value in named.items() if name not in outs}


def _invocation(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
    """The call itself; tensors are slots, numbered as `_arguments` numbers the operands."""
    count = 0

    def fill(value: Any) -> Any:
        nonlocal count
        if isinstance(value, list | tuple):
            return [fill(v) for v in value]
        if not isinstance(value, _Ref):
            return value
        if not (isinstance(value.value, int) and _is_tensor(value.node)):
            return value.value
        count += 1
        return Slot(count - 1)

    given = {name: fill(value) for name, value in _passed(node, args, kwargs).items()}
    if _kind(node) == "shardfold.function":
        given["name"] = functions[given["name"]]
    return Invocation(functional(node.target), given)


def _arguments(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Operand, ...], dict[str, Any]]:
    """Tensor arguments as operands, all others as plain attributes with defaults filled in."""
    operands: list[Operand] = []
    attributes: dict[str, Any] = {}
    for name, value in _passed(node, args, kwargs).items():
        if isinstance(value, _Ref) and isinstance(value.value, int) and _is_tensor(value.node):
            operands.append(Operand(name, value.value))
        elif isinstance(value, list | tuple) and any(isinstance(v, _Ref) for v in value):
            refs = [(f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, _Ref)]
            operands.extend(Operand(n, v.value) for n, v in refs if isinstance(v.value, int))
            if len(refs) < len(value):
                attributes[name] = tuple("*" if isinstance(v, _Ref) else v for v in value)
        else:
            attributes[name] = _plain(value)
    return tuple(operands), attributes


def _plain(value: Any) -> Any:
    if isinstance(value, _Ref):
        return _plain(value.value)
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise ModelError(f"The value {value} depends on data: shapes must be fixed to be planned.")
    return str(value).removeprefix("torch.")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) or node.op == "get_attr"


def _kind(node: fx.Node) -> str:
    """`aten.linear` for `aten.linear.default`; in-place names lose their underscore."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return _target_name(node)
    name = str(schema.name).replace("::", ".")
    return name.removesuffix("_") if schema.is_mutable and not name.endswith("__") else name


def _target_name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _are_alike(nodes: list[fx.Node]) -> bool:
    """Whether all tensors have one shape, so that there is nothing to broadcast."""
    return len({tuple(node.meta["val"].shape) for node in nodes}) == 1


def _is_left_out(described: Operator, node: fx.Node) -> bool:
    """Whether a call returns what it was given: a cast to the same dtype, a dropout of nothing."""
    if described.left_out in ("never", "always"):
        return described.left_out == "always"
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    before, after = source.meta.get("val"), node.meta["val"]
    if not isinstance(before, torch.Tensor) or before.dtype != after.dtype:
        return False
    if described.left_out == "same shape":
        return bool(before.shape == after.shape)
    if described.left_out == "idle":
        return bool(node.args[1] == 0.0)
    return described.left_out == "same dtype" or before.is_contiguous()


def _shared_names(program: ExportedProgram) -> dict[str, str]:
    """Further names of a tied parameter -> the name that the program uses for it."""
    by_storage: dict[int, str] = {}
    shared: dict[str, str] = {}
    used = {s.target for s in program.graph_signature.input_specs if s.target}
    names = sorted(program.state_dict, key=lambda n: n not in used)
    for name in names:
        first = by_storage.setdefault(id(program.state_dict[name]), name)
        if first != name:
            shared[name] = first
    return shared


def _wants_grad(program: ExportedProgram, target: str) -> bool:
    return bool(program.state_dict[target].requires_grad)
