"""The user's module is neither changed nor copied, and a large one takes no memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

from shardfold.capture import capture
from shardfold.capture.meta_copy import skeleton
from shardfold.errors import ModelError


class Model(nn.Module):
    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(4, wide)
        self.norm = nn.BatchNorm1d(wide)
        self.down = nn.Linear(wide, 1)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x * self.table))).sum()


def test_the_module_is_left_as_it_was() -> None:
    model = Model().eval()
    model.up.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identities = [id(p) for p in model.parameters()]
    x = torch.randn(3, 4)
    capture(model, (x,), dtype="bf16")
    assert not model.training
    assert [id(p) for p in model.parameters()] == identities
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert [p.requires_grad for p in model.up.parameters()] == [False, False]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_copy_holds_no_data_and_keeps_ties() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    copied = skeleton(model, None)
    assert {p.device.type for p in copied.parameters()} == {"meta"}
    assert copied["b"].weight is copied["a"].weight
    assert copied["b"].weight is not model["a"].weight
    assert copied.training


def test_a_large_module_is_not_copied() -> None:
    """200 MB of weights; the highest mark of memory rises by less than a quarter of that."""
    model = Model()
    model.large = nn.Parameter(torch.ones(50_000_000))
    torch.ones(50_000_000).sum()  # what torch itself needs is counted before
    capture(Model(), (torch.randn(3, 4),))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = torch.ones(1)
    capture(model, (torch.randn(3, 4),))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 50e6
    assert float(held) == 1.0


def test_a_module_that_cannot_be_copied_says_why() -> None:
    model = Model()
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match=r"Model cannot be copied.*lock"):
        capture(model, (torch.randn(3, 4),))


# VmHWM and not ru_maxrss: the latter counts what the process was before it became this program.
SEVENTY = """
import json, re
from pathlib import Path
import torch
torch.set_num_threads(1)
from shardfold import zoo
from shardfold.capture import capture
module, args, kwargs = zoo.build("llama3-70b")
graph = capture(module, args, kwargs)
sizes = [graph.tensors[i].type for i in graph.parameters()]
status = Path("/proc/self/status").read_text()
print(json.dumps({
    "layers": sum(op.kind.endswith("attention") for op in graph.ops),
    "parameter_bytes": sum(t.bytes for t in sizes),
    "peak_bytes": 1024 * int(re.search("VmHWM:\\s+(\\d+)", status)[1]),
}))
"""


def test_seventy_billion_parameters_are_captured_within_a_gibibyte() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", SEVENTY], capture_output=True, text=True, check=True, timeout=300
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["layers"] == 80
    assert found["parameter_bytes"] > 140e9
    assert found["peak_bytes"] < 2**30
