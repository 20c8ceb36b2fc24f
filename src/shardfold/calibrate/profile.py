"""`calibrate`: from the machine under our feet to a profile of it.

Calibration on one process, on several started here, or on those that torchrun started.

Where processes share a machine they are measured side by side, so that a table holds what a kernel
takes while the others compute, too: each time is the median over the processes.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from shardfold.calibrate.grids import Grid, cpu_plan, cuda_plan
from shardfold.calibrate.host import added_entries, host_entries
from shardfold.calibrate.kernels import Point, dtype_of, measure
from shardfold.calibrate.timers import clock_of
from shardfold.costs.profile import (
    FAMILIES,
    FORMAT,
    VERSION,
    CollectiveEntry,
    HostEntry,
    Machine,
    Profile,
    Rates,
    Table,
    fitted,
    sealed,
)
from shardfold.errors import ProfileError
from shardfold.plans.build import installed_versions
from shardfold.progress import Stage, Watch, without_gc
from shardfold.runtime.ranks import is_started, joined, launch


@without_gc()
def calibrate(
    device: str = "",
    *,
    quick: bool = False,
    families: Sequence[str] = (),
    watch: Watch = lambda stage: None,
) -> Profile:
    """Measure this machine: kernels, the host, and the collectives of the process group if any.

    `device` is cuda or cpu; by default the GPU, if there is one. `quick` takes two sizes of each
    kernel: it tries the machinery, and is no profile to plan with. With `families` only those that
    begin so are measured: enough for a model whose operators are known, and sooner done.
    """
    kind = _device(device)
    workspace = workspace_bytes(kind)
    plan = cuda_plan(quick) if kind == "cuda" else cpu_plan(quick)
    if families:
        kept = tuple(grid for grid in plan.grids if grid.family.startswith(tuple(families)))
        plan = replace(plan, grids=kept)
    clock = clock_of(kind, machine_of(kind).processes)
    tables, probes = measure(plan, clock, lambda n, k, of: watch(Stage(n, k, of)))
    dtype = dtype_of(plan.grids[0].dtype)
    host = host_entries(kind, dtype, lambda n, k, of: watch(Stage(f"launching {n}", k, of)))
    collectives = _collectives(kind, watch)
    machine = machine_of(kind, workspace)
    return assembled(machine, tables, probes, host, collectives)


@without_gc()
def extended(
    profile: Profile,
    *,
    quick: bool = False,
    host_anew: bool = False,
    watch: Watch = lambda stage: None,
) -> Profile:
    """The profile with what it lacks: what this version measures beside, or at other sizes.

    The machine must be the profile's own, in every way that the profile knows of. With `host_anew`
    the host is measured again, too: the same device may be in another one, or share it otherwise.
    """
    kind = _device(profile.machine.kind)
    here = machine_of(kind)
    if (here.name, here.processes) != (profile.machine.name, profile.machine.processes):
        raise ProfileError(
            f"The profile is of {profile.machine.name} with {profile.machine.processes} "
            f"processes, this is {here.name} with {here.processes}: calibrate anew."
        )
    plan = cuda_plan(quick) if kind == "cuda" else cpu_plan(quick)
    lacking = tuple(g for g in plan.grids if not _is_measured(profile, g))
    plan = replace(plan, grids=lacking)
    tables, probes = measure(plan, clock_of(kind), lambda n, k, of: watch(Stage(n, k, of)))
    fits = (fitted(t, probes.get((t.family, t.dtype), []), profile.rates) for t in tables)
    kept = () if host_anew else profile.host
    dtype = dtype_of(profile.dtypes[0])
    if host_anew:
        host = host_entries(kind, dtype, lambda n, k, of: watch(Stage(f"launching {n}", k, of)))
    else:
        host = added_entries(kind, dtype, {entry.kind for entry in kept})
    now = environment_of(kind)
    note = {"extended": f"{now['date']}, torch {now['torch']}"} if tables or host else {}
    return sealed(
        msgspec.structs.replace(
            profile,
            environment={**profile.environment, **note},
            tables=(*_but(profile, lacking), *fits),
            host=(*kept, *host),
        )
    )


def _is_measured(profile: Profile, grid: Grid) -> bool:
    """Whether a profile has a table of the very sizes that this version measures."""
    table = profile.table(grid.family, grid.dtype)
    return table is not None and table.grid == tuple(tuple(map(float, a)) for a in grid.axes)


def _but(profile: Profile, grids: Sequence[Grid]) -> list[Table]:
    """The profile's tables without those that are measured anew."""
    anew = {(grid.family, grid.dtype) for grid in grids}
    return [table for table in profile.tables if (table.family, table.dtype) not in anew]


def assembled(
    machine: Machine,
    tables: Sequence[Table],
    probes: dict[tuple[str, str], list[Point]],
    host: Sequence[HostEntry],
    collectives: Sequence[CollectiveEntry],
) -> Profile:
    """The profile of what was measured, with how far its tables are off at the probes."""
    rates = best_rates(tables)
    return sealed(
        Profile(
            FORMAT,
            VERSION,
            machine,
            environment_of(machine.kind),
            rates,
            tuple(fitted(t, probes.get((t.family, t.dtype), []), rates) for t in tables),
            tuple(host),
            tuple(collectives),
        )
    )


def best_rates(tables: Sequence[Table]) -> Rates:
    """The fastest product of each dtype, and the fastest large pass over memory."""
    flops: dict[str, float] = {}
    bandwidth = 0.0
    for table in tables:
        family = FAMILIES[table.family]
        for sizes, seconds in points_of(table):
            if table.family.startswith("matmul."):
                rate = float(family.flops(*sizes)) / seconds
                flops[table.dtype] = max(flops.get(table.dtype, 0.0), rate)
            elif table.family == "vector" and sizes[0] >= table.grid[0][-1] / 4:
                bandwidth = max(bandwidth, sizes[0] / seconds)
    return Rates({k: float(f"{v:.4g}") for k, v in flops.items()}, float(f"{bandwidth:.4g}"))


def points_of(table: Table) -> list[tuple[tuple[float, ...], float]]:
    """Every size of a table's grid that was measured, with its seconds."""
    from itertools import product

    pairs = zip(product(*table.grid), table.seconds, strict=True)
    return [(sizes, seconds) for sizes, seconds in pairs if seconds is not None]


def _device(asked: str) -> str:
    has_gpu = torch.cuda.is_available()
    if asked not in ("", "cuda", "cpu"):
        raise ProfileError(f"Unknown device {asked!r}: calibrate cuda or cpu.")
    if asked == "cuda" and not has_gpu:
        raise ProfileError("PyTorch sees no GPU here: calibrate with --device cpu.")
    return asked or ("cuda" if has_gpu else "cpu")


def workspace_bytes(kind: str) -> int:
    """What is left allocated by a product and its gradients, after all of their tensors."""
    if kind != "cuda":
        return 0
    before = torch.cuda.memory_allocated()
    left, right = (torch.randn(256, 256, device=kind, dtype=torch.bfloat16) for _ in range(2))
    (left.requires_grad_() @ right.requires_grad_()).sum().backward()
    del left, right
    return int(torch.cuda.memory_allocated() - before)


def machine_of(kind: str, workspace: int = 0) -> Machine:
    """What this machine is."""
    import torch.distributed as dist

    count = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    count = min(count, int(os.environ.get("LOCAL_WORLD_SIZE", count)))  # torchrun's, of one machine
    if kind == "cuda":
        found = torch.cuda.get_device_properties(0)
        return Machine(
            found.name, kind, found.multi_processor_count, found.total_memory, count, workspace
        )
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(_processor(), kind, os.cpu_count() or 1, pages, count)


def environment_of(kind: str) -> dict[str, str]:
    """The versions and settings that the times depend on."""
    found = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **installed_versions("shardfold"),
        "torch": str(torch.__version__),
        "platform": sys.platform,
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
    }
    if kind == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _collectives(kind: str, watch: Watch) -> tuple[CollectiveEntry, ...]:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return ()
    from shardfold.calibrate.collectives import collective_entries

    return collective_entries(kind, lambda n, k, of: watch(Stage(n, k, of)))


def calibrated(device: str, local: int | None, quick: bool, watch: Watch) -> Profile | None:
    """The profile, on rank 0; None on the other ranks of torchrun."""
    if local is not None:
        found: Profile = launch(_on_rank, local, device, quick)[0]
        return found
    if is_started():
        with joined() as (rank, _):
            shared = together(calibrate(device, quick=quick, watch=watch if not rank else _quiet))
            return shared if rank == 0 else None
    return calibrate(device, quick=quick, watch=watch)


def _quiet(stage: Stage) -> None:
    """A watch that looks away."""


def _on_rank(rank: int, device: str, quick: bool) -> Profile | None:
    found = together(calibrate(device, quick=quick))
    return found if rank == 0 else None


def together(profile: Profile) -> Profile:
    """The profile with the median of all processes in place of one's own times."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, profile)
    tables = tuple(_median(group) for group in zip(*[p.tables for p in everyone], strict=True))
    host = tuple(_median_host(group) for group in zip(*[p.host for p in everyone], strict=True))
    return sealed(msgspec.structs.replace(profile, tables=tables, host=host))


def _median_host(entries: Sequence[HostEntry]) -> HostEntry:
    return HostEntry(
        entries[0].kind,
        statistics.median(entry.forward_seconds for entry in entries),
        statistics.median(entry.backward_seconds for entry in entries),
    )


def _median(tables: Sequence[Table]) -> Table:
    columns = zip(*[table.seconds for table in tables], strict=True)
    times = tuple(
        None if None in column else statistics.median(t for t in column if t is not None)
        for column in columns
    )
    return msgspec.structs.replace(tables[0], seconds=times)
