"""A small Llama trained by other stacks with the configuration that is written for them.

    python benchmarks/stacks_run.py        # a few minutes on two cores
    python benchmarks/stacks_run.py --older PYTHON

accelerate is started by `accelerate launch` with its file, transformers with its
`DistributedConfig`; each on 2 and 4 gloo processes, for ten steps, beside ours. accelerate has no
FSDP on CPUs: it is told that gloo processes are GPUs, and that their device is the CPU; all else is
its own. Tensor parallel beside accelerate's FSDP starts with transformers 5.0 to 5.14: PYTHON has
one of these, with torch and accelerate, for that case. Results go to
benchmarks/results/stacks-run.json and docs/results/stacks.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SAMPLES, SEQ, VOCABULARY, STEPS = 8, 16, 64, 10
OLDER = ("accelerate", "fsdp=2 tp=2", 4)  # with transformers 5.0 to 5.14
CASES = [
    ("accelerate", "fsdp=2", 2),
    ("accelerate", "fsdp=4", 4),
    ("accelerate", "dp=2 fsdp=2", 4),
    ("accelerate", "tp=2", 2),
    ("accelerate", "tp=4", 4),
    ("hf", "tp=2", 2),
    ("hf", "tp=4", 4),
    ("hf", "fsdp=2", 2),
    ("hf", "fsdp=2 tp=2", 4),
]


def batches() -> list[Any]:
    """The whole batches of all steps."""
    import torch

    draw = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (SAMPLES, SEQ), generator=draw) for _ in range(STEPS)]


def save_model(folder: Path) -> None:
    """A Llama that all of them load."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=SEQ,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def by_accelerate(folder: str) -> list[float]:
    """What a user's script does under `accelerate launch`."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import LlamaForCausalLM

    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    accelerator = Accelerator()
    sizes = accelerator.parallelism_config
    more: dict[str, Any] = {}
    if sizes.tp_enabled and sizes.dp_shard_enabled:
        mesh = accelerator.torch_device_mesh
        more = {"tp_size": sizes.tp_size, "tp_plan": "auto", "device_mesh": mesh}
    elif sizes.tp_enabled:
        from transformers.distributed import DistributedConfig

        more = {"distributed_config": DistributedConfig(tp_size=sizes.tp_size)}
    model = LlamaForCausalLM.from_pretrained(folder, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    parts = sizes.dp_shard_size * sizes.dp_replicate_size
    part = accelerator.process_index // sizes.tp_size

    def backward(loss: Any) -> None:
        accelerator.backward(loss)

    return trained(model, optimizer, parts, part, backward)


def by_transformers(folder: str) -> list[float]:
    """Run transformers alone, with its own configuration."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    plain = json.loads(Path(folder, "config-of-stack").read_text())["distributed_config"]
    config = DistributedConfig(**plain)
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = max(1, config.fsdp_size or 1)
    part = dist.get_rank() // max(1, config.tp_size or 1)
    return trained(model, optimizer, parts, part, lambda loss: loss.backward())


def by_shardfold(folder: str) -> list[float]:
    """The same under a plan."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM

    import shardfold as sf

    model = LlamaForCausalLM.from_pretrained(folder)
    plan = sf.Plan.load(Path(folder, "config-of-stack"))
    first = batches()[0]
    module = sf.parallelize(model, plan, (), {"input_ids": first, "labels": first}, loss=loss_of)
    assert dist.get_world_size() > 1
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for batch in batches():
        loss = module(input_ids=batch, labels=batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def loss_of(output: Any) -> Any:
    """The loss of a model of transformers."""
    return output.loss


def trained(model: Any, optimizer: Any, parts: int, part: int, backward: Any) -> list[float]:
    """Ten steps on this process's part of each batch; the losses of the whole batches."""
    import torch.distributed as dist

    model.train()
    losses = []
    each = SAMPLES // parts
    for batch in batches():
        own = batch[part * each : (part + 1) * each]
        loss = model(input_ids=own, labels=own).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole) / dist.get_world_size())
    return losses


RUNS = {"accelerate": by_accelerate, "hf": by_transformers, "shardfold": by_shardfold}


def configuration(stack: str, words: str, devices: int) -> str:
    """The file that is written for a stack; of ours, a plan."""
    from shardfold.export.targets import target_named
    from shardfold.export.writers import Job, write
    from shardfold.strategies.stated import parse_strategy

    if stack == "shardfold":
        return plan_text(devices)
    target, version = target_named(stack)
    job = Job(samples=SAMPLES, seq=SEQ, layers=2, dtype=None, devices=devices, nodes=1)
    return write(target.name, version, parse_strategy(words, devices), job).text


def plan_text(devices: int) -> str:
    """A plan that splits batch and layers: so small a model is fastest without."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    import shardfold as sf
    from shardfold.plans.files import dumps

    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name))
        model = LlamaForCausalLM(AutoConfig.from_pretrained(name))
    first = torch.zeros(SAMPLES, SEQ, dtype=torch.long)
    split = "out/2" if devices == 2 else "batch/2 out/2"
    plan = sf.plan(
        model,
        (),
        {"input_ids": first, "labels": first},
        cluster=f"{devices}xcpu",
        loss=loss_of,
        cost="roofline",
        mesh="2" if devices == 2 else "2x2",
        pins={"model.layers.*.up_proj": split, "model.layers.*.q_proj": split},
    )
    return dumps(plan)


def losses_of(stack: str, words: str, devices: int, python: str = sys.executable) -> list[float]:
    """Start a stack with its configuration."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        file = folder / "config-of-stack"
        file.write_text(configuration(stack, words, devices))
        own = [__file__, stack, name]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
        if stack == "accelerate":
            file.rename(file.with_suffix(".yaml"))
            launch = ["-m", "accelerate.commands.launch", "--config_file", f"{file}.yaml"]
        path = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        more = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}
        done = subprocess.run(
            [python, *launch, *own],
            env={**os.environ, **more},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found: list[float] = json.loads((folder / "losses.json").read_text())
        return found


def beside(row: dict[str, Any], ours: list[float], python: str) -> dict[str, Any]:
    """What a stack gives in a case, and how far that is from ours."""
    try:
        found = losses_of(row["stack"], row["strategy"], row["processes"], python)
    except AssertionError as error:
        said = next(line for line in str(error).splitlines() if "Error: " in line)
        return {**row, "said": said}
    apart = max(abs(a - b) for a, b in zip(found, ours, strict=True))
    return {**row, "difference": apart, "losses": [found[0], found[-1]]}


def main() -> None:
    """All cases beside ours, or the one that wants an older transformers."""
    import stacks
    from environment import environment

    results = ROOT / "benchmarks" / "results"
    stored = results / "stacks-run.json"
    cases, python = CASES, sys.executable
    known = json.loads(stored.read_text())["rows"] if stored.exists() else []
    if sys.argv[1:2] == ["--older"]:
        cases, python = [OLDER], sys.argv[2]
    rows = [row for row in known if (row["stack"], row["strategy"], row["processes"]) not in cases]
    which = "import transformers; print(transformers.__version__)"
    version = subprocess.run([python, "-c", which], capture_output=True, text=True).stdout.strip()
    ours = {devices: losses_of("shardfold", "", devices) for devices in (2, 4)}
    for stack, words, devices in cases:
        row = {"stack": stack, "strategy": words, "processes": devices}
        if cases is not CASES:
            row["transformers"] = version
        rows.append(beside(row, ours[devices], python))
        print(rows[-1], flush=True)
    runs = {"rows": rows, "environment": environment()}
    stored.write_text(json.dumps(runs, indent=1) + "\n")
    priced = json.loads((results / "stacks.json").read_text())
    (ROOT / "docs" / "results" / "stacks.md").write_text(stacks.page(priced, runs))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in RUNS:
        told = RUNS[sys.argv[1]](sys.argv[2])
        if os.environ.get("RANK", "0") == "0":
            Path(sys.argv[2], "losses.json").write_text(json.dumps(told))
    else:
        main()
