"""The cost of running a plan: a step under it beside the same step written by hand.

On two processes of one thread each: the data-parallel plan beside DistributedDataParallel, and
the Megatron-style plan beside a Megatron-style module (benchmarks/megatron.py). On one process:
the parallelized module beside the plain one, eager and compiled. Both sides take turns in the
same processes, on the same weights and batch; the medians of their steps are compared, by the
clock and by the processor time that this process used (which other work on the machine does not
lengthen).

    python benchmarks/runner.py --world 2 --out benchmarks/results/runner-2.json
    python benchmarks/runner.py --world 1 --model gpt2 --out benchmarks/results/runner-1.json
    python benchmarks/runner.py --world 1 --model llama-1b --device cuda --only eager
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardfold as sf
from environment import environment
from megatron import GPT, SplitGPT
from shardfold.capture import capture
from shardfold.cluster import mesh_from_text, parse
from shardfold.costs import optimizer_named, pricing_named, tabulate
from shardfold.operators import rules_of
from shardfold.plans import Plan
from shardfold.plans.entries import operator_entries, parameter_entries, tensor_entries
from shardfold.plans.files import dumps, loads
from shardfold.runtime import parallelize
from shardfold.runtime.ranks import launch
from shardfold.sharding import find_subdims
from shardfold.simulate.decoded import DecodedChoice
from shardfold.strategies.baselines import Setting, Unfit, strategy_named

SMALL = {"vocabulary": 8192, "seq": 64, "width": 384, "layers": 4, "heads": 6}
BATCH = 8
WARM_UP = 3

Step = Callable[[], Tensor]


def strategy_plan(model: nn.Module, args: tuple[Any, ...], name: str, world: int) -> Plan:
    """The plan of a baseline."""
    import msgspec

    cluster = parse(f"{world}xcpu")
    mesh = mesh_from_text(str(world), cluster)
    graph = capture(model, args)
    pricing, optimizer = pricing_named("roofline"), optimizer_named("adamw")
    subdims = find_subdims(graph, rules_of(graph, pricing.rules))
    prices = pricing.model(cluster, mesh)
    tables = tabulate(graph, subdims, mesh, prices, optimizer)
    choice = strategy_named(name)(Setting(graph, subdims, tables))
    assert not isinstance(choice, Unfit), choice
    made = DecodedChoice(graph, subdims, tables, choice, prices, optimizer)
    return msgspec.structs.replace(
        sf.plan(model, args, cluster=cluster, mesh=mesh),
        operators=operator_entries(made),
        tensors=tensor_entries(made),
        parameters=parameter_entries(made),
    )


def stepping(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step:
    """A whole training step: loss, gradients, update."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> Tensor:
        found = module(*args, **kwargs)
        loss: Tensor = found if isinstance(found, Tensor) else found.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compared(sides: dict[str, Step], device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of each side's step and its last loss; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, float] = {}
    for number in range(WARM_UP + rounds):
        order = list(sides.items())
        for name, step in order if number % 2 else reversed(order):
            _wait(device)
            started, used = time.perf_counter(), time.process_time()
            loss = step()
            _wait(device)
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - used)
            losses[name] = float(loss)
    return {
        name: {
            "median_seconds": statistics.median(times[name]),
            "fastest_seconds": min(times[name]),
            "processor_seconds": statistics.median(cpu[name]),
            "loss": losses[name],
        }
        for name in sides
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def _batch() -> tuple[Tensor, Tensor]:
    shape = (BATCH, SMALL["seq"])
    return torch.randint(SMALL["vocabulary"], shape), torch.randint(SMALL["vocabulary"], shape)


def two_processes(rank: int, plans: dict[str, bytes], only: str, rounds: int) -> dict[str, Any]:
    """Both comparisons, on this process."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    model, args = GPT(**SMALL), _batch()
    mine = tuple(t.chunk(dist.get_world_size())[rank] for t in args)
    if "data" in only:
        whole = DistributedDataParallel(_copy(model))
        parallel = parallelize(model, loads(plans["data-parallel"]), args)
        sides = {"ours": stepping(parallel, args, {}), "by hand": stepping(whole, mine, {})}
        found["data parallel, beside DistributedDataParallel"] = compared(sides, "cpu", rounds)
    if "tensor" in only:
        split = SplitGPT(**SMALL)
        split.take(model)
        parallel = parallelize(model, loads(plans["megatron"]), args)
        sides = {"ours": stepping(parallel, args, {}), "by hand": stepping(split, args, {})}
        found["Megatron-style, beside a module split by hand"] = compared(sides, "cpu", rounds)
    return found


def _copy(model: GPT) -> GPT:
    made = GPT(**SMALL)
    made.load_state_dict(model.state_dict())
    return made


def one_process(
    model: str, device: str, modes: tuple[str, ...], rounds: int
) -> Iterator[tuple[str, Any]]:
    """The parallelized module beside the plain one, eager and compiled."""
    for mode in modes:
        plain, args, kwargs = _model(model, device)
        plan = sf.plan(plain, args, kwargs, cluster="cpu" if device == "cpu" else "h200")
        modules = {"ours": parallelize(plain, plan, args, kwargs), "by hand": plain}
        if mode == "compiled":
            torch._dynamo.reset()
            modules = {name: torch.compile(module) for name, module in modules.items()}
        sides = {name: stepping(module, args, kwargs) for name, module in modules.items()}
        yield f"{model} on one process, {mode}", compared(sides, device, rounds)


def _model(name: str, device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A transformers model without dropout, which one device would draw in its own way."""
    from shardfold.zoo.catalog import StackShape
    from shardfold.zoo.construct import Draw
    from shardfold.zoo.huggingface import build_from, class_of, gpt2, llama

    shapes = {
        "gpt2": (gpt2, StackShape(12, 768, 3072, 50_257, 12, 12), 1, 64, torch.float32),
        "gpt2-small-test": (gpt2, StackShape(2, 64, 256, 512, 4, 4), 2, 16, torch.float32),
        "llama-1b": (llama, StackShape(16, 2048, 8192, 128_256, 32, 8), 4, 2048, torch.bfloat16),
    }
    configure, shape, batch, seq, dtype = shapes[name]
    config = configure(shape, seq)
    config.use_cache = False
    for field in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    with torch.device(device):
        torch.manual_seed(0)
        kind = class_of(config, name)
        model, args, kwargs = build_from(config, kind, batch, seq, Draw("cpu"))
    model = model.to(device=device, dtype=dtype).train()
    return model, args, {key: value.to(device) for key, value in kwargs.items()}


@click.command()
@click.option("--world", type=click.Choice(["1", "2"]), default="2", show_default=True)
@click.option("--model", default="gpt2", show_default=True, help="gpt2 or llama-1b (one process).")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--only", default="data tensor eager compiled", show_default=True)
@click.option("--rounds", default=15, show_default=True, help="Steps of each side.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(world: str, model: str, device: str, only: str, rounds: int, out: Path | None) -> None:
    """Print how long steps take on both sides, and the ratio."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if world == "2":
        torch.manual_seed(0)
        small, args = GPT(**SMALL), _batch()
        names = ("data-parallel", "megatron")
        plans = {n: dumps(strategy_plan(small, args, n, 2)).encode() for n in names}
        found = launch(two_processes, 2, plans, only, rounds)[0]
    else:
        modes = tuple(mode for mode in ("eager", "compiled") if mode in only)
        found = dict(one_process(model, device, modes, rounds))
    for name, sides in found.items():
        ours, by_hand = sides["ours"], sides["by hand"]
        sides["ratio"] = ours["median_seconds"] / by_hand["median_seconds"]
        sides["processor_ratio"] = ours["processor_seconds"] / by_hand["processor_seconds"]
        click.echo(
            f"{name}: {ours['median_seconds'] * 1e3:.1f} ms against "
            f"{by_hand['median_seconds'] * 1e3:.1f} ms, ratio {sides['ratio']:.3f}, "
            f"of processor time {sides['processor_ratio']:.3f} "
            f"(losses {ours['loss']:.5f}, {by_hand['loss']:.5f})"
        )
    figures = {
        "environment": {**environment(), "torch": torch.__version__, "device": _device(device)},
        "small_model": {**SMALL, "batch": BATCH},
        "rounds": rounds,
        "steps": found,
    }
    click.echo(json.dumps(figures["environment"]))
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


if __name__ == "__main__":
    main()
