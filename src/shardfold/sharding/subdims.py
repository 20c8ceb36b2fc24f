"""Splits carried through reshapes: every tensor dim as a product of sub-dims.

A view that merges batch and sequence, or splits heads from hidden, relates a dim to several
factors. The finest grouping that all operators agree on is found once for the whole graph: dims
that one factor runs over are one class (union-find), each class has *cuts* (the suffix products
at which some view divides it), and cuts flow through views until nothing changes. The pieces
between cuts are the class's sub-dims. Layouts and configs are stated on sub-dims, so a split of the
sequence survives a merge with the batch, and the three parts of a packed q-k-v projection can
each be split by heads. A view whose cuts contradict (12 x 64 read as 8 x 96) carries nothing.

    linear out 768 -> view 12 x 64      cuts of 768: {64}      sub-dims: 12, 64
    packed 2304 -> split in 3, then view  cuts: {768, 64}      sub-dims: 3, 12, 64
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from shardfold.graph import Graph
from shardfold.operators.notation import Rule

WHOLE = -1


@dataclass(frozen=True, slots=True)
class SubdimRule:
    """A rule over sub-dims: per operand and result, the factor index that each sub-dim carries.

    Operators that are alike share one object.
    """

    rule: Rule
    factors: tuple[str, ...]
    sizes: tuple[int, ...]
    splittable: tuple[bool, ...]
    even: tuple[bool, ...]  # a strided factor's parts must be equal, or its rows misalign
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    joint: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def covers(self, factor: int) -> tuple[int, ...]:
        """The factors that are split where this one is: itself, or those that it stands for."""
        return self.joint.get(factor, (factor,))

    def base(self, factor: int) -> str:
        """The name of the rule's factor that this atomic factor is (a part of)."""
        return self.factors[factor].partition(".")[0]


@dataclass(frozen=True, slots=True)
class Subdims:
    """The sub-dims of every tensor (sizes, dims flattened), and every operator's rule on them."""

    tensors: tuple[tuple[int, ...], ...]
    dims: tuple[tuple[int, ...], ...]  # per tensor, per sub-dim: the dim it belongs to
    classes: tuple[tuple[int, ...], ...]  # per tensor, per sub-dim: its identity across the graph
    rules: tuple[SubdimRule, ...]
    factors: tuple[tuple[int, ...], ...]  # per operator, per factor: its identity


@dataclass(frozen=True, slots=True)
class _View:
    """The dim `whole` (a node) is the product of the nodes `parts`, major first, in operator op."""

    op: int
    whole: int
    parts: tuple[int, ...]


class _Classes:
    """Union-find over dims and factors."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []

    def add(self, size: int) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        return len(self.parent) - 1

    def find(self, node: int) -> int:
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def union(self, a: int, b: int) -> None:
        root, other = self.find(a), self.find(b)
        self.parent[max(root, other)] = min(root, other)


def find_subdims(graph: Graph, rules: Sequence[Rule]) -> Subdims:
    """Find the sub-dims of every tensor, and rewrite every rule over them."""
    kept = list(rules)
    while True:
        classes = _Classes()
        tensor_nodes = [[classes.add(n) for n in t.type.shape] for t in graph.tensors]
        factor_nodes = [{f: classes.add(rule.sizes[f]) for f in rule.factors} for rule in kept]
        views = _connect(graph, kept, classes, tensor_nodes, factor_nodes)
        cuts, broken = _propagate(classes, views)
        if broken is None:
            return _expand(graph, kept, classes, cuts, tensor_nodes, factor_nodes)
        kept[broken.op] = _without_merges(kept[broken.op])


def _sides(
    graph: Graph, op_index: int, rule: Rule
) -> list[tuple[int, tuple[tuple[str, ...], ...]]]:
    op = graph.ops[op_index]
    tensors = (*op.inputs, *op.results)
    return list(zip(tensors, (*rule.operands, *rule.results), strict=True))


def _connect(
    graph: Graph,
    rules: Sequence[Rule],
    classes: _Classes,
    tensor_nodes: list[list[int]],
    factor_nodes: list[dict[str, int]],
) -> list[_View]:
    views = []
    for i, rule in enumerate(rules):
        for tensor, dims in _sides(graph, i, rule):
            for node, dim in zip(tensor_nodes[tensor], dims, strict=True):
                if len(dim) == 1:
                    if classes.size[node] == rule.sizes[dim[0]]:
                        classes.union(node, factor_nodes[i][dim[0]])
                elif dim:
                    views.append(_View(i, node, tuple(factor_nodes[i][f] for f in dim)))
    return views


def _propagate(classes: _Classes, views: list[_View]) -> tuple[dict[int, set[int]], _View | None]:
    """Let cuts flow through the views until nothing changes, or a view contradicts them."""
    cuts: dict[int, set[int]] = {}
    changed = True
    while changed:
        changed = False
        for view in views:
            whole = classes.find(view.whole)
            found = cuts.setdefault(whole, set())
            outer = classes.size[view.whole]
            below = outer
            for part in view.parts:
                above, below = below, below // classes.size[part]
                inner = cuts.setdefault(classes.find(part), set())
                up = {below * c for c in inner} | ({below} if 1 < below < outer else set())
                inside = [c for c in found if below < c < above]
                if any(c % below or classes.size[part] % (c // below) for c in inside):
                    return cuts, view
                down = {c // below for c in inside}
                if up - found or down - inner:
                    changed = True
                    found |= up
                    inner |= down
            if below != 1 or not _is_chain(found, outer):
                return cuts, view
    return cuts, None


def _is_chain(cuts: set[int], size: int) -> bool:
    ordered = [*sorted(cuts), size]
    return all(b % a == 0 for a, b in pairwise(ordered))


def _without_merges(rule: Rule) -> Rule:
    """The rule without its merged dims; their factors are no longer carried anywhere."""
    lost = {
        f for side in (*rule.operands, *rule.results) for dim in side if len(dim) > 1 for f in dim
    }
    clean = [
        tuple(tuple(() if lost.intersection(dim) else dim for dim in tensor) for tensor in side)
        for side in (rule.operands, rule.results)
    ]
    return replace(rule, operands=clean[0], results=clean[1])


def _expand(
    graph: Graph,
    rules: Sequence[Rule],
    classes: _Classes,
    cuts: dict[int, set[int]],
    tensor_nodes: list[list[int]],
    factor_nodes: list[dict[str, int]],
) -> Subdims:
    pieces: dict[int, tuple[int, ...]] = {}

    def atoms_of(node: int) -> tuple[int, ...]:
        root = classes.find(node)
        if root not in pieces:
            size = classes.size[root]
            bounds = [size, *sorted(cuts.get(root, ()), reverse=True), 1]
            found = tuple(a // b for a, b in pairwise(bounds))
            pieces[root] = found if size != 1 else (1,)
        return pieces[root]

    tensors, dims, tensor_classes = [], [], []
    for nodes in tensor_nodes:
        sized = [(i, k, n) for i, node in enumerate(nodes) for k, n in enumerate(atoms_of(node))]
        tensors.append(tuple(n for _, _, n in sized))
        dims.append(tuple(i for i, _, _ in sized))
        tensor_classes.append(tuple(_class_id(classes, nodes[i], k) for i, k, _ in sized))
    atomic, identities = [], []
    shared: dict[object, SubdimRule] = {}
    for i, rule in enumerate(rules):
        identities.append(
            tuple(
                _class_id(classes, factor_nodes[i][f], k)
                for f in rule.factors
                for k in range(len(atoms_of(factor_nodes[i][_leading(rule, f)])))
            )
        )
        sides = [tensors[t] for t in (*graph.ops[i].inputs, *graph.ops[i].results)]
        key = (id(rule), *sides)
        if key not in shared:
            shared[key] = _expand_rule(graph, i, rule, tensor_nodes, factor_nodes[i], atoms_of)
        atomic.append(shared[key])
    return _identify(graph, tensors, dims, tensor_classes, atomic, identities)


def _identify(
    graph: Graph,
    tensors: list[tuple[int, ...]],
    dims: list[tuple[int, ...]],
    classes: list[tuple[int, ...]],
    rules: list[SubdimRule],
    factors: list[tuple[int, ...]],
) -> Subdims:
    """Give sub-dims that some operator carries from tensor to tensor one identity."""
    same: dict[int, int] = {}

    def find(atom: int) -> int:
        root = atom
        while same.get(root, root) != root:
            root = same[root]
        while same.get(atom, atom) != root:
            same[atom], atom = root, same.get(atom, atom)
        return root

    for op, rule, identities in zip(graph.ops, rules, factors, strict=True):
        sides = zip((*op.inputs, *op.results), (*rule.operands, *rule.results), strict=True)
        for tensor, carried in sides:
            for atom, factor in zip(classes[tensor], carried, strict=True):
                if factor != WHOLE and atom != identities[factor]:
                    a, b = find(atom), find(identities[factor])
                    same[max(a, b)] = min(a, b)
    return Subdims(
        tuple(tensors),
        tuple(dims),
        tuple(tuple(find(c) for c in found) for found in classes),
        tuple(rules),
        tuple(tuple(find(c) for c in found) for found in factors),
    )


def _leading(rule: Rule, factor: str) -> str:
    """The factor whose pieces this one has: of several that are split together, the first."""
    return rule.joint[factor][0] if factor in rule.joint else factor


def _class_id(classes: _Classes, node: int, atom: int) -> int:
    return classes.find(node) * 64 + atom


def _expand_rule(
    graph: Graph,
    op_index: int,
    rule: Rule,
    tensor_nodes: list[list[int]],
    nodes: dict[str, int],
    atoms_of: Callable[[int], tuple[int, ...]],
) -> SubdimRule:
    names: list[str] = []
    sizes: list[int] = []
    splittable: list[bool] = []
    index: dict[str, list[int]] = {}
    strided: set[int] = set()
    for factor in rule.factors:
        pieces = atoms_of(nodes[_leading(rule, factor)])
        index[factor] = list(range(len(names), len(names) + len(pieces)))
        for k, size in enumerate(pieces):
            names.append(factor if len(pieces) == 1 else f"{factor}.{k}")
            sizes.append(size)
            splittable.append(size > 1 and (k == 0 or factor not in rule.ranges))
    sides = []
    for tensor, dims in _sides(graph, op_index, rule):
        carried: list[int] = []
        for node, dim in zip(tensor_nodes[tensor], dims, strict=True):
            pieces = atoms_of(node)
            inner = [i for f in dim for i in index[f] if sizes[i] > 1 or len(index[f]) > 1]
            if math.prod(pieces) != math.prod(rule.sizes[f] for f in dim) and dim:
                # A strided factor: both sides must be one piece, or it cannot be split.
                if len(pieces) == 1 and len(index[dim[0]]) == 1:
                    carried.append(index[dim[0]][0])
                    strided.add(index[dim[0]][0])
                else:
                    for i in index[dim[0]]:
                        splittable[i] = False
                    carried.extend([WHOLE] * len(pieces))
            elif dim and len(inner) == len(pieces):
                carried.extend(inner)
            else:
                for i in inner:
                    splittable[i] = False
                carried.extend([WHOLE] * len(pieces))
        sides.append(tuple(carried))
    count = len(rule.operands)
    joint = {
        own: (lead, *(index[other][0] for other in rule.joint[factor][1:]))
        for factor in index.keys() & rule.joint.keys()
        for own, lead in zip(index[factor], index[rule.joint[factor][0]], strict=True)
    }
    for own, members in joint.items():
        splittable[own] &= all(splittable[i] for i in members)
        sizes[own] = min(sizes[i] for i in members)
    for i in (i for factor in index.keys() & rule.whole for i in index[factor]):
        splittable[i] = False
    return SubdimRule(
        rule,
        tuple(names),
        tuple(sizes),
        tuple(splittable),
        tuple(i in strided for i in range(len(names))),
        tuple(sides[:count]),
        tuple(sides[count:]),
        joint,
    )
