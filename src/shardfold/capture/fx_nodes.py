"""What one node of an exported graph says: its operator, its arguments, its line of code.

What cannot be called outside its trace, has no fixed shape or loses its casts is refused here.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from shardfold.capture.aliasing import functional
from shardfold.capture.guards import AUTOCAST_ADVICE
from shardfold.capture.program import Invocation, Slot
from shardfold.capture.stand_ins import functions
from shardfold.errors import ModelError
from shardfold.graph import Operand, Origin
from shardfold.operators import Operator, operator_of

FRAME = re.compile(r'File "([^"]+)", line (\d+)')
NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


@dataclass(frozen=True, slots=True)
class Ref:
    """The value that a node stands for."""

    value: Any
    node: fx.Node


def origin_of(node: fx.Node) -> Origin:
    """Module path and source line of a node; the line is that of the innermost user frame."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    source = f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""
    return Origin(stack[-1][0] if stack else "", source)


def kind_of(node: fx.Node) -> str:
    """`aten.linear` for `aten.linear.default`; in-place names lose their underscore."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return target_name(node)
    name = str(schema.name).replace("::", ".")
    return name.removesuffix("_") if schema.is_mutable and not name.endswith("__") else name


def target_name(node: fx.Node) -> str:
    """The name of what a node calls."""
    return str(getattr(node.target, "__name__", node.target))


def is_tensor(node: fx.Node) -> bool:
    """Whether a node stands for a tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor) or node.op == "get_attr"


def named_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by schema name, with defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(i): value for i, value in enumerate(args)} | kwargs
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def passed_arguments(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments by name, without those that are only written (`out=`)."""
    named = named_arguments(node, args, kwargs)
    if functional(node.target) is node.target:
        return named
    outs = {a.name for a in node.target._schema.arguments if a.is_out}
    return {name: value for name, value in named.items() if name not in outs}


def invocation_of(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
    """The call itself; tensors are slots, numbered as the operands are."""
    count = 0

    def fill(value: Any) -> Any:
        nonlocal count
        if isinstance(value, list | tuple):
            return [fill(v) for v in value]
        if not isinstance(value, Ref):
            return value
        if not (isinstance(value.value, int) and is_tensor(value.node)):
            return value.value
        count += 1
        return Slot(count - 1)

    given = {name: fill(value) for name, value in passed_arguments(node, args, kwargs).items()}
    if kind_of(node) == "shardfold.function":
        given["name"] = functions[given["name"]]
    made = node.meta.get("val")
    if not count and isinstance(made, torch.Tensor) and made.is_floating_point():
        given |= {"dtype": made.dtype} if given.get("dtype", 0) is None else {}  # not the default
    target = functional(node.target)
    if target is torch.ops.aten.copy.default:  # of torch's own functional form: has no derivative
        target = torch.ops.aten.copy_.default
    return Invocation(target, given)


def operands_and_attributes(
    node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Operand, ...], dict[str, Any]]:
    """Tensor arguments as operands, all others as plain attributes with defaults filled in."""
    operands: list[Operand] = []
    attributes: dict[str, Any] = {}
    for name, value in passed_arguments(node, args, kwargs).items():
        if isinstance(value, Ref) and isinstance(value.value, int) and is_tensor(value.node):
            operands.append(Operand(name, value.value))
        elif isinstance(value, list | tuple) and any(isinstance(v, Ref) for v in value):
            refs = [(f"{name}[{i}]", v) for i, v in enumerate(value) if isinstance(v, Ref)]
            operands.extend(Operand(n, v.value) for n, v in refs if isinstance(v.value, int))
            if len(refs) < len(value):
                attributes[name] = tuple("*" if isinstance(v, Ref) else v for v in value)
        else:
            attributes[name] = _plain(value)
    return tuple(operands), attributes


def _plain(value: Any) -> Any:
    if isinstance(value, Ref):
        return _plain(value.value)
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise ModelError(f"The value {value} depends on data: shapes must be fixed to be planned.")
    return str(value).removeprefix("torch.")


def is_left_out(described: Operator, node: fx.Node) -> bool:
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
        return node.args[1] == 0.0 or node.args[2] is False
    return described.left_out == "same dtype" or before.is_contiguous()


def idle_nodes(module: fx.GraphModule) -> set[fx.Node]:
    """What is computed for nothing, or only to be checked: numbers taken out of tensors, mostly."""
    found: set[fx.Node] = set()
    for node in reversed(module.graph.nodes):
        if node.op != "call_function" or not all(user in found for user in node.users):
            continue
        schema = getattr(node.target, "_schema", None)
        is_number = schema is None and isinstance(node.meta.get("val"), NUMBERS)
        is_number |= node.target is operator.getitem  # one of several results
        is_pure = schema is not None and not schema.is_mutable
        is_pure = is_pure and not operator_of(kind_of(node)).writes
        if is_number or (is_pure and kind_of(node).startswith("aten.")):
            found.add(node)
    return found


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


def bags_in_rows(node: fx.Node) -> tuple[list[fx.Node], list[Any]] | None:
    """Bags that are the rows of a matrix, which torch has flattened: the table and that matrix."""
    given = named_arguments(node, node.args, dict(node.kwargs))
    flat, starts = given["indices"], given["offsets"]
    if given["scale_grad_by_freq"] or given["sparse"] or given["per_sample_weights"] is not None:
        return None
    if target_name(flat).split(".")[0] not in ("reshape", "view"):
        return None
    if target_name(starts).split(".")[0] != "arange":
        return None
    matrix = flat.args[0]
    shape = tuple(matrix.meta["val"].shape)
    first, last, step = (*starts.args, 1)[:3] if len(starts.args) > 1 else (0, *starts.args, 1)
    if len(shape) != 2 or (first, last, step) != (0, shape[0] * shape[1], shape[1]):
        return None
    padding = -1 if given["padding_idx"] is None else given["padding_idx"]
    return [given["weight"], matrix], [None, given["mode"], padding]


TRANSFORMATIONS = {  # by what is seen of them
    "lazy_load_decompositions": "torch.vmap",
    "vmap": "torch.vmap",
    "jvp": "torch.func.jvp",
    "grad": "torch.func.grad",
    "flex_attention": "flex_attention",
    "cond": "torch.cond",
}


def check_operator(node: fx.Node, kind: str) -> None:
    """Refuse what cannot be called outside its trace, or has no fixed shape."""
    where = f"Operator {node.name} ({kind}, {origin_of(node)})"
    if getattr(node.target, "_schema", None) is None:
        known = (name for sign, name in TRANSFORMATIONS.items() if sign in kind)
        raise ModelError(
            f"Forward uses {next(known, kind)} ({origin_of(node)}), which is no operator of "
            "tensors but a transformation of functions or control flow: write it with ordinary "
            "operators, and gradients with torch.autograd.grad(..., create_graph=True)."
        )
    if kind == "aten._has_compatible_shallow_copy_type":
        raise ModelError(
            f"{where} replaces a tensor's memory (`.data = ...`). Write into the tensor instead: "
            "under torch.no_grad(), with copy_()."
        )
    if node.target is torch.ops.aten.view.dtype:
        raise ModelError(
            f"{where} takes the bits of numbers for those of another dtype (`view(dtype)`), which "
            "a plan does not: it may run in other dtypes. Convert them, with to(dtype)."
        )
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    if draws and operator_of(kind).local != "own form":
        raise ModelError(
            f"{where} draws random numbers, which would differ between devices and from one "
            "device. Draw them with torch.rand, randn or bernoulli, and give them to it."
        )
    for value in pytree.tree_leaves(node.meta.get("val")):
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        if any(isinstance(n, torch.SymInt | torch.SymFloat | torch.SymBool) for n in sizes):
            raise ModelError(
                f"{where} gives {value if isinstance(value, torch.SymInt) else tuple(sizes)}: a "
                "size or a number that depends on the values of a tensor (a boolean index, "
                "nonzero, unique, .item()?), and plans are for fixed shapes. Use torch.where or a "
                "mask, or a fixed capacity; a mean, a sum or a loss of x[mask] is well, and "
                "y[mask] = f(x[mask])."
            )
    if kind.startswith("aten.embedding") and named_arguments(node, node.args, {}).get("sparse"):
        raise ModelError(f"{where} gives sparse gradients: use sparse=False.")


def check_autocast(inner: fx.GraphModule, device: str, dtype: Any, enabled: bool) -> None:
    """Refuse an autocast region that would cast: the trace does not have its casts."""
    if not enabled or dtype in (None, torch.float32):
        return
    first = next((n for n in inner.graph.nodes if n.op == "call_function"), None)
    where = f" ({origin_of(first)})" if first is not None else ""
    raise ModelError(
        f"Forward runs under torch.autocast({device!r}, {dtype}){where}: its casts would be lost. "
        f"{AUTOCAST_ADVICE}."
    )


def shared_names(program: ExportedProgram) -> dict[str, str]:
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


def wants_grad(program: ExportedProgram, target: str) -> bool:
    """Whether a parameter is trained."""
    return bool(program.state_dict[target].requires_grad)
