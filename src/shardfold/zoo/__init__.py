"""Real models to plan: those of the papers and those of today, built from configurations.

The catalogue is plain data; torch is imported when a model is built, and transformers only
for the models that come from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardfold.zoo.catalog import Entry, entry, names

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Entry", "build", "entry", "from_config", "names"]


def build(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    device: str = "meta",
    dtype: torch.dtype | str | None = None,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model in training mode and a batch for it: `module(*args, **kwargs)` is the loss.

    On the default `meta` device neither weights nor inputs take memory. On a real device both
    are random, and the same on every call.
    """
    known = entry(name)
    from shardfold.zoo import construct

    return construct.build(
        known, batch=batch, seq=seq, layers=layers, hidden=hidden, device=device, dtype=dtype
    )


def from_config(
    path: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    layers: int | None = None,
    device: str = "meta",
    dtype: torch.dtype | str | None = None,
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """As `build`, for a Hugging Face `config.json`; nothing is downloaded."""
    from shardfold.zoo import construct

    return construct.from_config(
        path, batch=batch, seq=seq, layers=layers, device=device, dtype=dtype
    )
