"""Everything that is known of one kind of operator, said once.

Planner, cost models, simulator, strategies, runtime and capture ask this description; none of them
has a list of operators. What a description leaves out is taken to be the costly or careful case: an
operator without a rule is not split, its result is new memory, and a mean that it reads is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from shardfold.operators.kernels import Access, KernelMaker, pointwise

if TYPE_CHECKING:
    from shardfold.graph import Op
    from shardfold.operators.notation import Call, Rule

Maker: TypeAlias = "Callable[[Call], Rule]"
Local = Literal["same call", "own form", "whole"]
Memory = Literal[
    "new",  # written in the order of its dims
    "pointwise",  # new, and lies as the operands do
    "attention",  # new, heads inside positions
    "joined",  # new, operands beside each other
    "copy",  # new, of what may lie in another order
    "copy if needed",  # a view of what lies in order, else a copy
    "cast",  # the operand itself where the dtype is the same
    "dropout",  # the operand itself where nothing is dropped
    "view",  # of the same elements in the same order
    "permuted",  # a view with its dims in another order: see `permutes`
    "cut",  # a view of some elements
    "broadcast",  # a view that repeats elements
]
LeftOut = Literal["never", "always", "check", "same shape", "same dtype", "in order", "idle"]
SHARED: frozenset[Memory] = frozenset({"view", "permuted", "cut", "broadcast"})
HANDS_ON: frozenset[Memory] = frozenset({"view", "copy if needed", "permuted", "cast", "dropout"})


@dataclass(frozen=True, slots=True)
class Extra:
    """Memory of an operator that is no tensor of the graph, per item of a tensor of its own.

    `of` is an operand (or the result, -1) and `per_item` bytes for each of its items; where
    `over` is given, only for each row of that many trailing dims; where `points` are given, for
    each point of the local part of these factors instead. It is kept until backward, or taken for
    as long as a pass takes. With a `factor` it is only there where that is split, or only where it
    is whole.
    """

    of: int
    per_item: float
    over: int = 0
    life: Literal["kept", "forward", "backward"] = "kept"
    factor: str = ""
    is_split: bool = True
    points: tuple[str, ...] = ()


def _no_factors(call: Call) -> frozenset[str]:
    return frozenset()


def factors(*names: str) -> Callable[[Call], frozenset[str]]:
    """The same factors for every call."""
    return lambda call: frozenset(names)


def _no_extras(call: Call, access: Access) -> tuple[Extra, ...]:
    return ()


def _no_mean(op: Op) -> bool:
    return False


def _loses_means(op: Op, means: Sequence[bool]) -> bool:
    return False


def keeps_means(op: Op, means: Sequence[bool]) -> bool:
    """A linear operator: a sum of means, or the same elements elsewhere."""
    return True


@dataclass(frozen=True, slots=True)
class Operator:
    """What is known of one kind of operator.

    Splits: `rule` says how a call's tensors share factors; `local` how the runtime runs a part of
    it: by the same call on local tensors, by a form of its own in `runtime.ops`, or not at all.
    `unsupported` are the factors that the rule splits but the runtime cannot, for one call.
    `ranges` are those of which a part must be one range of the whole.

    Kernels: `kernels` are those of either pass. What the host takes for a call is that of the kind
    `launched_as` where its own was not measured; `calls` says whether it makes many. Calls with the
    same `shares` have a part of their work done by the first of them. `reads_in_order`: a first
    operand that lies in another order is copied.

    Backward: `remakes` names operands of the rule's `saves` of which something else is kept;
    `saves_beside` says so of its `saves_results`. `extras` is memory beside operands and results.
    `hands_gradient_on`: the gradient of the first operand is that of the result.

    Compiled: what is not pointwise may be a part of a kernel, too (`fuses`): what works row by row,
    a reduction, or what needs statistics of whole channels first.

    Memory: how the result lies, or whose it is; one that `keeps_channels` has them last in memory
    where its operand does; `permutes` gives for each dim of the result the
    operand's. `makes_result`: new memory that its own backward does not need; `makes_gradients`:
    operands whose gradients are new memory, which autograd gives to nobody else. `writes` names
    operands that are updated in place.

    Samples: `is_mean` says that a call takes the mean over what it reduces; `keeps_means` whether
    a result is still one, given which operands are; `fills`: the same for every sample.

    Words: `words` are the names of factors that tell what a dim is, `features` the in and out
    factor of a product with a weight.

    Capture: when a call is `left_out` of the graph, as its result is its operand or nothing.
    """

    rule: Maker | None = None
    local: Local = "same call"
    unsupported: Callable[[Call], frozenset[str]] = _no_factors
    ranges: Callable[[Call], frozenset[str]] = _no_factors
    kernels: KernelMaker = pointwise
    launched_as: str = "aten.mul"
    calls: Literal["one", "many", "many in parts"] = "one"
    shares: Callable[[Call], object] | None = None
    reads_in_order: bool = False
    remakes: tuple[str, ...] = ()
    saves_beside: bool = False
    extras: Callable[[Call, Access], tuple[Extra, ...]] = _no_extras
    hands_gradient_on: bool = False
    memory: Memory = "new"
    fuses: Literal["", "rows", "reduction", "by channels"] = ""
    permutes: Callable[[Call], list[int]] | None = None
    makes_result: bool = False
    makes_gradients: frozenset[str] = frozenset()
    writes: tuple[str, ...] = ()
    is_mean: Callable[[Op], bool] = _no_mean
    keeps_means: Callable[[Op, Sequence[bool]], bool] = _loses_means
    fills: bool = False
    words: Mapping[str, str] = field(default_factory=dict)
    features: tuple[str, str] | None = None
    is_convolution: bool = False
    keeps_channels: bool = False
    stops_gradient: bool = False
    left_out: LeftOut = "never"

    def is_idle(self, op: Op) -> bool:
        """Whether a call does nothing: a dropout that drops nothing."""
        drops = op.attributes.get("p", 0.5) and op.attributes.get("train") is not False
        return self.memory == "dropout" and not drops

    @property
    def passes_gradient(self) -> bool:
        """Whether the gradient of the first operand is that of the result, or a view of it."""
        return self.hands_gradient_on or self.memory in HANDS_ON


UNKNOWN = Operator(local="whole")


def aten(names: str, operator: Operator) -> dict[str, Operator]:
    """One description for several operators of torch, by name.

    >>> sorted(aten("mul div", UNKNOWN))
    ['aten.div', 'aten.mul']
    """
    return {f"aten.{name}": operator for name in names.split()}
