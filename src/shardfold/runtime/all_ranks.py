"""Agreement of all ranks: an error on one rank is raised on every rank.

A rank that gave up alone would leave the others waiting for it in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.errors import RunError, ShardfoldError
from shardfold.plans.build import installed_versions

T = TypeVar("T")


SHOWN = 5  # tensors that are named
CHUNK = 1 << 22  # elements of a tensor that are summed up at once


def is_shared() -> bool:
    """Whether several processes take part."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def agreed(function: Callable[[], T]) -> T:
    """The result of `function`, if it has one on every rank; else an error on every rank."""
    if not is_shared():
        return function()
    failed: ShardfoldError | None = None
    try:
        found = function()
    except ShardfoldError as error:
        failed = error
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if failed is None else str(failed))
    if failed is not None:
        raise failed
    for rank, said in enumerate(told):
        if said is not None:
            raise RunError(f"Rank {rank} cannot run the plan, so no rank does: {said}")
    return found


def versions() -> dict[str, str]:
    """Of the code that ranks run, which must be the same."""
    found = installed_versions("shardfold", "torch")
    return {f"version of {name}": version for name, version in found.items()}


def digest(text: str) -> str:
    """A short name for a long text.

    >>> digest("plan")
    '8eb3fa28'
    """
    return sha256(text.encode()).hexdigest()[:8]


def check_alike(facts: Mapping[str, str], advice: str) -> None:
    """Refuse to start, on every rank, where the ranks were given different things."""
    if not is_shared():
        return
    told: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(told, dict(facts))
    names = list(dict.fromkeys(name for each in told for name in each))
    differing = [name for name in names if len({each.get(name) for each in told}) > 1]
    if not differing:
        return
    shown = "; ".join(_told(name, told) for name in differing[:SHOWN])
    more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    raise RunError(f"The ranks were not started alike. {shown}{more}. {advice}")


def _told(name: str, told: Sequence[Mapping[str, str]]) -> str:
    """Who has what: `seed: 0 on rank 0, 2, 3, but 5 on rank 1`."""
    who: dict[str, list[int]] = {}
    for rank, each in enumerate(told):
        who.setdefault(each.get(name, "nothing"), []).append(rank)
    parts = (f"{value} on rank {_listed(ranks)}" for value, ranks in who.items())
    return f"{name}: {', but '.join(parts)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")


@torch.no_grad()
def fingerprint(tensor: Tensor) -> str:
    """Two sums of a tensor, one by position: what other values, or another order, would change."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    total = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for part in flat.split(CHUNK):
        wide = part.double()
        ramp = torch.arange(len(part), device=tensor.device, dtype=torch.float64) % 1021 + 1
        total += torch.stack([wide.sum(), (wide * ramp).sum()])
    return f"{tuple(tensor.shape)} {total[0].item():.17g} {total[1].item():.17g}"


def check_tensors_alike(found: Mapping[str, str]) -> None:
    """Refuse weights or buffers that differ between ranks: every copy must start alike."""
    if not is_shared():
        return
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, digest(repr(sorted(found.items()))))
    if len(set(told)) > 1:
        short = {name: digest(value) for name, value in found.items()}
        check_alike(
            short,
            "Seed all ranks alike before building the model, or load the same checkpoint on all.",
        )
