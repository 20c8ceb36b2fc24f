"""Training stacks by name: what each keeps, sums and sends in its own way.

A strategy says what is split. What the optimizer keeps in float32, in which type gradients are
summed and sent, what runs beside backward and what after it, is a habit of the stack that runs it.
Each names its source, and none comes from measured steps. The files of Composer, Megatron-LM and
DeepSpeed are named from memory, not checked at a commit; one setting of nanotron and DeepSpeed's
buffers were settled by published peaks (docs/results/published.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardfold.errors import InputError, nearest


@dataclass(frozen=True, slots=True)
class Stack:
    """The habits of one stack; the defaults are shardfold's own runner.

    The float32 habits speak of models in bf16 or fp16: one in float32 has nothing to add.
    """

    name: str
    source: str = ""
    fused_optimizer: bool = True  # or one parameter at a time: no copies of its state
    master_weights: bool = False  # the optimizer keeps weights and state in float32
    float32_parts: bool = False  # of FSDP: the stored parts themselves are the master weights
    float32_gradients: bool = False  # gradients are kept and summed in float32
    float32_reduction: bool = False  # gradients are sent in float32
    keeps_gradients: bool = False  # in a buffer that lives as long as the model
    reduces_beside: bool = True  # gradients are reduced while backward goes on
    regathers_activations: bool = False  # of sp: keeps parts, gathers them beside backward
    gradient_copies: int = 0  # of parameters' size and type, that stay: buckets, flat buffers
    float32_part_gradients: bool = False  # of the part that a device updates, beside the others
    float32_updates: bool = False  # the update reads gradients from a float32 copy, then dropped
    buffer_bytes: float = 0.0  # of fixed size, that stay
    bucket_bytes: float = 0.0  # of parameters that are sent, or whose gradients are, together
    gathers_at_once: bool = False  # all updated parameters in one call, whatever the buckets
    runs_whole_block_again: bool = False  # recomputation runs a block's last product, too
    flash_attention: int | None = None  # its generation; None: the best kernel of the device
    balances_stages: bool = False  # pp: by the work of products, not by the number of layers
    waits_for_sends: bool = False  # pp: of a schedule with one chunk, sends stop the sender's work
    context_bytes: float = 0.0  # of CUDA, its kernels and NCCL: no allocator counts them

    def reducing_half(self) -> Stack:
        """The same, told to send gradients in 16 bits.

        FSDP's parts of them stay float32; elsewhere they are summed in 16 bits, too, and only the
        update has them in float32 (Megatron-LM's --grad-reduce-in-bf16).
        """
        if not self.float32_reduction:
            return self
        is_summed = self.float32_gradients and not self.float32_parts
        return replace(
            self,
            float32_reduction=False,
            float32_gradients=self.float32_gradients and not is_summed,
            float32_updates=is_summed,
        )


MIB = 2.0**20
WHOLE = 1e12  # bytes: more than a device has gradients
# FLOP in a cycle of a multiprocessor, forward and backward: FlashAttention-2 reaches 225 and 190
# TFLOP/s on an A100 (Dao 2023, arXiv 2307.08691). An H100 feeds its tensor cores in another way,
# which that kernel does not use: 35% of the peak there (Shah et al. 2024, arXiv 2407.08608), which
# is the same in a cycle. The first generation is half as fast.
FLASH_ATTENTION = {1: (739.0, 624.0), 2: (1478.0, 1248.0)}
OWN = Stack("shardfold", fused_optimizer=False)
FSDP1 = Stack(
    "fsdp1",
    "PyTorch FullyShardedDataParallel with MixedPrecision: parts and optimizer state stay in "
    "float32, parameters are gathered in bf16. Composer's DEFAULT reduces gradients in float32, "
    "PURE in bf16 (composer/distributed/dist_strategy.py). Before torch 2.1, non-reentrant "
    "checkpointing runs the whole block again. attn_impl: triton is FlashAttention of the first "
    "generation, half as fast as the second (Dao 2023, arXiv 2307.08691).",
    float32_parts=True,
    float32_gradients=True,
    float32_reduction=True,
    runs_whole_block_again=True,
    flash_attention=1,
)
MEGATRON = Stack(
    "megatron",
    "Megatron-LM Float16OptimizerWithFloat16Params and DistributedOptimizer: float32 weights and "
    "moments; megatron/core/distributed/param_and_grad_buffer.py: one float32 buffer of gradients, "
    "reduced as it is; core/tensor_parallel/layers.py: with sequence parallel, inputs are kept in "
    "parts and gathered again beside backward; mpu/random.py CheckpointFunction runs the whole "
    "layer again; core/pipeline_parallel/schedules.py: without interleaving, send_forward and its "
    "like are waited for.",
    master_weights=True,
    float32_gradients=True,
    float32_reduction=True,
    keeps_gradients=True,
    reduces_beside=False,
    regathers_activations=True,
    bucket_bytes=WHOLE,
    runs_whole_block_again=True,
    waits_for_sends=True,
)
STACKS: Mapping[str, Stack] = {
    stack.name: stack
    for stack in (
        OWN,
        FSDP1,
        replace(FSDP1, name="fsdp1-pure", float32_reduction=False),
        MEGATRON,
        replace(
            MEGATRON,
            name="megatron-bridge",
            source="As megatron, with --overlap-grad-reduce (Megatron-Bridge's default), in "
            "buckets of 40 million parameters (megatron/core/distributed). " + MEGATRON.source,
            reduces_beside=True,
            bucket_bytes=2 * 40e6,
        ),
        Stack(
            "megatron-fp16",
            "Megatron-LM before version 2.4 (fp16/fp16.py, model/distributed.py): gradients stay "
            "in fp16 and are all-reduced so after backward; the optimizer has float32 weights.",
            master_weights=True,
            reduces_beside=False,
            bucket_bytes=WHOLE,
            runs_whole_block_again=True,
            waits_for_sends=True,
        ),
        Stack(
            "nanotron",
            "nanotron src/nanotron/optim/gradient_accumulator.py: float32 weights, one float32 "
            "buffer of gradients; a hook of DistributedDataParallel (whose buckets of 25 MiB hold "
            "another copy in bf16) reduces them in float32 beside the last backward, with ZeRO-1 "
            "by reduce-scatter; optim/zero.py gathers all updated parameters in one call "
            "(all_gather_coalesced); nn/attention.py calls flash-attn, of the second generation. "
            "Without tp_recompute_allgather, which pages do not state. Stages by models/base.py "
            "build_model: each ends with the block that takes it past its share of the products "
            "with weights; p2p.py reads what it sent of a tensor's shape back before it goes on, "
            "so that a stage waits for its sends.",
            flash_attention=2,
            waits_for_sends=True,
            master_weights=True,
            float32_gradients=True,
            float32_reduction=True,
            keeps_gradients=True,
            gradient_copies=1,
            bucket_bytes=25 * MIB,  # DistributedDataParallel's
            gathers_at_once=True,
            runs_whole_block_again=True,
            balances_stages=True,
        ),
        Stack(
            "megatron-deepspeed",
            "DeepSpeed runtime/zero/stage_1_and_2.py: float32 weights and state in parts, fp16 "
            "gradients, summed in fp16, flattened and reduced after the last backward, and a "
            "float32 copy of the updated part; buckets of 5e8 items to reduce and to gather (the "
            "defaults of reduce_bucket_size and allgather_bucket_size); Megatron's checkpointing "
            "runs the whole layer again; runtime/pipe/engine.py sends in the stream of the work. "
            "Context: the 1,113 MiB that "
            "bigscience/experiments/tr3m-1B3.md measured.",
            master_weights=True,
            reduces_beside=False,
            gradient_copies=1,
            float32_part_gradients=True,
            buffer_bytes=2 * 5e8 * 2,
            bucket_bytes=2 * 5e8,
            runs_whole_block_again=True,
            waits_for_sends=True,
            context_bytes=1113 * MIB,
        ),
        Stack(
            "internevo",
            "InternEvo solver/optimizer/hybrid_zero_optim.py: float32 weights and state in parts, "
            "bf16 gradients, reduced beside backward in buckets of 512 MiB "
            "(configs/_base_/models); FlashAttention 1.0.5 (doc/en/install.md), half as fast as "
            "the second generation (arXiv 2307.08691).",
            master_weights=True,
            bucket_bytes=512 * MIB,
            runs_whole_block_again=True,
            flash_attention=1,
        ),
        Stack(
            "alpa",
            "Alpa: XLA's program, one stream for work and collectives; TrainState with "
            "use_master_copy: float32 weights and state, fp16 gradients.",
            master_weights=True,
            reduces_beside=False,
            runs_whole_block_again=True,
        ),
        Stack(
            "torchtitan",
            "torchtitan models/llama3/infra/parallelize.py: FSDP2 (fully_shard) with "
            "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32): parts, their "
            "gradients and the optimizer's state stay in float32, parameters are gathered in bf16, "
            "gradients reduced in float32. Attention is PyTorch's, whose flash backend is "
            "FlashAttention-2.",
            float32_parts=True,
            float32_gradients=True,
            float32_reduction=True,
            flash_attention=2,
        ),
        Stack(
            "hf",
            "transformers 5.22 distributed/fsdp.py: FSDP2 with MixedPrecisionPolicy(bfloat16, "
            "reduce_dtype=float32), as torchtitan.",
            float32_parts=True,
            float32_gradients=True,
            float32_reduction=True,
            flash_attention=2,
        ),
        Stack(
            "accelerate",
            "accelerate 1.15 utils/dataclasses.py set_mixed_precision: FSDP2 with param_dtype and "
            "reduce_dtype bfloat16; parts and the optimizer's state stay in float32.",
            float32_parts=True,
            float32_gradients=True,
            flash_attention=2,
        ),
        Stack(
            "deepspeed",
            "DeepSpeed 0.19 with bf16: as megatron-deepspeed, with overlap_comm, so that gradients "
            "are reduced beside backward, and no flat copy of them (contiguous_gradients takes "
            "the buckets). Attention is PyTorch's.",
            master_weights=True,
            float32_part_gradients=True,
            buffer_bytes=2 * 5e8 * 2,
            bucket_bytes=2 * 5e8,
            flash_attention=2,
        ),
        replace(
            MEGATRON,
            name="simumax",
            source="Megatron-LM 23e00ed0 with overlap off, as SimuMax's release ran it: as "
            "megatron.",
        ),
    )
}


def stack_named(name: str) -> Stack:
    """The stack of that name."""
    if name not in STACKS:
        raise InputError(f"Unknown stack {name!r}. {nearest(name, STACKS)}")
    return STACKS[name]
