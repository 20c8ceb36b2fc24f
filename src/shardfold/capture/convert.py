"""Where in the user's model a traced node comes from.

From an exported program to a `Graph`: functional, without no-ops, without dead code.

torch.export keeps in-place operators and wraps `no_grad` regions into subgraphs. Both are undone
here in one pass: an in-place operator yields a new tensor that later readers see, and a subgraph
is inlined with its results marked as needing no gradient. Where an in-place operator writes
through an alias that is still read, torch's own functionalisation is asked instead; it would
drop the `no_grad` regions, so a program with both is refused.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from shardfold.capture.causal_masks import without_masks
from shardfold.capture.export import quiet
from shardfold.capture.program import Invocation, Program, Slot, Source, Template
from shardfold.capture.repeated_blocks import UnfoldableError
from shardfold.capture.replicas import Block, Folded
from shardfold.capture.shorten import KEPT, Run
from shardfold.errors import ModelError
from shardfold.graph import Graph, Op, Operand, Origin, Repeat, Tensor, TensorType
from shardfold.graph.repeats import are_alike

FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def origin_of(node: fx.Node) -> Origin:
    """Module path and source line of a node; the line is that of the innermost user frame."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    source = f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""
    return Origin(stack[-1][0] if stack else "", source)


# Operators that only check or re-label: what they return is what they were given.
TRANSPARENT = {"aten.alias", "aten.lift_fresh_copy", "aten.lift_fresh", "aten.lift"}
IGNORED = {"aten._assert_tensor_metadata", "aten._assert_async", "aten._assert_scalar"}
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
        converter = _Converter(folded.outer, folded=folded)
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
    aliases: dict[fx.Node, fx.Node] = field(default_factory=dict)
    order: dict[fx.Node, int] = field(default_factory=dict)
    folded: Folded | None = None
    templates: dict[Any, Template] = field(default_factory=dict)
    spans: list[tuple[int, int]] = field(default_factory=list)  # of blocks, among the operators

    def convert(self) -> Program:
        values = self._inputs()
        outputs = self._walk(self.program.graph_module, values, grad=True)
        loss = self._loss(outputs)
        without_masks(self.tensors, self.ops, self.calls)
        graph, number, kept = _prune(self.tensors, self.ops, loss)
        self.spans = [(bisect_left(kept, a), bisect_left(kept, b)) for a, b in self.spans]
        return Program(
            graph,
            tuple(self.calls[i] for i in kept),
            {number[i]: source for i, source in self.sources.items() if i in number},
            self.program.call_spec.in_spec,
        )

    def _inputs(self) -> dict[fx.Node, Any]:
        names: dict[str, list[str]] = {}
        shared = _shared_names(self.program)
        for alias, target in shared.items():
            names.setdefault(target, []).append(alias)
        placeholders = [n for n in self.program.graph.nodes if n.op == "placeholder"]
        values: dict[fx.Node, Any] = {}
        by_target: dict[str, int] = {}
        leaf = 0
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            leaf += spec.kind == InputKind.USER_INPUT
            if not isinstance(node.meta.get("val"), torch.Tensor):
                values[node] = node.meta.get("val")
                continue
            target = spec.target or spec.arg.name
            target = shared.get(target, target)
            if target not in by_target:
                role = ROLES.get(spec.kind, "input")
                all_names = (target, *names.get(target, ()))
                grad = spec.kind == InputKind.PARAMETER and _wants_grad(self.program, target)
                index = self._add(all_names, node.meta["val"], role, grad)
                by_target[target] = index
                self.sources[index] = self._source(spec.kind, target, leaf - 1)
            values[node] = by_target[target]
        return values

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

    def _walk(self, module: fx.GraphModule, values: dict[fx.Node, Any], grad: bool) -> Any:
        self.order.update({node: i for i, node in enumerate(module.graph.nodes)})
        for node in module.graph.nodes:
            if node.op == "get_attr":
                values[node] = self._attribute(module, node)
            elif node.op == "call_function":
                values[node] = self._call(module, node, values, grad)
            elif node.op == "output":
                return fx.map_arg(node.args[0], lambda n: values[n])
        raise AssertionError("An fx graph always ends in an output node.")

    def _attribute(self, module: fx.GraphModule, node: fx.Node) -> Any:
        value = operator.attrgetter(str(node.target))(module)
        if isinstance(value, torch.Tensor):
            index = self._add((str(node.target),), value, "buffer", False)
            self.sources[index] = Source("constant", str(node.target), value=value)
            return index
        return value

    def _call(
        self, module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], grad: bool
    ) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Ref(values[n], n))
        name = _target_name(node)
        if node.target is operator.getitem:
            return args[0].value[args[1]]
        if name in REGIONS:
            return self._region(name, args, grad)
        kind = _kind(node)
        if kind == "shardfold.block":
            return self._inline([ref.value for ref in args[0]], args[1], grad)
        if kind in IGNORED:
            return None
        if kind in TRANSPARENT or _is_no_op(kind, node):
            self.aliases[node] = node.args[0]
            return args[0].value
        if kind == "aten.broadcast_tensors" and _are_alike([a.node for a in args[0]]):
            return [a.value for a in args[0]]
        return self._operator(node, kind, args, kwargs, values, grad)

    def _region(self, name: str, args: tuple[Any, ...], grad: bool) -> Any:
        position = REGIONS[name]
        inner = args[position].value
        placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
        operands = [a.value if isinstance(a, _Ref) else a for a in args[position + 1 :]]
        enabled = grad and (name != "wrap_with_set_grad_enabled" or bool(args[0]))
        return self._walk(inner, dict(zip(placeholders, operands, strict=True)), enabled)

    def _operator(
        self,
        node: fx.Node,
        kind: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: dict[fx.Node, Any],
        grad: bool,
    ) -> Any:
        operands, attributes = _arguments(node, args, kwargs)
        self.calls.append(_invocation(node, args, kwargs))
        flows = grad and kind != "aten.detach"
        flows = flows and any(self.tensors[o.tensor].requires_grad for o in operands)
        outputs, spec = pytree.tree_flatten(node.meta["val"])
        indices: list[int | None] = []
        for position, output in enumerate(outputs):
            if isinstance(output, torch.Tensor):
                suffix = f".{position}" if len(outputs) > 1 else ""
                indices.append(self._add((node.name + suffix,), output, "activation", flows))
            else:
                indices.append(None)
        results = tuple(i for i in indices if i is not None)
        self.ops.append(Op(node.name, kind, operands, results, attributes, origin_of(node)))
        self._alias_and_write(node, values, results)
        return pytree.tree_unflatten(indices, spec)

    def _inline(self, given: list[int], number: int, grad: bool) -> list[int]:
        """Put a traced block in place of the opaque operator that stands for it."""
        assert self.folded is not None
        call = self.folded.calls[number]
        flows = tuple(self.tensors[i].requires_grad for i in given)
        key = (call.behaviour, flows, grad)
        if key not in self.templates:
            block = self.folded.blocks[call.behaviour]
            self.templates[key] = _Converter(block.program).template(block, flows, grad)
        lists = (self.tensors, self.ops, self.calls, self.sources)
        before = len(self.ops)
        outputs = self.templates[key].copy(given, call.path, *lists)
        self.spans.append((before, len(self.ops)))
        return outputs

    def template(self, block: Block, flows: tuple[bool, ...], grad: bool) -> Template:
        """The program as a block with open inputs; `flows` says which of them have gradients."""
        values = self._inputs()
        user = [
            node
            for node, spec in zip(
                (n for n in self.program.graph.nodes if n.op == "placeholder"),
                self.program.graph_signature.input_specs,
                strict=True,
            )
            if spec.kind == InputKind.USER_INPUT and isinstance(values[node], int)
            if isinstance(node.meta.get("val"), torch.Tensor)
        ]
        inputs = [values[node] for node in user]
        for index, flow in zip(inputs, flows, strict=True):
            self.tensors[index] = replace(self.tensors[index], requires_grad=flow)
        outputs, _ = pytree.tree_flatten(self._walk(self.program.graph_module, values, grad))
        if [values[node] for node in user] != inputs:
            raise UnfoldableError(f"{block.path} writes into its input")
        specs = self.program.graph_signature.output_specs
        made = [v for v, s in zip(outputs, specs, strict=True) if s.kind == OutputKind.USER_OUTPUT]
        return Template(
            tuple(self.tensors),
            tuple(self.ops),
            tuple(self.calls),
            self.sources,
            tuple(inputs),
            tuple(made[k] for k in block.made),
        )

    def _alias_and_write(
        self, node: fx.Node, values: dict[fx.Node, Any], results: tuple[int, ...]
    ) -> None:
        """Note views; let later readers of a tensor written in place see the new one."""
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            return
        for argument, value in zip(schema.arguments, node.args, strict=False):
            info = argument.alias_info
            if info is None or not isinstance(value, fx.Node):
                continue
            if not info.is_write:
                self.aliases[node] = value
                continue
            self._check_no_alias_is_read_after(node, value)
            self.aliases[node] = value
            values[value] = results[0]

    def _check_no_alias_is_read_after(self, node: fx.Node, written: fx.Node) -> None:
        base = self._base(written)
        for other in [*self.aliases, base]:
            if other in (written, node) or self._base(other) is not base:
                continue
            if any(self.order.get(user, 0) > self.order[node] for user in other.users):
                raise _AliasWriteError(f"{node.name} ({origin_of(node)})")

    def _base(self, node: fx.Node) -> fx.Node:
        while node in self.aliases:
            node = self.aliases[node]
        return node

    def _loss(self, outputs: Any) -> int:
        flat, _ = pytree.tree_flatten(outputs)
        specs = self.program.graph_signature.output_specs
        user = [v for v, s in zip(flat, specs, strict=True) if s.kind == OutputKind.USER_OUTPUT]
        tree = pytree.tree_unflatten(user, self.program.call_spec.out_spec)
        named = tree.get("loss") if isinstance(tree, dict) else getattr(tree, "loss", None)
        scalars = [v for v in user if isinstance(v, int) and self._is_loss(v)]
        if named in scalars:
            return int(named)
        if scalars and (len(scalars) == 1 or scalars[0] == user[0]):
            return scalars[0]
        shapes = [str(self.tensors[v].type) for v in user if isinstance(v, int)]
        raise ModelError(
            f"The model returns no loss: its outputs are {', '.join(shapes) or 'empty'}, and "
            "training needs one scalar that depends on the parameters. Return the loss from "
            "forward (Hugging Face models: pass labels=...), or give one: "
            "plan(..., loss=lambda output: ...); in a model file, wrap the module."
        )

    def _is_loss(self, index: int) -> bool:
        tensor = self.tensors[index]
        return tensor.requires_grad and all(n == 1 for n in tensor.type.shape)


@dataclass(frozen=True, slots=True)
class _Ref:
    """The value that a node stands for."""

    value: Any
    node: fx.Node


def _prune(
    tensors: list[Tensor], ops: list[Op], loss: int
) -> tuple[Graph, dict[int, int], list[int]]:
    """Keep what the loss depends on, renumbered; parameters that are never used stay listed.

    Returns the graph, the new number of each tensor that is kept, and the operators kept.
    """
    needed = {loss}
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
    return graph, number, kept


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


def _named(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by schema name, with defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): value for i, value in enumerate(args)} | kwargs
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


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

    named = _named(node, args, kwargs)
    return Invocation(node.target, {name: fill(value) for name, value in named.items()})


def _arguments(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Operand, ...], dict[str, Any]]:
    """Tensor arguments as operands, all others as plain attributes with defaults filled in."""
    operands: list[Operand] = []
    attributes: dict[str, Any] = {}
    for name, value in _named(node, args, kwargs).items():
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


def _is_no_op(kind: str, node: fx.Node) -> bool:
    """A cast to the same dtype, a dropout of nothing, a view to the same shape."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    before, after = source.meta.get("val"), node.meta["val"]
    if not isinstance(before, torch.Tensor) or before.dtype != after.dtype:
        return False
    if kind in ("aten.to", "aten._to_copy", "aten.type_as", "aten.contiguous"):
        return before.is_contiguous() or kind != "aten.contiguous"
    if kind in ("aten.view", "aten.reshape", "aten.expand", "aten.slice", "aten.flatten"):
        return bool(before.shape == after.shape)
    return kind == "aten.dropout" and node.args[1] == 0.0


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
