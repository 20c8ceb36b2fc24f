"""Sixty architectures of Hugging Face transformers, each with its real and a tiny size.

The list of classes was written down before any of them was tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        # Without dropout: on one device it is drawn for the rows that an expert has.
        {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
        | {"dropout_rate": 0.0},
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
        batch=4,  # attention is called once for every image
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
