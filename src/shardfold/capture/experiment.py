"""Finds how an operator that has no rule can be split: it is run in parts, and compared.

The call is made on small random tensors, whole and in parts. A factor is a set of operand dims
that are cut together; it holds if the parts' results, put side by side along a dim, or added, or
averaged, are those of the whole, and if the gradients of cut operands are the parts' side by
side, and those of the others their sum. `scale(x[b n], w[n])` is tried as follows: x alone by its
first dim (holds, joined by dim 0), x alone by its second (w no longer fits), w alone, x and w by n
(holds, joined by dim 1). What holds is tried once more with other numbers, in three parts, and
with parts that are no ranges.

The numbers are those of `small_call`, the same in every process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS

from shardfold.capture.program import Invocation, Program
from shardfold.capture.small_call import (
    CONSTANTS,
    DRAWS,
    Shape,
    Small,
    UnsteadyError,
    are_close,
    gradients_of,
    kept_by,
    leaf,
    run,
    scalars_of,
    shrunk,
    small_call,
)
from shardfold.capture.stand_ins import CtcLoss
from shardfold.errors import ModelError
from shardfold.graph import Graph, Op, Splits, TensorType
from shardfold.operators import operator_of

MOST_TRIES = 96  # sets of operand dims of one size that are tried
PRIVATE = "aten._"  # whose kernels do not check that their operands fit
FUNCTION = "shardfold.function"  # an autograd.Function, called with its own name
STAND_IN = torch.ops.shardfold.function.default
NEVER = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)

Chosen: TypeAlias = "dict[int, Way]"  # by operand
Points: TypeAlias = list[list[int]]  # of a factor, for each part


@dataclass(frozen=True, slots=True)
class Way:
    """Where a factor lies in a tensor: a dim of `outer` times points times `inner` elements."""

    dim: int
    outer: int = 1
    inner: int = 1

    def cut(self, tensor: Tensor, points: list[int]) -> Tensor:
        """The part of a tensor that has these points."""
        wide = tensor.unflatten(self.dim, (self.outer, -1, self.inner))
        taken = wide.index_select(self.dim + 1, torch.tensor(points))
        return taken.flatten(self.dim, self.dim + 2)

    def join(self, parts: Sequence[Tensor], points: Points) -> Tensor:
        """The whole of which these are the parts."""
        wide = [p.unflatten(self.dim, (self.outer, -1, self.inner)) for p in parts]
        order = torch.tensor([point for part in points for point in part]).argsort()
        return (
            torch.cat(wide, self.dim + 1)
            .index_select(self.dim + 1, order)
            .flatten(self.dim, self.dim + 2)
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A factor that holds: where it lies in operands and in results, if it does."""

    points: int
    operands: Mapping[int, Way]
    results: Mapping[int, Way]
    is_mean: bool = False
    in_ranges: bool = False  # parts must be ranges


def with_experiments(program: Program) -> Program:
    """The program with splits for every operator that no rule describes."""
    graph = program.graph
    ops = tuple(
        replace(op, splits=splits_of(graph, op, call)) if is_open(op, call) else op
        for op, call in zip(graph.ops, program.calls, strict=True)
    )
    return replace(program, graph=replace(graph, ops=ops))


def is_open(op: Op, call: Invocation) -> bool:
    """Whether an operator has no rule, and may be run to find one."""
    known = operator_of(op.kind)
    schema = getattr(call.target, "_schema", None)
    if known.rule is not None or schema is None or schema.is_mutable:
        return False
    if known.local == "own form" and op.kind != FUNCTION:
        return False
    if op.kind.startswith(PRIVATE) and len(op.operands) > 1:
        return False
    if op.kind == FUNCTION and call.arguments["name"].function is CtcLoss:
        return False  # lengths and letters that are drawn mean nothing
    return bool(op.operands) and not any(tag in call.target.tags for tag in NEVER)


@dataclass(frozen=True, slots=True)
class Experiment:
    """What was found of a call on small tensors."""

    small: Small
    factors: tuple[Found, ...]
    linear: tuple[int, ...]  # operands that may be sums not yet made

    def kept(self, needs: tuple[bool, ...]) -> tuple[tuple[int, ...], bool]:
        """The operands that autograd keeps, and whether a result, where these need a gradient."""
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            leaves = [leaf(t, need) for t, need in zip(self.small.operands, needs, strict=True)]
            try:
                return kept_by(self.small.call, leaves)
            except Exception:  # it runs without gradients only
                return (), False


CACHE: dict[object, Experiment | None] = {}


def splits_of(graph: Graph, op: Op, call: Invocation) -> Splits | None:
    """How a call can be split; None if not at all, or if it cannot be tried."""
    inputs = tuple(graph.tensors[t].type for t in op.inputs)
    results = tuple(graph.tensors[t].type for t in op.results)
    needs = tuple(graph.tensors[t].requires_grad for t in op.inputs)
    try:
        return find_splits(call, inputs, results, needs)
    except UnsteadyError:
        if op.kind.startswith("aten."):
            return None
        what = f"torch.autograd.Function {call.arguments['name']}" if op.kind == FUNCTION else ""
        raise ModelError(
            f"Operator {op.name} ({what or op.kind}, {op.origin}) gives something else when it is "
            "called again on the same numbers: it draws random numbers, or counts, and would "
            "differ between devices and from one device. Draw the numbers in forward (torch.rand, "
            "randn, bernoulli), count in a buffer, and give them to it as tensors."
        ) from None


def find_splits(
    call: Invocation,
    inputs: tuple[TensorType, ...],
    results: tuple[TensorType, ...],
    needs: tuple[bool, ...] | None = None,
) -> Splits | None:
    """As `splits_of`, for operands and results of these types.

    `needs` says which operands need a gradient: all that can have one, if it is left out.
    """
    scalars = scalars_of(call)
    for shapes in shrunk([kind.shape for kind in inputs], scalars):
        dtypes = tuple(kind.dtype for kind in inputs)
        key = (call.target, tuple(shapes), dtypes, repr(call.arguments), call.arguments.get("name"))
        if key not in CACHE:
            CACHE[key] = _experiment(call, shapes, dtypes, scalars)
        known = CACHE[key]
        if known is not None and _are_like(known.small.results, results):
            return _at_full_size(known, inputs, results, needs or (True,) * len(inputs))
    return None


def _are_like(small: Sequence[Tensor], results: Sequence[TensorType]) -> bool:
    return [r.dim() for r in small] == [len(kind.shape) for kind in results]


# -- factors


def _experiment(
    call: Invocation, shapes: Sequence[Shape], dtypes: Sequence[str], scalars: Sequence[int]
) -> Experiment | None:
    """All factors of a call on tensors of these shapes, or None if it cannot be made.

    The mode that planning was called in makes no difference, nor does it see random numbers drawn.
    """
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        for how in DRAWS:
            with torch.random.fork_rng([]):
                first = small_call(call, shapes, dtypes, how, 1)
                second = first and small_call(call, shapes, dtypes, how, 2)
                if first is None or second is None:
                    continue
                if call.target is STAND_IN and not any(r.count_nonzero() for r in first.results):
                    continue  # a user's function that gives nothing: there is nothing to see
                held = [_confirmed(found, second) for found in _candidates(first, scalars)]
                factors = _compatible([found for found in held if found is not None])
                return Experiment(first, factors, _linear(first))
    return None


def _candidates(small: Small, scalars: Sequence[int]) -> Iterator[Found]:
    """Every factor that holds in two parts; dims as they are before dims in pieces."""
    counts = _counts(small, scalars)
    used: set[tuple[int, int]] = set()
    for plain in (True, False):
        by_points: dict[int, dict[int, list[Way]]] = {}
        for k, operand in enumerate(small.operands):
            for points, way in _ways(operand.shape, () if plain else counts):
                if (k, way.dim) not in used:
                    by_points.setdefault(points, {}).setdefault(k, []).append(way)
        for points, ways in by_points.items():
            for chosen in _sets(ways, len(small.operands), _are_checked(small.call)):
                if not plain and all(way.outer == way.inner == 1 for way in chosen.values()):
                    continue
                found = _holds(small, points, chosen, _halves(points), counts)
                if found is not None:
                    if plain:
                        used |= {(k, way.dim) for k, way in chosen.items()}
                    yield found


def _counts(small: Small, scalars: Sequence[int]) -> tuple[int, ...]:
    """Numbers of repeats, groups or windows that the call may have to do with."""
    sides = [{n for t in ts for n in t.shape if n > 1} for ts in (small.operands, small.results)]
    ratios = {
        max(a, b) // min(a, b) for a in sides[0] for b in sides[1] if max(a, b) % min(a, b) == 0
    }
    return tuple(sorted((ratios | set(scalars)) & set(CONSTANTS)))


def _ways(shape: Shape, counts: Sequence[int]) -> Iterator[tuple[int, Way]]:
    """Where a factor may lie in a tensor, and its points."""
    for dim, n in enumerate(shape):
        if n > 1:
            yield n, Way(dim)
        for count in counts:
            if n % count == 0 and n // count > 1:
                yield n // count, Way(dim, outer=count)
                yield n // count, Way(dim, inner=count)


def _sets(ways: Mapping[int, list[Way]], operands: int, are_checked: bool) -> Iterator[Chosen]:
    """Every set of operands, with one way for each; the largest sets first.

    An operator that may not check its operands is given none that were cut, without their like.
    """
    choices: list[list[Way | None]] = [[*ways.get(k, ()), None] for k in range(operands)]
    if math.prod(map(len, choices)) > MOST_TRIES:  # many operands: all alike, or one of them
        first = dict.fromkeys(way for options in ways.values() for way in options)
        sets = [{k: way for k, options in ways.items() if way in options} for way in first]
        sets += [{k: way} for k, options in ways.items() for way in options]
    else:
        sets = [{k: w for k, w in enumerate(s) if w} for s in itertools.product(*choices)]
    for chosen in sorted(filter(None, sets), key=len, reverse=True):
        if are_checked or len(chosen) == len(ways):
            yield chosen


def _are_checked(call: Invocation) -> bool:
    """Whether an operator raises an error for operands that do not fit, as torch's and Python's."""
    name = str(call.target._schema.name)
    return name.startswith(("aten::", "shardfold::")) or name in OPDEFS


def _halves(points: int) -> Points:
    middle = (points + 1) // 2
    return [list(range(middle)), list(range(middle, points))]


def _thirds(points: int) -> Points:
    size = -(-points // 3)
    return [list(range(low, min(points, low + size))) for low in range(0, points, size)]


def _holds(
    small: Small, points: int, chosen: Mapping[int, Way], parts: Points, counts: Sequence[int]
) -> Found | None:
    """The factor, if the parts give what the whole gives."""
    leaves = _cut_operands(small, chosen, parts)
    try:
        made = [run(small.call, operands) for operands in leaves]
    except Exception:  # as above: this operator cannot be cut so
        return None
    if any(len(results) != len(small.results) for results in made):
        return None
    shares = [len(part) / points for part in parts]
    placed: dict[int, Way] = {}
    is_mean = False
    for k, whole in enumerate(small.results):
        pieces = [results[k].detach() for results in made]
        way = next(_joins(pieces, whole, points, parts, counts), None)
        if way is not None:
            placed[k] = way
        elif not _adds_up(pieces, whole):
            is_mean = _averages(pieces, whole, shares)
            if not is_mean:
                return None
    if is_mean and len(small.results) > 1:
        return None
    found = Found(points, dict(chosen), placed, is_mean)
    return found if _gradients_hold(small, found, leaves, made, parts) else None


def _cut_operands(small: Small, chosen: Mapping[int, Way], parts: Points) -> list[list[Tensor]]:
    any_gradient = any(gradient is not None for gradient in small.gradients)
    return [
        [
            leaf(chosen[k].cut(t, p) if k in chosen else t, any_gradient)
            for k, t in enumerate(small.operands)
        ]
        for p in parts
    ]


def _joins(
    pieces: Sequence[Tensor], whole: Tensor, points: int, parts: Points, counts: Sequence[int]
) -> Iterator[Way]:
    """Every way in which the pieces lie side by side in the whole."""
    if any(piece.dim() != whole.dim() for piece in pieces):
        return
    for dim, n in enumerate(whole.shape):
        times = n // points
        if n % points or any(
            piece.shape[dim] != times * len(part) for piece, part in zip(pieces, parts, strict=True)
        ):
            continue
        splits = {(1, times), (times, 1)}
        splits |= {(c, times // c) for c in counts if times % c == 0}
        for outer, inner in sorted(splits):
            way = Way(dim, outer, inner)
            others = [(*p.shape[:dim], *p.shape[dim + 1 :]) for p in (*pieces, whole)]
            if len(set(others)) == 1 and are_close(way.join(pieces, parts), whole):
                yield way


def _adds_up(pieces: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether the whole is a sum of pieces, none of which is the whole."""
    if not whole.is_floating_point() and not whole.is_complex():
        return False
    if any(piece.shape != whole.shape for piece in pieces):
        return False
    return are_close(torch.stack(list(pieces)).sum(0), whole)


def _averages(pieces: Sequence[Tensor], whole: Tensor, shares: Sequence[float]) -> bool:
    if any(piece.shape != whole.shape for piece in pieces) or not whole.is_floating_point():
        return False
    mean = sum(piece * share for piece, share in zip(pieces, shares, strict=True))
    return are_close(torch.as_tensor(mean), whole) and not are_close(pieces[0], whole)


def _gradients_hold(
    small: Small,
    found: Found,
    leaves: Sequence[Sequence[Tensor]],
    made: Sequence[Sequence[Tensor]],
    parts: Points,
) -> bool:
    """Whether the gradients of cut operands are the parts', and those of the others their sum."""
    each = []
    for part, operands, results in zip(parts, leaves, made, strict=True):
        share = len(part) / found.points if found.is_mean else 1.0
        sent = [
            found.results[k].cut(s, part) if k in found.results else s * share
            for k, s in enumerate(small.sent)
        ]
        try:
            each.append(gradients_of(results, sent, operands))
        except Exception:  # as above
            return False
    for k, whole in enumerate(small.gradients):
        pieces = [gradients[k] for gradients in each if gradients[k] is not None]
        if whole is None or len(pieces) < len(parts):
            if whole is not None or pieces:
                return False
            continue
        way = found.operands.get(k)
        if way is None:
            pieces, expected = [torch.stack(pieces).sum(0)], [whole]
        else:
            expected = [way.cut(whole, part) for part in parts]
        if not all(map(are_close, pieces, expected)):
            return False
    return True


def _confirmed(found: Found, other: Small) -> Found | None:
    """The factor, if it holds with other numbers and parts, too; says if parts must be ranges."""

    def holds(parts: Points) -> bool:
        again = _holds(other, found.points, found.operands, parts, _kept(found))
        return (
            again is not None and again.results == found.results and again.is_mean == found.is_mean
        )

    if not holds(_halves(found.points)) or (found.points > 2 and not holds(_thirds(found.points))):
        return None
    mixed = [list(range(0, found.points, 2)), list(range(1, found.points, 2))]
    return replace(found, in_ranges=found.points > 2 and not holds(mixed))


def _kept(found: Found) -> tuple[int, ...]:
    return tuple({n for way in found.results.values() for n in (way.outer, way.inner) if n > 1})


def _compatible(found: Sequence[Found]) -> tuple[Found, ...]:
    """Factors of which no two need the same dim; those that leave no sum first."""
    kept: list[Found] = []
    for new in sorted(found, key=lambda f: (-len(f.results), -len(f.operands))):
        if all(_fit(new, old) for old in kept):
            kept.append(new)
    return tuple(sorted(kept, key=lambda f: min((k, way.dim) for k, way in f.operands.items())))


def _fit(a: Found, b: Found) -> bool:
    for mine, theirs in ((a.operands, b.operands), (a.results, b.results)):
        for k in mine.keys() & theirs.keys():
            x, y = mine[k], theirs[k]
            if x.dim == y.dim and not (_is_above(x, y, b.points) or _is_above(y, x, a.points)):
                return False
    return True


def _is_above(x: Way, y: Way, points: int) -> bool:
    """Whether all of y, with so many points, lies inside one point of x."""
    return x.inner % (points * y.inner) == 0


# -- the rule


def _at_full_size(
    known: Experiment,
    inputs: Sequence[TensorType],
    results: Sequence[TensorType],
    needs: tuple[bool, ...],
) -> Splits | None:
    """The factors with the sizes of the call itself; those that do not carry over are left out."""
    small = known.small
    real = {
        a: b
        for t, kind in zip(small.operands, inputs, strict=True)
        for a, b in zip(t.shape, kind.shape, strict=True)
    }
    sizes: dict[str, int] = {}
    sides: list[list[list[list[tuple[Way, str]]]]] = [
        [[[] for _ in kind.shape] for kind in side] for side in (inputs, results)
    ]
    ranges, means = set(), set()
    for found in known.factors:
        name = f"i{len(sizes)}"
        ways = _scaled(found, small, inputs, results, real)
        if ways is None:
            continue
        points, placed = ways
        sizes[name] = points
        ranges |= {name} if found.in_ranges else set()
        means |= {name} if found.is_mean else set()
        for side, at in zip(sides, placed, strict=True):
            for k, way in at.items():
                side[k][way.dim].append((way, name))
    if not sizes:
        return None
    whole: set[str] = set()
    dims = tuple(
        tuple(
            tuple(
                _named(carried, n, sizes, whole)
                for carried, n in zip(tensor, kind.shape, strict=True)
            )
            for tensor, kind in zip(side, kinds, strict=True)
        )
        for side, kinds in zip(sides, (inputs, results), strict=True)
    )
    saves, saves_results = known.kept(needs)
    return Splits(
        dims[0],
        dims[1],
        tuple(sizes.items()),
        whole=frozenset(whole),
        ranges=frozenset(ranges),
        means=frozenset(means),
        linear=known.linear,
        saves=saves,
        saves_results=saves_results,
    )


def _scaled(
    found: Found,
    small: Small,
    inputs: Sequence[TensorType],
    results: Sequence[TensorType],
    real: Mapping[int, int],
) -> tuple[int, tuple[dict[int, Way], dict[int, Way]]] | None:
    """A factor's points and places at full size."""
    sizes = {
        inputs[k].shape[way.dim] / (way.outer * way.inner) for k, way in found.operands.items()
    }
    points = int(min(sizes))
    if len(sizes) != 1 or points != min(sizes) or points < 2:
        return None
    placed: dict[int, Way] = {}
    for k, way in found.results.items():
        times, rest = divmod(results[k].shape[way.dim], points)
        before = way.outer * way.inner
        if rest or (times != before and real.get(before) != times):
            return None
        if way.outer == 1:
            placed[k] = replace(way, inner=times)
        elif way.inner == 1:
            placed[k] = replace(way, outer=times)
        elif times == before:
            placed[k] = way
        else:
            return None
    return points, (dict(found.operands), placed)


def _named(
    carried: list[tuple[Way, str]], size: int, sizes: dict[str, int], whole: set[str]
) -> tuple[str, ...]:
    """The factors of one dim, major first; what is between them is never split."""
    names: list[str] = []
    left = size

    def fill(count: int) -> None:
        if count > 1:
            name = f"n{len(whole)}"
            names.append(name)
            sizes[name] = count
            whole.add(name)

    if not carried:
        return ()
    for way, name in sorted(carried, key=lambda c: -c[0].inner):
        fill(left // (sizes[name] * way.inner))
        names.append(name)
        left = way.inner
    fill(left)
    return tuple(names)


def _linear(small: Small) -> tuple[int, ...]:
    """The operands that may be sums not yet made: all together, or else one."""
    floats = tuple(
        k for k, t in enumerate(small.operands) if t.is_floating_point() or t.is_complex()
    )
    if not all(r.is_floating_point() or r.is_complex() for r in small.results):
        return ()
    sets = (floats, *((k,) for k in floats if len(floats) > 1))
    return next((chosen for chosen in sets if chosen and _passes_sums(small, chosen)), ())


def _passes_sums(small: Small, chosen: Sequence[int]) -> bool:
    """Whether the call on a sum is the sum of the calls, and so backward.

    Each summand's gradient is that of the sum; what is no sum has the sum of the gradients. Half of
    the numbers of a summand are zero, as where one device has them all.
    """
    rng = torch.Generator().manual_seed(3)
    first, second = list(small.operands), list(small.operands)
    for k in chosen:
        drawn = torch.randn(first[k].shape, generator=rng, dtype=first[k].dtype)
        first[k] = drawn * (torch.rand(drawn.shape, generator=rng) > 0.5)
        second[k] = second[k] - first[k]
    made, back = [], []
    try:
        for operands in (first, second):
            leaves = [
                leaf(t, g is not None) for t, g in zip(operands, small.gradients, strict=True)
            ]
            made.append(run(small.call, leaves))
            back.append(gradients_of(made[-1], small.sent, leaves))
    except Exception:  # as above
        return False
    if not all(are_close(x + y, z) for x, y, z in zip(*made, small.results, strict=True)):
        return False
    for k, whole in enumerate(small.gradients):
        pieces = [gradients[k] for gradients in back]
        if whole is None:
            continue
        if any(each is None for each in pieces):
            return False
        same = pieces if k in chosen else [pieces[0] + pieces[1]]  # type: ignore[operator]
        if not all(are_close(each, whole) for each in same if each is not None):
            return False
    return True
