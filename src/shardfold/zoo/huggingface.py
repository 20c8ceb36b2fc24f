"""Models of Hugging Face transformers, from configurations that are written out here.

Two public registries of transformers are used so that the captured graph is what training runs:

- attention: plain `scaled_dot_product_attention` under a name for which no mask is built. Under
  `torch.export` transformers otherwise adds a dense [batch, 1, seq, seq] mask; without padding,
  `is_causal` says the same.
- experts: `expert_linear`, which keeps the dims of the tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardfold.errors import ModelError, nearest
from shardfold.zoo.catalog import StackShape
from shardfold.zoo.construct import Draw

try:
    import transformers
    from transformers.integrations.moe import ExpertsInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
except ImportError as error:
    raise ModelError(
        f"This model comes from Hugging Face transformers, which cannot be imported ({error}). "
        "Run: pip install 'shardfold[hf]'"
    ) from error

from shardfold.runtime.ops.experts import routed_experts

ATTENTION = "shardfold_sdpa"
EXPERTS = "shardfold_experts"
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class LossOf(nn.Module):
    """Returns the loss alone out of a transformers model's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """The model's loss."""
        loss: Tensor = self.model(*args, **kwargs).loss
        return loss


def causal(config: Any, batch: int, seq: int, draw: Draw) -> Built:
    """A decoder that predicts the next token."""
    tokens = draw.integers(config.vocab_size, batch, seq)
    labels = draw.integers(config.vocab_size, batch, seq)
    return _model("ForCausalLM", config), (), {"input_ids": tokens, "labels": labels}


def masked(config: Any, batch: int, seq: int, draw: Draw) -> Built:
    """An encoder that predicts the masked tokens."""
    tokens = draw.integers(config.vocab_size, batch, seq)
    labels = draw.masked_labels(tokens)
    return _model("ForMaskedLM", config), (), {"input_ids": tokens, "labels": labels}


def conditional(config: Any, batch: int, seq: int, draw: Draw) -> Built:
    """An encoder-decoder; the decoder's input is given, so that no shift is in the graph."""
    tokens, decoder, labels = (draw.integers(config.vocab_size, batch, seq) for _ in range(3))
    kwargs = {"input_ids": tokens, "decoder_input_ids": decoder, "labels": labels}
    return _model("ForConditionalGeneration", config), (), kwargs


def image(config: Any, batch: int, seq: int, draw: Draw) -> Built:
    """A classifier of images; `seq` does not matter."""
    pixels = draw.images(batch, config.image_size)
    labels = draw.integers(config.num_labels, batch)
    return _model("ForImageClassification", config), (), {"pixel_values": pixels, "labels": labels}


TASKS = {
    "ForCausalLM": causal,
    "LMHeadModel": causal,
    "ForMaskedLM": masked,
    "ForConditionalGeneration": conditional,
    "ForImageClassification": image,
}


def gpt2(shape: StackShape, seq: int) -> Any:
    """GPT-2's configuration; `gelu_pytorch_tanh` is its activation as one operator."""
    return transformers.GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=seq,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.feedforward,
        activation_function="gelu_pytorch_tanh",
        loss_type="ForCausalLM",
        **_token_ids(),
    )


def llama(shape: StackShape, seq: int) -> Any:
    """Llama 3's configuration: grouped-query attention, rotary base 500,000, nothing tied."""
    return transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feedforward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=seq,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=False,
        **_token_ids(),
    )


def mixtral(shape: StackShape, seq: int) -> Any:
    """Mixtral's configuration: two experts a token, no auxiliary loss."""
    return transformers.MixtralConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feedforward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=seq,
        num_local_experts=shape.experts,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        **_token_ids(),
    )


def t5(shape: StackShape, seq: int) -> Any:
    """T5's configuration (version 1.0): tied embeddings, relative position bias."""
    return transformers.T5Config(
        vocab_size=shape.vocabulary,
        d_model=shape.hidden,
        d_kv=shape.head_size,
        d_ff=shape.feedforward,
        num_layers=shape.layers,
        num_decoder_layers=shape.layers,
        num_heads=shape.heads,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


def bert(shape: StackShape, seq: int) -> Any:
    """BERT's configuration."""
    return transformers.BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feedforward,
        max_position_embeddings=seq,
    )


def vit(shape: StackShape, seq: int) -> Any:
    """ViT's configuration; the vocabulary is the classes."""
    return transformers.ViTConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.feedforward,
        image_size=shape.image,
        patch_size=shape.patch,
        num_labels=shape.vocabulary,
        problem_type="single_label_classification",
    )


def build_from(config: Any, task: str, batch: int, seq: int, draw: Draw) -> Built:
    """The model of a configuration for one of `TASKS`, and a batch for it."""
    transformers.AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    ExpertsInterface.register(EXPERTS, routed_experts)
    config.use_cache = False
    config._attn_implementation = ATTENTION if _needs_no_mask(config, seq) else "sdpa"
    config._experts_implementation = EXPERTS
    return TASKS[task](config, batch, seq, draw)


def _needs_no_mask(config: Any, seq: int) -> bool:
    """Whether attention is all-to-all or causal in every layer, and so needs no dense mask."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    is_full = set(kinds) == {"full_attention"}
    return is_full and (window is None or window >= seq)


def read(path: str, layers: int | None) -> tuple[Any, str]:
    """The configuration in a `config.json`, and which of `TASKS` its architecture is."""
    try:
        fields = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read the configuration {path}: {error}.") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ModelError(f"{path} has no model_type, so it is no transformers configuration.")
    kind = fields.pop("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        known = nearest(kind, transformers.CONFIG_MAPPING.keys())
        raise ModelError(f"{path}: transformers has no model_type {kind!r}. {known}")
    config = transformers.AutoConfig.for_model(kind, **fields)
    if layers is not None:
        _set_depth(config, layers)
    for architecture in config.architectures or ["(none)"]:
        for task in TASKS:
            if architecture.endswith(task):
                return config, task
    raise ModelError(
        f"{path}: no loss is known for architectures {config.architectures}; "
        f"they should end in one of {', '.join(TASKS)}."
    )


def _set_depth(config: Any, layers: int) -> None:
    config.num_hidden_layers = layers
    if getattr(config, "num_decoder_layers", None) is not None:
        config.num_decoder_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]


def _model(task: str, config: Any) -> nn.Module:
    auto = {
        "ForCausalLM": transformers.AutoModelForCausalLM,
        "ForMaskedLM": transformers.AutoModelForMaskedLM,
        "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
        "ForImageClassification": transformers.AutoModelForImageClassification,
    }[task]
    if type(config) not in auto._model_mapping:
        raise ModelError(
            f"transformers has no model of type {config.model_type!r} that ends in {task}."
        )
    return LossOf(auto.from_config(config))


def _token_ids() -> dict[str, int]:
    """Special tokens that exist in the smallest vocabulary; none of them matters in training."""
    return {"bos_token_id": 0, "eos_token_id": 1}
