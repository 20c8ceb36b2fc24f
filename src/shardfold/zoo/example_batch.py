"""A batch for any transformers class with a loss, read off its forward and its configuration.

What forward can take says what kind of input there is (`input_ids`, `pixel_values`,
`input_features`, `input_values`); the configuration says how large; the class's name says what
its labels are. Inputs of whose *values* shapes are made (the grid of patches of an image) are no
tensors of the batch: they are `fixed`, and become constants of the program.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardfold.errors import ModelError
from shardfold.zoo.construct import Draw

IMAGE_SIDE = 224  # where the configuration names none
AUDIO_SAMPLES = 160_000  # ten seconds
CHOICES = 4
FRAMES = 512  # of features of sound
TOKEN_LABELS = ("CausalLM", "LMHeadModel", "ConditionalGeneration", "MTModel", "PreTraining")


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors for forward by name, and numbers that forward turns into constants."""

    tensors: dict[str, Any]
    fixed: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A class, its configuration, and the sizes that were asked for."""

    kind: type
    config: Any
    batch: int
    seq: int | None
    draw: Draw

    @property
    def takes(self) -> Mapping[str, inspect.Parameter]:
        """What forward can be given, by name."""
        return inspect.signature(self.kind.forward).parameters  # type: ignore[attr-defined]

    @property
    def text(self) -> Any:
        """The part of the configuration that is about text."""
        return self.config.get_text_config()

    @property
    def vision(self) -> Any:
        """The part of the configuration that is about images."""
        return getattr(self.config, "vision_config", None) or self.config

    @property
    def length(self) -> int:
        """Tokens of a text: as asked for, or as many as there are positions, 8,192 at most."""
        if self.seq is not None:
            return self.seq
        names = ("max_position_embeddings", "n_positions", "max_target_positions")
        limits = [getattr(self.text, name, None) for name in names]
        return min([limit for limit in limits if isinstance(limit, int) and limit > 0] or [512])

    @property
    def side(self) -> tuple[int, int]:
        """Height and width of an image."""
        size = getattr(self.vision, "image_size", None) or IMAGE_SIDE
        if isinstance(size, Mapping):
            size = (size["height"], size["width"])
        return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def example_batch(kind: type, config: Any, batch: int, seq: int | None, draw: Draw) -> Batch:
    """A batch of a transformers class: its inputs, then what its loss needs."""
    wanted = Wanted(kind, config, batch, seq, draw)
    tensors: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    if "image_grid_thw" in wanted.takes:
        _patches(wanted, tensors, fixed)
    else:
        for name, make in INPUTS.items():
            if name in wanted.takes:
                tensors[name] = make(wanted)
    if not tensors:
        raise ModelError(
            f"{kind.__name__} takes none of {', '.join(INPUTS)}, so no batch is known for it. "
            "Plan it from Python, with a batch of your own."
        )
    if config.is_encoder_decoder and "decoder_input_ids" in wanted.takes:
        tensors["decoder_input_ids"] = _tokens(wanted, wanted.length)
    return Batch({**tensors, **_targets(wanted, tensors)}, fixed)


# -- inputs


def _input_ids(wanted: Wanted) -> Tensor:
    if _ends(wanted, "MultipleChoice"):
        return wanted.draw.integers(wanted.text.vocab_size, wanted.batch, CHOICES, wanted.length)
    return _with_images(wanted, _tokens(wanted, wanted.length), _image_tokens(wanted))


def _tokens(wanted: Wanted, length: int) -> Tensor:
    return wanted.draw.integers(wanted.text.vocab_size, wanted.batch, length)


def _image_token(wanted: Wanted) -> int | None:
    """The token in whose places the features of an image are put."""
    names = ("image_token_id", "image_token_index")
    found = (getattr(wanted.config, name, None) for name in names)
    return next((token for token in found if isinstance(token, int)), None)


def _image_tokens(wanted: Wanted) -> int:
    """How many tokens an image has."""
    if _image_token(wanted) is None:
        return 0
    for config, name in (
        (wanted.config, "image_seq_length"),
        (wanted.config, "mm_tokens_per_image"),
        (wanted.text, "num_image_tokens"),
    ):
        if isinstance(found := getattr(config, name, None), int):
            return found
    height, width = wanted.side
    patch = getattr(wanted.vision, "patch_size", 1)
    return (height // patch) * (width // patch)


def _with_images(wanted: Wanted, tokens: Tensor, count: int) -> Tensor:
    """Texts that begin with an image, and have no other."""
    token = _image_token(wanted)
    if token is None or not count:
        return tokens
    if count >= tokens.shape[1]:
        raise ModelError(
            f"An image of {wanted.kind.__name__} has {count} tokens, a text {tokens.shape[1]}: "
            "choose a longer sequence."
        )
    if wanted.draw.is_meta:
        return tokens
    tokens = tokens.masked_fill(tokens == token, 0)
    tokens[:, :count] = token
    return tokens


def _pixel_values(wanted: Wanted) -> Tensor:
    channels = getattr(wanted.vision, "num_channels", 3)
    frames = getattr(wanted.config, "num_frames", None)
    many = (frames,) if isinstance(frames, int) and _ends(wanted, "VideoClassification") else ()
    return wanted.draw.normal(wanted.batch, *many, channels, *wanted.side)


def _input_features(wanted: Wanted) -> Tensor:
    config = wanted.config
    bins = getattr(config, "num_mel_bins", None)
    if isinstance(bins, int) and isinstance(getattr(config, "max_source_positions", None), int):
        return wanted.draw.normal(wanted.batch, bins, 2 * config.max_source_positions)
    names = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins")
    sizes = (getattr(config, name, None) for name in names)
    size = next((found for found in sizes if isinstance(found, int)), 80)
    return wanted.draw.normal(wanted.batch, FRAMES, size)


def _input_values(wanted: Wanted) -> Tensor:
    """A spectrogram, or samples of sound: then the sequence is one of samples."""
    config = wanted.config
    if isinstance(getattr(config, "num_mel_bins", None), int):
        return wanted.draw.normal(wanted.batch, config.max_length, config.num_mel_bins)
    return wanted.draw.normal(wanted.batch, wanted.seq or AUDIO_SAMPLES)


def _patches(wanted: Wanted, tensors: dict[str, Any], fixed: dict[str, Any]) -> None:
    """Images as rows of patches, all in one tensor, with the grid that each is cut into."""
    vision = wanted.config.vision_config
    patch, merged = vision.patch_size, vision.spatial_merge_size
    across = max(1, min(16, math.isqrt(wanted.length // 2)))  # half of a text is its image
    per = across * merged
    inside = vision.in_channels * vision.temporal_patch_size * patch * patch
    tokens = _with_images(wanted, _tokens(wanted, wanted.length), across**2)
    tensors["input_ids"] = tokens
    tensors["pixel_values"] = wanted.draw.normal(wanted.batch * per * per, inside)
    fixed["image_grid_thw"] = [[1, per, per]] * wanted.batch
    tensors["position_ids"] = wanted.draw.integers(wanted.length, 3, wanted.batch, wanted.length)


INPUTS: Mapping[str, Callable[[Wanted], Tensor]] = {
    "input_ids": _input_ids,
    "pixel_values": _pixel_values,
    "input_features": _input_features,
    "input_values": _input_values,
}


# -- what the loss needs


def _ends(wanted: Wanted, *endings: str) -> bool:
    return wanted.kind.__name__.endswith(endings)


def _targets(wanted: Wanted, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Labels, or the word that asks for the loss."""
    takes, draw, batch = wanted.takes, wanted.draw, wanted.batch
    if "start_positions" in takes:
        ends = ("start_positions", "end_positions")
        return {name: draw.integers(wanted.length, batch) for name in ends}
    if "labels" in takes:
        found: dict[str, Any] = {"labels": _labels(wanted, tensors)}
        if "next_sentence_label" in takes and _ends(wanted, "PreTraining"):
            found["next_sentence_label"] = draw.integers(2, batch)
        if "token_type_ids" in takes and _image_token(wanted) is not None:
            found["token_type_ids"] = _after_image(wanted, tensors["input_ids"])
        return found
    if "return_loss" in takes:
        return {"return_loss": True}
    if "bool_masked_pos" in takes:
        height, width = wanted.side
        patch = wanted.config.patch_size
        return {"bool_masked_pos": draw.flags(batch, (height // patch) * (width // patch))}
    if _ends(wanted, "ForPreTraining"):
        return {}
    raise ModelError(
        f"{wanted.kind.__name__} takes neither labels nor return_loss: it has no loss."
    )


def _after_image(wanted: Wanted, tokens: Tensor) -> Tensor:
    """0 for the image and 1 for the text that is to be learnt."""
    return tokens.ne(_image_token(wanted)).long()


def _labels(wanted: Wanted, tensors: Mapping[str, Tensor]) -> Tensor:
    draw, batch, labels = wanted.draw, wanted.batch, getattr(wanted.config, "num_labels", 2)
    if _ends(wanted, "MaskedLM"):
        return draw.masked_labels(tensors["input_ids"])
    if _ends(wanted, *TOKEN_LABELS):
        return draw.integers(wanted.text.vocab_size, batch, wanted.length)
    if _ends(wanted, "TokenClassification"):
        return draw.integers(labels, batch, wanted.length)
    if _ends(wanted, "MultipleChoice"):
        return draw.integers(CHOICES, batch)
    if _ends(wanted, "NextSentencePrediction"):
        return draw.integers(2, batch)
    if _ends(wanted, "CTC"):
        return draw.integers(wanted.config.vocab_size - 1, batch, _ctc_length(wanted)) + 1
    if _ends(wanted, "SemanticSegmentation"):
        return draw.integers(labels, batch, *wanted.side)
    if _ends(wanted, "QuestionAnswering"):  # answers of which several may be right
        return draw.uniform(batch, labels)
    if _ends(wanted, "Classification", "XVector"):
        return _class_labels(wanted, labels)
    raise ModelError(
        f"The loss of {wanted.kind.__name__} needs labels of a kind of its own, which its "
        "configuration does not tell. Plan it from Python, with a batch of your own."
    )


def _class_labels(wanted: Wanted, labels: int) -> Tensor:
    problem = getattr(wanted.config, "problem_type", None)
    if problem == "regression" or (problem is None and labels == 1):
        sizes = () if labels == 1 else (labels,)
        return wanted.draw.normal(wanted.batch, *sizes)
    if problem == "multi_label_classification":
        return wanted.draw.uniform(wanted.batch, labels)
    return wanted.draw.integers(labels, wanted.batch)


def _ctc_length(wanted: Wanted) -> int:
    """A quarter of the frames, and 32 at most: shorter than any alignment."""
    strides = getattr(wanted.config, "conv_stride", None) or [4]
    frames = int((wanted.seq or AUDIO_SAMPLES) // math.prod(strides))
    return max(1, min(32, frames // 4))
