"""Measures the cases of the fidelity benchmark on this machine's GPU, and writes them as JSON.

A step is the runner's own: forward, backward and AdamW, each step waited for. A rank's share of a
plan for eight devices runs in a process group whose collectives do nothing: its compute and its
memory are real, its communication is not there. Every case has a process to itself, so that nothing
of another is in its memory or its way.

    python benchmarks/fidelity_measure.py --out measured.json
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
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
from shardfold.calibrate.calibrate import environment_of, machine_of, workspace_bytes
from shardfold.capture import capture_program
from shardfold.run.alone import alone
from shardfold.run.parallelize import Settings, assemble, parallelize
from shardfold.spaces import atomise, rules_of

WARM, STEPS = 3, 9


def module_of(case: Case, device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], str]:
    """The runner's module of a case: on one device, or rank 0 of eight; and the plan's digest."""
    model, args, kwargs = case.build(device)
    if case.method == ALONE and not case.recompute:
        program = capture_program(model, args, kwargs)
        atoms = atomise(program.graph, rules_of(program.graph))
        return assemble(model, program, alone(program, atoms), Settings()), args, kwargs, ""
    plan = case.plan(model, args, kwargs)
    return parallelize(model, plan, args, kwargs), args, kwargs, choices_of(plan)


def measured(case: Case, device: str) -> dict[str, Any]:
    """Seconds of each step, and bytes at rest and at the peak."""
    workspace = workspace_bytes(device)
    module, args, kwargs, choices = module_of(case, device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    gc.collect()

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
    runs = [step() for _ in range(STEPS)]
    seconds = [run[-1] - run[0] for run in runs]
    hosts = [[b - a for a, b in pairwise(run)] for run in runs]
    found = {
        "name": case.name,
        **asdict(case),
        "choices": choices,
        "step_seconds": statistics.median(seconds),
        "all_seconds": [round(s, 6) for s in seconds],
        "host_seconds": [round(statistics.median(h[k] for h in hosts), 6) for k in range(4)],
        "workspace_bytes": workspace,
        "parameters": sum(p.numel() for p in module.parameters()),
        "tensors": len(list(module.parameters())),
        "resting_bytes": _allocated(device),
    }
    if device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _join_fake_group() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEVICES)


def _in_process(case: Case, device: str, to: Connection) -> None:
    """Measure one case, and send what was found, the machine, and its environment."""
    try:
        if case.method != ALONE:
            _join_fake_group()
        entry = measured(case, device)
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
    for case in cases:
        left = seconds - (time.perf_counter() - began)
        if left <= 0:
            print(f"{case.name}: no time left", file=sys.stderr)
            continue
        here, there = forks.Pipe(duplex=False)
        process = forks.Process(target=_in_process, args=(case, device, there))
        process.start()
        there.close()
        try:
            found = here.recv() if here.poll(left + 60) else "took too long"
        except EOFError:
            found = "its process ended without a word"
        if found == "took too long":
            process.kill()
        process.join()
        yield case, found


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
        spread = max(entry["all_seconds"]) / min(entry["all_seconds"]) - 1
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
