"""A plan made by hand: two layers that repeat, a wrapper's name, and a head."""

from __future__ import annotations

import msgspec

from shardfold.planner.options import Request
from shardfold.plans import Estimate, MeshEntry, Plan, Provenance
from shardfold.plans.files import FORMAT
from shardfold.plans.plan import (
    VERSION,
    AxisEntry,
    CollectiveEntry,
    FinalistEntry,
    InputEntry,
    OperatorEntry,
    PinEntry,
    Pinned,
    UnsplitEntry,
)
from shardfold.simulate import Simulation

MIB = 2**20


def operator(
    module: str,
    kind: str,
    seconds: float,
    split: dict[str, int],
    *collectives: CollectiveEntry,
) -> OperatorEntry:
    return OperatorEntry(kind, f"aten.{kind}", module, "", (), split, seconds, collectives)


def collective(phase: str, kind: str, *axes: str, mib: float, seconds: float) -> CollectiveEntry:
    return CollectiveEntry(phase, kind, axes, mib * MIB, 1, seconds)


def layer(at: int) -> list[OperatorEntry]:
    inner = f"model.layers.{at}"
    reduce = collective("backward", "all_reduce", "node", mib=4, seconds=0.02)
    both = {"batch": 4, "heads": 8}
    return [
        operator(f"{inner}.attention.query", "linear", 0.05, both, reduce),
        operator(f"{inner}.attention", "view", 0.0, both),
        operator(f"{inner}.attention.key", "linear", 0.05, both, reduce),
        operator(f"{inner}.norm", "pow", 0.005, {"batch": 4}),
        operator(f"{inner}.norm", "mul", 0.005, {"batch": 4}),
        operator(inner, "add", 0.04, {}),
    ]


HEAD = operator(
    "model.head",
    "linear",
    0.6984,
    {"batch": 4, "vocab": 8},
    collective("forward", "all_gather", "node", "gpu0", "gpu1", mib=8, seconds=0.1),
    collective("backward", "reduce_scatter", "gpu0", mib=16, seconds=0.1),
    collective("backward", "reduce_scatter", "gpu1", mib=8, seconds=0.05),
    collective("backward", "all_reduce", "node", mib=0.001, seconds=1e-6),
)


SIMULATION = Simulation(
    step_seconds=0.8,
    compute_seconds=0.7,
    communication_seconds=0.3,
    exposed_seconds=0.1,
    peak_bytes=60 * 2**30,
    peak_by_class={},
    peak_at="head backward",
    mfu=0.5,
    utilisation={},
)
FINALISTS = (
    FinalistEntry("search", "4x2x4", 0.8, 1.0, 0.1, 60 * 2**30, 0.5),
    FinalistEntry("fsdp", "4x2x4", 1.2, 1.5, 0.5, 20 * 2**30, 0.3, True, source="baseline"),
    FinalistEntry("data-parallel", "4x2x4", 2.0, 2.5, 1.2, 90 * 2**30, 0.2, source="baseline"),
)


def full() -> Plan:
    """With all that can be said of a plan."""
    plan = made(optimal=False)
    provenance = msgspec.structs.replace(
        plan.provenance, model="Language", notes=("The profile is an old one.",)
    )
    estimate = msgspec.structs.replace(
        plan.estimate,
        step_seconds=0.8,
        data_parallel_seconds=2.0,
        fully_sharded_seconds=1.2,
        fully_sharded_recomputes=True,
    )
    return msgspec.structs.replace(
        plan,
        estimate=estimate,
        simulation=SIMULATION,
        finalists=FINALISTS,
        inputs=(InputEntry("ids", (8, 1024), ("dim 0",), 0, "0", "int64"),),
        micro_batches=2,
        recompute=((0, 6), (6, 12)),
        pinned=Pinned((PinEntry("head", "batch/4 vocab/8", 1),), 0.6, 0.9),
        provenance=provenance,
    )


def made(*, fits: bool = True, optimal: bool = True) -> Plan:
    operators = (*layer(0), *layer(1), HEAD, operator("", "sum", 0.0016, {}))
    return Plan(
        format=FORMAT,
        version=VERSION,
        cluster="4x8xh100",
        mesh=(
            AxisEntry("node", 4, "node"),
            AxisEntry("gpu0", 2, "gpu"),
            AxisEntry("gpu1", 4, "gpu"),
        ),
        estimate=Estimate(
            step_seconds=1.0,
            additive_seconds=1.0,
            additive_lower_bound_seconds=1.0 if optimal else 0.98,
            optimal=optimal,
            compute_seconds=0.6,
            communication_seconds=0.3,
            update_seconds=0.1,
            data_parallel_seconds=2.5,
            data_parallel_bytes=90 * 2**30,
            fully_sharded_seconds=1.5,
            peak_bytes=60 * 2**30,
            fully_sharded_bytes=20 * 2**30,
            device_bytes=80 * 2**30,
            limit_bytes=(72 if fits else 50) * 2**30,
            min_feasible_bytes=None if fits else 55.0 * 2**30,
        ),
        meshes=(MeshEntry("4x2x4", 1.0, 1.0, 1.0), MeshEntry("2x2x8", 1.25, 1.25, 1.25)),
        unsplit=(
            UnsplitEntry("mine.op", 2, 0.02, 0.02, "no rule"),
            UnsplitEntry("aten.arange", 1, 0.0, 0.0, "depends on no parameter"),
        ),
        operators=operators,
        tensors=(),
        parameters=(),
        provenance=Provenance(
            graph="sha256:0",
            operators=len(operators),
            parameters=8_030_000_000,
            cluster={},
            request=Request(dtype="bf16"),
            versions={},
            capture_seconds=1.5,
            search_seconds=0.25,
        ),
    )
