"""The same program on one device: what every plan's numbers are compared with."""

from __future__ import annotations

import numpy as np

from shardfold.capture import Program
from shardfold.cluster import Mesh
from shardfold.run.decisions import Decisions
from shardfold.run.lower import Lowered, lower
from shardfold.run.parts import Place
from shardfold.spaces import Atoms, Space


def alone(program: Program, atoms: Atoms) -> Lowered:
    """The instructions of a mesh without axes: nothing split, nothing sent."""
    spaces = tuple(Space(rule, np.zeros((1, 0), dtype=np.int8)) for rule in atoms.rules)
    stored: dict[int, tuple[int, ...]] = dict.fromkeys(program.graph.parameters(), ())
    decisions = Decisions(Mesh(()), spaces, {}, stored, frozenset())
    return lower(program, atoms, decisions, Place((), ()))
