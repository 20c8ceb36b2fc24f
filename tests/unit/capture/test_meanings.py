"""What forward does is right under a plan, or refused by name: never silently otherwise.

The oracle is the module itself in plain PyTorch, float64: loss, gradients, buffers and parameters
after each of two or three forward and backward passes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardfold.capture import capture_program
from shardfold.errors import ShardfoldError
from shardfold.operators import rules_of
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.sharding import find_subdims

from . import meanings

CASES = {
    name: case
    for name, case in vars(meanings).items()
    if isinstance(case, type) and issubclass(case, nn.Module) and hasattr(case, "steps")
    if name != "Case"
}
RIGHT: set[str] = set()
REFUSED: dict[str, str] = {}


def as_case(tree: Any, case: Any) -> Any:
    """Copies of a batch, in the case's dtype."""

    def copied(t: Tensor) -> Tensor:
        return t.to(dtype_of(case), copy=True) if t.is_floating_point() else t.clone()

    return pytree.tree_map_only(Tensor, copied, tree)


def dtype_of(case: Any) -> torch.dtype:
    found: torch.dtype = getattr(case, "dtype", torch.float64)
    return found


def built(name: str) -> Any:
    return CASES[name]().to(dtype_of(CASES[name]))


def loss_of(case: Any, output: Any) -> Tensor:
    found: Tensor = case.loss(output) if hasattr(case, "loss") else output
    return found


def trained(module: nn.Module, case: Any, steps: Any) -> list[dict[str, Tensor]]:
    """What is there after each step: the loss, gradients, buffers, parameters."""
    found = []
    for args, kwargs in steps:
        module.zero_grad()
        args, kwargs = as_case((args, kwargs), case)
        output = module(*args, **kwargs)
        loss = output if isinstance(output, Tensor) else loss_of(case, output)
        loss.backward()
        state = {"loss": loss.detach()}
        for key, parameter in module.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                state[f"gradient of {key}"] = grad.to_dense() if grad.is_sparse else grad.clone()
            state[key] = parameter.detach().clone()
        state |= {key: buffer.clone() for key, buffer in module.named_buffers()}
        found.append(state)
    return found


def captured(name: str) -> list[dict[str, Tensor]]:
    case = built(name)
    steps = case.steps()
    args, kwargs = as_case(steps[0], case)
    program = capture_program(case, args, kwargs)
    subdims = find_subdims(program.graph, rules_of(program.graph))
    module = assemble(
        case, program, alone(program, subdims), Settings(double=dtype_of(case) == torch.float64)
    )
    return trained(module, case, steps)


def differences(name: str) -> list[str]:
    case = built(name)
    expected = trained(copy.deepcopy(case) if name not in HOOKED else case, case, case.steps())
    found = captured(name)
    return [
        f"step {number}: {key}"
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        for key in theirs
        if key not in ours or not torch.allclose(ours[key], theirs[key], rtol=1e-9, atol=1e-12)
    ]


HOOKED = {"ParameterHook", "AccumulateHook"}  # a copy would lose the hook


@pytest.mark.parametrize("name", CASES)
def test_a_meaning_is_kept_or_refused(name: str) -> None:
    torch.manual_seed(2)
    try:
        found = differences(name)
    except ShardfoldError as error:
        print(f"REFUSED {name}: {error}")
        return
    assert found == []
