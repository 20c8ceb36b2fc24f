"""Lightning on two processes fits, validates, saves and resumes as on one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardfold as sf
from shardfold.errors import InputError
from shardfold.plans.files import dumps, loads

from .ranks import Launch

lightning_ = pytest.importorskip("lightning", reason="needs pip install 'shardfold[lightning]'")

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/trainers.md"
BATCH = 8


class Net(nn.Module):
    """The loss of a batch, with a norm over the samples of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16, bias=False)  # before a norm, its gradient would be noise
        self.norm, self.down = nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(x)).relu()
        return nn.functional.cross_entropy(self.down(hidden), y)


class Task(lightning_.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = Net(), list[float]()

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = self.net(*batch)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", self.net(*batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def data() -> TensorDataset:
    torch.manual_seed(0)
    labels = torch.arange(32) % 3
    return TensorDataset(torch.randn(32, 6) + labels.view(-1, 1), labels)


@contextmanager
def as_started_by_torchrun() -> Iterator[None]:
    """While it lasts, Lightning finds the processes of this job."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0} if dist.is_initialized() else {}
    os.environ.update({name: str(value) for name, value in found.items()})
    try:
        yield
    finally:
        for name in found:
            os.environ.pop(name, None)


def fitted(rank: int, folder: str, plan: bytes | None, resume: bool) -> dict[str, Any]:
    """The losses of a run, what it validates to, and where its checkpoint is."""
    with as_started_by_torchrun():
        samples = data()
        torch.manual_seed(0)
        task = Task()
        options: dict[str, Any] = {"devices": 1}
        if plan is not None:
            from shardfold.lightning import Strategy

            strategy = Strategy(loads(plan), samples[:BATCH], module="net")
            options = {"devices": 2, "strategy": strategy}
        trainer = lightning_.Trainer(
            accelerator="cpu",
            max_epochs=4 if resume else 2,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,  # Lightning's own shuffles, whatever the loader says
            default_root_dir=folder,
            **options,
        )
        loaders = DataLoader(samples, BATCH, shuffle=False), DataLoader(samples, BATCH)
        path = f"{folder}/run.ckpt"
        trainer.fit(task, *loaders, ckpt_path=path if resume else None)
        validated = trainer.validate(task, loaders[1], verbose=False)
        trainer.save_checkpoint(f"{folder}/{'again' if resume else 'run'}.ckpt")
        return {"losses": task.losses, "validated": validated[0]["val_loss"]}


def test_two_processes_are_one(on_ranks: Launch, tmp_path: Path) -> None:
    given = data()[:BATCH]
    plan = sf.plan(Net(), given, cluster="2xcpu", cost="roofline", pins={"up": "batch/2"})
    told = dumps(plan).encode()
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for resume in (False, True):
        (alone,) = on_ranks(fitted, 1, str(tmp_path / "one"), None, resume)
        for found in on_ranks(fitted, 2, str(tmp_path / "two"), told, resume):
            assert len(found["losses"]) == 8
            np.testing.assert_allclose(found["losses"], alone["losses"], atol=1e-5)
            assert abs(found["validated"] - alone["validated"]) < 1e-5
    files = [tmp_path / who / "again.ckpt" for who in ("one", "two")]
    one, two = (torch.load(file, weights_only=False) for file in files)
    assert one["state_dict"].keys() == two["state_dict"].keys()
    torch.testing.assert_close(two["state_dict"], one["state_dict"], rtol=0, atol=1e-5)
    assert one["optimizer_states"][0]["state"].keys() == two["optimizer_states"][0]["state"].keys()
    Task().load_state_dict(two["state_dict"])  # an ordinary checkpoint


def ran(rank: int, script: str) -> float:
    """The last loss of a script."""
    with as_started_by_torchrun():
        found: dict[str, Any] = {}
        exec(compile(script, "train.py", "exec"), found)
        return float(found["trainer"].callback_metrics["loss"])


def test_the_script_of_the_page_runs(on_ranks: Launch) -> None:
    text = PAGE.read_text()
    scripts = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    script = next(script for script in scripts if "shardfold.lightning" in script)
    first, second = on_ranks(ran, 2, script)
    assert first == second
    assert 0 < first < 2


class Outside(Task):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_what_cannot_be_honoured_is_refused() -> None:
    from shardfold.lightning import Strategy

    given = data()[:BATCH]
    plan = sf.plan(Net(), given, cluster="2xcpu", cost="roofline")
    with pytest.raises(InputError, match="find_unused_parameters: a plan reduces gradients"):
        Strategy(plan, given, find_unused_parameters=True)
    with pytest.raises(InputError, match="use accumulate_grad_batches"):
        Strategy(msgspec.structs.replace(plan, micro_batches=2), given)
    strategy = Strategy(plan, given, module="net")
    strategy.connect(Outside())
    with pytest.raises(InputError, match=r"Parameters outside 'net' .* scale"):
        strategy._put_under_plan()
    strategy = Strategy(plan, given)
    strategy.connect(Task())
    with pytest.raises(InputError, match="Task has no module 'model'"):
        strategy._put_under_plan()
