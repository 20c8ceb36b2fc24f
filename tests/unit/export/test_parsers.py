"""What is written is read by the stacks' own parsers, where these are installed."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from shardfold.cluster import parse
from shardfold.export.targets import Sizes, configurations, target_named
from shardfold.export.writers import Job, Written, write
from shardfold.strategies.stated import Stated

JOB = Job(samples=64, seq=8192, layers=32, dtype="bf16", devices=64, nodes=8)
REASON = "its own parser is not installed; test_writers.py checks the names of fields"


def installed(package: str, version: str) -> None:
    """Skip where the package is not there, or is another version than the one that was checked."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package}: {REASON}")
    if not found.startswith(version):
        pytest.skip(f"{package} {found}: the fields of {version} are written")


def written(stack: str, every: int = 7) -> list[tuple[Stated, Written]]:
    """Configurations of all kinds, some of each."""
    target, version = target_named(stack)
    found = list(configurations(target, parse("8x8xh100"), Sizes(64, 32)))
    return [(stated, write(target.name, version, stated, JOB)) for stated in found[::every]]


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
    for stated, each in written("accelerate"):
        path.write_text(each.text)
        assert load_config_from_file(str(path)).fsdp_config["fsdp_version"] == 2
        asked = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        found, _, _ = _validate_launch_command(asked)
        assert found.use_parallelism_config
        assert found.parallelism_config_dp_shard_size == stated.shards
        assert found.parallelism_config_dp_replicate_size == stated.replicas
        assert found.parallelism_config_tp_size == stated.tensor
        assert found.fsdp_reshard_after_forward == stated.reshards


def test_deepspeed_reads_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    installed("deepspeed", "0.19")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(comm, "get_rank", lambda *args: 0)
    for stated, each in written("deepspeed"):
        found = DeepSpeedConfig(json.loads(each.text), mpu=Devices(stated.data))
        assert found.zero_config.stage == stated.zero
        assert found.gradient_accumulation_steps == stated.micro_batches


class Devices:
    """What DeepSpeed asks of a job: how many devices share the batch out."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_data_parallel_world_size(self) -> int:
        return self.count


def test_torchtitan_parses_its_arguments() -> None:
    installed("torchtitan", "0.3")
    from torchtitan.config.manager import ConfigManager

    for stated, each in written("torchtitan", every=31):
        words = shlex.split(each.text.replace("\\\n", " "))
        own = ["--module", "llama3", "--config", "llama3_8b"]
        found: Any = ConfigManager().parse_args([*own, *words])
        assert found.parallelism.tensor_parallel_degree == stated.tensor
        assert found.parallelism.data_parallel_shard_degree == stated.shards
        assert found.parallelism.pipeline_parallel_degree == stated.stages
        assert (found.activation_checkpoint is None) == (stated.recompute == "none")


def test_torchtitan_reads_its_file(tmp_path: Path) -> None:
    installed("torchtitan", "0.2.2")
    from torchtitan.config.manager import ConfigManager

    path = tmp_path / "job.toml"
    for stated, each in written("torchtitan@0.2.2", every=31):
        path.write_text(each.text)
        found: Any = ConfigManager().parse_args(["--job.config_file", str(path)])
        assert found.parallelism.pipeline_parallel_degree == stated.stages
        assert found.activation_checkpoint.mode == stated.recompute


def test_megatron_core_takes_the_layout_of_stages() -> None:
    installed("megatron-core", "0.16")
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from shardfold.export.writers import layout

    found = PipelineParallelLayerLayout.parse_str_to_list(layout([7, 8, 8, 7]))
    assert [len(stage) for stage in found] == [8, 8, 8, 8]
