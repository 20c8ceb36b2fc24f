"""Checkpoints in one process: what is saved is what is loaded, and nothing else is."""

from __future__ import annotations

import os
import pickle
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardfold.errors import CheckpointError
from shardfold.runtime.checkpoint import folders, load, save, storage
from shardfold.runtime.checkpoint.index import FILE, encode_index, read_index


class Model(nn.Module):
    """A tied weight, a batch norm, a buffer that is not saved, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens)) * self.scale.float()
        return nn.functional.cross_entropy(self.head(hidden), tokens)


def made(seed: int = 0, lr: float = 1e-2) -> tuple[Model, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Model()
    groups = [{"params": [model.scale], "lr": 0.5 * lr}, {"params": _rest(model)}]
    return model, torch.optim.AdamW(groups, lr=lr)


def _rest(model: Model) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p is not model.scale]


def train(model: Any, optimizer: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randint(11, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    model, optimizer = made()
    train(model, optimizer, 3)
    save(model, optimizer, tmp_path, step=3, data={"epoch": 1}, extra=[1.5, "x", None])
    expected = [*train(model, optimizer, 3), random.random(), np.random.random()]

    model, optimizer = made(seed=1, lr=0.7)
    found = load(model, optimizer, tmp_path)
    assert (found.step, found.data, found.extra) == (3, {"epoch": 1}, [1.5, "x", None])
    assert found.path == tmp_path / "step-00000003"
    assert [*train(model, optimizer, 3), random.random(), np.random.random()] == expected
    assert model.head.weight is model.embedding.weight
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_it_is_a_plain_state_dict_too_and_other_programs_read_the_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = made()
    path = save(model, optimizer, tmp_path, step=0)
    found = load(None, None, path).state_dict()
    expected = model.state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["head.weight"] is found["embedding.weight"]
    read = safetensors.load_file(path / "part-00000.safetensors")
    assert torch.equal(read["model/scale"], model.scale)


class Bomb:
    """Pickled, it is a file that runs a command when it is unpickled."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.sign),)


def test_a_strangers_checkpoint_cannot_run_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    path = save(model, optimizer, tmp_path / "run", step=0)
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    for name in (".metadata", "__0_0.distcp", "model.pt", "part-00001.safetensors"):
        (path / name).write_bytes(bomb)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a checkpoint was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refused)
    monkeypatch.setattr(torch, "load", refused)
    load(model, optimizer, path)
    load(None, None, path).state_dict()
    for name in (FILE, "part-00000.safetensors"):
        kept = (path / name).read_bytes()
        (path / name).write_bytes(bomb)
        with pytest.raises(CheckpointError, match="damaged"):
            load(model, optimizer, path)
        (path / name).write_bytes(kept)
    assert not (tmp_path / "ran").exists()


def changed(path: Path, change: Any) -> None:
    """Rewrite the index with a change, and a right checksum: what a hostile hand would do."""
    plain = msgspec.json.decode((path / FILE).read_bytes())["index"]
    change(plain)
    body = msgspec.json.encode(plain)
    text = b'{"checksum":%d,"index":%s}' % (zlib.crc32(body), body)
    (path / FILE).write_bytes(text)


def _file(name: str) -> Any:
    def change(plain: Any) -> None:
        plain["files"] = {name: 10**6}
        for tensor in plain["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk["file"] = name

    return change


def _chunk(**fields: Any) -> Any:
    return lambda plain: plain["tensors"]["model/head.bias"]["chunks"][0].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_file("../../etc/passwd"), "names the file"),
        (_file("part-00007.safetensors"), "is missing"),
        (_chunk(begin=10**9), "lies outside"),
        (_chunk(begin=-8), "lies outside"),
        (_chunk(shape=[12]), "lies outside"),
        (_chunk(offset=[1]), "lies outside"),
        (_chunk(offset=[0, 0]), "lies outside"),
        (_chunk(shape=[10]), "10 of 11 elements"),
        (_chunk(checksum=1), "do not have their checksum"),
        (lambda p: p["tensors"]["model/scale"].update(dtype="object"), "unknown dtype"),
        (lambda p: p["tensors"].update(a=p["tensors"]["model/scale"]), "share bytes"),
        (lambda p: p.update(version=3), "newer"),
        (lambda p: p.update(step="3"), "not its index"),
        (lambda p: p["tensors"].pop("model/scale"), "lacks model/scale"),
    ],
)
def test_a_hostile_index_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    model, optimizer = made()
    path = save(model, optimizer, tmp_path, step=0)
    changed(path, change)
    with pytest.raises(CheckpointError, match=message) as error:
        load(model, optimizer, tmp_path)
    assert str(path) in str(error.value)


def test_a_link_instead_of_a_file_is_refused(tmp_path: Path) -> None:
    model, optimizer = made()
    path = save(model, optimizer, tmp_path, step=0)
    (path / "part-00000.safetensors").rename(tmp_path / "away")
    (path / "part-00000.safetensors").symlink_to(tmp_path / "away")
    with pytest.raises(CheckpointError, match="not a plain file"):
        load(model, optimizer, tmp_path)


def test_every_changed_byte_of_the_data_is_found(tmp_path: Path) -> None:
    model, optimizer = made()
    path = save(model, optimizer, tmp_path, step=0)
    file = path / "part-00000.safetensors"
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place in random.Random(0).sample(range(begin, len(whole)), 20):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"damaged: the bytes of .* in part-00000"):
            load(model, optimizer, tmp_path)
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"part-00000.safetensors has .* bytes of"):
        load(model, optimizer, tmp_path)


@pytest.mark.parametrize("moment", ["write_file", "encode_index", "commit", "prune"])
def test_a_crash_at_any_moment_leaves_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    model, optimizer = made()
    for step in (1, 2):
        save(model, optimizer, tmp_path, step=step, keep=2)

    class Crash(BaseException):
        """Not an error that anyone handles: as if the process had been killed."""

    def crash(*args: Any, **kwargs: Any) -> None:
        raise Crash

    saving = sys.modules["shardfold.runtime.checkpoint.save_load"]  # `save` itself is the function
    owner: Any = {"write_file": storage, "encode_index": saving}.get(moment, folders)
    with monkeypatch.context() as patch:
        patch.setattr(owner, moment, crash)
        with pytest.raises(BaseException, match=r"Crash|^$"):
            save(model, optimizer, tmp_path, step=3, keep=2)
    assert load(model, optimizer, tmp_path).step == (3 if moment == "prune" else 2)
    save(model, optimizer, tmp_path, step=4, keep=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    before = 3 if moment == "prune" else 2
    assert left == [f"step-{before:08d}", "step-00000004"]


def test_a_full_disk_is_an_error_and_the_last_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    save(model, optimizer, tmp_path, step=1)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"No space left .*step-00000001 is still"):
            save(model, optimizer, tmp_path, step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_step_that_is_saved_again_stands_beside_the_first(tmp_path: Path) -> None:
    model, optimizer = made()
    for extra in range(3):
        save(model, optimizer, tmp_path, step=5, extra=extra, keep=2)
    assert [path.name for path in folders.listed(tmp_path)] == [
        "step-00000005-1",
        "step-00000005-2",
    ]
    assert load(None, None, tmp_path).extra == 2


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    model, optimizer = made()
    with pytest.raises(CheckpointError, match="does not exist"):
        load(model, optimizer, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no checkpoint in it"):
        load(model, optimizer, tmp_path)
    with pytest.raises(CheckpointError, match=r"`data` is a builtins.object, which"):
        save(model, optimizer, tmp_path, step=0, data=object())
    train(model, optimizer, 1)
    save(model, optimizer, tmp_path, step=0)
    with pytest.raises(CheckpointError, match=r"lacks model/bias, model/num_batches_tracked"):
        load(nn.BatchNorm1d(6), None, tmp_path)
    wide = made()[0]
    wide.scale = nn.Parameter(torch.zeros(6))
    with pytest.raises(CheckpointError, match=r"scale as bfloat16 \(6,\), the model as float"):
        load(wide, None, tmp_path)
    with pytest.raises(CheckpointError, match="of the optimizer AdamW, not SGD"):
        load(model, torch.optim.SGD(model.parameters(), lr=1.0), tmp_path)
    with pytest.raises(CheckpointError, match="2 groups of parameters, the optimizer 1"):
        load(model, torch.optim.AdamW(model.parameters()), tmp_path)


def test_the_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    model, optimizer = made()
    path = save(model, optimizer, tmp_path, step=7)
    index = read_index(path)
    assert (path / FILE).read_bytes() == encode_index(index)
    assert index.aliases == {"head.weight": "embedding.weight"}
    assert "model/scratch" not in index.tensors
