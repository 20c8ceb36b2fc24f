"""Measures the cases of the fidelity benchmark on this machine's GPU, and writes them as JSON.

A step is the runner's own: forward, backward and AdamW, each step waited for. A rank's share of a
plan for eight devices runs in a process group whose collectives do nothing: its compute and its
memory are real, its communication is not there.

    python benchmarks/fidelity_measure.py --out measured.json
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn

from fidelity_cases import ALONE, CASES, CLUSTER, DEVICES, Case
from shardfold.calibrate.calibrate import environment_of, machine_of
from shardfold.capture import capture_program
from shardfold.plans import Plan
from shardfold.run.alone import alone
from shardfold.run.parallelize import Settings, assemble, parallelize
from shardfold.spaces import atomise, rules_of
from shardfold.versus import compare

WARM, STEPS = 3, 9


def module_of(case: Case, device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The runner's module of a case: on one device, or rank 0 of eight."""
    model, args, kwargs = case.build(device)
    if case.method == ALONE:
        program = capture_program(model, args, kwargs)
        atoms = atomise(program.graph, rules_of(program.graph))
        return assemble(model, program, alone(program, atoms), Settings()), args, kwargs
    with tempfile.TemporaryDirectory() as folder:
        compare(model, args, kwargs, cluster=CLUSTER, methods=(case.method,), save_plans=folder)
        plan = Plan.load(Path(folder) / f"{case.method}.json")
    return parallelize(model, plan, args, kwargs), args, kwargs


def measured(case: Case, device: str) -> dict[str, Any]:
    """Seconds of each step, and bytes at rest and at the peak."""
    before = _allocated(device)
    module, args, kwargs = module_of(case, device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5)
    gc.collect()

    def step() -> list[float]:
        _wait(device)
        times = [time.perf_counter()]
        loss = module(*args, **kwargs)
        times.append(time.perf_counter())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
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
        "step_seconds": statistics.median(seconds),
        "all_seconds": [round(s, 6) for s in seconds],
        "host_seconds": [round(statistics.median(h[k] for h in hosts), 6) for k in range(4)],
        "before_bytes": before,
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


@click.command()
@click.option("--out", required=True, type=click.Path(dir_okay=False))
@click.option("--only", default="", help="Cases whose name has this text.")
@click.option("--device", default="cuda")
def main(out: str, only: str, device: str) -> None:
    """Measure all cases; one that fails is reported and left out."""
    cases = [case for case in CASES if only in case.name]
    found: list[dict[str, Any]] = []
    for case in sorted(cases, key=lambda c: c.method != ALONE):
        if case.method != ALONE and not dist.is_initialized():
            _join_fake_group()
        began = time.perf_counter()
        try:
            entry = measured(case, device)
        except (RuntimeError, ValueError, KeyError) as error:
            traceback.print_exc()
            print(f"{case.name}: failed, {error}", file=sys.stderr)
            continue
        finally:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        entry["took_seconds"] = time.perf_counter() - began
        found.append(entry)
        spread = max(entry["all_seconds"]) / min(entry["all_seconds"]) - 1
        print(
            f"{case.name}: {entry['step_seconds'] * 1e3:.2f} ms (spread {spread:.0%}), "
            f"{entry.get('peak_bytes', 0) / 2**30:.2f} GiB, took {entry['took_seconds']:.1f} s",
            flush=True,
        )
        plain = {
            "machine": asdict_machine(device),
            "environment": environment_of(device),
            "cases": found,
        }
        Path(out).write_text(json.dumps(plain, indent=1) + "\n")


def asdict_machine(device: str) -> dict[str, Any]:
    """The machine as plain values."""
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(machine_of(device))
    return plain


if __name__ == "__main__":
    main()
