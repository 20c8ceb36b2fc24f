"""What Hugging Face's Trainer asks for and a plan cannot give is refused before the first step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState

from shardfold.errors import InputError, PlanError
from shardfold.hf import Trainer

ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(48).reshape(6, 8) % 32]


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What TrainingArguments leave in the environment and in accelerate stays in this test."""
    with patch.dict(os.environ):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def model() -> Any:
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config)


def made(folder: Path, kind: type = Trainer, given: Any = None, **options: Any) -> Any:
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], per_device_train_batch_size=2, **options
    )
    return kind(model(), args, train_dataset=ROWS, **(given or {}))


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("options", "given", "kind", "says"),
    [
        ({"fsdp": True}, {}, Trainer, "leave fsdp out"),
        ({"gradient_checkpointing": True}, {}, Trainer, "plan with recompute='auto'"),
        ({"torch_compile": True}, {}, Trainer, "leave torch_compile out"),
        ({"label_smoothing_factor": 0.1}, {}, Trainer, "the loss is the model's own"),
        ({"optim": "lion_32bit"}, {}, Trainer, "'lion_32bit' is not known to work"),
        ({}, {"compute_loss_func": print}, Trainer, "compute_loss_func cannot be honoured"),
        ({}, {"optimizers": (1, None)}, Trainer, "give optimizer_cls_and_kwargs"),
        ({}, {}, OwnLoss, "OwnLoss has its own compute_loss"),
        ({}, {"plan": "a.json", "cluster": "2xcpu"}, Trainer, "not both"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused(
    options: Any, given: Any, kind: type, says: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=says):
        made(tmp_path, kind, given, **options)


def test_a_plan_is_made_for_the_batch_of_its_devices(tmp_path: Path) -> None:
    trainer = made(tmp_path)
    with pytest.raises(InputError, match="Give the trainer a plan="):
        trainer.train()
    before = torch.get_rng_state()
    plan = trainer.make_plan("2xcpu", cost="roofline")
    assert torch.equal(torch.get_rng_state(), before)
    inputs = {entry.name: entry.shape for entry in plan.inputs}
    assert inputs == {"input_ids": (4, 8), "labels": (4, 8), "num_items_in_batch": ()}
    plan.save(tmp_path / "plan.json")
    other = made(tmp_path, given={"plan": tmp_path / "plan.json"})
    other.args.per_device_train_batch_size = 4
    with pytest.raises(PlanError, match="batches of 4 samples; per_device_train_batch_size=4"):
        other.train()
    bf16 = made(tmp_path, bf16=True)
    assert bf16.make_plan("2xcpu", cost="roofline").provenance.request.numbers == "bf16-mixed"
    bf16.plan = bf16.make_plan("2xcpu", cost="roofline", precision="bf16")
    with pytest.raises(PlanError, match=r"keeps weights in bf16, .* precision='bf16-mixed'"):
        bf16.train()
    fewer = [{"input_ids": row["input_ids"]} for row in ROWS]
    blind = made(tmp_path, given={"plan": plan})
    blind.train_dataset = fewer
    with pytest.raises(PlanError, match="labels, num_items_in_batch; the data has input_ids"):
        blind.train()


def test_processes_that_transformers_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = made(tmp_path).args
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="2 processes were started, transformers sees 1: on CPUs"):
        Trainer(model(), args)
