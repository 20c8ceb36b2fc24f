"""A model that cannot be traced is refused with the module's name and what to change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardfold.capture import capture
from shardfold.errors import ModelError


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
    with pytest.raises(ModelError, match="Unknown dtype 'int3'"):
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
