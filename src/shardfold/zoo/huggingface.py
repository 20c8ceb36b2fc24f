"""Models of Hugging Face transformers, from configurations that are written out here.

Two public registries of transformers are used so that the captured graph is what training runs:

- attention: plain `scaled_dot_product_attention` under a name for which no mask is built. Under
  `torch.export` transformers otherwise adds a dense [batch, 1, seq, seq] mask; without padding,
  `is_causal` says the same.
- experts: one sort for all of them; a trace sees the block as one operator, as in every model.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.errors import ModelError, nearest
from shardfold.zoo.catalog import StackShape
from shardfold.zoo.construct import Draw
from shardfold.zoo.example_batch import example_batch

try:
    import transformers
    from transformers.integrations.moe import ExpertsInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
except ImportError as error:
    raise ModelError(
        f"This model comes from Hugging Face transformers, which cannot be imported ({error}). "
        "Run: pip install 'shardfold[hf]'"
    ) from error

from shardfold.runtime.ops.experts import experts_forward

ATTENTION = "shardfold_sdpa"
EXPERTS = "shardfold_experts"
ASKS = frozenset({"labels", "return_loss", "start_positions", "bool_masked_pos"})
# Which class a configuration means that names none: the first of these with one for its type.
AUTO = (
    *("Seq2SeqLM", "ImageTextToText", "SpeechSeq2Seq", "MaskedLM", "CausalLM", "CTC"),
    *("ImageClassification", "AudioClassification", "VideoClassification", "SemanticSegmentation"),
    *("ZeroShotImageClassification", "SequenceClassification", "TokenClassification"),
    *("MaskedImageModeling", "PreTraining"),
)
Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class LossOf(nn.Module):
    """Returns the loss alone out of a transformers model's output.

    `fixed` are inputs whose values make shapes: they are no part of a batch, but constants.
    """

    def __init__(self, model: nn.Module, fixed: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.model = model
        self.fixed = fixed or {}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The model's loss."""
        constants = {name: torch.tensor(value) for name, value in self.fixed.items()}
        loss: Tensor | None = self.model(*args, **kwargs, **constants).loss
        if loss is None:
            raise ModelError(f"{type(self.model).__name__} gave no loss for this batch.")
        return loss


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


def build_from(config: Any, kind: type, batch: int, seq: int | None, draw: Draw) -> Built:
    """The model of a configuration as a class of transformers, and a batch for it."""
    transformers.AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    ExpertsInterface.register(EXPERTS, experts_forward)
    config.use_cache = False
    config.dtype = None  # the dtype is an option of planning
    config._attn_implementation = _attention(kind, config, seq)
    config._experts_implementation = EXPERTS
    if kind.__name__.endswith("Classification") and config.problem_type is None:
        # Else some classes ask the labels, and note the answer in their first step.
        is_number = config.num_labels == 1
        config.problem_type = "regression" if is_number else "single_label_classification"
    try:
        made = example_batch(kind, config, batch, seq, draw)
        return LossOf(kind(config), made.fixed), (), made.tensors
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"transformers cannot build {kind.__name__} from this configuration: {_told(error)}"
        ) from error


def _attention(kind: Any, config: Any, seq: int | None) -> str:
    """The attention that a class has, whatever its configuration asks for."""
    if not kind._supports_sdpa:
        return "eager"
    takes_any = hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")
    is_single = not getattr(type(config), "sub_configs", None)
    return ATTENTION if takes_any and is_single and _needs_no_mask(config, seq) else "sdpa"


def _needs_no_mask(config: Any, seq: int | None) -> bool:
    """Whether attention is all-to-all or causal in every layer, and so needs no dense mask."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    is_full = set(kinds) == {"full_attention"}
    return is_full and (window is None or (seq is not None and window >= seq))


def read(path: str, layers: int | None) -> tuple[Any, type]:
    """The configuration in a `config.json`, and the class with a loss that it names."""
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
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
    except Exception as error:
        raise ModelError(f"{path} is no configuration of {kind!r}: {_told(error)}") from error
    if layers is not None:
        _set_depth(config, layers)
    return config, class_of(config, path)


def _told(error: Exception) -> str:
    """An error of transformers in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def class_of(config: Any, path: str) -> type:
    """The first architecture of a configuration that has a loss, or else its type's class."""
    for architecture in config.architectures or ():
        if has_loss(found := named(architecture)):
            return found
    for auto in AUTO:
        mapping = getattr(transformers, f"AutoModelFor{auto}")._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            for each in found if isinstance(found, tuple) else (found,):
                if has_loss(each):
                    return each  # type: ignore[no-any-return]
    raise ModelError(
        f"{path}: transformers has no class with a loss for {config.model_type!r} "
        f"(architectures: {config.architectures}). Plan it from Python, with loss=..."
    )


def named(architecture: str) -> type:
    """A class of transformers."""
    found = getattr(transformers, architecture, None)
    if isinstance(found, type):
        return found
    raise ModelError(
        f"transformers {transformers.__version__} has no class {architecture!r}. "
        "Is it another version's, or a model with code of its own?"
    )


def has_loss(kind: type) -> bool:
    """Whether forward can be asked for a loss."""
    asked = inspect.signature(kind.forward).parameters  # type: ignore[attr-defined]
    return not ASKS.isdisjoint(asked) or kind.__name__.endswith("ForPreTraining")


def _set_depth(config: Any, layers: int) -> None:
    config.num_hidden_layers = layers
    if getattr(config, "num_decoder_layers", None) is not None:
        config.num_decoder_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]


def _token_ids() -> dict[str, int]:
    """Special tokens that exist in the smallest vocabulary; none of them matters in training."""
    return {"bos_token_id": 0, "eos_token_id": 1}
