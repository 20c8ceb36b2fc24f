"""The state of the random generators, as plain values and tensors.

All ranks of a plan are given the same batches, so they must draw alike: rank 0's state is saved,
and every rank takes it up.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

PREFIX = "random/"


def generator_tensors() -> dict[str, Tensor]:
    """The states of torch's generators."""
    found = {f"{PREFIX}cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found[f"{PREFIX}cuda"] = torch.cuda.get_rng_state()
    return found


def restore_tensors(found: dict[str, Tensor]) -> None:
    """Set torch's generators."""
    torch.set_rng_state(found[f"{PREFIX}cpu"])
    if f"{PREFIX}cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found[f"{PREFIX}cuda"])


def generator_values() -> dict[str, Any]:
    """The states of Python's and NumPy's generators."""
    version, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), int(place), int(has_gauss), float(cached)],
    }


def restore_values(found: dict[str, Any]) -> None:
    """Set Python's and NumPy's generators."""
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words), gauss))
    keys, place, has_gauss, cached = found["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), place, has_gauss, cached))
