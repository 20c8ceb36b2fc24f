"""What users do with the parts and parameters of a parallel module, beside the plain one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.optim.swa_utils import update_bn

import shardfold as sf
from shardfold.errors import RunError
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize

from .choices import Chooser
from .ranks import Launch
from .test_faithful import whole
from .test_utilities import compared


class Block(nn.Module):
    """Attention and a perceptron, of which one part has no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.packed = nn.LayerNorm(8), nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        packed = self.packed(self.norm(x)).unflatten(-1, (3, 2, 4))
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v)
        return x + self.mlp(found.transpose(1, 2).flatten(2) + self.packed.bias[:8])


class Classifier(nn.Module):
    """A list of blocks, a norm with statistics, a number that is trained, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.strength = 0.5

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        for block in self.blocks:
            h = block(h) * self.strength
        return functional.cross_entropy(self.head(h * self.temperature).transpose(1, 2), y)


Batch = tuple[Tensor, Tensor]
Loop = Callable[[Any, Batch], list[Any]]


def built() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 12, (2, 8, 6))
    return Classifier().double(), (tokens[0], tokens[1])


def stepped(module: Any, batch: Batch, groups: Any, change: Any = None) -> list[Any]:
    """Losses and the state after steps whose gradients are changed in between."""
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        loss = module(*(each.roll(step, 0) for each in batch))
        loss.backward()
        found += [loss.detach(), torch.as_tensor(change(module) if change else 0.0)]
        optimizer.step()
    return [*found, *(whole(v).clone() for v in module.state_dict().values())]


def by_class(module: Any, batch: Batch) -> list[Any]:
    """Decay for what is in neither a norm nor a look-up."""
    decayed: dict[Tensor, bool] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            decayed[parameter] = not isinstance(part, nn.LayerNorm | nn.BatchNorm1d | nn.Embedding)
    groups = [
        {"params": [p for p, is_decayed in decayed.items() if is_decayed is wanted]}
        for wanted in (True, False)
    ]
    groups[0]["weight_decay"] = 0.5  # type: ignore[assignment]
    return stepped(module, batch, groups)


def by_layer(module: Any, batch: Batch) -> list[Any]:
    """Another rate for each block; parts without tensors count."""
    layers = [list(block.parameters()) for block in module.blocks]
    assert module.blocks[0].mlp[2].weight.shape == (8, 16)
    assert [len(module.blocks), len(module.blocks[1].mlp)] == [2, 3]
    groups = [{"params": each, "lr": 0.05 * (k + 1)} for k, each in enumerate(layers)]
    return stepped(module, batch, [*groups, {"params": [module.temperature, module.embed.weight]}])


def clipped_by_hand(module: Any, _: Any = None) -> float:
    """The norm of all gradients from that of each, as numbers."""
    gradients = [p.grad for p in module.parameters()]
    total = math.sqrt(sum(g.detach().norm(2).item() ** 2 for g in gradients))
    largest = max(float(g.abs().max()) for g in gradients)
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.1 / (total + 1e-6)))
    return total + largest


def norms_by_hand(module: Any, batch: Batch) -> list[Any]:
    return stepped(module, batch, module.parameters(), clipped_by_hand)


def written_to(module: Any, batch: Batch) -> list[Any]:
    """Plain tensors into parameters, through all that leads to their memory."""
    with torch.no_grad():
        for parameter in module.parameters():
            number = torch.arange(parameter.numel()).reshape(parameter.shape)
            parameter.copy_(number.sin() * 0.3)
            parameter.data.copy_(parameter.detach() * 0.9)
        module.blocks[0].mlp[0].bias.copy_(torch.tensor(0.1))
        module.norm.running_mean.copy_(torch.arange(6))
    module.norm.reset_running_stats()
    return stepped(module, batch, module.parameters())


def told(module: Any, batch: Batch) -> list[Any]:
    """What a module tells of itself, and numbers without gradients."""
    known = dict(module.named_modules())
    classes = [type(known[path]).__name__ for path in ("embed", "blocks", "blocks.1.mlp.1", "norm")]
    shown = str(module.blocks[0].mlp[0])
    said = repr(([*known], classes, module.strength, module.norm.eps, shown))
    module.eval()
    with torch.inference_mode():
        judged = [module(*batch).clone(), module(*(each[:5] for each in batch)).clone()]
    module.train()
    lacking = module.load_state_dict({"temperature": torch.tensor(0.3)}, strict=False).missing_keys
    return [torch.tensor(list((said + str(lacking)).encode())), *judged, module(*batch).detach()]


def state_of_a_plain_module(module: Any, batch: Batch) -> list[Any]:
    """An optimizer that goes on where one of a plain module has stopped."""
    plain, _ = built()
    before = torch.optim.AdamW(plain.parameters(), lr=0.01)
    plain(*batch).backward()
    before.step()
    module.load_state_dict(plain.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
    module(*batch).backward()
    optimizer.step()
    return [whole(v).clone() for v in module.state_dict().values()]


LOOPS: tuple[Loop, ...] = (
    by_class,
    by_layer,
    norms_by_hand,
    written_to,
    told,
    state_of_a_plain_module,
)


def looped(rank: int, plans: list[bytes]) -> list[str]:
    """What differs from the plain module."""
    found = []
    for number, data in enumerate(plans):
        for loop in LOOPS:
            model, batch = built()
            expected = loop(copy.deepcopy(model), batch)
            ours = loop(parallelize(model, loads(data), batch), batch)
            found += compared(ours, expected, f"{loop.__name__} under plan {number}")
    return found


@pytest.fixture(scope="module")
def plans() -> list[bytes]:
    """Both baselines, and random ones of which some send keys round."""
    model, batch = built()
    chooser = Chooser(model, batch, {}, "2xcpu", "2")
    drawn = [chooser.random(seed) for seed in range(12)]
    ring = next(p for p in drawn if any("c" in o.config for o in p.operators))
    return [dumps(p).encode() for p in (*chooser.baselines(), ring, drawn[0])]


def test_parts_and_parameters_are_as_on_the_plain_module(
    plans: list[bytes], on_ranks: Launch
) -> None:
    for told_of in on_ranks(looped, 2, plans):
        assert told_of == []


def resumed(rank: int, plans: list[bytes], folder: str) -> list[str]:
    """A state of the optimizer for a parameter that is a number."""
    found = []
    for number, data in enumerate(plans):
        for kind in (torch.optim.SGD, torch.optim.NAdam):
            given = {"momentum": 0.9} if kind is torch.optim.SGD else {}
            model, batch = built()
            single, module = copy.deepcopy(model), parallelize(model, loads(data), batch)
            states = []
            for each in (single, module):
                optimizer: Any = kind(each.parameters(), lr=0.05, **given)
                for step in range(3):
                    if step == 2 and each is module:
                        where = Path(folder) / f"{number} {kind.__name__}"
                        sf.save(module, optimizer, where, step=2)
                        optimizer = kind(each.parameters(), lr=0.05, **given)
                        sf.load(module, optimizer, where)
                    optimizer.zero_grad()
                    each(*batch).backward()
                    optimizer.step()
                states.append([whole(v) for v in each.state_dict().values()])
            found += compared(states[1], states[0], f"{kind.__name__} under plan {number}")
    return found


def test_the_state_of_a_number_is_resumed(
    plans: list[bytes], tmp_path: Path, on_ranks: Launch
) -> None:
    for told_of in on_ranks(resumed, 2, plans[:2], str(tmp_path)):
        assert told_of == []


def refusals(rank: int, data: bytes) -> list[str]:
    model, batch = built()
    module = parallelize(model, loads(data), batch)
    said = []
    calls: tuple[Callable[[], Any], ...] = (
        lambda: module.blocks[0](torch.ones(8, 6, 8)),
        lambda: setattr(module, "strength", 0.9),
        lambda: update_bn([batch[0]], module),
    )
    for call in calls:
        with pytest.raises(RunError) as error:
            call()
        said.append(str(error.value))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.blocks[0].nothing
    assert isinstance(module.norm.running_mean, Tensor)
    assert not isinstance(module.norm.running_mean, DTensor)
    return said


def test_what_a_part_cannot_do_is_refused(plans: list[bytes], on_ranks: Launch) -> None:
    for called, strength, momentum in on_ranks(refusals, 2, plans[1]):
        assert "A part of the parallel module (Block) cannot be called by itself" in called
        assert "'strength' of the model had its value read" in strength
        assert "'momentum' of the model had its value read" in momentum
