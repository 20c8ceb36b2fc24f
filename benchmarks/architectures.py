"""Sixty architectures of Hugging Face transformers: planned at their real sizes, run when tiny.

Each is a `config.json` and goes the way of `hf:config.json`. At its real size (on meta: no weights)
it is planned for eight H100s. In a tiny size it runs on 2 and on 2x2 gloo processes in float64
under the best plan, data parallel, fully sharded and random plans; two steps on different batches
are held against the plain eager module: loss, gradients, buffers. The collectives that run are
held against those planned.

    python benchmarks/architectures.py --out benchmarks/results/architectures.json
    python benchmarks/architectures.py gpt2 whisper --random 2
    python benchmarks/architectures.py --page       # write the page from what was measured before
"""

from __future__ import annotations

import copy
import json
import logging
import math
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from environment import environment
from forked import forked

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the choices and the recorder are those of the tests

PAGE = ROOT / "docs" / "results" / "architectures.md"
RESULTS = ROOT / "benchmarks" / "results" / "architectures.json"
CLUSTER, MESHES = "8xh100", ("2", "2x2")
TINY_BATCH = 4
TOLERANCE = 1e-6  # as of `shardfold check`: where forward insists on float32, they differ
PATIENCE = timedelta(seconds=120)
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A class of transformers; `real` and `tiny` differ from its configuration's defaults."""

    name: str  # transformers' model_type
    class_name: str
    kind: str
    tiny: Fields
    real: Fields = field(default_factory=dict)
    batch: int = 16
    seq: int | None = 1024
    tiny_seq: int | None = 12


STACK: Fields = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED: Fields = {**STACK, "num_key_value_heads": 2, "head_dim": 8}
GPT: Fields = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}
BOTH: Fields = {  # encoder and decoder
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}
T5: Fields = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
}
IDS: Fields = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PATCHES: Fields = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
LABELS: Fields = {"num_labels": 6}
CLASSES: Fields = {"num_labels": 1000}
# Forward tosses coins for LayerDrop, and draws masks with numpy, unless these are off.
PLAIN_SPEECH: Fields = {"layerdrop": 0.0, "apply_spec_augment": False}
SPEECH: Fields = {
    **{k: v for k, v in STACK.items() if k != "vocab_size"},
    "conv_dim": [16, 16, 16],
    "conv_stride": [5, 2, 2],
    "conv_kernel": [10, 3, 3],
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
SSM: Fields = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "time_step_rank": 4,
}

TEXT = (
    Architecture("gpt2", "GPT2LMHeadModel", "text", {**GPT, **IDS}),
    Architecture(
        "gpt_neo",
        "GPTNeoForCausalLM",
        "text",
        {
            "vocab_size": 96,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            **IDS,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    Architecture("gptj", "GPTJForCausalLM", "text", {**GPT, **IDS, "rotary_dim": 4}),
    Architecture("gpt_neox", "GPTNeoXForCausalLM", "text", {**STACK, **IDS}),
    Architecture(
        "opt", "OPTForCausalLM", "text", {**STACK, **IDS, "ffn_dim": 64, "word_embed_proj_dim": 32}
    ),
    Architecture(
        "bloom",
        "BloomForCausalLM",
        "text",
        {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4, **IDS},
        {"hidden_size": 4096, "n_layer": 30, "n_head": 32},  # 7.1 billion
    ),
    Architecture(
        "falcon",
        "FalconForCausalLM",
        "text",
        {**STACK, **IDS, "num_kv_heads": 4, "ffn_hidden_size": 64},
    ),
    Architecture("llama", "LlamaForCausalLM", "text", {**GROUPED, **IDS}),
    Architecture("mistral", "MistralForCausalLM", "text", {**GROUPED, **IDS, "sliding_window": 4}),
    Architecture("qwen2", "Qwen2ForCausalLM", "text", {**GROUPED, **IDS}),
    Architecture("qwen3", "Qwen3ForCausalLM", "text", {**GROUPED, **IDS}),
    Architecture("gemma2", "Gemma2ForCausalLM", "text", {**GROUPED, **IDS, "sliding_window": 4}),
    Architecture(
        "gemma3_text", "Gemma3ForCausalLM", "text", {**GROUPED, **IDS, "sliding_window": 4}
    ),
    Architecture("phi3", "Phi3ForCausalLM", "text", {**STACK, **IDS, "num_key_value_heads": 2}),
    Architecture("olmo2", "Olmo2ForCausalLM", "text", {**STACK, **IDS, "num_key_value_heads": 2}),
    Architecture("cohere", "CohereForCausalLM", "text", {**STACK, **IDS, "num_key_value_heads": 2}),
    Architecture("bert", "BertForMaskedLM", "text", STACK, seq=512),
    Architecture("roberta", "RobertaForSequenceClassification", "text", STACK, seq=256),
    Architecture(
        "distilbert",
        "DistilBertForQuestionAnswering",
        "text",
        {"vocab_size": 96, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
        seq=512,
    ),
    Architecture("albert", "AlbertForMaskedLM", "text", {**STACK, "embedding_size": 16}, seq=512),
    Architecture(
        "electra", "ElectraForTokenClassification", "text", {**STACK, "embedding_size": 16}, seq=512
    ),
    Architecture(
        "deberta-v2",
        "DebertaV2ForSequenceClassification",
        "text",
        {**STACK, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        seq=512,
    ),
    Architecture(
        "modernbert", "ModernBertForMaskedLM", "text", {**STACK, **IDS, "local_attention": 8}
    ),
    Architecture("mpnet", "MPNetForMultipleChoice", "text", STACK, seq=128),
    Architecture(
        "esm",
        "EsmForMaskedLM",
        "text",
        {**STACK, "vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
        {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "hidden_size": 1280}
        | {"num_hidden_layers": 33, "num_attention_heads": 20, "intermediate_size": 5120},
    ),
    Architecture("t5", "T5ForConditionalGeneration", "text", T5, seq=512),
    Architecture("bart", "BartForConditionalGeneration", "text", {**BOTH, **IDS}, seq=512),
    Architecture(
        "m2m_100",
        "M2M100ForConditionalGeneration",
        "text",
        {**BOTH, **IDS},
        {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        seq=512,
    ),
    Architecture("marian", "MarianMTModel", "text", {**BOTH, "decoder_vocab_size": 96}, seq=512),
)
EXPERTS = (
    Architecture(
        "mixtral", "MixtralForCausalLM", "experts", {**GROUPED, **IDS, "num_local_experts": 4}
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "experts",
        {**GROUPED, **IDS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "experts",
        {
            **STACK,
            **IDS,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        "experts",
        {**GROUPED, **IDS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        "experts",
        {**STACK, **IDS, "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        "experts",
        {
            **STACK,
            **IDS,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        {"hidden_size": 1536, "intermediate_size": 512, "num_attention_heads": 24}
        | {"num_key_value_heads": 8, "num_local_experts": 40, "num_experts_per_tok": 8},  # 3b-a800m
    ),
    Architecture(
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        "experts",
        {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        seq=512,
    ),
)
STATE_SPACE = (
    Architecture("mamba", "MambaForCausalLM", "state space", {**SSM, **IDS}, seq=128),
    Architecture(
        "mamba2",
        "Mamba2ForCausalLM",
        "state space",
        {**SSM, **IDS, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    ),
    Architecture("falcon_mamba", "FalconMambaForCausalLM", "state space", {**SSM, **IDS}, seq=128),
    Architecture(
        "jamba",
        "JambaForCausalLM",
        "state space",
        {
            **STACK,
            **IDS,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
        },
        {"use_mamba_kernels": False},
        seq=128,
    ),
    Architecture(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        "state space",
        {**STACK, **IDS, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
        seq=128,
    ),
)
VISION = (
    Architecture(
        "vit",
        "ViTForImageClassification",
        "vision",
        {**PATCHES, **LABELS},
        CLASSES,
        seq=None,
        tiny_seq=None,
    ),
    Architecture(
        "swin",
        "SwinForImageClassification",
        "vision",
        {
            **LABELS,
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        CLASSES,
        seq=None,
        tiny_seq=None,
    ),
    Architecture(
        "convnext",
        "ConvNextForImageClassification",
        "vision",
        {**LABELS, "image_size": 32, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        CLASSES,
        seq=None,
        tiny_seq=None,
    ),
    Architecture(
        "resnet",
        "ResNetForImageClassification",
        "vision",
        {
            **LABELS,
            "image_size": 32,
            "embedding_size": 8,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
        },
        CLASSES,
        seq=None,
        tiny_seq=None,
    ),
    Architecture(
        "segformer",
        "SegformerForSemanticSegmentation",
        "vision",
        {
            **LABELS,
            "image_size": 32,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "hidden_sizes": [16, 32],
            "sr_ratios": [2, 1],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
        },
        {"num_labels": 150, "depths": [3, 6, 40, 3], "hidden_sizes": [64, 128, 320, 512]}
        | {"decoder_hidden_size": 768},  # B5
        seq=None,
        tiny_seq=None,
    ),
    Architecture(
        "dinov2",
        "Dinov2ForImageClassification",
        "vision",
        {**PATCHES, **LABELS, "drop_path_rate": 0.1},
        CLASSES,
        seq=None,
        tiny_seq=None,
    ),
    Architecture(
        "beit",
        "BeitForImageClassification",
        "vision",
        {**PATCHES, **LABELS},
        CLASSES,
        seq=None,
        tiny_seq=None,
    ),
    Architecture(
        "vit_mae",
        "ViTMAEForPreTraining",
        "vision",
        {
            **PATCHES,
            "decoder_num_attention_heads": 2,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_intermediate_size": 32,
        },
        seq=None,
        tiny_seq=None,
    ),
    Architecture(
        "videomae",
        "VideoMAEForVideoClassification",
        "vision",
        {**PATCHES, **LABELS, "num_frames": 4},
        {"num_labels": 400},
        seq=None,
        tiny_seq=None,
    ),
)
AUDIO = (
    Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        "audio",
        {**BOTH, **IDS, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        seq=448,
    ),
    Architecture(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        "audio",
        {**SPEECH, **PLAIN_SPEECH},
        PLAIN_SPEECH,
        seq=None,
        tiny_seq=400,
    ),
    Architecture(
        "hubert",
        "HubertForSequenceClassification",
        "audio",
        {**SPEECH, **PLAIN_SPEECH, "classifier_proj_size": 16},
        PLAIN_SPEECH,
        seq=None,
        tiny_seq=400,
    ),
    Architecture(
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        "audio",
        {
            **{k: v for k, v in PATCHES.items() if k != "image_size"},
            **LABELS,
            "max_length": 16,
            "num_mel_bins": 16,
            "frequency_stride": 4,
            "time_stride": 4,
        },
        {"num_labels": 527},
        seq=None,
        tiny_seq=None,
    ),
)
PICTURE_TOWER: Fields = {**PATCHES, "projection_dim": 16}
TEXT_TOWER: Fields = {**STACK, "max_position_embeddings": 16, "projection_dim": 16, **IDS}
MULTIMODAL = (
    Architecture(
        "clip",
        "CLIPModel",
        "multi-modal",
        {"text_config": TEXT_TOWER, "vision_config": PICTURE_TOWER, "projection_dim": 16},
        batch=256,
        seq=77,
        tiny_seq=16,
    ),
    Architecture(
        "siglip",
        "SiglipModel",
        "multi-modal",
        {"text_config": {**TEXT_TOWER, "projection_size": 32}, "vision_config": PATCHES},
        batch=256,
        seq=64,
        tiny_seq=16,
    ),
    Architecture(
        "llava",
        "LlavaForConditionalGeneration",
        "multi-modal",
        {
            "text_config": {**GROUPED, **IDS, "model_type": "llama"},
            "vision_config": {**PICTURE_TOWER, "model_type": "clip_vision_model"},
            "image_token_index": 95,
            "image_seq_length": 16,
        },
        {"text_config": {"model_type": "llama", "vocab_size": 32064}},
        tiny_seq=24,
    ),
    Architecture(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        "multi-modal",
        {
            "text_config": {**GROUPED, **IDS, "model_type": "gemma"},
            "vision_config": {**PICTURE_TOWER, "model_type": "siglip_vision_model"}
            | {"vision_use_head": False, "projection_dim": 32},
            "image_token_index": 95,
            "projection_dim": 32,
            "hidden_size": 32,
            "vocab_size": 96,
        },
        tiny_seq=24,
    ),
    Architecture(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        "multi-modal",
        {
            "text_config": {**STACK, **IDS, "num_key_value_heads": 2}
            | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}
            | {"patch_size": 4},
            "image_token_id": 95,
            "video_token_id": 94,
            "vision_start_token_id": 93,
            "vision_end_token_id": 92,
        },
        {  # 7B
            "text_config": {"hidden_size": 3584, "intermediate_size": 18944}
            | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
            | {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
        },
        tiny_seq=24,
    ),
    Architecture(
        "vilt",
        "ViltForQuestionAnswering",
        "multi-modal",
        {**STACK, **PATCHES, **LABELS, "max_position_embeddings": 16},
        {"num_labels": 3129},
        seq=40,
    ),
)
ARCHITECTURES = (*TEXT, *EXPERTS, *STATE_SPACE, *VISION, *AUDIO, *MULTIMODAL)


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one tiny model: how far it is from the plain module, and what was said."""

    plan: str
    mesh: str
    apart: float  # largest difference of a loss, a gradient or a buffer, relative
    outcome: str  # "right", "wrong", "refused", "raw"
    told: str = ""


def configuration(known: Architecture, tiny: bool) -> Fields:
    """The fields of a config.json."""
    sizes = {**known.real, **known.tiny} if tiny else known.real
    return {"model_type": known.name, "architectures": [known.class_name], **sizes}


def built(known: Architecture, tiny: bool) -> tuple[Any, Any, Any]:
    """The model by way of its config.json: on meta at its real size, with weights if tiny."""
    from shardfold import zoo

    with tempfile.TemporaryDirectory(prefix="shardfold-") as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(configuration(known, tiny)))
        if tiny:
            return zoo.from_config(str(path), batch=TINY_BATCH, seq=known.tiny_seq, device="cpu")
        return zoo.from_config(str(path), batch=known.batch, seq=known.seq)


def plain(known: Architecture, ours: Any) -> Any:
    """The class as transformers builds it by itself, with the same weights."""
    import transformers

    fields = dict(configuration(known, True))
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.use_cache = False
    config._experts_implementation = "eager"
    theirs = copy.copy(ours)
    theirs._modules = {"model": type(ours.model)(config).train()}
    theirs.load_state_dict(ours.state_dict())
    return theirs


def planned(known: Architecture) -> dict[str, Any]:
    """The real size on eight H100s: the plan in numbers, or what was said instead."""
    import shardfold as sf

    started = time.perf_counter()
    found: dict[str, Any] = {"outcome": "planned", "told": ""}
    try:
        model, args, kwargs = built(known, tiny=False)
        plan = sf.plan(model, args, kwargs, cluster=CLUSTER, dtype="bf16")
        found |= {
            "parameters": sum(p.numel() for p in model.parameters()),
            "step_seconds": plan.estimate.step_seconds,
            "fits": plan.fits,
        }
    except sf.ShardfoldError as error:
        found |= {"outcome": "refused", "told": str(error)}
    except Exception as error:
        found |= {"outcome": "raw", "told": _raw(error)}
    return {**found, "seconds": time.perf_counter() - started}


def _raw(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
    last = (str(error).strip().splitlines() or [""])[-1]  # another process's has a traceback
    return f"{type(error).__name__}: {last[:300]} ({where})"


Case = tuple[str, str, bytes]  # label, mesh, plan


def cases(model: Any, args: Any, kwargs: Any, mesh: str, random_plans: int) -> list[Case]:
    """The best plan, the two baselines, and random legal ones."""
    from tests.distributed.choices import Chooser

    from shardfold.plans.files import dumps

    processes = math.prod(map(int, mesh.split("x")))
    chooser = Chooser(model, args, kwargs, f"{processes}xcpu", mesh)
    data_parallel, fully_sharded = chooser.baselines()
    named = {"best": chooser.best(), "data parallel": data_parallel, "fully sharded": fully_sharded}
    named |= {f"random {seed}": chooser.random(seed) for seed in range(random_plans)}
    return [(label, mesh, dumps(plan).encode()) for label, plan in named.items()]


class Runner:
    """A tiny model with its program, beside the plain module; made before the processes."""

    def __init__(self, known: Architecture) -> None:
        self.known = known
        self.model, self.args, self.kwargs = built(known, tiny=True)

    def plain(self) -> Any:
        """The module that plans are held against."""
        return plain(self.known, self.model)

    def prepare(self, plan: Any) -> None:
        """Capture the program that all plans of this model share."""
        from shardfold.runtime.parallelize import prepared

        self.captured = prepared(self.model, plan, self.args, self.kwargs, None, None)

    def module(self, plan: Any | None) -> Any:
        """The module under a plan, or on one device."""
        from shardfold.runtime.lower import alone
        from shardfold.runtime.parallelize import Settings, assemble, lowered_here

        program, subdims = self.captured
        lowered = (
            alone(program, subdims) if plan is None else lowered_here(plan, program, subdims, None)
        )
        return assemble(self.model, program, lowered, Settings(float64=True))

    def batches(self) -> list[Any]:
        """Two batches, the second with samples in another order and other numbers."""
        from shardfold.runtime.reference import other_batch

        first = (self.args, self.kwargs)
        return [first, other_batch(first)]


Numbers = dict[str, Any]


def trained(module: Any, batches: list[Any], recording: Any = nullcontext) -> Numbers:
    """Losses of two steps, gradients added up over both, and buffers."""
    found: Numbers = {}
    for number, (args, kwargs) in enumerate(batches):
        with recording() if number == 0 else nullcontext():
            loss = module(*args, **kwargs)
            loss.backward()
        found[f"loss {number}"] = loss.detach()
    keepings = module._run.named()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"gradient {name}"] = keepings[name].whole(parameter.grad).to_dense().clone()
    module.gather_buffers()
    return found | {f"buffer {n}": b.detach().clone() for n, b in module.named_buffers()}


def expected(rank: int, runner: Runner) -> Numbers:
    """The same of the plain module, with the random numbers that the program draws."""
    from shardfold.runtime.reference import Reference

    single = runner.module(None)
    reference = Reference(runner.plain(), None)
    found: Numbers = {}
    total: Numbers = {}
    for number, batch in enumerate(runner.batches()):
        single._run.context.drawn = drawn = []
        single(*batch[0], **batch[1])
        single._run.context.drawn = None
        outcome = reference.step([batch], drawn)
        found[f"loss {number}"] = outcome.loss
        for name, gradient in outcome.gradients.items():
            key = f"gradient {name}"
            total[key] = total[key] + gradient if key in total else gradient
    buffers = dict(reference.module.named_buffers())
    return found | total | {f"buffer {n}": outcome.state[n].clone() for n in buffers}


def apart(found: Numbers, wanted: Numbers) -> tuple[float, str]:
    """The largest relative difference, and of what."""
    import torch

    from shardfold.runtime.check import SMALL, difference

    gradients = [g for k, g in wanted.items() if k.startswith("gradient")]
    floor = SMALL * max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)
    worst = (0.0, "")
    for key in {**found, **wanted}:
        here, there = found.get(key), wanted.get(key)
        if here is None or there is None:  # a gradient of zeros may not be there at all
            other = here if there is None else there
            amount = (
                float(torch.as_tensor(other).abs().max() > 0) * math.inf
                if other is not None
                else 0.0
            )
            amount = 0.0 if amount != amount else amount
        else:
            least = floor if key.startswith("gradient") else 0.0
            amount = difference(torch.as_tensor(here), torch.as_tensor(there).to(here.dtype), least)
        worst = max(worst, (amount, key))
    return worst


def job(rank: int, runner: Runner, given: list[Case], wanted: Numbers) -> list[Row]:
    """Every plan of a model, one after the other; on each process."""
    from shardfold.errors import ShardfoldError

    rows = []
    for label, mesh, data in given:
        try:
            amount, what = tried(rank, runner, data, wanted)
            is_right = amount <= TOLERANCE and not what.startswith("planned")
            outcome = "right" if is_right else "wrong"
            rows.append(Row(label, mesh, amount, outcome, "" if is_right else what))
        except ShardfoldError as error:
            rows.append(Row(label, mesh, math.inf, "refused", str(error)))
        except Exception as error:
            rows.append(Row(label, mesh, math.inf, "raw", _raw(error)))
            break  # the ranks may no longer be at the same place
    return rows


def tried(rank: int, runner: Runner, data: bytes, wanted: Numbers) -> tuple[float, str]:
    """How far a plan is from the plain module, and in what; or which collectives differ."""
    from tests.distributed import recorder

    from shardfold.plans.files import loads

    plan = loads(data)
    module = runner.module(plan)
    names = tuple(axis.name for axis in plan.mesh)
    ran: Any = None

    @contextmanager
    def recording() -> Iterator[None]:
        nonlocal ran
        with recorder.recorded(module._run.context.groups, names, widened=True) as ran:
            yield
        ran = recorder.by_member(ran, module._run.uses.launched, names, widened=True)

    found = trained(module, runner.batches(), recording)
    if rank:
        return 0.0, ""
    amount, what = apart(found, wanted)
    listed = recorder.planned(plan)
    if amount <= TOLERANCE and ran != listed:
        return amount, f"planned {dict(listed - ran)}, ran {dict(ran - listed)}"
    return amount, what


def ran(make: Callable[[], Runner], random_plans: int, meshes: tuple[str, ...]) -> dict[str, Any]:
    """The tiny size under plans of every mesh."""
    from shardfold.errors import ShardfoldError
    from shardfold.plans.files import loads

    started = time.perf_counter()
    rows: list[Row] = []
    try:
        runner = make()
        for mesh in meshes:
            given = cases(runner.model, runner.args, runner.kwargs, mesh, random_plans)
            if mesh == meshes[0]:
                runner.prepare(loads(given[0][2]))
                wanted = forked(1, expected, runner)
            processes = math.prod(map(int, mesh.split("x")))
            rows += forked(processes, job, runner, given, wanted, patience=PATIENCE)
        outcomes = [row.outcome for row in rows]
        worst = next((o for o in ("raw", "wrong", "refused") if o in outcomes), "right")
        told = next((f"{r.plan} on {r.mesh}: {r.told}" for r in rows if r.outcome == worst), "")
        found = {"outcome": worst, "told": "" if worst == "right" else told}
    except ShardfoldError as error:
        found = {"outcome": "refused", "told": str(error)}
    except Exception as error:
        found = {"outcome": "raw", "told": _raw(error)}
    right = [row.apart for row in rows if row.outcome == "right"]
    return {
        **found,
        "plans": len(rows),
        "meshes": meshes,
        "random": random_plans,
        "apart": max(right, default=0.0),
        "seconds": time.perf_counter() - started,
    }


def line(name: str, result: Mapping[str, Any]) -> str:
    """An architecture as a line of the terminal."""
    cells = [f"{name:30}"]
    for part in ("real", "tiny"):
        if part in result:
            found = result[part]
            cells.append(f"{part} {found['outcome']:8} {found['seconds']:5.0f} s")
    if "tiny" in result:
        cells.append(f"{result['tiny']['plans']:3} plans, {result['tiny']['apart']:.0e} apart")
    told = [found["told"] for found in result.values() if found["told"]]
    return "  ".join(cells) + "".join(f"\n    {each.splitlines()[0][:300]}" for each in told)


def counted(results: Mapping[str, Any], part: str) -> str:
    """How many had which outcome, in words."""
    found = Counter(each[part]["outcome"] for each in results.values() if part in each)
    order = ("planned", "right", "refused", "wrong", "raw")
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in order if found[outcome])


def _range(numbers: list[int]) -> str:
    least, most = min(numbers, default=0), max(numbers, default=0)
    return str(most) if least == most else f"{least} to {most}"


def page(stored: Mapping[str, Any]) -> str:
    """The results as a page."""
    results, facts = stored["architectures"], stored["environment"]
    tinies = [each["tiny"] for each in results.values() if "tiny" in each]
    lines, told = [], []
    for known in ARCHITECTURES:
        real, tiny = (results.get(known.name, {}).get(part) for part in ("real", "tiny"))
        size = f"{real['parameters'] / 1e9:.2f}" if real and "parameters" in real else ""
        step = f"{real['step_seconds'] * 1e3:.0f}" if real and "step_seconds" in real else ""
        meshes = " and ".join(tiny["meshes"]) if tiny else ""
        cells = (
            f"`{known.class_name}`",
            known.kind,
            size,
            real["outcome"] if real else "not tried",
            f"{real['seconds']:.0f}" if real else "",
            step,
            tiny["outcome"] if tiny else "not run",
            f"{tiny['plans']} on {meshes}" if tiny and tiny["plans"] else "",
            f"{tiny['apart']:.0e}" if tiny and tiny["plans"] else "",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
        for part, found in (("real size", real), ("tiny", tiny)):
            if found and found["told"]:
                said = " ".join(found["told"].split())
                told.append(f"- `{known.class_name}`, {part}: {said}")
    return TEXT.format(
        table="\n".join(lines),
        told="\n".join(told) or "Nothing.",
        planned=counted(results, "real") or "none tried",
        run=counted(results, "tiny") or "none run",
        plans=sum(found["plans"] for found in tinies),
        random=_range([found["random"] for found in tinies]),
        **{k: facts[k] for k in ("date", "processor", "cores", "python", "torch", "transformers")},
    )


TEXT = """# Sixty architectures of Hugging Face transformers

Each is a `config.json`, built as [`hf:config.json`](../how-to/hugging-face.md) builds it. The list
of classes was written down before any of them was tried; afterwards LayerDrop was set to 0 for
M2M-100, and some tiny sizes were corrected. What is not measured yet says so.

- **Real size**: on the meta device, planned for 8 H100s in bf16. {planned}.
- **Tiny**: run on gloo processes in float64 under the best plan, data parallel, fully sharded and
  random plans on each mesh ({plans} plans in all; random ones {random} a mesh). Two steps on
  different batches are held against the class as transformers builds it by itself, run eagerly:
  losses, gradients added up over both steps, buffers (largest difference, relative; the limit is
  1e-6). The collectives that ran are held against those planned. {run}.

| class | kind | billion parameters | real size | planned in s | step, ms | tiny | plans | apart |
|---|---|---:|---|---:|---:|---|---:|---:|
{table}

## What was said of the others

{told}

Measured on {date}, on a machine busy with other work: {processor}, {cores} cores, Python {python},
torch {torch}, transformers {transformers}.
Again: `python benchmarks/architectures.py --out benchmarks/results/architectures.json`.
"""


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--random", "random_plans", default=10, show_default=True, help="Plans of each mesh.")
@click.option("--mesh", "meshes", multiple=True, default=MESHES, show_default=True)
@click.option("--only", type=click.Choice(["real", "tiny"]), help="Plan only, or run only.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write results as JSON; add to them.")
@click.option("--again", is_flag=True, help="Also what the file of results has already.")
@click.option("--page", "write", is_flag=True, help="Write the page from the stored results.")
def main(
    names: tuple[str, ...],
    random_plans: int,
    meshes: tuple[str, ...],
    only: str | None,
    out: str | None,
    again: bool,
    write: bool,
) -> None:
    """Plan and run each architecture, and print a line for it."""
    if write:
        PAGE.write_text(page(json.loads(RESULTS.read_text())))
        return
    warnings.simplefilter("ignore")
    for name in ("torch", "torch.distributed.tensor._redistribute", "transformers"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    facts = {**environment(), "torch": version("torch"), "transformers": version("transformers")}
    click.echo(", ".join(f"{key} {value}" for key, value in facts.items()))
    stored: dict[str, Any] = {}
    if out and Path(out).exists():
        stored = json.loads(Path(out).read_text())["architectures"]
    for known in ARCHITECTURES:
        if names and known.name not in names:
            continue
        result = stored.setdefault(known.name, {})
        for part in ("real", "tiny") if only is None else (only,):
            if again or part not in result:
                is_real, make = part == "real", partial(Runner, known)
                result[part] = planned(known) if is_real else ran(make, random_plans, meshes)
        click.echo(line(known.name, result))
        if out:  # after each, so that a long run that is cut short leaves what it has
            results = {"environment": facts, "architectures": stored}
            Path(out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
