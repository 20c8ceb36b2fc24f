"""Reads what is written for stacks by their own parsers; run where their packages are installed.

    PYTHONPATH=.venv/stacks python parsers.py CASES.json

CASES has, for each stack, pairs of a text and the degrees that were stated; what a parser refuses
or reads otherwise is printed as JSON, with the number of texts. The packages are apart from the
others, as libraries behave otherwise where they find one of them.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

Read = Callable[[str], Mapping[str, Any]]


def torchtitan(text: str) -> Mapping[str, Any]:
    """By its command line."""
    _stand_in("triton", "triton.language", "torch.utils.tensorboard")
    from torchtitan.config.manager import ConfigManager

    own = ["--module", "llama3", "--config", "llama3_8b"]
    found: Any = ConfigManager().parse_args([*own, *shlex.split(text.replace("\\\n", " "))])
    kept = found.activation_checkpoint
    names = {"NoneType": "none", "FullAC": "full", "SelectiveAC": "products"}
    kind = type(kept).__qualname__.partition(".")[0]
    return {**_of_titan(found), "recompute": names[kind]}


def torchtitan_older(text: str) -> Mapping[str, Any]:
    """By the job file of 0.2.2."""
    _stand_in("triton", "triton.language")
    from torchtitan.config.manager import ConfigManager

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        found: Any = ConfigManager().parse_args(["--job.config_file", file.name])
    mode = found.activation_checkpoint.mode
    return {**_of_titan(found), "recompute": "products" if mode == "selective" else mode}


def _stand_in(*names: str) -> None:
    """Mocks of modules that parsing does not use, and that are not there or cannot be imported."""
    import_module("torch._inductor.runtime.triton_compat")  # it looks for triton, once

    for name in names:
        if name not in sys.modules and (name != "triton" or find_spec(name) is None):
            module = types.ModuleType(name)
            module.__getattr__ = lambda name: mock.MagicMock()  # type: ignore[method-assign]
            sys.modules[name] = module


def _of_titan(found: Any) -> dict[str, Any]:
    degrees = found.parallelism
    return {
        "replicas": degrees.data_parallel_replicate_degree,
        "shards": degrees.data_parallel_shard_degree,
        "tensor": degrees.tensor_parallel_degree,
        "stages": degrees.pipeline_parallel_degree,
        "half": found.training.mixed_precision_reduce == "bfloat16",
    }


def deepspeed(text: str) -> Mapping[str, Any]:
    """By its configuration class, on so many devices as the batch says."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    plain = json.loads(text)
    passes = plain["train_micro_batch_size_per_gpu"] * plain["gradient_accumulation_steps"]
    devices = mock.Mock()
    devices.get_data_parallel_world_size = lambda: plain["train_batch_size"] // passes
    with mock.patch.object(comm, "get_rank", return_value=0):
        found = DeepSpeedConfig(plain, mpu=devices)
    return {
        "zero": found.zero_config.stage,
        "micro_batches": found.gradient_accumulation_steps,
        "tensor": max(1, found.tensor_parallel_config.autotp_size),
    }


def megatron(text: str) -> Mapping[str, Any]:
    """By the configuration classes of megatron-core, from which its arguments are made.

    The parser of the arguments is in megatron.training, which the package does not have.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    words = shlex.split(text.replace("\\\n", " "))
    given: dict[str, Any] = {}
    for k, word in enumerate(words):
        if word.startswith("--"):
            value = words[k + 1] if k + 1 < len(words) else "--"
            is_flag = value.startswith("--")
            given[word[2:].replace("-", "_")] = True if is_flag else _plain(value)
    of_data = {"overlap_grad_reduce", "use_distributed_optimizer", "overlap_param_gather"}
    of_batch = {"micro_batch_size", "global_batch_size", "seq_length"}
    if "num_virtual_stages_per_pipeline_rank" in given:
        chunks = given.pop("num_virtual_stages_per_pipeline_rank")
        given["virtual_pipeline_model_parallel_size"] = chunks
    sums = {"grad_reduce_in_fp32": not given.pop("grad_reduce_in_bf16", False)}
    if "recompute_modules" in given:
        given["recompute_modules"] = [given["recompute_modules"]]
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    experts = {"num_moe_experts": 8, "add_bias_linear": False}
    more = experts if "expert_model_parallel_size" in given else {}
    own = {k: v for k, v in given.items() if k not in of_data | of_batch}
    stages = own["pipeline_model_parallel_size"]
    kind = {"pipeline_dtype": "bf16"} if stages > 1 else {}
    found = TransformerConfig(**sizes, **more, **kind, **own)
    data = {k: v for k, v in given.items() if k in of_data}
    buckets = DistributedDataParallelConfig(**data, **sums)
    recompute = found.recompute_granularity or "none"
    return {
        "tensor": found.tensor_model_parallel_size,
        "stages": found.pipeline_model_parallel_size,
        "context": found.context_parallel_size,
        "experts": found.expert_model_parallel_size,
        "recompute": recompute,
        "half": not buckets.grad_reduce_in_fp32,
    }


def _plain(value: str) -> Any:
    return int(value) if value.isdecimal() else value


def nanotron(text: str) -> Mapping[str, Any]:
    """By its configuration classes; what every file needs besides is added.

    Its module of logging imports its configuration, which imports logging: another one is in its
    place, or none of the two can be imported.
    """
    import yaml

    _stand_in("nanotron.logging")
    from nanotron.config.config import get_config_from_dict

    plain = yaml.safe_load(text)
    plain["tokens"] |= {"train_steps": 10}
    adam = {"adam_eps": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.95, "torch_adam_is_fused": True}
    rates = {"learning_rate": 1e-4, "lr_warmup_style": "linear", "lr_decay_style": "linear"}
    rates |= {"min_decay_lr": 1e-5}
    plain["optimizer"] |= adam | {"weight_decay": 0.1, "clip_grad": 1.0}
    plain["optimizer"]["learning_rate_scheduler"] = rates
    plain |= {"general": {"project": "p"}, "tokenizer": {}}
    plain["model"] = {"init_method": {"std": 0.02}, "model_config": LLAMA}
    found = get_config_from_dict(plain)
    tensor = found.parallelism.tp
    return {
        "data": found.parallelism.dp,
        "tensor": tensor,
        "stages": found.parallelism.pp,
        "sequence": tensor > 1 and found.parallelism.tp_mode.name == "REDUCE_SCATTER",
        "zero": found.optimizer.zero_stage,
        "micro_batches": found.tokens.batch_accumulation_per_replica,
    }


LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "is_llama_config": True}
READERS: Mapping[str, Read] = {
    "torchtitan@0.3.0": torchtitan,
    "torchtitan@0.2.2": torchtitan_older,
    "deepspeed@0.19": deepspeed,
    "megatron@0.16": megatron,
    "nanotron@0.4": nanotron,
}


def problems(read: Read, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """What a parser refuses, or reads as something else than was stated."""
    found = []
    for text, stated in cases:
        try:
            for name, value in read(text).items():
                if stated[name] != value:
                    found.append(f"{name} is {value}, not {stated[name]}: {text}")
        except (Exception, SystemExit) as error:
            found.append(f"{type(error).__name__}: {error}: {text}")
    return found


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    given = json.loads(Path(sys.argv[1]).read_text())
    told = {stack: problems(READERS[stack], cases) for stack, cases in given.items()}
    Path(sys.argv[2]).write_text(json.dumps(told))
