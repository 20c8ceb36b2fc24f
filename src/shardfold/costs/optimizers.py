"""The optimizers: what each keeps of a parameter between steps, and what its update passes over.

A new one is a line in `OPTIMIZERS`; one that `shardfold train` and `calibrate` are to run is built
in `UPDATES` of `runtime/training.py`. Until it is measured, it is priced by its passes over memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardfold.errors import InputError, nearest


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What an update keeps and touches.

    PyTorch updates all parameters of a GPU at once. AdamW takes the square roots of all second
    moments first: `copies` of a state, of every parameter, are there until the update is done.
    """

    name: str
    states: int  # tensors beside each parameter
    memory_passes: int  # over tensors of its size, if each is read and written once
    flops: float  # of an item
    passes_of_torch: int  # what its kernels for many tensors make of that
    copies: int = 0


OPTIMIZERS: Mapping[str, Optimizer] = {
    each.name: each
    for each in (
        Optimizer("sgd", 0, 3, 2.0, 4),
        Optimizer("momentum", 1, 5, 4.0, 11),
        Optimizer("adam", 2, 7, 12.0, 25, copies=1),
        Optimizer("adamw", 2, 7, 14.0, 27, copies=1),
    )
}


def optimizer_named(name: str) -> Optimizer:
    """The optimizer of that name."""
    if name not in OPTIMIZERS:
        raise InputError(f"Unknown optimizer {name!r}. {nearest(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]
