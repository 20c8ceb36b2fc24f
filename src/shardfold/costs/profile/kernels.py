"""The kernels of an operator, forward and backward: which family, and how large on one device.

PyTorch runs an operator as a few kernels, and its gradient as a few others. A linear layer is one
product forward and two backward, one of the transposed input; a product of two tensors is one pass
over memory forward, and one for each operand backward, followed by a sum where it was broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardfold.costs.memory_format import EXPERTS, Habit
from shardfold.costs.profile.families import PARITIES, WINDOWS
from shardfold.costs.steps import Values

if TYPE_CHECKING:
    from shardfold.costs.operator_steps import Work

ACTIVATIONS = (
    "gelu silu relu tanh sigmoid leaky_relu elu hardswish mish softplus relu6 selu exp sqrt abs "
    "clamp clamp_min log sin cos rsqrt reciprocal hardtanh"
).split()
ADDITIONS = ("aten.add", "aten.sub", "aten.rsub")
PRODUCTS = ("aten.mul", "aten.div")
VIEWS = (
    "view reshape flatten unflatten squeeze unsqueeze transpose permute t detach swapaxes "
    "_unsafe_view movedim view_as expand_as"
).split()
SORTED_BYTES, SORT_PASSES = 16.0, 8.0  # a key and a place; a byte of the key in each pass
PIECES = ("aten.split", "aten.chunk", "aten.split_with_sizes", "aten.unbind", "aten.tensor_split")
SUMS = ("aten.sum", "aten.mean")

RUNNING = 5  # calls by which a batch norm of a part updates its running statistics


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of a family in a dtype, with an entry of each size for every case."""

    family: str
    dtype: str
    sizes: tuple[Values, ...]
    times: float | Values = 1.0
    is_awaited: bool = False  # the host goes on when it has what the kernel found


def kernels_of(work: Work, phase: str) -> list[Kernel]:
    """The kernels of one operator in one pass."""
    habit = work.tensors.habit
    if habit.is_idle:
        return []
    make = MAKERS.get(habit.kind, _pointwise)
    found = make(work, habit, phase)
    if phase == "backward":
        found += [
            Kernel("vector", work.inputs[k].dtype, (3.0 * work.operand_bytes(k),), times)
            for k, times in enumerate(habit.adds)
            if times
        ]
    return found


def _pass(size: Values, dtype: str, family: str = "vector") -> Kernel:
    return Kernel(family, dtype, (size,))


def _family(work: Work, *, strided: bool) -> str:
    if strided:
        return "strided"
    return "cast" if len(set(work.float_dtypes)) > 1 else "vector"


def _reduced(work: Work, k: int) -> list[Kernel]:
    """The sum of a gradient over what operand `k` was broadcast along."""
    whole, part = work.result_items(0), work.operand_items(k)
    if np.all(part >= whole):
        return []
    shape, full = work.inputs[k].shape, work.results[0].shape
    keeps_last = bool(shape) and shape[-1] == full[-1]
    if keeps_last:
        return [Kernel("sum_columns", work.results[0].dtype, (whole / part, part))]
    return [Kernel("sum_rows", work.results[0].dtype, (part, whole / part))]


def _pointwise(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """One pass; backward, the gradient and what was kept are read, and one result written."""
    dtype, family = work.dtype, _family(work, strided=habit.is_strided)
    if phase != "backward":
        return [_pass(work.read_bytes() + work.result_bytes(0), dtype, family)]
    passes = len(work.trained)
    return [_pass(3.0 * work.result_bytes(0), dtype, family)] * min(1, passes)


def _added(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """Gradients pass as they are: nothing to do but to sum what was broadcast."""
    if phase != "backward":
        return _pointwise(work, habit, phase)
    found = []
    for k in work.trained:
        found += _reduced(work, k)
        if k == 1 and habit.kind == "aten.sub":
            found.append(_pass(2.0 * work.operand_bytes(k), work.dtype))
    return found


def _multiplied(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    if phase != "backward":
        return _pointwise(work, habit, phase)
    whole = work.result_bytes(0)
    if len(work.inputs) == 1:
        return [_pass(2.0 * whole, work.dtype, _family(work, strided=False))]
    found = []
    for k in work.trained:
        other = work.operand_bytes(1 - k) if k < 2 else whole
        family = _family(work, strided=habit.is_strided and bool(np.any(other < whole)))
        times = 2 if habit.kind == "aten.div" and k == 1 else 1
        found += [_pass(2.0 * whole + other, work.results[0].dtype, family)] * times
        found += _reduced(work, k)
        if work.inputs[k].dtype != work.results[0].dtype:
            found.append(_pass(work.operand_bytes(k) + whole, work.dtype, "cast"))
    return found


def _power(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """The base to one less, times the exponent, times the gradient: three passes."""
    if phase != "backward":
        return _pointwise(work, habit, phase)
    whole = work.result_bytes(0)
    return [_pass(times * whole, work.dtype) for times in (2.0, 2.0, 3.0)]


def _cast(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    size = work.operand_bytes(0) + work.result_bytes(0)
    source = work.results[0] if phase == "backward" else work.inputs[0]
    return [_pass(size, source.dtype, "cast")]


def _copy(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """A view is free, unless it has to move its elements."""
    if not habit.copies or phase == "backward":
        return []
    return [_pass(2.0 * work.result_bytes(0), work.dtype, "strided")]


def _sliced(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """Backward, zeros of the whole, and a copy of the gradient into them."""
    if phase != "backward":
        return []
    fill = _pass(work.operand_bytes(0), work.dtype, "fill")
    return [fill, _pass(2.0 * work.result_bytes(0), work.dtype, "strided")]


def _pieces(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """Backward, the gradients of all pieces are put together."""
    if phase != "backward":
        return []
    return [_pass(2.0 * work.operand_bytes(0), work.dtype)]


def _joined(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """Backward, the pieces are views of the gradient."""
    if phase == "backward":
        return []
    return [_pass(2.0 * work.result_bytes(0), work.dtype)]


def _expanded(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    return _reduced(work, 0) if phase == "backward" else []


def _summed(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """Forward a sum; backward a mean divides what is broadcast, a sum only broadcasts."""
    whole, part = work.operand_items(0), work.result_items(0)
    if phase == "backward":
        mean = habit.kind == "aten.mean"
        return [_pass(2.0 * work.operand_bytes(0), work.dtype, "strided")] if mean else []
    shape, after = work.inputs[0].shape, work.results[0].shape
    keeps_last = bool(after) and shape[-1] == after[-1] and len(shape) > 1
    if keeps_last:
        return [Kernel("sum_columns", work.dtype, (whole / part, part))]
    return [Kernel("sum_rows", work.dtype, (part, whole / part))]


def _linear(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """The weight is stored by rows of outputs, but for addmm, whose second matrix is not."""
    turned = habit.kind == "aten.linear"
    first = 0 if turned else len(work.inputs) - 2
    weight, bias = (1, 2) if turned else (first + 1, 0 if first else -1)
    k, n = work.factor("m"), work.factor("n")
    rows, dtype = work.result_items(0) / n, work.dtype
    if phase != "backward":
        return _products("nt" if turned else "nn", dtype, (rows, n, k), (n, k))
    found = []
    if first in work.trained:
        found += _products("nn" if turned else "nt", dtype, (rows, k, n), (n, k))
    if weight in work.trained:
        sizes = (n, k, rows) if turned else (k, n, rows)
        found += _products("tn", dtype, sizes, (n, k))
    if bias in work.trained:
        found.append(Kernel("sum_columns", dtype, (rows, n)))
    return found


def _products(
    layout: str, dtype: str, sizes: tuple[Values, ...], features: tuple[Values, Values]
) -> list[Kernel]:
    """A product, by whether a device's own features fill the words that matrix units read.

    Eight, two, or one at a time: 30,522 classes are even, half of them are odd.
    """
    n, k = (np.asarray(each).astype(np.int64) for each in features)
    common = np.gcd(n, k)
    parities = np.where(common % 8 == 0, "", np.where(common % 2 == 0, ".even", ".odd"))
    return [
        Kernel(f"matmul.{layout}{parity}", dtype, (sizes[0] * (parities == parity), *sizes[1:]))
        for parity in PARITIES
        if (parities == parity).any()
    ]


def _batched(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    m, k, n = work.factor("b"), work.factor("m"), work.factor("n")
    b = np.maximum(work.result_items(0) / (m * n), 1.0)
    if phase != "backward":
        return [Kernel("bmm", work.dtype, (b, m, n, k))]
    ways = {0: (b, m, k, n), 1: (b, k, n, m)}
    return [Kernel("bmm", work.dtype, ways[t]) for t in work.trained if t in ways]


def _attention(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    queries, keys, depth = work.factor("q"), work.factor("k"), work.factor("d")
    heads = work.operand_items(0) / (queries * depth)
    kind = "causal" if habit.is_causal else "full"
    if 3 in work.trained:  # a mask without a gradient is as good as none
        kind = "bias"
    elif habit.is_causal and work.inputs[0].shape[-3] != work.inputs[1].shape[-3]:
        kind = "shared"
    phase = "backward" if phase == "backward" else "forward"
    length = np.sqrt(queries * keys)
    return [Kernel(f"attention.{kind}.{phase}", work.dtype, (heads, length, depth))]


def _convolution(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    window = _nearest_window(habit.window)
    b, c, n = work.factor("b"), work.factor("c"), work.factor("n") * work.factor("g")
    side = np.sqrt(work.result_items(0) / (b * n))
    (high, wide), _ = WINDOWS[window]
    taps = math.prod(habit.window[:-1]) / (high * wide)
    phase = "backward" if phase == "backward" else "forward"
    found = [Kernel(f"conv.{window}.{phase}", work.dtype, (b, c * taps, n, side))]
    if phase == "backward" and 2 in work.trained:
        found.append(Kernel("sum_columns", work.dtype, (b * side * side, n)))
    return found


def _nearest_window(window: tuple[int, ...]) -> str:
    """The window that was measured with the same stride and the nearest number of taps."""
    *kernel, stride = window
    taps = math.prod(kernel)

    def distance(name: str) -> tuple[bool, float]:
        (high, wide), step = WINDOWS[name]
        return (step != stride, abs(math.log(high * wide / taps)))

    return min(WINDOWS, key=distance)


def _rows(family: str, columns: Callable[[Work], Values]) -> Callable[..., list[Kernel]]:
    def make(work: Work, habit: Habit, phase: str) -> list[Kernel]:
        wide = columns(work)
        phase = "backward" if phase == "backward" else "forward"
        dtype = work.inputs[0].dtype
        return [Kernel(f"{family}.{phase}", dtype, (work.operand_items(0) / wide, wide))]

    return make


def _batch_norm(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """Examples, channels, and the side of a plane; of a part, the running statistics apart."""
    b, c = work.factor("b"), work.factor("c")
    side = np.sqrt(work.operand_items(0) / (b * c))
    dtype = work.inputs[0].dtype
    phase = "backward" if phase == "backward" else "forward"
    is_split = work.operand_items(0) * work.parts("c") < math.prod(work.inputs[0].shape)
    found = [Kernel(f"batch_norm.{phase}", dtype, (b * ~is_split, c, side))]
    if is_split.any():
        found.append(Kernel(f"split_norm.{phase}", dtype, (b * is_split, c, side)))
        if phase == "forward":
            found.append(Kernel("vector", "float32", (8.0 * c * is_split,), RUNNING))
    return found


def _last(work: Work) -> Values:
    """The local size of the first operand's last dim."""
    factors = work.space.rule.rule.operands[0][-1]
    columns = np.full(len(work.space.configs), float(work.inputs[0].shape[-1]))
    if factors:
        columns = np.prod([work.factor(f) for f in factors], axis=0)
    return columns


def _loss(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """Cross-entropy; with the classes in parts, passes in float32 around the sums of all parts."""
    wide, is_split = _last(work), work.parts("c") > 1
    phase = "backward" if phase == "backward" else "forward"
    dtype, items = work.inputs[0].dtype, work.operand_items(0)
    found = [Kernel(f"loss.{phase}", dtype, (items / wide * ~is_split, wide))]
    if not is_split.any():
        return found
    size = 4.0 * items * is_split
    half = dtype in ("bfloat16", "float16")
    cast = [_pass(1.5 * size, dtype, "cast")] if half else []  # read in two bytes, written in four
    passes = [*cast, *[_pass(2.0 * size, "float32", "strided")], _pass(2.0 * size, "float32")]
    if phase == "forward":  # the largest; less that; exponentials; their sum
        sizes = (items / wide * is_split, wide)
        return [*found, *passes, *(Kernel("sum_rows", kind, sizes) for kind in (dtype, "float32"))]
    back = [_pass(1.5 * size, "float32", "cast")] if half else []
    return [*found, *passes, _pass(2.0 * size, "float32", "strided"), *back]


def _lookup(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    columns = work.factor("d")
    rows = work.result_items(0) / columns
    if phase != "backward":
        return [Kernel("lookup.forward", work.dtype, (rows, columns))]
    table = work.operand_items(0) / columns
    return [Kernel("lookup.backward", work.dtype, (rows, table, columns))]


def _pool(kind: str) -> Callable[..., list[Kernel]]:
    def make(work: Work, habit: Habit, phase: str) -> list[Kernel]:
        size = work.operand_bytes(0) + work.result_bytes(0)
        phase = "backward" if phase == "backward" else "forward"
        return [_pass(size, work.dtype, f"{kind}_pool.{phase}")]

    return make


def _experts(work: Work, habit: Habit, phase: str) -> list[Kernel]:
    """Rows sorted by expert, once, which the host waits for; gathered, multiplied, put back.

    As many rows as the experts at hand are of all: balanced routing.
    """
    n, m, e = work.factor("n"), work.factor("m"), work.factor("e")
    rows, dtype = work.result_items(0) / n, work.dtype
    mine = rows * (e / work.inputs[1].shape[0])
    per = mine / e
    sort = Kernel("vector", "float32", (2.0 * SORTED_BYTES * rows,), SORT_PASSES, is_awaited=True)

    def moved(columns: Values) -> Kernel:
        return Kernel("lookup.forward", dtype, (mine, columns))

    written = [_pass(2.0 * rows * m * work.inputs[0].item_bytes, dtype, "strided")]
    written = written if habit.copies else []
    if phase != "backward":
        sorts = [] if habit.is_sorted else [sort]
        return [*sorts, *written, moved(m), Kernel("matmul.nt", dtype, (per, n, m), e), moved(n)]
    found = [moved(n)]
    if 0 in work.trained:
        found += [Kernel("matmul.nn", dtype, (per, m, n), e), moved(m)]
    if 1 in work.trained:
        zeros = _pass(work.operand_bytes(1), dtype, "fill")
        found += [*written, moved(m), zeros, Kernel("matmul.tn", dtype, (n, m, per), e)]
    return found


MAKERS: Mapping[str, Callable[[Work, Habit, str], list[Kernel]]] = {
    **dict.fromkeys(ADDITIONS, _added),
    **dict.fromkeys(PRODUCTS, _multiplied),
    "aten.pow": _power,
    "aten.to": _cast,
    "aten._to_copy": _cast,
    **{f"aten.{name}": _copy for name in (*VIEWS, "contiguous", "clone")},
    "aten.slice": _sliced,
    "aten.narrow": _sliced,
    "aten.select": _sliced,
    **dict.fromkeys(PIECES, _pieces),
    "aten.cat": _joined,
    "aten.expand": _expanded,
    **dict.fromkeys(SUMS, _summed),
    "aten.linear": _linear,
    "aten.addmm": _linear,
    "aten.mm": _linear,
    "aten.bmm": _batched,
    "aten.matmul": _batched,
    "aten.baddbmm": _batched,
    "aten.scaled_dot_product_attention": _attention,
    "aten.conv1d": _convolution,
    "aten.conv2d": _convolution,
    "aten.conv3d": _convolution,
    "aten.layer_norm": _rows("layer_norm", _last),
    "aten.native_layer_norm": _rows("layer_norm", _last),
    "aten.rms_norm": _rows("layer_norm", _last),
    "aten.batch_norm": _batch_norm,
    "aten.softmax": _rows("softmax", _last),
    "aten.log_softmax": _rows("softmax", _last),
    "aten.cross_entropy_loss": _loss,
    "aten.embedding": _lookup,
    "aten.max_pool2d": _pool("max"),
    "aten.avg_pool2d": _pool("avg"),
    "aten.adaptive_avg_pool2d": _pool("avg"),
    EXPERTS: _experts,
}
