"""What is written is read by the stacks' own parsers, where these are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import pytest

from shardfold.cluster import parse
from shardfold.export.targets import Sizes, configurations, target_named
from shardfold.export.writers import Job, Written, write
from shardfold.strategies.stated import Stated, parse_strategy

JOB = Job(samples=64, seq=8192, layers=32, dtype="bf16", devices=64, nodes=8)
PARSERS = Path(__file__).with_name("parsers.py")
REASON = "its own parser is not installed; test_writers.py checks the names of fields"


def installed(package: str, version: str) -> None:
    """Skip where the package is not there, or is another version than the one that was checked."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package}: {REASON}")
    if not found.startswith(version):
        pytest.skip(f"{package} {found}: the fields of {version} are written")


def written(stack: str, every: int = 7, job: Job = JOB) -> list[tuple[Stated, Written]]:
    """Configurations of all kinds, some of each."""
    target, version = target_named(stack)
    found = list(configurations(target, parse("8x8xh100"), Sizes(64, 32, experts=8)))
    return [(stated, write(target.name, version, stated, job)) for stated in found[::every]]


def read(stack: str) -> list[tuple[str, dict[str, object]]]:
    """What is written for a stack, and what its parser is asked for; gradients in bf16, too."""
    cases, every = list[tuple[str, dict[str, object]]](), EVERY[stack]
    for half in (False, True) if stack.startswith("megatron") else (False,):
        job = replace(JOB, reduces_half=half)
        cases += [(w.text, {**seen(s), "half": half}) for s, w in written(stack, every, job)]
    return cases


def test_transformers_reads_its_configuration() -> None:
    installed("transformers", "5.22")
    from transformers.distributed import DistributedConfig

    for stated, each in written("hf", every=1):
        plain = json.loads(each.text)
        config = DistributedConfig(**plain["distributed_config"])
        assert (config.tp_size, config.fsdp_size) == (stated.tensor, stated.shards)


def test_transformers_reads_its_training_arguments(tmp_path: Path) -> None:
    installed("transformers", "5.22")
    installed("accelerate", "1.")
    from transformers import TrainingArguments

    for stated, each in written("hf"):
        arguments = json.loads(each.text)["training_arguments"]
        found = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments)
        assert found.gradient_accumulation_steps == stated.micro_batches


def test_accelerate_launch_takes_its_file(tmp_path: Path) -> None:
    installed("accelerate", "1.15")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    path = tmp_path / "accelerate.yaml"
    plain = []
    for words, devices in (("tp=8", 8), ("dp=1", 1)):
        stated = parse_strategy(words, devices)
        job = replace(JOB, dtype=None, devices=devices, nodes=1)
        plain.append((stated, write("accelerate", "1.15", stated, job)))
    assert "distributed_type: NO\n" in plain[-1][1].text
    for stated, each in [*written("accelerate"), *plain]:
        path.write_text(each.text)
        fsdp = load_config_from_file(str(path)).fsdp_config
        assert fsdp["fsdp_version"] == 2 if stated.shards > 1 else not fsdp
        asked = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        found, _, _ = _validate_launch_command(asked)
        assert found.use_parallelism_config
        assert found.parallelism_config_dp_shard_size == stated.shards
        assert found.parallelism_config_dp_replicate_size == stated.replicas
        assert found.parallelism_config_tp_size == stated.tensor
        assert found.fsdp_reshard_after_forward == stated.reshards or stated.shards == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "stacks"),
    [
        ("stacks", ["torchtitan@0.3.0", "deepspeed@0.19", "megatron@0.16", "nanotron@0.4"]),
        ("stacks-older", ["torchtitan@0.2.2"]),
    ],
)
def test_stacks_read_what_is_written_for_them(
    folder: str, stacks: list[str], tmp_path: Path
) -> None:
    """In a process of its own: other libraries behave otherwise where they find these packages."""
    packages = Path(sys.prefix) / folder
    if not packages.is_dir():
        pytest.skip(f"{folder}: {REASON}")
    asked, told = tmp_path / "cases.json", tmp_path / "problems.json"
    cases = {stack: read(stack) for stack in stacks}
    assert all(len(each) > 9 for each in cases.values())
    asked.write_text(json.dumps(cases))
    command = [sys.executable, str(PARSERS), str(asked), str(told)]
    path = os.pathsep.join([str(packages), str(Path(sys.prefix) / "stacks")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(told.read_text()) == {stack: [] for stack in stacks}


EVERY = {  # of how many configurations one is read: parsers take up to a second
    "torchtitan@0.3.0": 61,
    "torchtitan@0.2.2": 61,
    "deepspeed@0.19": 5,
    "megatron@0.16": 223,
    "nanotron@0.4": 5,
}


def seen(stated: Stated) -> dict[str, object]:
    """What parsers are asked for."""
    return {**asdict(stated), "data": stated.data}
