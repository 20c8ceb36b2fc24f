"""A class of transformers gets a batch that its own forward turns into a loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardfold import zoo
from shardfold.errors import ModelError

pytest.importorskip("transformers")

STACK = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PATCHES = {k: v for k, v in STACK.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4}
SOUND = {
    **{k: v for k, v in STACK.items() if k != "vocab_size"},
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "classifier_proj_size": 8,
}
TOWERS = {
    "text_config": {**STACK, "max_position_embeddings": 8, "eos_token_id": 2},
    "vision_config": PATCHES,
}
CLASSES: dict[str, dict[str, Any]] = {
    "BertForPreTraining": {"model_type": "bert", **STACK},
    "BertForNextSentencePrediction": {"model_type": "bert", **STACK},
    "BertForMultipleChoice": {"model_type": "bert", **STACK},
    "BertForQuestionAnswering": {"model_type": "bert", **STACK},
    "BertForTokenClassification": {"model_type": "bert", **STACK, "num_labels": 3},
    "RobertaForSequenceClassification": {"model_type": "roberta", **STACK, "num_labels": 1},
    "DebertaForSequenceClassification": {
        "model_type": "deberta",
        **STACK,
        "num_labels": 3,
        "problem_type": "multi_label_classification",
    },
    "ViTForMaskedImageModeling": {"model_type": "vit", **PATCHES, "encoder_stride": 4},
    "BeitForImageClassification": {"model_type": "beit", **PATCHES, "num_labels": 3},
    "TimesformerForVideoClassification": {
        "model_type": "timesformer",
        **PATCHES,
        "num_labels": 3,
        "num_frames": 2,
    },
    "Data2VecAudioForSequenceClassification": {
        "model_type": "data2vec-audio",
        **SOUND,
        "num_labels": 3,
    },
    "HubertForCTC": {"model_type": "hubert", **SOUND, "vocab_size": 8, "seq": 200},
    "CLIPModel": {"model_type": "clip", **TOWERS, "projection_dim": 8},
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "image_token_index": 49,
        "image_seq_length": 4,
        "text_config": {**STACK, "model_type": "llama", "num_key_value_heads": 1},
        "vision_config": {**PATCHES, "model_type": "clip_vision_model"},
    },
}


def built(tmp_path: Path, name: str, fields: dict[str, Any]) -> Any:
    fields = dict(fields)
    seq = fields.pop("seq", 200 if "Audio" in name else 8)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**fields, "architectures": [name]}))
    return zoo.from_config(str(path), batch=2, seq=seq, device="cpu")


@pytest.mark.parametrize("name", CLASSES)
def test_its_loss_is_a_number_with_gradients(tmp_path: Path, name: str) -> None:
    module, args, kwargs = built(tmp_path, name, CLASSES[name])
    assert type(module.model).__name__ == name
    loss = module(*args, **kwargs)
    assert loss.isfinite()
    assert loss.dim() == 0
    loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())


def test_a_text_that_is_shorter_than_its_image_is_refused(tmp_path: Path) -> None:
    fields = CLASSES["LlavaForConditionalGeneration"] | {"seq": 4}
    with pytest.raises(ModelError, match="has 4 tokens, a text 4: choose a longer sequence"):
        built(tmp_path, "LlavaForConditionalGeneration", fields)


def test_a_file_may_ask_for_an_attention_that_the_class_lacks(tmp_path: Path) -> None:
    fields = {"vocab_size": 50, "hidden_size": 16, "n_layer": 1, "n_head": 2}
    fields |= {"model_type": "bloom", "_attn_implementation": "flash_attention_2"}
    module, args, kwargs = built(tmp_path, "BloomForCausalLM", fields)
    assert module(*args, **kwargs).isfinite()
