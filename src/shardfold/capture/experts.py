"""Blocks of experts as one operator, whichever implementation a model's configuration names.

    routed_experts: x[t m], expert[t k], share[t k], up[e u m], down[e n f] -> y[t n]
    y[r] = sum over j of share[r, j] * down[e] between(up[e] x[r]),  e = expert[r, j]

Transformers has a loop over experts, a gather of matrices and sorted products for the same thing,
and all blocks of experts ask its registry which of them to run. While a model is traced, the answer
is this operator. What stands between the two products is the model's own: it is traced by itself,
for any number of rows and features, and its code goes with the operator.

A row whose expert is not among 0..e-1 gives zeros.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from shardfold.operators.experts import Between

SCHEMA = (
    "(Tensor x, Tensor expert, Tensor share, Tensor up, Tensor down, str between, "
    "Tensor? up_bias=None, Tensor? down_bias=None) -> Tensor"
)
torch.library.define("shardfold::routed_experts", SCHEMA)


@torch.library.register_fake("shardfold::routed_experts")
def _(x: Tensor, expert: Tensor, share: Tensor, up: Tensor, down: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[1])


ROWS, FEATURES = 3, 8  # of a trial run
REGISTRY = "transformers.integrations.moe"
_KNOWN: dict[object, Between | None] = {}  # by what a block says of itself


@cache
def between_of(text: str) -> Callable[[Tensor], Tensor]:
    """The function that stands between the products of a block."""
    names: dict[str, Any] = {
        "torch": torch,
        "device": torch.device,
        "inf": math.inf,
        "nan": math.nan,
    }
    exec(Between.parse(text).code, names)  # as it was traced, in whatever process
    return partial(names["forward"], None)


@contextmanager
def one_operator() -> Iterator[None]:
    """While it lasts, blocks of experts of transformers are one operator each."""
    registry = sys.modules.get(REGISTRY)
    if registry is None:  # then no module of the model is a block of its
        yield
        return
    kind = registry.ExpertsInterface
    own = kind.get_interface

    def get_interface(self: Any, name: str, default: Any) -> Any:
        chosen = own(self, name, default)

        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            found = Routed.of(module, [*args, *kwargs.values()])
            return chosen(module, *args, **kwargs) if found is None else found.call()

        return run

    with patch.object(kind, "get_interface", get_interface):
        yield


@dataclass(frozen=True, slots=True)
class Routed:
    """One call of a block: its rows, where they go with which weight, and what is done there."""

    module: Any
    x: Tensor
    expert: Tensor
    share: Tensor
    between: Between

    @classmethod
    def of(cls, module: Any, given: list[Any]) -> Routed | None:
        """Read a call of a block; None if it is not of the form that the operator has."""
        if len(given) != 3 or not all(isinstance(tensor, Tensor) for tensor in given):
            return None
        x, expert, share = given
        is_plain = not module.has_post_expert_norm and not module._is_expert_parallel
        if not is_plain or x.dim() != 2 or expert.dim() != 2 or expert.shape != share.shape:
            return None
        if expert.dtype not in (torch.int32, torch.int64) or not share.is_floating_point():
            return None
        between = _described(module)
        return None if between is None else cls(module, x, expert, share, between)

    def call(self) -> Tensor:
        """The operator on the block's own weights."""
        names = ("gate_up_proj" if self.module.has_gate else "up_proj", "down_proj")
        weights = [getattr(self.module, name) for name in names]
        if self.module.is_transposed:
            weights = [weight.transpose(1, 2) for weight in weights]
        has_bias = self.module.has_bias
        biases = [getattr(self.module, f"{n}_bias") if has_bias else None for n in names]
        found: Tensor = torch.ops.shardfold.routed_experts(
            self.x, self.expert, self.share, *weights, str(self.between), *biases
        )
        return found


def _described(module: Any) -> Between | None:
    """What stands between a block's products; blocks that say the same of themselves are alike."""
    dtype = module.down_proj.dtype
    plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str))}
    act = getattr(module, "act_fn", None)
    key = (type(module), dtype, tuple(sorted(plain.items())), repr(act))
    if key not in _KNOWN:
        function = module._apply_gate if module.has_gate else act
        _KNOWN[key] = described(function, FEATURES * (2 if module.has_gate else 1), dtype)
    return _KNOWN[key]


def described(function: Any, wide: int, dtype: torch.dtype) -> Between | None:
    """Trace and try a function of rows; None if it is not one of each row by itself."""
    # What is traced around this must not see it.
    with torch._guards.tracing(None), _disable_current_modes(), torch._C.DisableTorchFunction():
        rows = torch.linspace(-2.0, 3.0, ROWS * wide, dtype=dtype).view(ROWS, wide)
        program = make_fx(lambda rows: function(rows), tracing_mode="symbolic")(rows)
        nodes = list(program.graph.nodes)
        steps = [node for node in nodes if _computes(node)]
        pairing = _pairing(program, rows)
        if pairing is None or not steps or any(node.op == "get_attr" for node in nodes):
            return None
        arrays = [1 + len(node.all_input_nodes) for node in steps]
        names = tuple(node.target.__name__.partition(".")[0] for node in steps)
        return Between(pairing, names, sum(arrays), _kept(program, rows), program.code.strip())


def _computes(node: fx.Node) -> bool:
    """Whether an operator writes something new: no view, no arithmetic on sizes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or node.target is torch.ops.aten.sym_size.int:
        return False
    return all(returned.alias_info is None for returned in schema.returns)


def _pairing(program: fx.GraphModule, rows: Tensor) -> str | None:
    """Which features make one: what is not a number goes where it is used."""
    wide = rows.shape[1]
    inner = program(rows).shape[1]
    reached = []
    for feature in range(wide):
        spoilt = rows.clone()
        spoilt[0, feature] = math.nan
        found = program(spoilt).isnan()
        if found.shape != (ROWS, inner) or found[1:].any():
            return None
        reached.append(found[0].nonzero().flatten().tolist())
    if reached == [[k] for k in range(inner)]:
        return "own"
    if reached == [[k % inner] for k in range(wide)] and wide == 2 * inner:
        return "halves"
    if reached == [[k // 2] for k in range(wide)] and wide == 2 * inner:
        return "pairs"
    return "any"


def _kept(program: fx.GraphModule, rows: Tensor) -> int:
    """How many arrays as large as the result autograd keeps."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result: Tensor = program(rows.requires_grad_())
    own: int = result.numel() * result.element_size()
    return math.ceil(sum(sizes.values()) / own)
