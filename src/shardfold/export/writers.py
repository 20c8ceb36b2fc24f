"""A configuration in the words of each stack: the file or the arguments that it reads.

Only what the configuration decides is written: degrees, batch, types, recomputation. The model, its
data and its learning rate stay the user's own. What a file cannot say is in the notes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardfold.errors import InputError
from shardfold.export.targets import samples_per_pass
from shardfold.pipeline.cut import equal
from shardfold.strategies.stated import Stated


@dataclass(frozen=True, slots=True)
class Job:
    """What a file says besides the strategy."""

    samples: int  # in the whole batch
    seq: int | None  # tokens of a sample
    layers: int
    dtype: str | None  # bf16, fp16, fp32; None: as in the model, float32
    devices: int
    nodes: int
    reduces_half: bool = False  # gradients are sent in 16 bits, where the stack would in float32

    @property
    def half(self) -> str | None:
        """The 16-bit type of computation, if there is one."""
        return self.dtype if self.dtype in ("bf16", "fp16") else None


@dataclass(frozen=True, slots=True)
class Written:
    """A configuration as one stack reads it."""

    kind: str  # toml, arguments, json or yaml
    text: str
    notes: tuple[str, ...] = ()  # what has to be done besides

    @property
    def comment(self) -> str:
        """Where the file may hold comments, how one begins."""
        return {"toml": "#", "yaml": "#", "arguments": "#"}.get(self.kind, "")


Writer = Callable[[Stated, Job], Written]
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
}
RECOMPUTE_IN_CODE = "Recompute in code: model.gradient_checkpointing_enable()."
FLOAT = {None: "float32", "fp32": "float32", "bf16": "bfloat16"}


def write(target: str, version: str, stated: Stated, job: Job) -> Written:
    """The configuration for a version of a stack."""
    if job.dtype == "fp64":
        raise InputError(f"{target} does not train in float64: plan with --precision bf16 or fp32.")
    return WRITERS[target, version](stated, job)


def _reshards(stated: Stated) -> bool:
    return stated.zero == 3 and stated.reshards


# torchtitan


def _torchtitan_parallelism(stated: Stated, job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": stated.replicas,
        "data_parallel_shard_degree": stated.shards,
        "fsdp_reshard_after_forward": "always" if _reshards(stated) else "never",
        "tensor_parallel_degree": stated.tensor,
        "pipeline_parallel_degree": stated.stages,
    }
    if stated.stages == 1:
        return found
    stages = stated.stages * stated.chunks
    less = 0 if job.layers % stages == 0 else 1  # then embedding and head count as a layer each
    found |= {
        "pipeline_parallel_schedule": SCHEDULES[stated.schedule],
        "pipeline_parallel_first_stage_less_layers": less,
        "pipeline_parallel_last_stage_less_layers": less,
    }
    if stated.chunks > 2:
        found["pipeline_parallel_layers_per_stage"] = math.ceil((job.layers + 2 * less) / stages)
    return found


def _torchtitan_training(stated: Stated, job: Job) -> dict[str, Any]:
    each = samples_per_pass(stated, job.samples)
    local = each * (stated.micro_batches if stated.stages > 1 else 1)
    return {
        "local_batch_size": local,
        "global_batch_size": job.samples,
        **({} if job.seq is None else {"seq_len": job.seq}),
        "mixed_precision_param": _torchtitan_dtype(job),
        "mixed_precision_reduce": "float32",
    }


def _torchtitan_dtype(job: Job) -> str:
    if job.dtype not in FLOAT:
        raise InputError(f"torchtitan has no {job.dtype}: plan with --precision bf16 or fp32.")
    return FLOAT[job.dtype]


def _torchtitan_recompute(stated: Stated) -> dict[str, str]:
    """By operator: torchtitan's own list of what is kept, with every second product."""
    if stated.recompute == "products":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": stated.recompute}


def torchtitan_toml(stated: Stated, job: Job) -> Written:
    """Sections of a job file of torchtitan 0.2.2."""
    parallelism = _torchtitan_parallelism(stated, job)
    if stated.stages > 1:
        each = samples_per_pass(stated, job.samples)
        parallelism["pipeline_parallel_microbatch_size"] = each
    sections = {
        "training": _torchtitan_training(stated, job),
        "parallelism": parallelism,
        "activation_checkpoint": _torchtitan_recompute(stated),
    }
    lines = []
    for name, values in sections.items():
        lines += [
            f"[{name}]",
            *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
            "",
        ]
    return Written("toml", "\n".join(lines), ("Put the sections into the model's job file.",))


def torchtitan_arguments(stated: Stated, job: Job) -> Written:
    """Arguments of torchtitan 0.3.0; recomputation comes last, as a subcommand."""
    parallelism = _torchtitan_parallelism(stated, job)
    if stated.stages > 1:
        each = samples_per_pass(stated, job.samples)
        parallelism["pipeline_parallel_microbatch_size"] = each
    written = _torchtitan_line(_torchtitan_training(stated, job), parallelism, stated)
    if stated.stages == 1:
        return written
    # Its parser refuses a pipeline with CUDA graphs.
    return replace(written, text="--training.disable_cuda_graphs \\\n" + written.text)


def torchtitan_head(stated: Stated, job: Job) -> Written:
    """Arguments of torchtitan's head, which counts a batch in tokens."""
    if job.seq is None:
        raise InputError("torchtitan's head counts a batch in tokens, and this model has none.")
    training, parallelism = _torchtitan_training(stated, job), _torchtitan_parallelism(stated, job)
    own = {name: training[name] for name in ("mixed_precision_param", "mixed_precision_reduce")}
    tokens = {
        "num_tokens_per_microbatch_per_dp_rank": samples_per_pass(stated, job.samples) * job.seq,
        "num_tokens_per_train_step": job.samples * job.seq,
        "max_context_length": job.seq,
    }
    if stated.stages > 1:
        parallelism["num_pp_microbatches"] = stated.micro_batches
    return _torchtitan_line({**tokens, **own}, parallelism, stated)


def _torchtitan_line(
    training: Mapping[str, Any], parallelism: Mapping[str, Any], stated: Stated
) -> Written:
    words = [f"--training.{name} {value}" for name, value in training.items()]
    words += [f"--parallelism.{name} {value}" for name, value in parallelism.items()]
    words.append(f"activation-checkpoint:{_torchtitan_recompute(stated)['mode']}")
    note = "Put the arguments after torchtitan's own --module and --config."
    return Written("arguments", _continued(words), (note,))


# Megatron-LM


def megatron(stated: Stated, job: Job) -> Written:
    """Arguments of Megatron-LM."""
    words = [*_megatron_degrees(stated, job), *_megatron_recompute(stated)]
    if stated.data > 1:
        words.append("--overlap-grad-reduce")
    if stated.zero == 1:
        words += ["--use-distributed-optimizer", "--overlap-param-gather"]
    words += [
        f"--micro-batch-size {samples_per_pass(stated, job.samples)}",
        f"--global-batch-size {job.samples}",
        *([] if job.seq is None else [f"--seq-length {job.seq}"]),
        *([f"--{job.half}"] if job.half else []),
        *(["--grad-reduce-in-bf16"] if job.reduces_half else []),
    ]
    return Written("arguments", _continued(words), ("Put them beside the model's own arguments.",))


CP_COMM_TYPE = {"ring": "p2p", "ulysses": "a2a"}


def _megatron_degrees(stated: Stated, job: Job) -> Iterator[str]:
    yield f"--tensor-model-parallel-size {stated.tensor}"
    if stated.sequence:
        yield "--sequence-parallel"
    if stated.context > 1:
        yield f"--context-parallel-size {stated.context}"
        yield f"--cp-comm-type {CP_COMM_TYPE[stated.attention]}"
    if stated.experts > 1:
        yield f"--expert-model-parallel-size {stated.experts}"
        yield "--moe-token-dispatcher-type alltoall"
        yield "--moe-grouped-gemm"
    yield f"--pipeline-model-parallel-size {stated.stages}"
    stages = stated.stages * stated.chunks
    if stated.stages > 1 and job.layers % stages:
        yield f'--pipeline-model-parallel-layout "{layout(equal(job.layers, stages))}"'
    elif stated.chunks > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {stated.chunks}"


def layout(counts: Sequence[int]) -> str:
    """The layers of each stage as Megatron-LM writes them.

    >>> layout([2, 3, 2])
    'Et*2|t*3|t*2L'
    """
    stages = [f"t*{count}" if count else "" for count in counts]
    return "E" + "|".join(stages) + "L"


def _megatron_recompute(stated: Stated) -> Iterator[str]:
    if stated.recompute == "full":
        yield from ("--recompute-granularity full", "--recompute-method uniform")
        yield "--recompute-num-layers 1"
    elif stated.recompute == "selective":
        yield from ("--recompute-granularity selective", "--recompute-modules core_attn")


# Hugging Face


def huggingface(stated: Stated, job: Job) -> Written:
    """`DistributedConfig` and `TrainingArguments` of transformers."""
    config: dict[str, Any] = {"tp_size": stated.tensor, "fsdp_size": stated.shards}
    if stated.tensor > 1:
        config["tp_plan"] = "auto"
    if _bf16_alone("transformers' DistributedConfig", job):
        config["fsdp_mixed_precision"] = True
    arguments = {
        "per_device_train_batch_size": samples_per_pass(stated, job.samples),
        "gradient_accumulation_steps": stated.micro_batches,
        "gradient_checkpointing": stated.recompute == "full",
    }
    plain = {"distributed_config": config, "training_arguments": arguments}
    return Written(
        "json",
        json.dumps(plain, indent=2) + "\n",
        (
            "Load the model in float32 with "
            "from_pretrained(..., distributed_config=DistributedConfig(**distributed_config)), and "
            "train with TrainingArguments(..., **training_arguments).",
        ),
    )


def accelerate(stated: Stated, job: Job) -> Written:
    """A configuration file of `accelerate launch`: FSDP, tensor parallel, or both."""
    is_sharded = stated.shards > 1
    plain: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_sharded else "MULTI_GPU" if job.devices > 1 else "NO",
        "mixed_precision": job.half or "no",
        "num_machines": job.nodes,
        "num_processes": job.devices,
        "machine_rank": 0,
    }
    if is_sharded:
        plain["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": _reshards(stated),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": stated.recompute == "full",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        }
    plain["parallelism_config"] = {
        "parallelism_config_dp_replicate_size": stated.replicas,
        "parallelism_config_dp_shard_size": stated.shards,
        "parallelism_config_tp_size": stated.tensor,
        "parallelism_config_cp_size": 1,
    }
    return Written("yaml", "\n".join(_yaml(plain)) + "\n", tuple(_accelerate_notes(stated, job)))


def _accelerate_notes(stated: Stated, job: Job) -> Iterator[str]:
    """What the user's script has to do."""
    each = samples_per_pass(stated, job.samples)
    yield f"The batch is the script's: DataLoader(batch_size={each})."
    if stated.tensor > 1:
        how = f"distributed_config=DistributedConfig(tp_size={stated.tensor})) of transformers"
        if stated.shards > 1:
            how = (
                f'tp_size={stated.tensor}, tp_plan="auto", device_mesh=accelerator.'
                "torch_device_mesh) of transformers 5.0 to 5.14: later ones do not start with it "
                "beside FSDP"
            )
        yield f"Load the model after Accelerator(), with from_pretrained(..., {how}."
    if stated.recompute == "full" and stated.shards == 1:
        yield RECOMPUTE_IN_CODE
    if stated.micro_batches > 1 and stated.shards == 1:
        yield f"Accumulate with gradient_accumulation_steps={stated.micro_batches}."
    elif stated.micro_batches > 1:
        yield (
            "Accumulate with GradientAccumulationPlugin("
            f"num_steps={stated.micro_batches}, sync_each_batch=True): without the latter, whole "
            "gradients are kept, which is not priced."
        )


def _bf16_alone(stack: str, job: Job) -> bool:
    if job.dtype == "fp16":
        raise InputError(f"{stack} has no fp16: plan with --precision bf16 or fp32.")
    return job.dtype == "bf16"


# DeepSpeed and nanotron


def deepspeed(stated: Stated, job: Job) -> Written:
    """A configuration file of DeepSpeed."""
    plain: dict[str, Any] = {
        "train_batch_size": job.samples,
        "train_micro_batch_size_per_gpu": samples_per_pass(stated, job.samples),
        "gradient_accumulation_steps": stated.micro_batches,
        "zero_optimization": {"stage": stated.zero, "overlap_comm": True},
    }
    if job.half:
        plain[job.half] = {"enabled": True}
    if stated.tensor > 1:
        plain["tensor_parallel"] = {"autotp_size": stated.tensor}
    notes = (RECOMPUTE_IN_CODE,) if stated.recompute == "full" else ()
    return Written("json", json.dumps(plain, indent=2) + "\n", notes)


def nanotron(stated: Stated, job: Job) -> Written:
    """Sections of nanotron's YAML, as its head reads them."""
    return _nanotron(stated, job, {"recompute_layer": stated.recompute == "full"})


def nanotron_old(stated: Stated, job: Job) -> Written:
    """The same for nanotron 0.4."""
    return _nanotron(stated, job, {})


def _nanotron(stated: Stated, job: Job, more: Mapping[str, Any]) -> Written:
    engine = {"gpipe": "afab"}.get(stated.schedule, stated.schedule)
    plain = {
        "parallelism": {
            "dp": stated.data,
            "pp": stated.stages,
            "tp": stated.tensor,
            "pp_engine": engine,
            "tp_mode": "REDUCE_SCATTER" if stated.sequence else "ALL_REDUCE",
            "tp_linear_async_communication": stated.sequence,
            **more,
        },
        "tokens": {
            **({} if job.seq is None else {"sequence_length": job.seq}),
            "micro_batch_size": samples_per_pass(stated, job.samples),
            "batch_accumulation_per_replica": stated.micro_batches,
        },
        "optimizer": {
            "zero_stage": stated.zero,
            "accumulate_grad_in_fp32": job.half is not None,
        },
    }
    note = "Merge the sections into the model's file: it has others that are required."
    return Written("yaml", "\n".join(_yaml(plain)) + "\n", (note,))


def _yaml(plain: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Nested mappings of plain values: JSON's scalars are YAML's."""
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _yaml(value, indent + "  ")
        else:
            is_word = isinstance(value, str) and value.replace("_", "").isalpha() and value != "no"
            yield f"{indent}{name}: {value if is_word else json.dumps(value)}"


def _continued(words: Sequence[str]) -> str:
    """A line of a shell, one word a line."""
    return " \\\n".join(words) + "\n"


WRITERS: Mapping[tuple[str, str], Writer] = {
    ("torchtitan", "0.3.0"): torchtitan_arguments,
    ("torchtitan", "0.2.2"): torchtitan_toml,
    ("torchtitan", "head"): torchtitan_head,
    ("megatron", "0.16"): megatron,
    ("hf", "5.22"): huggingface,
    ("accelerate", "1.15"): accelerate,
    ("deepspeed", "0.19"): deepspeed,
    ("nanotron", "head"): nanotron,
    ("nanotron", "0.4"): nanotron_old,
}
