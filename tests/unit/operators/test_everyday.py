"""Everyday functions of torch are split as they can be, and in parts give what they give whole.

Each function is captured as a model is. A factor counts if every operator of the capture has a
configuration that splits it, with nothing moved between them; then two devices run their parts,
forward and backward, and what they give is joined and compared with torch's own call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardfold.capture import Invocation
from shardfold.capture.convert import _Converter
from shardfold.capture.experiment import with_experiments
from shardfold.capture.export import export
from shardfold.capture.program import Program
from shardfold.cluster import Mesh
from shardfold.cluster.mesh import Axis
from shardfold.graph import Graph
from shardfold.operators import rules_of
from shardfold.runtime.ops import Context, Site, localise
from shardfold.runtime.shards import Extent, Place, extent
from shardfold.sharding import Space, Subdims, find_subdims, space_of
from shardfold.sharding.layouts import PENDING, REPLICATED, forward_states

from .everyday import LISTED, Everyday

MESH = Mesh((Axis("a", 2, 0),))
PLACES = [Place.of_rank(rank, (2,)) for rank in range(2)]
CHUNK = 20
Dims = list[list[str]]  # per dim the letters and counts in it
# What is not split as it could be, and why.
LACKING = {
    "F.group_norm": "the sums of a group are not exchanged over space",
    "F.instance_norm": "nor are those of a channel",
    "torch.addmv": "what is added must be added by one part alone",
    "F.affine_grid": "the number of samples is among its arguments",
}


def parsed(side: str) -> list[Dims]:
    """`a (b 4), c -> ...`: per tensor and dim, its tokens."""
    if not side.strip():
        return [[]]
    return [
        [(merged or single).split() for merged, single in re.findall(r"\(([^)]*)\)|(\S+)", tensor)]
        for tensor in side.split(",")
    ]


def letters(side: Sequence[Dims]) -> list[str]:
    found = [token for dims in side for dim in dims for token in dim if token.isalpha()]
    return list(dict.fromkeys(found))


class Many(nn.Module):
    """Some of the functions, one after the other."""

    def __init__(self, some: Sequence[Everyday]) -> None:
        super().__init__()
        self.some = some
        self.given = nn.ParameterList(
            nn.Parameter(torch.empty(shape)) for f in some for _, shape in floats(f)
        )

    def forward(self, others: list[Tensor]) -> list[list[Tensor]]:
        given, rest, found = iter(self.given), iter(others), []
        for each in self.some:
            is_float = dict(floats(each))
            operands = [
                next(given) if k in is_float else next(rest) for k in range(len(each.shapes))
            ]
            found.append(pytree.tree_leaves(each.function(*operands)))
        return found


def dtype_of(each: Everyday, position: int) -> torch.dtype:
    if position in each.bools:
        return torch.bool
    return torch.long if position in each.ints else torch.float32


def floats(each: Everyday) -> list[tuple[int, tuple[int, ...]]]:
    fixed = {*each.ints, *each.bools, *each.fixed}
    return [(k, shape) for k, shape in enumerate(each.shapes) if k not in fixed]


@dataclass
class Captured:
    """One function as it was captured: its operators, their calls, its operands and results."""

    graph: Graph
    calls: list[Invocation]
    operands: list[int]
    results: list[int]
    constants: dict[int, Tensor]


@cache
def captured(chunk: int) -> list[Captured]:
    some = LISTED[chunk * CHUNK : (chunk + 1) * CHUNK]
    others = [
        torch.empty(each.shapes[k], dtype=dtype_of(each, k), device="meta")
        for each in some
        for k in sorted({*each.ints, *each.bools, *each.fixed})
    ]
    with torch.device("meta"):
        root = Many(some)
    converter = _Converter(export(root, (others,), {}).program)
    converter._inputs()
    outputs = converter._walk(converter.program.graph_module, grad=True)
    graph = Graph(tuple(converter.graph.tensors), tuple(converter.graph.ops), 0)
    program = with_experiments(
        Program(graph, tuple(converter.graph.calls), converter.graph.sources, None)
    )
    made = iter(pytree.tree_leaves(outputs))
    names = {t.name: k for k, t in enumerate(graph.tensors)}
    given = iter(sorted((n for n in names if n.startswith("given.")), key=lambda n: int(n[6:])))
    rest = iter(sorted(k for k, s in converter.graph.sources.items() if s.role == "input"))
    found = []
    for each in some:
        is_float = dict(floats(each))
        operands = [
            names[next(given)] if k in is_float else next(rest) for k in range(len(each.shapes))
        ]
        results = [next(made) for _ in parsed(each.splits.split("->")[1])]
        found.append(_only(program, operands, results))
    return found


def _only(program: Program, operands: list[int], results: list[int]) -> Captured:
    needed, kept = set(results), []
    for k, op in reversed(list(enumerate(program.graph.ops))):
        if needed.intersection(op.results):
            needed.update(op.inputs)
            kept.append(k)
    kept.reverse()
    graph = replace(program.graph, ops=tuple(program.graph.ops[k] for k in kept))
    constants = {k: s.value for k, s in program.sources.items() if s.value is not None}
    return Captured(graph, [program.calls[k] for k in kept], operands, results, constants)


@dataclass
class Split:
    """A factor through all operators: the state of each tensor, each operator's configuration."""

    states: dict[int, int]
    rows: list[int]


@dataclass
class Setting:
    """A function's operators on two devices."""

    each: Everyday
    made: Captured
    subdims: Subdims
    spaces: list[Space]

    @classmethod
    def of(cls, each: Everyday, made: Captured) -> Setting:
        subdims = find_subdims(made.graph, rules_of(made.graph))
        return cls(each, made, subdims, [space_of(rule, MESH) for rule in subdims.rules])

    def splits(self, letter: str) -> Iterator[Split]:
        """Every way to split a factor of the notation with nothing moved."""
        before, after = map(parsed, self.each.splits.split("->"))
        choices = []
        for tensor, dims in zip(self.made.operands, before, strict=True):
            at = next((d for d, dim in enumerate(dims) if letter in dim), None)
            choices.append(self._pieces(tensor, at))
        wanted = []
        for tensor, dims in zip(self.made.results, after, strict=True):
            at = next((d for d, dim in enumerate(dims) if letter in dim), None)
            wanted.append(self._pieces(tensor, at) if at is not None else [PENDING, REPLICATED])
        for chosen in product(*choices):
            states = dict(zip(self.made.operands, chosen, strict=True))
            for split in self._through(states, [], 0):
                ends = [split.states.get(r, REPLICATED) for r in self.made.results]
                if all(e in w for e, w in zip(ends, wanted, strict=True)):
                    yield split

    def _pieces(self, tensor: int, dim: int | None) -> list[int]:
        if dim is None:
            return [REPLICATED]
        return [k for k, d in enumerate(self.subdims.dims[tensor]) if d == dim]

    def _through(self, states: dict[int, int], rows: list[int], at: int) -> Iterator[Split]:
        if at == len(self.spaces):
            yield Split(states, rows)
            return
        op, space = self.made.graph.ops[at], self.spaces[at]
        before = [forward_states(space.operand_layouts(k)) for k in range(len(op.inputs))]
        after = [space.result_layouts(k) for k in range(len(op.results))]
        for row in range(len(space.configs)):
            given = zip(op.inputs, before, strict=True)
            if all(states.get(t, REPLICATED) == layouts[row, 0] for t, layouts in given):
                made = {t: int(a[row, 0]) for t, a in zip(op.results, after, strict=True)}
                yield from self._through(states | made, [*rows, row], at + 1)

    def exchanges(self, split: Split) -> bool:
        """Whether an operator sends something inside, which takes processes."""
        for space, row in zip(self.spaces, split.rows, strict=True):
            factor = int(space.configs[row, 0])
            if factor >= 0 and any(
                e.factor == space.rule.base(factor) for e in space.rule.rule.exchanges
            ):
                return True
        return False

    def extent(self, split: Split, tensor: int, place: Place) -> Extent:
        rank = len(self.made.graph.tensors[tensor].type.shape)
        pieces = self.subdims.tensors[tensor], self.subdims.dims[tensor]
        return extent(*pieces, rank, (split.states.get(tensor, REPLICATED),), place)

    def run(self, split: Split, leaves: dict[int, Tensor], place: Place) -> dict[int, Tensor]:
        """All tensors of one device."""
        context = Context(None, torch.device("cpu"), double=True)  # type: ignore[arg-type]
        values = {**self.made.constants, **leaves}
        for number, op in enumerate(self.made.graph.ops):
            inputs = tuple(self.extent(split, t, place) for t in op.inputs)
            results = tuple(self.extent(split, t, place) for t in op.results)
            space, row = self.spaces[number], split.rows[number]
            config = tuple(space.configs[row].tolist())
            site = Site(
                number, op, self.made.calls[number], space.rule, config, place, inputs, results
            )
            made = localise(site)([values[t] for t in op.inputs], context)
            flat = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
            values |= dict(zip(op.results, flat, strict=True))
        return values


def cut(tensor: Tensor, part: Extent) -> Tensor:
    wide = tensor.reshape(part.subdims)
    for d, (low, high) in enumerate(part.bounds):
        wide = wide.narrow(d, low, high - low)
    return wide.reshape(part.shape)


def draw(each: Everyday, position: int, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    if position in each.bools:
        return torch.rand(shape, generator=rng) > 0.5
    if position in each.ints:
        return torch.randint(each.high, shape, generator=rng)
    normal = torch.randn(shape, generator=rng, dtype=torch.float64)
    if each.draw == "positive":
        return torch.rand(shape, generator=rng, dtype=torch.float64) * 0.8 + 0.1
    if each.draw == "signs" and position == len(each.shapes) - 1:
        return torch.where(normal > 0, 1.0, -1.0).double()
    if each.draw == "definite" and shape[-1] == shape[-2]:
        return normal @ normal.mT + shape[-1] * torch.eye(shape[-1], dtype=torch.float64)
    return normal


def leaf(tensor: Tensor, with_gradient: bool) -> Tensor:
    return tensor.detach().clone().requires_grad_(with_gradient and tensor.is_floating_point())


def gradients(
    results: list[Tensor], sent: list[Tensor], leaves: list[Tensor]
) -> list[Tensor | None]:
    pairs = [(r, s.to(r.dtype)) for r, s in zip(results, sent, strict=True) if r.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    made = iter(
        torch.autograd.grad([r for r, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True)
    )
    return [next(made) if t.requires_grad else None for t in leaves]


def close(each: Everyday, a: Tensor, b: Tensor) -> bool:
    tolerance = 1e-5 if each.is_coarse else 1e-9
    same = torch.allclose(a.to(b.dtype), b, tolerance, tolerance, equal_nan=True)
    return a.shape == b.shape and same


def joined(parts: list[Tensor], extents: list[Extent], state: int, whole: Tensor) -> Tensor:
    """The whole of which these are the parts, or their sum."""
    if state == PENDING:
        return parts[0] + parts[1]
    if state < 0:
        return parts[0]
    wide = [p.reshape(e.lengths) for p, e in zip(parts, extents, strict=True)]
    return torch.cat(wide, state).reshape(whole.shape)


def difference(setting: Setting, split: Split) -> str:
    """What two devices' parts give otherwise than the whole."""
    each, made = setting.each, setting.made
    rng = torch.Generator().manual_seed(5)
    drawn = [draw(each, k, shape, rng) for k, shape in enumerate(each.shapes)]
    whole = [leaf(t, k not in each.fixed) for k, t in enumerate(drawn)]
    results = pytree.tree_leaves(each.function(*whole))
    sent = [torch.randn(r.shape, generator=rng, dtype=torch.float64) for r in results]
    expected = gradients(results, sent, whole)
    outcome = []
    for place in PLACES:
        extents = [setting.extent(split, t, place) for t in made.operands]
        cuts = [cut(t, e) for t, e in zip(drawn, extents, strict=True)]
        mine = [leaf(t, k not in each.fixed) for k, t in enumerate(cuts)]
        values = setting.run(split, dict(zip(made.operands, mine, strict=True)), place)
        parts = [values[t] for t in made.results]
        back = [
            cut(s, setting.extent(split, t, place)) for s, t in zip(sent, made.results, strict=True)
        ]
        outcome.append((parts, gradients(parts, back, mine)))
    for k, tensor in enumerate(made.results):
        extents = [setting.extent(split, tensor, place) for place in PLACES]
        found = joined(
            [o[0][k].detach() for o in outcome], extents, split.states.get(tensor, -1), results[k]
        )
        if not close(each, found, results[k].detach()):
            return f"result {k}"
    for k, (tensor, gradient) in enumerate(zip(made.operands, expected, strict=True)):
        parts = [o[1][k] for o in outcome]
        if gradient is None or any(p is None for p in parts):
            if any(p is not None and p.any() for p in (gradient, *parts)):
                return f"no gradient of operand {k}"
            continue
        state = split.states.get(tensor, REPLICATED)
        extents = [setting.extent(split, tensor, place) for place in PLACES]
        state = PENDING if state == REPLICATED else state
        found = joined(parts, extents, state, gradient)
        if not close(each, found, gradient) and not (
            state == PENDING and close(each, parts[0], gradient)
        ):
            return f"gradient of operand {k}"
    return ""


def setting_of(number: int) -> Setting:
    return Setting.of(LISTED[number], captured(number // CHUNK)[number % CHUNK])


def lacking(setting: Setting) -> list[str]:
    """The factors that are not split though they could be; fails if one is split wrongly."""
    before, after = map(parsed, setting.each.splits.split("->"))
    found = []
    for letter in letters([*before, *after]):
        split = next(setting.splits(letter), None)
        if split is None:
            found.append(letter)
        elif not setting.exchanges(split):
            wrong = difference(setting, split)
            assert not wrong, f"{setting.each}: {letter} in two parts gives another {wrong}"
    return found


@pytest.mark.parametrize("number", range(len(LISTED)), ids=[each.name for each in LISTED])
def test_an_everyday_function_is_split_as_it_can_be(number: int) -> None:
    assert bool(lacking(setting_of(number))) == (LISTED[number].name in LACKING)


def test_nearly_all_are() -> None:
    assert len(LISTED) >= 250
    assert len(LACKING) <= 0.05 * len(LISTED)


def test_the_page_lists_them_all() -> None:
    text = (Path(__file__).parents[3] / "docs" / "results" / "operators.md").read_text()
    rows = re.findall(r"^\| (.*?) \| `(.*?)` \|", text, re.MULTILINE)
    assert rows == [(each.name, each.splits.strip()) for each in LISTED]
