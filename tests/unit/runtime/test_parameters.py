"""What torch cannot put together is refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardfold.errors import RunError
from shardfold.runtime.parameters import whole_of


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_packed_weight_that_torch_does_not_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_tensor(part: DTensor) -> torch.Tensor:
        raise ValueError("as PyTorch 2.11 does")

    monkeypatch.setattr(DTensor, "full_tensor", full_tensor)
    mesh, local, sizes = init_device_mesh("cpu", (2,)), torch.zeros(6, 4), torch.Size((12, 4))
    for placement, error, told in (
        (_StridedShard(0, split_factor=3), RunError, r"shape \(12, 4\) that is packed .* 2\.12"),
        (Shard(0), ValueError, "as PyTorch 2.11 does"),
    ):
        part = DTensor.from_local(local, mesh, [placement], shape=sizes, stride=(4, 1))
        with pytest.raises(error, match=told):
            whole_of(part)
