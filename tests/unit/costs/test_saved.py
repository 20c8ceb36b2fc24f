"""What autograd keeps, against autograd itself: bytes of distinct memory, on one device."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardfold.capture import capture
from shardfold.cluster import parse
from shardfold.costs import Roofline, optimizer_named, tabulate
from shardfold.operators import rules_of
from shardfold.sharding import find_subdims
from shardfold.simulate.decoded import DecodedChoice
from shardfold.simulate.local_layouts import MemoryFacts
from shardfold.simulate.memory import Footprint
from shardfold.zoo import build


def kept_by_autograd(module, args, kwargs):
    """Bytes of the memory that autograd holds after forward, parameters and inputs left out."""
    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs))]
    own = {t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(*args, **kwargs)
    assert loss.requires_grad
    return sum(size for size, _ in held.values())


def kept_by_our_count(module, args, kwargs):
    graph = capture(module, args, kwargs)
    subdims = find_subdims(graph, rules_of(graph))
    cluster = parse("1xh100")
    mesh = cluster.meshes()[0]
    model, optimizer = Roofline(cluster, mesh), optimizer_named("adamw")
    tables = tabulate(graph, subdims, mesh, model, optimizer)
    alone = (0,) * len(tables.vertices)
    decoded = DecodedChoice(graph, subdims, tables, alone, model, optimizer)
    return Footprint(decoded, MemoryFacts(graph, subdims)).kept_bytes


def zoo_model(name):
    module, args, kwargs = build(name)
    module = module.to_empty(device="cpu")
    for parameter in (*module.parameters(), *module.buffers()):
        nn.init.zeros_(parameter)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), (args, kwargs)
    )
    return module, args, kwargs


@pytest.mark.parametrize(
    "name",
    ["llama3-8b-tiny", "vit-large-tiny", "mixtral-8x7b-tiny", "resnet50-tiny", "densenet121-tiny"],
)
def test_a_model_of_the_zoo_keeps_what_we_count(name):
    module, args, kwargs = zoo_model(name)
    assert kept_by_our_count(module, args, kwargs) == kept_by_autograd(module, args, kwargs)


class Pointwise(nn.Module):
    """Operators that keep an operand, a result, a condition, or nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        y = x * self.weight
        y = torch.where(x > 0, torch.tanh(y), torch.exp(y)) + torch.maximum(y, x)
        y = y.masked_fill(x > 1, 0.0).relu() / (1 + self.weight.abs())
        return y.pow(2).sqrt().mean()


class Views(nn.Module):
    """A transpose is no copy, `contiguous` after it is one, and after attention it is none."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 96)
        self.outer = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        q, k, v = self.inner(x).view(2, 8, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = self.outer(y.transpose(1, 2).contiguous().view(2, 8, 32))
        y = self.norm(y.transpose(0, 1).contiguous())
        return nn.functional.silu(y.reshape(16, 32)).sum()


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 5)

    def forward(self, x, labels):
        y = nn.functional.max_pool2d(self.norm(self.first(x)), 2)
        y = nn.functional.avg_pool2d(y, 2)
        y = nn.functional.adaptive_avg_pool2d(y, 1).flatten(1)
        return nn.functional.cross_entropy(self.last(y), labels)


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (Pointwise(), (torch.randn(4, 6),)),
        (Views(), (torch.randn(2, 8, 32),)),
        (Pools(), (torch.randn(2, 3, 18, 18), torch.tensor([1, 2]))),
    ],
    ids=["pointwise", "views", "pools"],
)
def test_small_modules_keep_what_we_count(module, args):
    assert kept_by_our_count(module, args, {}) == kept_by_autograd(module, args, {})
