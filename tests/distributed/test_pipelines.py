"""Stages of a pipeline on real processes: the numbers of one device, the messages of the plan."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from draws import covering
from shardfold.api import plan as find_plan
from shardfold.cluster import parse
from shardfold.costs.unroll import unroll
from shardfold.errors import RunError, ShardfoldError
from shardfold.pipeline.cut import Layers, equal
from shardfold.plans import Plan
from shardfold.plans.files import dumps, loads
from shardfold.plans.parts import firsts_of_parts
from shardfold.plans.plan import PipelineEntry
from shardfold.plans.wholes import Whole, joined
from shardfold.runtime.check import compare_captured
from shardfold.runtime.checkpoint import load, save
from shardfold.runtime.crossings import Incoming
from shardfold.runtime.parallelize import (
    Settings,
    assemble_stages,
    lowered_parts,
    parallelize,
    prepared,
)
from shardfold.simulate.decoded import DecodedChoice, UnrolledChoice

from .jobs import FLOAT64
from .models import HAND_WRITTEN
from .ranks import Launch
from .recorder import by_member, planned, recorded
from .test_accumulation import Passes, without_dropout

SCHEDULES = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2))


class Skips(nn.Module):
    """Layers in a list, a skip from the first to the last, a table that both ends read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16))
            for _ in range(4)
        )
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        first = x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        self.steps += 1
        logits = (x * first) @ self.table.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _skips() -> tuple[nn.Module, Any, Any]:
    numbers = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(0, 24, (8, 6), generator=numbers) for _ in range(2))
    return Skips(), (tokens, labels), {}


class UNet(nn.Module):
    """Convolutions in a list, down and up again; what goes down is read on the way up."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((4, 8), (8, 16), (16, 8), (16, 4))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.GELU(), _Scale(b))
            for a, b in widths
        )
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        wide = self.blocks[0](x)
        deep = self.blocks[1](nn.functional.avg_pool2d(wide, 2))
        up = nn.functional.interpolate(self.blocks[2](deep), scale_factor=2.0)
        last = self.blocks[3](torch.cat([up, wide], 1))
        return nn.functional.mse_loss(self.head(torch.cat([last, x], 1)), noise)


class _Scale(nn.Module):
    """A factor for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _unet() -> tuple[nn.Module, Any, Any]:
    numbers = torch.Generator().manual_seed(4)
    return UNet(), tuple(torch.randn(8, 4, 8, 8, generator=numbers) for _ in range(2)), {}


class Blocks(nn.Module):
    """Layers that keep much for backward beside what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            for _ in range(8)
        )
        self.head = nn.Linear(64, 1000)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _blocks() -> tuple[nn.Module, Any, Any]:
    numbers = torch.Generator().manual_seed(5)
    return Blocks(), tuple(torch.randint(0, 1000, (32, 64), generator=numbers) for _ in "xy"), {}


HAND_WRITTEN["blocks"] = _blocks
HAND_WRITTEN["skips"] = _skips
HAND_WRITTEN["unet"] = _unet


def staged(plan: Plan, chooser: Passes, schedule: str, parts: int, chunks: int) -> Plan:
    """The plan as that of every stage of a pipeline of equal layers."""
    layers = tuple(equal(len(Layers.of(chooser.graph)), parts * chunks))
    cluster = parse(f"{parts}x{chooser.cluster.size}xcpu")
    return msgspec.structs.replace(
        plan,
        cluster=cluster.name,
        provenance=msgspec.structs.replace(plan.provenance, cluster=cluster.as_plain()),
        pipeline=PipelineEntry(schedule, parts, chunks, layers),
    )


def run_all(rank: int, cases: list[tuple[str, bool, list[bytes]]]) -> list[tuple[str, str, str]]:
    """Of each plan: what differs from one device, and what is sent and not planned."""
    told = []
    for name, is_tied, plans in cases:
        model, args, kwargs = without_dropout(name)
        captured = prepared(model, loads(plans[0]), args, kwargs, None, None)
        for data in plans:
            plan = loads(data)
            settings = replace(FLOAT64, passes=plan.micro_batches, cuts=plan.micro_batch_dims)
            outcome = compare_captured(model, plan, captured, args, kwargs, None, settings)
            differs = "" if outcome.is_equal else str(outcome)
            sent = "" if is_tied else _sent(plan, model, captured, (args, kwargs), settings)
            told.append((name, differs, sent))
    return told


def _sent(plan: Plan, model: nn.Module, captured: Any, batch: Any, settings: Settings) -> str:
    """The collectives of all stages together, beside the plan's."""
    program, subdims = captured
    lower = partial(lowered_parts, plan, subdims=subdims, rules=None)
    split = assemble_stages(model, program, lower, settings, plan)
    names = split._run.lowered.mesh.names
    split._run.context.groups.make([tuple(range(len(names)))])
    with recorded(split._run.context.groups, names, widened=True) as ran:
        split.accumulate(*batch[0], **batch[1])
    uses = [stage.run.uses for stage in split._run.stages.stages.values()]
    launched = [each for held in uses if held is not None for each in held.launched]
    own = by_member(ran, launched, names, widened=True) - _gathered(split, names)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    # Of each stage the rank with the fullest parts of everything, which is what a plan counts.
    total = sum((every[rank] for rank in firsts_of_parts(plan)), start=Counter())
    wanted = planned(plan)
    return "" if total == wanted else f"planned {wanted - total}, ran {total - wanted}"


def _gathered(split: Any, names: tuple[str, ...]) -> Counter[Any]:
    """The sums before messages, and the gathers of what several ranks took a part each of."""
    stages, shape = split._run.stages, split._run.lowered.mesh.shape
    found: Counter[Any] = Counter()

    def note(
        kind: str, axes: tuple[int, ...], items: int, dtype: torch.dtype, times: int = 0
    ) -> None:
        if axes:
            bytes_each = 4 if dtype.is_floating_point else dtype.itemsize
            told = kind, tuple(names[a] for a in axes), float(items * bytes_each)
            found[told] += times or stages.pipeline.micro_batches

    def gather(way: Incoming, times: int = 0) -> None:
        members, own = math.prod(shape[a] for a in way.gathered), list(way.lengths)
        if way.gathered:
            own[way.along] = -(-way.whole // members) * members
        note("all_gather", way.gathered, math.prod(own), way.dtype, times)

    for tied in stages.tied.values():
        for _, back in (tied.ways or {}).values():
            gather(back, 1)
    for stage in stages.stages.values():
        for received, side in ((stage.received, "F"), (stage.sent, "B")):
            for each in received:
                way = each.ways["FB".index(side)]
                if way is not None:
                    gather(way)
        for sent, side in ((stage.sent, "F"), (stage.received, "B")):
            for each in sent:
                way = each.ways["FB".index(side)]
                if way is not None:
                    note("all_reduce", way.summed, math.prod(way.lengths), torch.float32)
    return found


@pytest.mark.parametrize(
    ("cases", "parts", "cluster", "mesh"),
    [
        (
            {
                "skips": (4, 3, True),
                "gpt2-tiny": (4, 1, True),
                "t5-large-tiny": (2, 1, True),
                "llama3-8b-tiny": (4, 2, False),
                "mixtral-8x7b-tiny": (2, 1, False),
                "bert-large-tiny": (4, 1, True),
                "unet": (4, 2, False),
            },
            2,
            "2xcpu",
            "2",
        ),
        ({"skips": (4, 0, True), "unet": (2, 0, False)}, 4, "1xcpu", "1"),
        ({"skips": (4, 0, True), "unet": (4, 0, False)}, 4, "2xcpu", "2"),
    ],
    ids=["2 x 2", "4 x 1", "4 x 2"],
)
def test_stages_give_the_numbers_of_one_device_and_send_what_the_plan_says(
    cases: dict[str, tuple[int, int, bool]], parts: int, cluster: str, mesh: str, on_ranks: Launch
) -> None:
    """The first model has its best plan under every schedule; else they take turns."""
    given = []
    for number, (model, (passes, count, is_tied)) in enumerate(cases.items()):
        chooser = Passes(model, passes, cluster, mesh)
        _, sharded = chooser.baselines()
        plans = [chooser.best()] * (1 if number else 3)
        plans += [sharded, *chooser.covering(count).values()]
        most = len(Layers.of(chooser.graph))
        possible = [each for each in SCHEDULES if parts * each[1] <= most]
        turns = zip(plans, islice(cycle(possible), number, None), strict=False)
        listed = [staged(p, chooser, schedule, parts, n) for p, (schedule, n) in turns]
        given.append((model, is_tied, [dumps(plan).encode() for plan in listed]))
    for told in on_ranks(run_all, parts * parse(cluster).size, given):
        assert len(told) == sum(len(plans) for *_, plans in given)
        for model, differs, sent in told:
            assert differs == "", model
            assert sent == "", model


def apart(parts: list[tuple[Passes, tuple[int, ...]]], cluster: str, schedule: str) -> Plan:
    """A plan whose parts follow choices of their own, in equal layers."""
    wholes = []
    for chooser, choice in parts:
        given = (chooser.graph, chooser.subdims, chooser.tables, choice)
        at = DecodedChoice(*given, chooser.prices, chooser.optimizer)
        model = UnrolledChoice(at, unroll(chooser.tables, chooser.graph), np.array(choice))
        wholes.append(Whole.of(model, chooser.cluster, chooser.cuts))
    layers, chunks = Layers.of(parts[0][0].graph), dict(SCHEDULES)[schedule]
    counts = equal(len(layers), len(parts) * chunks)
    found = joined(wholes, layers.begins(counts), [*range(len(parts))] * chunks)
    plan, whole = parts[0][0].best(), parse(cluster)
    follows = tuple(range(len(parts)))
    entry = PipelineEntry(schedule, len(parts), chunks, tuple(counts))
    return msgspec.structs.replace(
        plan,
        cluster=whole.name,
        mesh=wholes[0].mesh,
        operators=found.operators,
        tensors=found.tensors,
        parameters=found.parameters,
        inputs=wholes[0].inputs,
        provenance=msgspec.structs.replace(plan.provenance, cluster=whole.as_plain()),
        pipeline=msgspec.structs.replace(entry, choices=found.choices, follows=follows),
    )


@pytest.mark.parametrize(
    ("cases", "cluster", "parts"),
    [
        ({"skips": 3, "llama3-8b-tiny": 1, "unet": 1}, "4xcpu", (("1", "1"), ("3", "3"))),
        ({"skips": 2, "gpt2-tiny": 1, "unet": 1}, "2x2xcpu", (("2", "2"), ("2", "2"))),
        ({"skips": 2}, "4xcpu", (("2", "2"), ("1", "1"), ("1", "1"))),
        ({"skips": 2, "llama3-8b-tiny": 1}, "2x4xcpu", (("4", "4"), ("4", "2x2"))),
    ],
    ids=["1 + 3", "2 + 2", "2 + 1 + 1", "4 + 2 x 2"],
)
def test_parts_that_differ_give_the_numbers_of_one_device(
    cases: dict[str, int], cluster: str, parts: tuple[tuple[str, str], ...], on_ranks: Launch
) -> None:
    """Each part has its own mesh, and splits of its own at random; GPT-2 is tied."""
    given, turns = [], cycle(SCHEDULES[:2] if len(parts) > 2 else SCHEDULES)
    for model, count in cases.items():
        made = {part: Passes(model, 4, f"{part[0]}xcpu", part[1]) for part in set(parts)}
        sizes = {part: [len(c) for c in made[part].tables.problem.costs] for part in made}
        listed = [
            apart(
                [(made[p], covering(sizes[p], number + 7 * k)) for k, p in enumerate(parts)],
                cluster,
                next(turns)[0],
            )
            for number in range(count)
        ]
        given.append((model, model == "gpt2-tiny", [dumps(plan).encode() for plan in listed]))
    for told in on_ranks(run_all, parse(cluster).size, given):
        for model, differs, sent in told:
            assert differs == "", model
            assert sent == "", model


@pytest.mark.parametrize(
    ("cluster", "pipeline", "recompute"),
    [("2x2xcpu", 2, "never"), ("2x2xcpu", 2, "always"), ("4xcpu", "1+3", "always")],
)
def test_a_planned_pipeline_runs_as_planned(
    cluster: str, pipeline: int | str, recompute: str, on_ranks: Launch
) -> None:
    model, args, kwargs = without_dropout("skips")
    given = {"cluster": cluster, "pipeline": pipeline, "recompute": recompute}
    plan = find_plan(model, args, kwargs, micro_batches=4, **given)
    assert plan.pipeline is not None
    assert plan.pipeline.follows == ((0, 1) if pipeline == "1+3" else ())
    assert bool(plan.recompute) == (recompute == "always")
    for told in on_ranks(run_all, 4, [("skips", True, [dumps(plan).encode()])]):
        assert told == [("skips", "", "")]


def test_where_memory_binds_stages_of_their_own_choice_run_as_planned(on_ranks: Launch) -> None:
    """The first two compute again what they kept, the last two do not."""
    model, args, kwargs = without_dropout("blocks")
    given = {"cluster": "4xcpu", "pipeline": 4, "micro_batches": 8}
    free = find_plan(model, args, kwargs, **given)
    given["memory_limit"] = 0.85 * free.estimate.peak_bytes
    plan = find_plan(model, args, kwargs, **given)
    assert plan.pipeline is not None
    assert plan.pipeline.follows == (0, 0, 1, 1)
    assert 0 < len(plan.recompute) < 8
    for told in on_ranks(run_all, 4, [("blocks", False, [dumps(plan).encode()])]):
        assert told == [("blocks", "", "")]


STEPS = 3


def trained(
    rank: int, name: str, data: bytes, folder: Path, *, resumes: bool, clip: float
) -> list[float]:
    """The losses of some steps in float64, from the beginning or from what was saved; the loss
    in eval mode last."""
    model, args, kwargs = without_dropout(name)
    module = parallelize(model, loads(data), args, kwargs, float64=True)
    decayed = [p for p in module.parameters() if p.ndim > 1]
    others = [p for p in module.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    if resumes:
        assert load(module, optimizer, folder).step == STEPS
    losses = []
    for _ in range(STEPS):
        losses.append(float(module.accumulate(*args, **kwargs)))
        norm = module.clip_grad_norm_(clip)
        losses.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    if not resumes:
        save(module, optimizer, folder, step=STEPS)
    module.eval()
    losses.append(float(module.accumulate(*args, **kwargs)))
    buffers = {name: float(t) for name, t in module.state_dict().items() if name == "steps"}
    return [*losses, *buffers.values()]


@pytest.mark.parametrize("name", ["skips", "gpt2-tiny"])
def test_a_run_goes_on_with_other_stages_or_none(
    name: str, tmp_path: Path, on_ranks: Launch
) -> None:
    two, one = Passes(name, 4, "2xcpu", "2"), Passes(name, 4, "1xcpu", "1")
    fsdp = list(two.baselines())[1]
    piped = staged(fsdp, two, "1f1b", 2, 1)
    plans = [(4, piped), (2, fsdp), (1, one.best())]
    if name == "skips":
        three = Passes(name, 4, "3xcpu", "3")
        sizes = [[len(c) for c in each.tables.problem.costs] for each in (one, three)]
        pair = [(one, covering(sizes[0], 0)), (three, covering(sizes[1], 3))]
        plans += [(2, staged(one.best(), one, "interleaved", 2, 2))]
        plans += [(4, apart(pair, "4xcpu", "1f1b"))]

    def run(plan: Plan, processes: int, folder: str, *, resumes: bool) -> list[float]:
        given = (name, dumps(plan).encode(), tmp_path / folder)
        job = partial(trained, resumes=resumes, clip=0.1)
        every: list[list[float]] = on_ranks(job, processes, *given)
        for each in every:
            assert each == pytest.approx(every[0], rel=1e-12)
        return every[0]

    first = {k: run(plan, n, f"run {k}", resumes=False) for k, (n, plan) in enumerate(plans)}
    for each in first.values():
        assert each == pytest.approx(first[2], rel=1e-9)
    # Each goes on from what the one before it saved.
    later = [
        run(plan, n, f"run {k - 1 if k else len(plans) - 1}", resumes=True)
        for k, (n, plan) in enumerate(plans)
    ]
    for each in later:
        assert each == pytest.approx(later[0], rel=1e-9)
    assert later[0][0] < first[0][0]


def refused(rank: int, data: bytes) -> list[str]:
    """What is said of calls that stages cannot answer, and of a plan that is for other layers."""
    model, args, kwargs = without_dropout("skips")
    plan = loads(data)
    module = parallelize(model, plan, args, kwargs)
    said = []
    for call in (lambda: module(*args), lambda: module.outputs("layers.0").__enter__()):
        with pytest.raises(RunError) as error:
            call()
        said.append(str(error.value))
    entry = msgspec.structs.replace(plan.pipeline, layers=(1, 1))
    with pytest.raises(ShardfoldError) as wrong:
        parallelize(model, msgspec.structs.replace(plan, pipeline=entry), args, kwargs)
    return [*said, str(wrong.value)]


def test_what_stages_cannot_do_is_said(on_ranks: Launch) -> None:
    one = Passes("skips", 4, "1xcpu", "1")
    for said in on_ranks(refused, 2, dumps(staged(one.best(), one, "1f1b", 2, 1)).encode()):
        assert "call accumulate()" in said[0]
        assert "Outputs" in said[1]
        assert "2 layers into 2 stages; the model has 4" in said[2]
