"""Every configuration of an operator on a mesh, and the layouts each one implies.

A configuration gives each mesh axis a factor to split, or none (NONE), or lets a pending sum
pass on that axis (PASS). The fullest part of a factor split n ways has ceil(size / n) points; a
split is legal when no part is empty and the fullest is at most a quarter larger than the even
share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from shardfold.cluster import Mesh
from shardfold.sharding.layouts import PENDING, REPLICATED, SHARED, Layouts
from shardfold.sharding.subdims import SubdimRule

NONE = -1
PASS = -2
CONFIG_WORDS = {NONE: "-", PASS: "+"}  # the words of plan files for what is no factor
MOST_UNEVEN = 1.25

Configs = NDArray[np.int8]  # (number of configurations, axes)


def is_legal_split(size: int, parts: int) -> bool:
    """Whether `size` points can be split `parts` ways.

    >>> is_legal_split(50257, 8), is_legal_split(5, 4), is_legal_split(3, 2)
    (True, False, False)
    """
    chunk = -(-size // parts)
    return size >= parts and chunk * (parts - 1) < size and chunk * parts <= MOST_UNEVEN * size


@dataclass(frozen=True, slots=True)
class Space:
    """The configurations of one operator on one mesh, as rows."""

    rule: SubdimRule
    configs: Configs

    def operand_layouts(self, position: int) -> Layouts:
        """How each configuration needs an operand to lie."""
        carried = self.rule.operands[position]
        states = self._states(carried, SHARED)
        passes = position in self.rule.rule.linear
        return np.where(self.configs == PASS, PENDING if passes else SHARED, states).astype(np.int8)

    def result_layouts(self, position: int) -> Layouts:
        """How each configuration leaves a result."""
        carried = self.rule.results[position]
        states = self._states(carried, PENDING)
        for factor in range(len(self.rule.factors)):
            if self.rule.base(factor) in self.rule.rule.resolved and factor not in carried:
                states[self.configs == factor] = REPLICATED
        return np.where(self.configs == PASS, PENDING, states).astype(np.int8)

    def _states(self, carried: Sequence[int], absent: int) -> Layouts:
        """Per axis: the sub-dim that carries the axis's factor, `absent` if none does."""
        states = np.full(self.configs.shape, REPLICATED, dtype=np.int8)
        for factor in range(len(self.rule.factors)):
            atoms = [carried.index(f) for f in self.rule.covers(factor) if f in carried]
            states[self.configs == factor] = atoms[0] if atoms else absent
        return states

    def parts(self, shape: Sequence[int]) -> NDArray[np.int64]:
        """For each configuration and factor, into how many parts the factor is split."""
        counts = np.ones((len(self.configs), len(self.rule.factors)), dtype=np.int64)
        for axis, size in enumerate(shape):
            rows = np.flatnonzero(self.configs[:, axis] >= 0)
            counts[rows, self.configs[rows, axis]] *= size
        for factor, members in self.rule.joint.items():
            counts[:, members] *= counts[:, factor : factor + 1]
        return counts


def space_of(rule: SubdimRule, mesh: Mesh) -> Space:
    """Every configuration of `rule` on `mesh` that splits each factor legally."""
    options = [i for i, can in enumerate(rule.splittable) if can]
    passing = [PASS] if rule.rule.linear else []
    per_axis = [
        [NONE, *passing, *(f for f in options if _allows(rule, f, axis.size))] for axis in mesh.axes
    ]
    grid = list(product(*per_axis))
    rows = np.array(grid, dtype=np.int8).reshape(len(grid), len(mesh.axes))
    return Space(rule, rows[_is_legal(rows, rule, mesh)])


def leaves_no_part_empty(rule: SubdimRule, row: Sequence[int], mesh: Mesh) -> bool:
    """Whether a configuration can be run at all, however uneven its parts are.

    Parts of factors whose rows must align are equal, and none is thinner than neighbours need.
    """
    named = {int(f) for f in row if f >= 0}
    if not all(rule.splittable[factor] for factor in named):
        return False
    for factor in named.union(*(rule.covers(f) for f in named)):
        pairs = zip(row, mesh.axes, strict=True)
        parts = [a.size for f, a in pairs if f >= 0 and factor in (f, *rule.covers(f))]
        least = rule.rule.least.get(rule.base(factor), 1)
        if rule.even[factor] and rule.sizes[factor] % math.prod(parts):
            return False
        if thinnest(rule.sizes[factor], parts) < least:
            return False
    return PASS not in row or bool(rule.rule.linear)


def thinnest(size: int, parts: Sequence[int]) -> int:
    """How many points the smallest part has, of a size that is cut again and again.

    >>> thinnest(5, (2, 2)), thinnest(3, (2, 2))
    (1, 0)
    """
    for count in parts:
        size -= -(-size // count) * (count - 1)
    return max(size, 0)


def _is_legal(rows: Configs, rule: SubdimRule, mesh: Mesh) -> NDArray[np.bool_]:
    """Factors that several axes split must allow them all together."""
    legal = np.ones(len(rows), dtype=bool)
    sizes = np.array(mesh.shape, dtype=np.int64)
    for factor in range(len(rule.factors)) if len(sizes) > 1 else ():
        splits = rows == factor
        for joint, members in rule.joint.items():
            splits = splits | (rows == joint) if factor in members else splits
        parts = np.where(splits, sizes, 1).prod(axis=1)
        for count in set(parts.tolist()) - {1}:
            if not _allows(rule, factor, count):
                legal &= parts != count
    for joint, members in rule.joint.items():
        if rule.base(joint) in rule.rule.ranges:
            inner = np.isin(rows, _inner(rule, members)).any(axis=1)
            legal &= ~(inner & (rows == joint).any(axis=1))
    return legal


def _inner(rule: SubdimRule, members: Sequence[int]) -> list[int]:
    """The other pieces of what goes together: split as well, no part would be a range."""
    bases = {rule.base(member) for member in members}
    return [f for f in range(len(rule.factors)) if rule.base(f) in bases and f not in members]


def _allows(rule: SubdimRule, factor: int, parts: int) -> bool:
    """Whether a factor can be split that many ways.

    Evenly where its rows must align, and no part too thin for what its neighbours need of it.
    """
    if factor in rule.joint:
        return all(_allows(rule, member, parts) for member in rule.joint[factor])
    size = rule.sizes[factor]
    if rule.even[factor] and size % parts:
        return False
    chunk = -(-size // parts)
    thinnest = size - chunk * (parts - 1)
    return is_legal_split(size, parts) and thinnest >= rule.rule.least.get(rule.base(factor), 1)
