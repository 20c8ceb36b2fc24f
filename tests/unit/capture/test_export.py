"""The user's module is neither changed nor copied, and a large one takes no memory.

A model that cannot be traced is refused with the module's name and what to change.
"""

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
from shardfold.capture.export import skeleton
from shardfold.errors import InputError, ModelError


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


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * 2 if y.sum() > 0 else y


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


X = torch.zeros(2, 4)


def message(model: nn.Module, *args: object, **kwargs: object) -> str:
    with pytest.raises(ModelError) as caught:
        capture(model, args, kwargs)
    return str(caught.value)


def test_a_data_dependent_branch_names_its_module_and_the_way_out() -> None:
    text = message(Outer(), X)
    assert "module 'blocks.1' (Inner, test_export.py:" in text
    assert "depends on the values of a tensor" in text
    assert "torch.where" in text


def test_a_shape_that_depends_on_values() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)[x[:, 0] > 0].sum() * len(x.nonzero())

    assert "depends on" in message(Model(), X)


def test_an_item_taken_out_of_a_tensor() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scale = float(x.max().item())
            return self.linear(x).sum() * (2 if scale > 1 else 3)

    assert "depends on the values of a tensor" in message(Model(), X)


def test_arguments_that_do_not_match() -> None:
    text = message(Outer(), X, labels=X)
    assert "do not match the signature" in text
    assert "do not match the signature" in message(Outer())
    assert "do not match the signature" in message(Outer(), X, X)


def test_a_model_without_a_loss_says_how_to_give_one() -> None:
    text = message(nn.Linear(4, 3), X)
    assert "returns no loss" in text
    assert "float32[2, 3]" in text
    assert "labels=" in text
    assert "loss=" in text


def test_a_scalar_that_depends_on_no_parameter_is_no_loss() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    assert "returns no loss" in message(Model(), X)


def test_a_tensor_made_on_a_fixed_device() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * torch.ones(4, device="cpu")).sum()

    assert "device=x.device" in message(Model(), X)


def test_shapes_that_do_not_fit_name_the_module() -> None:
    assert "module 'blocks.0' (Linear" in message(Outer(), torch.zeros(2, 5))


def test_what_is_not_a_module() -> None:
    with pytest.raises(ModelError, match=r"must be a torch.nn.Module, got function"):
        capture(lambda x: x, (X,))  # type: ignore[arg-type]


def test_an_unknown_dtype() -> None:
    with pytest.raises(InputError, match="Unknown precision 'int3'"):
        capture(Outer(), (X,), dtype="int3")


def test_a_cache_that_is_returned() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, use_cache=True)
    model = transformers.GPT2LMHeadModel(config)
    text = message(model, torch.zeros(1, 4, dtype=torch.int64), use_cache=True)
    assert "use_cache=False" in text or "returns no loss" in text


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    message(Outer(), X)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_parameters_in_a_list_of_the_module_are_no_change_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4)  # keeps its weights in a list, too, which the trace swaps

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0].sum()

    traced, original = list[object](), torch.export.export

    def export(*args: object, **kwargs: object) -> object:
        traced.append(original(*args, **kwargs))  # type: ignore[arg-type]
        return traced[-1]

    monkeypatch.setattr(torch.export, "export", export)
    capture(Recurrent(), (torch.zeros(2, 3, 4),))
    assert len(traced) == 1


def test_what_an_earlier_forward_left_in_an_attribute_is_no_obstacle() -> None:
    class Keeps(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.up(x)
            return self.down(self.norm(self.hidden)).sum()

    model, x = Keeps(), torch.randn(3, 4)
    kinds = [op.kind for op in capture(model, (x,)).ops]
    model(x)
    assert [op.kind for op in capture(model, (x,)).ops] == kinds
