"""Stages that differ: parts of other sizes where they are asked for, and choices of their own."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from shardfold.api import Planner
from shardfold.errors import ClusterError, InputError, PlanError
from shardfold.plans import Plan
from shardfold.plans.batch import part_of
from shardfold.plans.files import dumps, loads
from shardfold.plans.parts import (
    firsts_of_parts,
    meshes_of_operators,
    meshes_of_parameters,
    on_part,
    seat,
    sizes_of_parts,
)


@pytest.fixture(scope="module")
def unequal(stack: Planner) -> Plan:
    return stack.plan(cluster="4xa100", pipeline="1+3", micro_batches=4)


def test_parts_have_the_devices_that_were_asked_for(unequal: Plan) -> None:
    assert unequal.pipeline is not None
    assert unequal.pipeline.schedule == "1f1b"
    assert sizes_of_parts(unequal) == (1, 3)
    assert firsts_of_parts(unequal) == (0, 1)
    assert [seat(unequal, rank) for rank in range(4)] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert unequal.processes == 4
    assert sum(unequal.pipeline.layers) == 6
    assert "one device and gpu=3 in the parts of a pipeline" in str(unequal)
    assert "Part 2 (3):" in str(unequal)


def test_an_operator_is_on_the_mesh_of_the_part_that_runs_it(unequal: Plan) -> None:
    """Every entry is of one part, and a part's own view has all entries on its mesh."""
    for entries, meshes in (
        ([len(e.config) for e in unequal.operators], meshes_of_operators(unequal)),
        ([len(e.layout) for e in unequal.parameters], meshes_of_parameters(unequal)),
    ):
        assert entries == [len(mesh) for mesh in meshes]
        assert sorted(set(entries)) == [0, 1]
    for part, axes in ((0, 0), (1, 1)):
        own = on_part(unequal, part)
        assert len(own.mesh) == axes
        assert {len(entry.config) for entry in own.operators} == {axes}
        assert {len(entry.layout) for entry in own.parameters} == {axes}
    assert part_of(unequal, 0)[0] == 0


@pytest.mark.parametrize(
    ("cluster", "pipeline", "says"),
    [
        ("1xa100", "off", "The device computes its operators in full."),
        ("2xa100", "1+1", "Each stage is on one device, which computes its operators in full."),
    ],
)
def test_on_one_device_no_operator_is_said_to_have_nothing_to_split(
    stack: Planner, cluster: str, pipeline: str, says: str
) -> None:
    found = stack.plan(cluster=cluster, pipeline=pipeline, micro_batches=4)
    assert found.unsplit == ()
    assert says in str(found)


def test_such_a_plan_is_kept_in_a_file_that_is_checked(unequal: Plan) -> None:
    text = dumps(unequal)
    assert loads(text.encode()) == unequal
    for change, message in (
        (lambda found: found["pipeline"]["follows"].pop(), "says of 1 what they follow"),
        (lambda found: found["pipeline"]["follows"].__setitem__(1, 5), "follows none of 2"),
        (lambda found: found["pipeline"]["choices"][1]["operators"].pop(), "choice"),
        (lambda found: found["pipeline"]["choices"][1]["mesh"][0].update(size=2), "devices"),
    ):
        plain = json.loads(text)
        change(plain)
        with pytest.raises(PlanError, match=message):
            loads(json.dumps(plain).encode())


@pytest.mark.parametrize(
    ("cluster", "pipeline", "error", "message"),
    [
        ("4xa100", "1+2", ClusterError, "Parts of 1.2 devices are not all 4"),
        ("2x4xa100", "3+5", ClusterError, "does not lie along the cluster"),
        ("8xa100", "1+1+1+1+1+1+2", InputError, "has 6 layers"),
        ("4xa100", "1+x", InputError, "Unknown number of stages"),
    ],
)
def test_parts_that_cannot_be_are_refused(
    stack: Planner, cluster: str, pipeline: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        stack.plan(cluster=cluster, pipeline=pipeline, micro_batches=4)


class Blocks(nn.Module):
    """Layers that keep much for backward, and are long enough that computing them again costs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 512)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
            for _ in range(8)
        )
        self.head = nn.Linear(512, 1000)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_where_memory_binds_the_first_stage_alone_computes_again() -> None:
    """Under 1F1B it holds the most micro-batches."""
    tokens = torch.zeros(32, 256, dtype=torch.long)
    planner = Planner(Blocks(), (tokens, tokens), cluster="4xa100")
    given = {"pipeline": 4, "micro_batches": 8}
    free = planner.plan(**given)
    given["memory_limit"] = 0.8 * free.estimate.peak_bytes
    found, every = planner.plan(**given), planner.plan(**given, recompute="always")
    assert found.fits
    assert every.fits
    assert found.pipeline is not None
    assert found.pipeline.follows == (0, 1, 1, 1)
    last = max(end for _, end in found.recompute)
    layers = [entry.module for entry in found.operators[:last]]
    assert {name.split(".")[1] for name in layers if name.startswith("layers.")} == {"0", "1"}
    assert found.estimate.step_seconds < every.estimate.step_seconds
    assert loads(dumps(found).encode()) == found
