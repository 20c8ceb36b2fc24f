"""Models that nobody tuned for: each set was written down before the first of it was measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DEVELOPED = (
    *(
        "StableLmForCausalLM",
        "GraniteForCausalLM",
        "DistilBertForMaskedLM",
        "DeiTForImageClassification",
    ),
    *(
        "BartForConditionalGeneration",
        "ConvNextV2ForImageClassification",
        "RegNetForImageClassification",
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A transformers configuration and class, and the sizes of a batch."""

    config: str
    kind: str
    batch: int
    seq: int | None = None
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The class and the batch."""
        shape = f"{self.batch} x {self.seq:,}" if self.seq else f"{self.batch}"
        return f"{self.kind}, {shape}"


def _text(layers: int, hidden: int, heads: int, wide: int, vocabulary: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": wide,
        "vocab_size": vocabulary,
    }


def _grouped(
    layers: int, hidden: int, heads: int, wide: int, vocabulary: int, shared: int
) -> dict[str, Any]:
    """As `_text`, with so many heads of keys and values."""
    return {**_text(layers, hidden, heads, wide, vocabulary), "num_key_value_heads": shared}


CASES = (
    Case(
        "OPTConfig",
        "OPTForCausalLM",
        4,
        2048,
        {
            "num_hidden_layers": 24,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "ffn_dim": 8192,
            "word_embed_proj_dim": 2048,
            "layerdrop": 0.0,
        },
    ),
    Case("OPTConfig", "OPTForCausalLM", 16, 512, {"layerdrop": 0.0}),
    Case(
        "BloomConfig",
        "BloomForCausalLM",
        4,
        1024,
        {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
    ),
    Case("GPTJConfig", "GPTJForCausalLM", 4, 1024, {"n_embd": 2048, "n_layer": 12, "n_head": 16}),
    Case(
        "FalconConfig",
        "FalconForCausalLM",
        4,
        2048,
        {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "alibi": False},
    ),
    Case("StableLmConfig", "StableLmForCausalLM", 4, 2048, _text(16, 2048, 32, 5632, 50304)),
    Case("StableLmConfig", "StableLmForCausalLM", 1, 4096, _text(16, 2048, 32, 5632, 50304)),
    Case("Olmo2Config", "Olmo2ForCausalLM", 4, 2048, _text(12, 2048, 16, 8192, 100352)),
    Case(
        "MistralConfig",
        "MistralForCausalLM",
        2,
        4096,
        {**_text(8, 4096, 32, 14336, 32000), "sliding_window": None},
    ),
    Case(
        "MistralConfig",
        "MistralForCausalLM",
        1,
        8192,
        {**_text(8, 4096, 32, 14336, 32000), "sliding_window": None},
    ),
    Case("GraniteConfig", "GraniteForCausalLM", 4, 2048, _text(24, 1536, 24, 4096, 49152)),
    Case(
        "GPTBigCodeConfig",
        "GPTBigCodeForCausalLM",
        4,
        2048,
        {"n_positions": 2048, "n_embd": 2048, "n_layer": 16, "n_head": 16},
    ),
    Case("CohereConfig", "CohereForCausalLM", 2, 2048, _text(8, 4096, 32, 11008, 64000)),
    Case(
        "NemotronConfig",
        "NemotronForCausalLM",
        4,
        2048,
        {**_text(12, 3072, 24, 12288, 64000), "num_key_value_heads": 8},
    ),
    Case(
        "RobertaConfig",
        "RobertaForMaskedLM",
        32,
        512,
        {**_text(24, 1024, 16, 4096, 50265), "max_position_embeddings": 514},
    ),
    Case(
        "RobertaConfig",
        "RobertaForSequenceClassification",
        64,
        128,
        {**_text(12, 768, 12, 3072, 50265), "max_position_embeddings": 514},
    ),
    Case("DebertaV2Config", "DebertaV2ForMaskedLM", 16, 512, _text(12, 768, 12, 3072, 128100)),
    Case("ElectraConfig", "ElectraForMaskedLM", 64, 512, _text(12, 768, 12, 3072, 30522)),
    Case("DistilBertConfig", "DistilBertForMaskedLM", 64, 512),
    Case("ModernBertConfig", "ModernBertForMaskedLM", 16, 1024),
    Case("BartConfig", "BartForConditionalGeneration", 8, 1024),
    Case("PegasusConfig", "PegasusForConditionalGeneration", 8, 512),
    Case("BeitConfig", "BeitForImageClassification", 64, None, {"num_labels": 1000}),
    Case("DeiTConfig", "DeiTForImageClassification", 128, None, {"num_labels": 1000}),
    Case(
        "Dinov2Config",
        "Dinov2ForImageClassification",
        32,
        None,
        {
            "num_labels": 1000,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
        },
    ),
    Case("SegformerConfig", "SegformerForImageClassification", 64, None, {"num_labels": 1000}),
    Case("RegNetConfig", "RegNetForImageClassification", 128, None, {"num_labels": 1000}),
    Case("MobileNetV2Config", "MobileNetV2ForImageClassification", 256, None, {"num_labels": 1000}),
    Case("PoolFormerConfig", "PoolFormerForImageClassification", 64, None, {"num_labels": 1000}),
    Case("ConvNextV2Config", "ConvNextV2ForImageClassification", 128, None, {"num_labels": 1000}),
    Case(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        16,
        448,
        {
            "encoder_layers": 12,
            "decoder_layers": 12,
            "d_model": 768,
            "encoder_attention_heads": 12,
            "decoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072,
        },
    ),
    Case("ASTConfig", "ASTForAudioClassification", 16, None, {"num_labels": 527}),
    Case("CLIPConfig", "CLIPModel", 64, 77),
    Case("MambaConfig", "MambaForCausalLM", 2, 512, {"hidden_size": 768, "num_hidden_layers": 4}),
)


# Chosen after all mends that the first set led to, and before any of these was measured.
SECOND = (
    Case(
        "GemmaConfig",
        "GemmaForCausalLM",
        4,
        1024,
        {**_text(12, 2048, 8, 16384, 256000), "num_key_value_heads": 1, "head_dim": 256},
    ),
    Case("PhiConfig", "PhiForCausalLM", 4, 2048, _text(24, 2048, 32, 8192, 51200)),
    Case(
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        2,
        4096,
        {**_text(12, 3072, 24, 12288, 49152), "num_key_value_heads": 2, "sliding_window": None},
    ),
    Case(
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        4,
        2048,
        {
            "hidden_size": 2048,
            "num_layers": 12,
            "num_heads": 16,
            "attention_types": [[["global", "local"], 6]],
        },
    ),
    Case("CodeGenConfig", "CodeGenForCausalLM", 8, 1024, {"n_embd": 1024, "n_layer": 20}),
    Case("OlmoConfig", "OlmoForCausalLM", 2, 4096, _text(12, 2048, 16, 8192, 50304)),
    Case(
        "GlmConfig",
        "GlmForCausalLM",
        4,
        2048,
        {**_text(12, 2048, 16, 6912, 151552), "num_key_value_heads": 2, "head_dim": 128},
    ),
    Case(
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        2,
        2048,
        {**_text(18, 2048, 16, 11008, 128256), "num_key_value_heads": 4},
    ),
    Case("MptConfig", "MptForCausalLM", 4, 2048, {"d_model": 2048, "n_heads": 16, "n_layers": 12}),
    Case("XGLMConfig", "XGLMForCausalLM", 4, 1024, {"num_layers": 24, "layerdrop": 0.0}),
    Case("BioGptConfig", "BioGptForCausalLM", 4, 1024, {"layerdrop": 0.0}),
    Case("AlbertConfig", "AlbertForMaskedLM", 32, 512, _text(12, 1024, 16, 4096, 30000)),
    Case("MPNetConfig", "MPNetForMaskedLM", 32, 512, {"max_position_embeddings": 514}),
    Case(
        "XLMRobertaConfig",
        "XLMRobertaForMaskedLM",
        16,
        512,
        {**_text(12, 768, 12, 3072, 250002), "max_position_embeddings": 514},
    ),
    Case("MobileBertConfig", "MobileBertForMaskedLM", 32, 128),
    Case("MBartConfig", "MBartForConditionalGeneration", 8, 512),
    Case("MarianConfig", "MarianMTModel", 16, 256),
    Case("ViTMSNConfig", "ViTMSNForImageClassification", 64, None, {"num_labels": 1000}),
    Case(
        "EfficientNetConfig",
        "EfficientNetForImageClassification",
        64,
        None,
        {
            "num_labels": 1000,
            "image_size": 224,
            "width_coefficient": 1.0,
            "depth_coefficient": 1.0,
            "hidden_dim": 1280,
        },
    ),
    Case("MobileViTConfig", "MobileViTForImageClassification", 64, None, {"num_labels": 1000}),
    Case("CvtConfig", "CvtForImageClassification", 64, None, {"num_labels": 1000}),
    Case("FocalNetConfig", "FocalNetForImageClassification", 64, None, {"num_labels": 1000}),
    Case("HieraConfig", "HieraForImageClassification", 64, None, {"num_labels": 1000}),
    Case("Data2VecVisionConfig", "Data2VecVisionForImageClassification", 32, None),
    Case("LevitConfig", "LevitForImageClassification", 128, None, {"num_labels": 1000}),
    Case("Swinv2Config", "Swinv2ForImageClassification", 64, None, {"num_labels": 1000}),
    Case("SiglipConfig", "SiglipModel", 32, 64),
)
# Chosen for steps that are compiled, too, before any of these was measured.
THIRD = (
    Case("HeliumConfig", "HeliumForCausalLM", 4, 2048, _text(10, 2560, 20, 7040, 48000)),
    Case("ArceeConfig", "ArceeForCausalLM", 4, 1024, _grouped(10, 2560, 20, 18432, 32000, 4)),
    Case("ApertusConfig", "ApertusForCausalLM", 2, 4096, _grouped(8, 3072, 24, 12288, 65536, 8)),
    Case("Ernie4_5Config", "Ernie4_5ForCausalLM", 8, 1024, _grouped(18, 1024, 16, 3072, 103424, 2)),
    Case(
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        4,
        2048,
        {**_grouped(10, 2048, 16, 6144, 64000, 4), "head_dim": 128},
    ),
    Case(
        "SeedOssConfig",
        "SeedOssForCausalLM",
        1,
        8192,
        {**_grouped(6, 3584, 28, 9472, 80000, 4), "head_dim": 128},
    ),
    Case(
        "Glm4Config",
        "Glm4ForCausalLM",
        2,
        2048,
        {**_grouped(8, 3072, 24, 8192, 151552, 2), "head_dim": 128},
    ),
    Case("PersimmonConfig", "PersimmonForCausalLM", 4, 1024, _text(10, 2048, 32, 8192, 65536)),
    Case("NanoChatConfig", "NanoChatForCausalLM", 8, 1024, _text(12, 1280, 10, 5120, 65536)),
    Case("DiffLlamaConfig", "DiffLlamaForCausalLM", 4, 1024, _text(6, 2048, 16, 5632, 32000)),
    Case(
        "CTRLConfig",
        "CTRLLMHeadModel",
        4,
        512,
        {"n_embd": 1280, "dff": 8192, "n_layer": 12, "n_head": 16, "vocab_size": 50000},
    ),
    Case("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", 16, 512),
    Case(
        "MegatronBertConfig", "MegatronBertForMaskedLM", 16, 512, _text(12, 1024, 16, 4096, 29056)
    ),
    Case("RoFormerConfig", "RoFormerForMaskedLM", 16, 512, _text(12, 768, 12, 3072, 50000)),
    Case("ConvBertConfig", "ConvBertForMaskedLM", 16, 512, _text(8, 768, 12, 3072, 30522)),
    Case(
        "EsmConfig",
        "EsmForMaskedLM",
        16,
        512,
        {**_text(12, 640, 20, 2560, 33), "pad_token_id": 1, "mask_token_id": 32},
    ),
    Case("RemBertConfig", "RemBertForMaskedLM", 8, 512, _text(10, 1152, 18, 4608, 250300)),
    Case("EuroBertConfig", "EuroBertForMaskedLM", 8, 2048, _text(12, 768, 12, 3072, 128256)),
    Case("XLMRobertaXLConfig", "XLMRobertaXLForMaskedLM", 8, 512, _text(6, 2560, 32, 10240, 50000)),
    Case(
        "BlenderbotConfig",
        "BlenderbotForConditionalGeneration",
        8,
        128,
        {"d_model": 1280, "decoder_layers": 8, "encoder_layers": 2},
    ),
    Case("PLBartConfig", "PLBartForConditionalGeneration", 8, 512),
    Case("UMT5Config", "UMT5ForConditionalGeneration", 8, 512, {"vocab_size": 64000}),
    Case(
        "M2M100Config",
        "M2M100ForConditionalGeneration",
        16,
        128,
        {
            "encoder_layers": 6,
            "decoder_layers": 6,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        },
    ),
    Case("PvtConfig", "PvtForImageClassification", 64, None, {"num_labels": 1000}),
    Case("PvtV2Config", "PvtV2ForImageClassification", 64, None, {"num_labels": 1000}),
    Case("BitConfig", "BitForImageClassification", 64, None, {"num_labels": 1000}),
    Case("MobileNetV1Config", "MobileNetV1ForImageClassification", 256, None, {"num_labels": 1000}),
    Case("MobileViTV2Config", "MobileViTV2ForImageClassification", 64, None, {"num_labels": 1000}),
    Case("SwiftFormerConfig", "SwiftFormerForImageClassification", 128, None, {"num_labels": 1000}),
    Case("HGNetV2Config", "HGNetV2ForImageClassification", 128, None, {"num_labels": 1000}),
    Case("IJepaConfig", "IJepaForImageClassification", 64, None, {"num_labels": 1000}),
    Case(
        "Dinov2WithRegistersConfig",
        "Dinov2WithRegistersForImageClassification",
        64,
        None,
        {"num_labels": 1000},
    ),
    Case("VideoMAEConfig", "VideoMAEForVideoClassification", 8, None, {"num_labels": 400}),
    Case("TimesformerConfig", "TimesformerForVideoClassification", 8, None, {"num_labels": 400}),
    Case(
        "HubertConfig",
        "HubertForSequenceClassification",
        8,
        80000,
        {"num_labels": 12, "layerdrop": 0.0, "apply_spec_augment": False},
    ),
    Case("ChineseCLIPConfig", "ChineseCLIPModel", 32, 52),
)
# Chosen after the kernels of 35 models of the first three sets had been traced, and before any of
# these was measured.
FOURTH = (
    Case("Cohere2Config", "Cohere2ForCausalLM", 4, 2048, _grouped(10, 2048, 16, 8192, 65024, 4)),
    Case(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        4,
        1024,
        {**_grouped(12, 1152, 4, 6912, 131072, 1), "head_dim": 256},
    ),
    Case("Olmo3Config", "Olmo3ForCausalLM", 2, 4096, _text(10, 2048, 16, 8192, 50304)),
    Case("Exaone4Config", "Exaone4ForCausalLM", 4, 2048, _grouped(12, 2048, 32, 5632, 65536, 8)),
    Case("BitNetConfig", "BitNetForCausalLM", 4, 1024, _grouped(12, 2560, 20, 6912, 64128, 5)),
    Case(
        "MinistralConfig",
        "MinistralForCausalLM",
        2,
        4096,
        {**_grouped(10, 2560, 20, 8960, 65536, 4), "head_dim": 128},
    ),
    Case(
        "VaultGemmaConfig",
        "VaultGemmaForCausalLM",
        4,
        1024,
        {**_grouped(12, 1152, 4, 6912, 131072, 4), "head_dim": 256},
    ),
    Case(
        "GPTNeoXJapaneseConfig",
        "GPTNeoXJapaneseForCausalLM",
        4,
        1024,
        {"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16},
    ),
    Case("CamembertConfig", "CamembertForMaskedLM", 32, 256, {"max_position_embeddings": 514}),
    Case(
        "Data2VecTextConfig", "Data2VecTextForMaskedLM", 16, 512, {"max_position_embeddings": 514}
    ),
    Case("ErnieConfig", "ErnieForMaskedLM", 32, 512, _text(10, 1024, 16, 4096, 40000)),
    Case(
        "RobertaPreLayerNormConfig",
        "RobertaPreLayerNormForMaskedLM",
        16,
        512,
        {"max_position_embeddings": 514},
    ),
    Case("LayoutLMConfig", "LayoutLMForMaskedLM", 16, 512),
    Case("SqueezeBertConfig", "SqueezeBertForMaskedLM", 32, 256),
    Case(
        "XLMConfig", "XLMWithLMHeadModel", 16, 256, {"emb_dim": 1024, "n_layers": 8, "n_heads": 8}
    ),
    Case(
        "FlaubertConfig",
        "FlaubertWithLMHeadModel",
        16,
        512,
        {"emb_dim": 768, "n_layers": 12, "n_heads": 12},
    ),
    Case("YosoConfig", "YosoForMaskedLM", 16, 512, {"use_expectation": True}),
    Case("FunnelConfig", "FunnelForMaskedLM", 16, 512),
    Case(
        "MvpConfig",
        "MvpForConditionalGeneration",
        8,
        512,
        {"encoder_layers": 6, "decoder_layers": 6},
    ),
    Case("BlenderbotSmallConfig", "BlenderbotSmallForConditionalGeneration", 16, 256),
    Case("MT5Config", "MT5ForConditionalGeneration", 16, 512, {"vocab_size": 64000}),
    Case("TextNetConfig", "TextNetForImageClassification", 64, None, {"num_labels": 1000}),
    Case("DonutSwinConfig", "DonutSwinForImageClassification", 32, None, {"num_labels": 1000}),
    Case(
        "PerceiverConfig", "PerceiverForImageClassificationLearned", 16, None, {"num_labels": 1000}
    ),
    Case("VivitConfig", "VivitForVideoClassification", 4, None, {"num_labels": 400}),
    Case("Siglip2Config", "Siglip2ForImageClassification", 32, None, {"num_labels": 1000}),
    Case(
        "Wav2Vec2Config",
        "Wav2Vec2ForSequenceClassification",
        8,
        80000,
        {"num_labels": 12, "layerdrop": 0.0, "apply_spec_augment": False},
    ),
    Case(
        "WavLMConfig",
        "WavLMForSequenceClassification",
        8,
        80000,
        {"num_labels": 12, "layerdrop": 0.0, "apply_spec_augment": False},
    ),
    Case(
        "UniSpeechConfig",
        "UniSpeechForSequenceClassification",
        8,
        80000,
        {"num_labels": 12, "layerdrop": 0.0, "apply_spec_augment": False},
    ),
    Case(
        "SEWConfig",
        "SEWForSequenceClassification",
        8,
        80000,
        {"num_labels": 12, "layerdrop": 0.0, "apply_spec_augment": False},
    ),
    Case(
        "Data2VecAudioConfig",
        "Data2VecAudioForSequenceClassification",
        8,
        80000,
        {"num_labels": 12, "layerdrop": 0.0, "apply_spec_augment": False},
    ),
    Case("AltCLIPConfig", "AltCLIPModel", 32, 64),
    Case("GroupViTConfig", "GroupViTModel", 32, 64),
    Case("DPTConfig", "DPTForSemanticSegmentation", 16, None, {"num_labels": 150}),
)
FIFTH = (
    Case("CwmConfig", "CwmForCausalLM", 4, 2048, _grouped(10, 2048, 16, 7168, 64128, 4)),
    Case("Lfm2Config", "Lfm2ForCausalLM", 4, 2048, {"num_hidden_layers": 12, "vocab_size": 65536}),
    Case(
        "Ministral3Config",
        "Ministral3ForCausalLM",
        4,
        2048,
        {**_grouped(10, 2560, 20, 8960, 65536, 4), "head_dim": 128},
    ),
    Case(
        "HyperCLOVAXConfig",
        "HyperCLOVAXForCausalLM",
        4,
        2048,
        _grouped(12, 2048, 16, 7168, 64128, 4),
    ),
    Case("Jais2Config", "Jais2ForCausalLM", 4, 1024, _grouped(10, 2560, 20, 10240, 64128, 20)),
    Case("MiniCPM3Config", "MiniCPM3ForCausalLM", 4, 1024, {"num_hidden_layers": 12}),
    Case(
        "YoutuConfig", "YoutuForCausalLM", 4, 1024, {"num_hidden_layers": 12, "vocab_size": 64128}
    ),
    Case(
        "GraniteSWAConfig", "GraniteSWAForCausalLM", 4, 2048, _grouped(10, 2048, 16, 8192, 49152, 4)
    ),
    Case("DogeConfig", "DogeForCausalLM", 4, 1024, {"num_hidden_layers": 12}),
    Case("ModernBertDecoderConfig", "ModernBertDecoderForCausalLM", 16, 512),
    Case("TrOCRConfig", "TrOCRForCausalLM", 16, 256),
    Case("XLNetConfig", "XLNetLMHeadModel", 16, 512, {"n_layer": 12}),
    Case("BigBirdConfig", "BigBirdForMaskedLM", 8, 512, {"attention_type": "original_full"}),
    Case("XmodConfig", "XmodForMaskedLM", 16, 512, {"default_language": "en_XX"}),
    Case("LukeConfig", "LukeForMaskedLM", 16, 512),
    Case("NomicBertConfig", "NomicBertForMaskedLM", 16, 512),
    Case("LiltConfig", "LiltForTokenClassification", 16, 512, {"num_labels": 9}),
    Case("DebertaConfig", "DebertaForMaskedLM", 16, 512),
    Case("ProphetNetConfig", "ProphetNetForConditionalGeneration", 8, 256),
    Case("LongT5Config", "LongT5ForConditionalGeneration", 4, 1024, {"vocab_size": 32128}),
    Case(
        "BigBirdPegasusConfig",
        "BigBirdPegasusForConditionalGeneration",
        4,
        512,
        {"attention_type": "original_full", "encoder_layers": 6, "decoder_layers": 6},
    ),
    Case(
        "ImageGPTConfig",
        "ImageGPTForImageClassification",
        8,
        None,
        {"num_labels": 1000, "n_layer": 12},
    ),
    Case("UperNetConfig", "UperNetForSemanticSegmentation", 8, None, {"num_labels": 150}),
    Case("ViTMAEConfig", "ViTMAEForPreTraining", 64, None),
    Case("MetaClip2Config", "MetaClip2Model", 32, 64),
    Case("AlignConfig", "AlignModel", 8, 64),
    Case(
        "Wav2Vec2ConformerConfig",
        "Wav2Vec2ConformerForSequenceClassification",
        8,
        80000,
        {"num_labels": 12, "layerdrop": 0.0, "apply_spec_augment": False, "num_hidden_layers": 12},
    ),
    Case(
        "UniSpeechSatConfig",
        "UniSpeechSatForSequenceClassification",
        8,
        80000,
        {"num_labels": 12, "layerdrop": 0.0, "apply_spec_augment": False},
    ),
    Case("Speech2TextConfig", "Speech2TextForConditionalGeneration", 16, 128),
    Case("GitConfig", "GitForCausalLM", 8, 64),
    Case("BlipConfig", "BlipForConditionalGeneration", 16, 64),
)
# To develop prices of compiled steps by: models that were measured before.
COMPILED = (
    Case(
        "Qwen3Config",
        "Qwen3ForCausalLM",
        4,
        2048,
        {
            **_grouped(28, 1024, 16, 3072, 151936, 8),
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    *(case for case in CASES if case.kind in DEVELOPED),
)
SETS = {
    "first": CASES,
    "second": SECOND,
    "third": THIRD,
    "fourth": FOURTH,
    "fifth": FIFTH,
    "compiled": COMPILED,
}
