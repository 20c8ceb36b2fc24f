"""Find the best way to split the training of a PyTorch model over many devices."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardfold.api import Planner, compare, estimate, explain, plan, plan_for, what_if
    from shardfold.errors import ShardfoldError
    from shardfold.plans import Plan
    from shardfold.runtime import parallelize
    from shardfold.runtime.checkpoint import load, save

__version__ = "0.2.0"
__all__ = [
    "Plan",
    "Planner",
    "ShardfoldError",
    "compare",
    "estimate",
    "explain",
    "load",
    "parallelize",
    "plan",
    "plan_for",
    "save",
    "what_if",
]

# Public names and where they live: importing shardfold loads none of them, nor torch.
_HOMES = {
    "Plan": "shardfold.plans",
    "Planner": "shardfold.api",
    "ShardfoldError": "shardfold.errors",
    "compare": "shardfold.api",
    "estimate": "shardfold.api",
    "explain": "shardfold.api",
    "load": "shardfold.runtime.checkpoint",
    "parallelize": "shardfold.runtime",
    "plan": "shardfold.api",
    "plan_for": "shardfold.api",
    "save": "shardfold.runtime.checkpoint",
    "what_if": "shardfold.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardfold' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
