"""Optimizers: what an update keeps beside the parameters, and who knows them by name."""

from __future__ import annotations

import pytest
import torch

from allocations import Allocations
from shardfold.costs.kernels import PASSES
from shardfold.costs.optimizers import OPTIMIZERS, optimizer_named
from shardfold.costs.profile import FAMILIES
from shardfold.errors import InputError
from shardfold.runtime.training import UPDATES


def test_every_optimizer_is_priced_measured_and_run() -> None:
    assert set(UPDATES) == set(OPTIMIZERS)
    for name, optimizer in OPTIMIZERS.items():
        assert optimizer.memory_passes <= optimizer.passes_of_torch
        assert f"update.{name}" in PASSES
        assert f"update.{name}" in FAMILIES


def test_an_unknown_optimizer_is_named_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"Unknown optimizer 'adamv'.*adamw"):
        optimizer_named("adamv")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_copies_are_what_torch_makes_while_it_updates_all_at_once(name: str) -> None:
    """Every tensor that a second step allocates, and how much of that is there at once."""
    parameters = [torch.nn.Parameter(torch.ones(n, 8)) for n in (64, 32, 96)]
    made = UPDATES[name](parameters, lr=0.1)
    made.param_groups[0]["foreach"] = True
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    with Allocations() as seen:
        made.step()
    whole = sum(parameter.nbytes for parameter in parameters)
    assert seen.most == pytest.approx(OPTIMIZERS[name].copies * whole, abs=whole / 20)
