"""Users' idioms under any plan, beside the plain eager module: losses, gradients, weights, state.

What is compared is a loop with accumulation, clipping and decay by the number of dims, since it is
there that gradients which share memory, or have another shape, show.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardfold.capture import capture
from shardfold.errors import ModelError
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize

from .choices import Chooser
from .idioms import IDIOMS
from .ranks import Launch

RANDOM = ("recurrent_dropout",)
RANDOM_PLANS = 3
ON_A_GRID = (  # one of each kind
    *("positions_and_segments", "through_views", "masked_logits_with_weights", "packed_attention"),
    *("packed_gate", "norm_called_twice", "depthwise_and_group_norm", "summed_loss"),
)
REFUSED = {
    "norm_of_all_batches": r"averages its statistics over all batches \(momentum=None\)",
    "norm_twice_of_all_batches": r"averages its statistics over all batches \(momentum=None\)",
}


def built(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    model, args = IDIOMS[name]()
    return model.double(), tuple(a.double() if a.is_floating_point() else a for a in args)


def plans(
    name: str, cluster: str, mesh: str, count: int, *, covering: bool = False
) -> list[tuple[str, str, bytes]]:
    """The best plan, both baselines, and random ones, which may try all there is before long."""
    model, args = built(name)
    chooser = Chooser(model, args, {}, cluster, mesh)
    drawn = (
        chooser.covering(count)
        if covering
        else {f"random {seed}": chooser.random(seed) for seed in range(count)}
    )
    made = {
        "best": chooser.best(),
        **dict(zip(("data parallel", "fully sharded"), chooser.baselines(), strict=True)),
        **drawn,
    }
    return [(name, f"{label} on {mesh}", dumps(plan).encode()) for label, plan in made.items()]


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices alone, told by their dims."""
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def owns_memory(module: nn.Module) -> bool:
    """Whether no two of all parameters and gradients share a byte."""
    ranges = []
    for parameter in module.parameters():
        for tensor in (parameter, parameter.grad):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            assert local.is_contiguous()
            begin = local.data_ptr()
            ranges += [(begin, begin + local.nbytes)] if local.numel() else []
    ranges.sort()
    return all(end <= begin for (_, end), (begin, _) in pairwise(ranges))


def trained(
    module: nn.Module, args: Any, is_parallel: bool, fused: bool | None = None
) -> dict[str, Any]:
    """All that a loop with accumulation and clipping shows."""
    optimizer = torch.optim.AdamW(groups(module), lr=0.05, fused=fused)
    found: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad(set_to_none=step == 0)
        for turn in range(2):
            loss = module(*(a.roll(step + 2 * turn, 0) for a in args))
            (loss / 2).backward()
            found[f"loss {step} {turn}"] = loss.detach()
        assert not is_parallel or owns_memory(module)
        for name, parameter in module.named_parameters():
            found[f"gradient {step} {name}"] = whole(parameter.grad).clone()
            found[f"shape {step} {name}"] = torch.tensor(parameter.shape)
            if is_parallel:
                assert parameter.grad.shape == parameter.shape
        found[f"norm {step}"] = whole(nn.utils.clip_grad_norm_(module.parameters(), 0.1))
        optimizer.step()
    # Two forwards whose backward is one.
    optimizer.zero_grad()
    (module(*args) + module(*(a.roll(1, 0) for a in args))).backward()
    for name, parameter in module.named_parameters():
        found[f"both {name}"] = whole(parameter.grad).clone()
    found |= {f"state {k}": whole(v).clone() for k, v in module.state_dict().items()}
    module.eval()
    with torch.no_grad():
        found["eval"] = module(*args)
    module.train()
    return found


def beside_eager(
    rank: int, cases: list[tuple[str, str, bytes]], fused: bool | None = None
) -> list[str]:
    """For each case, what differs from the plain module; empty if nothing does."""
    told, eager = [], dict[str, dict[str, Any]]()
    for name, label, data in cases:
        model, args = built(name)
        if name not in eager:
            eager[name] = trained(copy.deepcopy(model), args, False, fused)
        expected = eager[name]
        try:
            found = trained(parallelize(model, loads(data), args), args, True, fused)
        except Exception as error:
            told.append(f"{name} {label}: {type(error).__name__}: {error}")
            continue
        told.append("")
        for key, value in expected.items():
            if found[key].shape != value.shape:
                told[-1] = f"{name} {label}: {key} is {found[key].shape}, not {value.shape}"
            elif not torch.allclose(found[key], value, rtol=1e-7, atol=1e-9, equal_nan=True):
                apart = (found[key] - value).abs().max()
                told[-1] = f"{name} {label}: {key} differs by {apart}"
            if told[-1]:
                break
    return told


@pytest.mark.parametrize("name", [name for name in IDIOMS if name not in (*RANDOM, *REFUSED)])
def test_trains_as_the_plain_module(name: str, on_ranks: Launch) -> None:
    cases = plans(name, "2xcpu", "2", RANDOM_PLANS, covering=True)[1:]
    for told in on_ranks(beside_eager, 2, cases):
        assert [line for line in told if line] == []


@pytest.mark.parametrize("name", ON_A_GRID)
def test_trains_as_the_plain_module_on_two_axes(name: str, on_ranks: Launch) -> None:
    cases = plans(name, "4xcpu", "2x2", 5, covering=True)[2:]
    for told in on_ranks(beside_eager, 4, cases, True):
        assert [line for line in told if line] == []


def drawn(rank: int, cases: list[tuple[str, str, bytes]]) -> list[dict[str, Tensor]]:
    """What a loop with random masks shows under each plan; and in eval mode, beside the module."""
    found = []
    for name, _, data in cases:
        model, args = built(name)
        module = parallelize(model, loads(data), args)
        with torch.no_grad():
            assert torch.allclose(module.eval()(*args), copy.deepcopy(model).eval()(*args))
        module.train()
        found.append(trained(module, args, True))
    return found


@pytest.mark.parametrize("name", RANDOM)
def test_what_is_random_is_the_same_under_every_plan(name: str, on_ranks: Launch) -> None:
    cases = plans(name, "2xcpu", "2", 2)
    for told in on_ranks(drawn, 2, cases):
        for found in told[1:]:
            for key, value in told[0].items():
                torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9, msg=key)
        assert told[0]["loss 0 0"] != told[0]["eval"]


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_before_planning(name: str) -> None:
    model, args = built(name)
    with pytest.raises(ModelError, match=REFUSED[name]):
        capture(model, args)
