"""Measures the cases of the fidelity benchmark on this machine's GPU, and writes them as JSON.

A step is the runner's own: forward, backward and AdamW, each step waited for. A rank's share of a
plan for eight devices runs in a process group whose collectives do nothing: its compute and its
memory are real, its communication is not there. Plans are made first, several at a time; then
every case has a process and the machine to itself, so that nothing of another is in its way.

Steps are timed in windows, without Python's garbage collection, until the last windows agree; the
others have warmed up. A case's time is the median of the last ones' steps. A host that is shared
with others is fast for one case and slow for another: its pace is taken right after each, by a
block of small operators that has nothing to do with the case.

    python benchmarks/fidelity_measure.py --out measured.json
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import msgspec
import torch
import torch.distributed as dist
from torch import nn

from fidelity_cases import ALONE, CASES, DEVICES, Case, choices_of
from shardfold.calibrate.host import Pace
from shardfold.calibrate.profile import environment_of, machine_of, workspace_bytes
from shardfold.calibrate.timers import middle
from shardfold.capture import capture_program
from shardfold.operators import rules_of
from shardfold.plans import Plan
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import Settings, assemble, parallelize
from shardfold.sharding import find_subdims

WARM, WINDOW = 3, 5  # steps
SETTLED, MOST_WINDOWS = 3, 10  # windows that agree, and how many there may be until then
AGREED = 0.02  # how far apart they may be
PACES = 3
GRACE_SECONDS = 60.0  # for a case that was begun in time


def module_of(
    case: Case, device: str, plans: Mapping[str, str]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], str]:
    """The runner's module of a case: on one device, or rank 0 of eight; and the plan's digest."""
    model, args, kwargs = case.build(device)
    if not _is_planned(case):
        program = capture_program(model, args, kwargs)
        subdims = find_subdims(program.graph, rules_of(program.graph))
        return assemble(model, program, alone(program, subdims), Settings()), args, kwargs, ""
    plan = Plan.load(plans[case.name])
    return parallelize(model, plan, args, kwargs), args, kwargs, choices_of(plan)


def _is_planned(case: Case) -> bool:
    return case.method != ALONE or case.recompute


def planned(case: Case, folder: str) -> str:
    """The file of a case's plan; made without a GPU."""
    file = str(Path(folder) / f"{abs(hash(case))}.json")
    try:
        case.plan(*case.build("meta")).save(file)
    except Exception:  # the case will fail for want of its plan, the others go on
        traceback.print_exc()
    return file


def measured(case: Case, device: str, plans: Mapping[str, str]) -> dict[str, Any]:
    """Seconds of each step, bytes at rest and at the peak, and the host's pace."""
    workspace = workspace_bytes(device)
    module, args, kwargs, choices = module_of(case, device, plans)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    gc.collect()
    gc.disable()

    def step() -> list[float]:
        _wait(device)
        times = [time.perf_counter()]
        loss = module(*args, **kwargs)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter())
        _wait(device)
        times.append(time.perf_counter())
        return times

    for _ in range(WARM):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    runs = until_settled(step)
    every = [run[-1] - run[0] for run in runs]
    runs, seconds = runs[-SETTLED * WINDOW :], every[-SETTLED * WINDOW :]
    hosts = [[b - a for a, b in pairwise(run)] for run in runs]
    found = {
        "name": case.name,
        **asdict(case),
        "choices": choices,
        "step_seconds": statistics.median(seconds),
        "all_seconds": [round(s, 6) for s in every],
        "window_seconds": [round(s, 6) for s in medians(seconds)],
        "windows": len(every) // WINDOW,
        "host_seconds": [round(statistics.median(h[k] for h in hosts), 6) for k in range(4)],
        "workspace_bytes": workspace,
        "parameters": sum(p.numel() for p in module.parameters()),
        "tensors": len(list(module.parameters())),
        "resting_bytes": _allocated(device),
    }
    if device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    pace = Pace(device, torch.bfloat16)
    found["pace_seconds"] = middle([pace.now() for _ in range(PACES)])
    return found


def until_settled(step: Callable[[], list[float]]) -> list[list[float]]:
    """Windows of steps until the last of them agree; those before have warmed up.

    Where sizes differ from step to step (experts), memory is looked for anew for some dozen steps.
    """
    runs: list[list[float]] = []
    for number in range(MOST_WINDOWS):
        runs += [step() for _ in range(WINDOW)]
        last = medians([run[-1] - run[0] for run in runs])[-SETTLED:]
        if number + 1 >= SETTLED and max(last) <= (1 + AGREED) * min(last):
            break
    return runs


def medians(seconds: list[float]) -> list[float]:
    """Of each window."""
    starts = range(0, len(seconds), WINDOW)
    return [statistics.median(seconds[at : at + WINDOW]) for at in starts]


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _join_fake_group() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEVICES)


def _in_process(case: Case, device: str, plans: Mapping[str, str], to: Connection) -> None:
    """Measure one case, and send what was found, the machine, and its environment."""
    try:
        if case.method != ALONE:
            _join_fake_group()
        entry = measured(case, device, plans)
        machine = msgspec.to_builtins(machine_of(device))
        to.send((entry, machine, environment_of(device)))
    except Exception:  # reported where it is awaited: the other cases go on
        to.send(traceback.format_exc())


def each(cases: list[Case], device: str, seconds: float) -> Iterator[tuple[Case, Any]]:
    """Every case with what its process sent, as long as there is time to begin another.

    Processes are forked before anything touches the GPU, so that modules are imported once.
    """
    import shardfold.zoo.huggingface  # noqa: F401

    forks = multiprocessing.get_context("fork")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        wanted = [case for case in cases if _is_planned(case)]
        with forks.Pool(min(len(wanted), os.cpu_count() or 1) or 1) as pool:
            files = pool.starmap(planned, [(case, folder) for case in wanted], chunksize=1)
        print(f"{len(files)} plans made in {time.perf_counter() - began:.0f} s", flush=True)
        plans = dict(zip((case.name for case in wanted), files, strict=True))
        for case in cases:
            left = seconds - (time.perf_counter() - began)
            if left <= 0:
                print(f"{case.name}: no time left", file=sys.stderr)
                continue
            yield case, _awaited(forks, (case, device, plans), left)


def _awaited(forks: Any, given: tuple[Case, str, Mapping[str, str]], seconds: float) -> Any:
    """What a process of its own sends about a case, or why it does not."""
    here, there = forks.Pipe(duplex=False)
    process = forks.Process(target=_in_process, args=(*given, there))
    process.start()
    there.close()
    try:
        found = here.recv() if here.poll(seconds + GRACE_SECONDS) else "it took too long"
    except EOFError:
        found = "its process ended without a word"
    if process.is_alive() and isinstance(found, str):
        process.kill()
    process.join()
    return found


@click.command()
@click.option("--out", required=True, type=click.Path(dir_okay=False))
@click.option("--only", default="", help="Cases whose name has one of these texts, given with |.")
@click.option("--device", default="cuda")
@click.option("--seconds", default=420.0, help="Begin no case after so long.")
def main(out: str, only: str, device: str, seconds: float) -> None:
    """Measure all cases; one that fails is reported and left out."""
    cases = [case for case in CASES if any(text in case.name for text in only.split("|"))]
    # Shares and recomputed blocks take the longest to prepare: they come first.
    cases.sort(key=lambda case: (case.method == ALONE, not case.recompute))
    entries: list[dict[str, Any]] = []
    for case, found in each(cases, device, seconds):
        if isinstance(found, str):
            print(f"{case.name}: failed, {found}", file=sys.stderr, flush=True)
            continue
        entry, machine, environment = found
        entries.append(entry)
        spread = max(entry["window_seconds"]) / min(entry["window_seconds"]) - 1
        print(
            f"{case.name}: {entry['step_seconds'] * 1e3:.2f} ms (spread {spread:.0%}), "
            f"{entry.get('peak_bytes', 0) / 2**30:.2f} GiB",
            flush=True,
        )
        ordered = [e for c in CASES for e in entries if e["name"] == c.name]
        plain = {"machine": machine, "environment": environment, "cases": ordered}
        Path(out).write_text(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
