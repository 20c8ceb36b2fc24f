"""What cannot be run ends in an error on every rank, in seconds, whoever found it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

from shardfold.cli import main
from shardfold.errors import LostError, RunError, ShardfoldError
from shardfold.plans.files import dumps, loads, save
from shardfold.runtime import parallelize
from shardfold.runtime.ranks import joined, launch

from .choices import chooser
from .jobs import build
from .ranks import Launch, start_server
from .torchrun import free_port


def refused(rank: int, plans: dict[str, bytes]) -> dict[str, str]:
    """What this rank is told of each plan, model and batch."""
    said = {}

    def told(what: str, plan: bytes, model: nn.Module, batch: Any) -> None:
        try:
            parallelize(model, loads(plan), *batch)(*batch[0])
        except ShardfoldError as error:
            said[what] = f"{type(error).__name__}: {error}"

    model, args, kwargs = build("mlp")
    batch, own = (args, kwargs), plans["own"]
    told("another model", own, *_pair(build("norms")))
    told("another world", plans["of four"], model, batch)
    told("another dtype", own, model.bfloat16(), batch)
    model, args, kwargs = build("mlp")
    told("another mesh", plans["two axes"], model, batch)
    told("another batch", own, model, ((args[0][:9], args[1][:9]), {}))
    model.up = nn.Linear(10, 24)
    model.down = nn.Linear(24, 6)
    told("a changed model", own, model, batch)
    model, *_ = build("mlp")
    if rank == 1:
        model.up.weight.data = torch.randn(23, 10)
        model.up.bias.data = torch.randn(23)
        model.down.weight.data = torch.randn(6, 23)
    told("changed on one rank", own, model, batch)
    return said


def _pair(built: Any) -> tuple[Any, Any]:
    model, args, kwargs = built
    return model, (args, kwargs)


def test_bad_input_is_refused_on_every_rank_once(on_ranks: Launch) -> None:
    choices = chooser("mlp", "2xcpu", "2")
    own = next(choices.baselines())
    four = next(chooser("mlp", "4xcpu", "4").baselines())
    axis = msgspec.structs.replace(own.mesh[0], name="other", size=1)
    plans = {"own": own, "of four": four}
    plans["two axes"] = msgspec.structs.replace(own, mesh=(*own.mesh, axis))
    both = on_ranks(refused, 2, {name: dumps(plan).encode() for name, plan in plans.items()})
    for rank, said in enumerate(both):
        assert "PlanError: The plan is for another model" in said["another model"]
        assert "The plan is for 4 processes" in said["another world"]
        assert "2 processes run" in said["another world"]
        assert "another batch size, sequence length or dtype?" in said["another dtype"]
        assert "Mesh axis 'other' needs at least 2 devices, got 1" in said["another mesh"]
        assert "The plan is for another model" in said["another batch"]
        assert "down.weight has shape (6, 22), the model's has (6, 24)" in said["a changed model"]
        alone = said["changed on one rank"]
        assert ("Rank 1 cannot run the plan, so no rank does" in alone) == (rank == 0)
        assert "down.weight has shape (6, 22), the model's has (6, 23)" in alone
    assert len(both[0]) == len(both[1]) == 7


def dies(rank: int, how: str, awake: Path) -> None:
    dist.barrier()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RunError("rank 1 gives up") if how == "raises" else ValueError("odd")
    dist.all_reduce(torch.zeros(1))
    time.sleep(60)
    awake.touch()


@pytest.mark.parametrize(
    ("how", "said", "is_lost"),
    [
        ("killed", "SIGKILL", True),
        ("raises", "rank 1 gives up", False),
        ("breaks", "odd|closed|reset", True),
    ],
)
def test_a_rank_that_dies_ends_the_others_in_seconds(
    how: str, said: str, is_lost: bool, tmp_path: Path
) -> None:
    awake = tmp_path / "awake"
    with pytest.raises(RunError, match=said) as raised:
        launch(dies, 2, how, awake)
    assert isinstance(raised.value, LostError) is is_lost
    assert not awake.exists()  # the other was ended in its sleep, or before


KILLED = """
import os, signal, torch, torch.distributed as dist
def make():
    if dist.is_initialized() and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.MSELoss()), (torch.ones(4, 8),), {}
"""


def test_a_killed_rank_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    file, saved = tmp_path / "model.py", tmp_path / "plan.json"
    file.write_text(KILLED)
    save(next(chooser("mlp", "2xcpu", "2").baselines()), saved)
    given = ["train", f"{file}:make", "--plan", str(saved), "--local", "2"]
    found = CliRunner().invoke(main, given)
    assert found.exit_code == 3, found.output
    assert "SIGKILL" in found.output
    assert "Traceback" not in found.output


def is_lost(rank: int, environment: dict[str, str], said: Path) -> None:
    os.environ.update({**environment, "RANK": str(rank)})
    try:
        with joined():
            dist.barrier()
            if rank == 1:
                os._exit(3)
            dist.all_reduce(torch.zeros(1))
    except LostError as error:
        said.write_text(str(error))
        os._exit(4)


def test_a_rank_of_torchrun_that_is_lost_is_named_on_the_others(tmp_path: Path) -> None:
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = tmp_path / "said"
    ranks = [start_server().Process(target=is_lost, args=(rank, given, said)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [4, 3]
    assert "Another process has ended, or the link to it is lost" in said.read_text()
