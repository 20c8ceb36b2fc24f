"""Every stack's own words: the texts, and that they are fields which the stack has."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import replace

import pytest

from shardfold.cluster import parse
from shardfold.errors import InputError
from shardfold.export.targets import TARGETS, Sizes, configurations, target_named
from shardfold.export.writers import WRITERS, Job, layout, write
from shardfold.pipeline.cut import equal
from shardfold.strategies.stated import parse_strategy

JOB = Job(samples=64, seq=8192, layers=32, dtype="bf16", devices=64, nodes=8)
# Fields as the stacks' own sources have them, in the versions that `TARGETS` names.
TITAN = (
    "training.local_batch_size training.global_batch_size training.seq_len "
    "training.mixed_precision_param training.mixed_precision_reduce "
    "parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree "
    "parallelism.fsdp_reshard_after_forward parallelism.tensor_parallel_degree "
    "parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_schedule "
    "parallelism.pipeline_parallel_first_stage_less_layers "
    "parallelism.pipeline_parallel_last_stage_less_layers "
    "parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_microbatch_size"
)
FIELDS = {
    "torchtitan@0.3.0": f"{TITAN} training.disable_cuda_graphs",
    "torchtitan@0.2.2": f"{TITAN} activation_checkpoint.mode "
    "activation_checkpoint.selective_ac_option",
    "torchtitan@head": TITAN
    + " training.num_tokens_per_microbatch_per_dp_rank training.num_tokens_per_train_step"
    " training.max_context_length parallelism.num_pp_microbatches",
    "megatron@0.16": "tensor-model-parallel-size sequence-parallel pipeline-model-parallel-size "
    "pipeline-model-parallel-layout num-virtual-stages-per-pipeline-rank recompute-granularity "
    "recompute-method recompute-num-layers recompute-modules overlap-grad-reduce "
    "context-parallel-size cp-comm-type expert-model-parallel-size moe-token-dispatcher-type "
    "moe-grouped-gemm "
    "use-distributed-optimizer overlap-param-gather micro-batch-size global-batch-size seq-length "
    "bf16 fp16",
    "hf@5.22": "distributed_config.tp_size distributed_config.fsdp_size distributed_config.tp_plan "
    "distributed_config.fsdp_mixed_precision training_arguments.per_device_train_batch_size "
    "training_arguments.gradient_accumulation_steps training_arguments.gradient_checkpointing",
    "accelerate@1.15": "compute_environment distributed_type mixed_precision num_machines "
    "num_processes machine_rank fsdp_config.fsdp_version fsdp_config.fsdp_reshard_after_forward "
    "fsdp_config.fsdp_auto_wrap_policy fsdp_config.fsdp_activation_checkpointing "
    "fsdp_config.fsdp_state_dict_type fsdp_config.fsdp_cpu_ram_efficient_loading "
    "parallelism_config.parallelism_config_dp_replicate_size "
    "parallelism_config.parallelism_config_dp_shard_size "
    "parallelism_config.parallelism_config_tp_size parallelism_config.parallelism_config_cp_size",
    "deepspeed@0.19": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "zero_optimization.stage zero_optimization.overlap_comm bf16.enabled fp16.enabled "
    "tensor_parallel.autotp_size",
    "nanotron@head": "parallelism.dp parallelism.pp parallelism.tp parallelism.pp_engine "
    "parallelism.tp_mode parallelism.tp_linear_async_communication parallelism.recompute_layer "
    "tokens.sequence_length tokens.micro_batch_size tokens.batch_accumulation_per_replica "
    "optimizer.zero_stage optimizer.accumulate_grad_in_fp32",
}
FIELDS["nanotron@0.4"] = FIELDS["nanotron@head"].replace("parallelism.recompute_layer ", "")


def read(kind: str, text: str) -> dict[str, object]:
    """The fields of a text, with dots for what is nested."""
    if kind == "arguments":
        words = shlex.split(text.replace("\\\n", " "))
        names = [word.removeprefix("--") for word in words if word.startswith("--")]
        assert len(names) == len(set(names))
        return dict.fromkeys(names)
    plain = {"toml": tomllib.loads, "json": json.loads, "yaml": parse_yaml}[kind](text)
    found: dict[str, object] = {}
    for name, value in plain.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": each for inner, each in value.items()}
        else:
            found[name] = value
    return found


def parse_yaml(text: str) -> dict[str, object]:
    """The little of YAML that is written: two levels of scalars."""
    found: dict[str, object] = {}
    section = ""
    for line in text.splitlines():
        match = re.fullmatch(r"( *)(\w+):(?: (.+))?", line)
        assert match, line
        indent, name, value = match.groups()
        if value is None:
            section = name
            found[name] = {}
        elif indent:
            inner = found[section]
            assert isinstance(inner, dict)
            inner[name] = value
        else:
            found[name] = value
    return found


@pytest.mark.parametrize(("name", "version"), WRITERS)
def test_all_that_is_written_is_a_field_of_the_stack(name: str, version: str) -> None:
    target, _ = target_named(f"{name}@{version}")
    known = set(FIELDS[f"{name}@{version}"].split())
    for stated in configurations(target, parse("8x8xh100"), Sizes(64, 32, experts=8)):
        written = write(name, version, stated, JOB)
        assert set(read(written.kind, written.text)) <= known


def test_every_version_has_a_writer() -> None:
    assert set(WRITERS) == {(name, v) for name, each in TARGETS.items() for v in each.versions}


def text(stack: str, strategy: str, job: Job = JOB) -> str:
    target, version = target_named(stack)
    stated = parse_strategy(strategy, job.devices)
    assert not target.refusal(stated)
    return write(target.name, version, stated, job).text


def test_torchtitan_in_toml() -> None:
    strategy = "pp=4 dp=2 fsdp=4 tp=2 zero=1 sp recompute=full micro-batches=8 schedule=zbv"
    assert text("torchtitan@0.2.2", strategy) == (
        "[training]\n"
        "local_batch_size = 8\n"
        "global_batch_size = 64\n"
        "seq_len = 8192\n"
        'mixed_precision_param = "bfloat16"\n'
        'mixed_precision_reduce = "float32"\n'
        "\n"
        "[parallelism]\n"
        "data_parallel_replicate_degree = 2\n"
        "data_parallel_shard_degree = 4\n"
        'fsdp_reshard_after_forward = "never"\n'
        "tensor_parallel_degree = 2\n"
        "pipeline_parallel_degree = 4\n"
        'pipeline_parallel_schedule = "ZBVZeroBubble"\n'
        "pipeline_parallel_first_stage_less_layers = 0\n"
        "pipeline_parallel_last_stage_less_layers = 0\n"
        "pipeline_parallel_microbatch_size = 1\n"
        "\n"
        "[activation_checkpoint]\n"
        'mode = "full"\n'
    )


def test_torchtitans_arguments_end_with_recomputation() -> None:
    words = shlex.split(text("torchtitan", "fsdp=64 recompute=full").replace("\\\n", " "))
    assert words[-1] == "activation-checkpoint:full"
    assert words[words.index("--training.local_batch_size") + 1] == "1"
    staged = text("torchtitan", "pp=4 dp=16 zero=1 micro-batches=4 schedule=1f1b")
    assert staged.startswith("--training.disable_cuda_graphs")


def test_megatron_writes_uneven_stages_as_a_layout() -> None:
    words = text("megatron", "pp=4 dp=2 tp=8 zero=1 sp micro-batches=8")
    assert "layout" not in words
    assert "--use-distributed-optimizer" in words
    uneven = Job(samples=64, seq=8192, layers=30, dtype="bf16", devices=64, nodes=8)
    words = text("megatron", "pp=4 dp=2 tp=8 zero=1 sp micro-batches=8", uneven)
    assert '--pipeline-model-parallel-layout "Et*7|t*8|t*8|t*7L"' in words
    assert layout(equal(30, 4)) == "Et*7|t*8|t*8|t*7L"


def test_notes_say_what_a_file_cannot() -> None:
    stated = parse_strategy("fsdp=32 tp=2 recompute=full micro-batches=2", 64)
    (recompute,) = write("deepspeed", "0.19", stated, JOB).notes
    assert "gradient_checkpointing_enable" in recompute
    sharded, job = parse_strategy("fsdp=64 micro-batches=2", 64), replace(JOB, samples=128)
    notes = " ".join(write("accelerate", "1.15", sharded, job).notes)
    assert "batch_size=1" in notes
    assert "num_steps=2, sync_each_batch=True" in notes
    both = " ".join(write("accelerate", "1.15", stated, JOB).notes)
    assert 'tp_size=2, tp_plan="auto", device_mesh=accelerator.torch_device_mesh' in both
    assert "transformers 5.0 to 5.14" in both
    assert "sync_each_batch=True" in both


@pytest.mark.parametrize(
    ("stack", "dtype"), [("torchtitan", "fp16"), ("hf", "fp16"), ("megatron", "fp64")]
)
def test_a_type_that_a_stack_lacks_is_refused(stack: str, dtype: str) -> None:
    target, version = target_named(stack)
    job = Job(64, 8192, 32, dtype, 64, 8)
    with pytest.raises(InputError, match="plan with --precision bf16"):
        write(target.name, version, parse_strategy("fsdp=64", 64), job)
