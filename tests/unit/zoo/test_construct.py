"""Every model has its published size, trains a step when tiny, and keeps operators whole."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfold import zoo
from shardfold.capture import capture
from shardfold.errors import ModelError

TINY = [name for name in zoo.names() if name.endswith("-tiny")]
HF = "Hugging Face transformers"

# Exact where the authors' or transformers' checkpoint is the source.
PARAMETERS = {
    "alexnet": 62_378_344,
    "inceptionv3": 23_834_568,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "densenet121": 7_978_856,
    "gpt2": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "t5-large": 737_668_096,
    "vit-large": 304_326_632,
    "mixtral-8x7b": 46_702_792_704,
}
# Within 1% of the round figure that is published.
ABOUT = {"bert-large": 335e6, "gpt3-175b": 175e9, "resnet50-wide": 228e6}


def test_a_tiny_checks_every_family() -> None:
    assert len(TINY) == 18


def build(name: str, **options: Any) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    if zoo.entry(name).source == HF:
        pytest.importorskip("transformers")
    return zoo.build(name, **options)


def count(name: str, **options: Any) -> int:
    module, _, _ = build(name, **options)
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_published_number_of_parameters(name: str) -> None:
    assert count(name) == PARAMETERS[name]


@pytest.mark.parametrize("name", ABOUT)
def test_about_the_published_number_of_parameters(name: str) -> None:
    assert count(name) == pytest.approx(ABOUT[name], rel=0.01)


def test_the_rnnlm_is_two_embeddings_and_its_lstm() -> None:
    vocabulary, hidden = 793_472, 2048
    lstm = 2 * (2 * 4 * hidden * hidden + 2 * 4 * hidden)
    assert count("rnnlm") == 2 * vocabulary * hidden + lstm


@pytest.mark.parametrize(
    ("name", "h", "f"), [("transformer", 512, 2048), ("transformer-big", 1024, 4096)]
)
def test_the_transformer_has_one_embedding_and_its_layers(name: str, h: int, f: int) -> None:
    attention, feedforward, norm = 4 * (h * h + h), 2 * h * f + h + f, 2 * h
    encoder = attention + feedforward + 2 * norm
    decoder = 2 * attention + feedforward + 3 * norm
    assert count(name) == 32_000 * h + 6 * (encoder + decoder) + 2 * norm


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_trains_a_step(name: str) -> None:
    module, args, kwargs = build(name, device="cpu")
    assert module.training
    loss = module(*args, **kwargs)
    assert loss.shape == ()
    loss.backward()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for path, parameter in module.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.abs().max() > 0, path
    optimizer.step()
    assert module(*args, **kwargs).isfinite()


@pytest.mark.parametrize(
    "name", ["alexnet-tiny", "rnnlm-tiny", "llama3-8b-tiny", "bert-large-tiny"]
)
def test_weights_and_batch_are_the_same_every_time(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, first_args, first_kwargs = build(name, device="cpu")
    assert torch.equal(torch.get_rng_state(), before), "the caller's random state was touched"
    torch.manual_seed(6)
    again, args, kwargs = build(name, device="cpu")
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(
        (*first_args, *first_kwargs.values()), (*args, *kwargs.values()), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["resnet50", "rnnlm", "transformer", "llama3-405b", "t5-large"])
def test_nothing_is_allocated_on_the_meta_device(name: str) -> None:
    module, args, kwargs = build(name, layers=None if name == "resnet50" else 1)
    tensors = [*module.parameters(), *module.buffers(), *args, *kwargs.values()]
    assert all(tensor.is_meta for tensor in tensors)


@pytest.mark.parametrize("dtype", ["bf16", torch.bfloat16])
@pytest.mark.parametrize("name", ["resnet50-tiny", "transformer-tiny", "llama3-8b-tiny"])
def test_the_dtype_is_that_of_the_parameters_and_no_default_stays(name: str, dtype: Any) -> None:
    module, args, kwargs = build(name, dtype=dtype)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    assert module(*args, **kwargs).is_meta
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "positive batch, got batch=0"),
        ({"seq": -1}, "positive seq, got seq=-1"),
        ({"dtype": "bf61"}, "'bf61'. Did you mean bf16"),
        ({"hidden": 7}, "cannot take hidden=7"),
    ],
)
def test_what_cannot_be_built_says_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build("transformer", **options)


def test_an_image_model_has_no_sequence() -> None:
    with pytest.raises(ModelError, match="takes images, so seq=9"):
        build("resnet50", seq=9)


def test_sizes_are_what_was_asked_for() -> None:
    module, args, kwargs = build("transformer", batch=3, seq=5, layers=1, hidden=128)
    assert [tuple(x.shape) for x in (*args, kwargs["labels"])] == [(3, 5)] * 3
    assert (len(module.encoder), len(module.decoder)) == (1, 1)
    assert module.embedding.embedding_dim == 128
    assert module.encoder[0].attention.heads == 2


def captured(name: str, **options: Any) -> Counter[str]:
    return Counter(op.kind.rpartition(".")[-1] for op in capture(*build(name, **options)).ops)


# The operators that carry a model's work, at full width: whole, and as many as the model has.
WHOLE = {
    "alexnet": {"conv2d": 5, "linear": 3, "max_pool2d": 3},
    "inceptionv3": {"conv2d": 94, "batch_norm": 94, "cat": 15},
    "rnnlm": {"embedding": 1, "lstm": 1, "linear": 1},
    "transformer": {"embedding": 2, "linear": 97, "scaled_dot_product_attention": 18},
    "resnet50": {"conv2d": 53, "batch_norm": 53, "linear": 1},
    "gpt2": {"addmm": 8, "linear": 1, "scaled_dot_product_attention": 2, "gelu": 2},
    "llama3-405b": {"linear": 15, "scaled_dot_product_attention": 2, "embedding": 1},
    "t5-large": {"linear": 33, "scaled_dot_product_attention": 6},
    "bert-large": {"linear": 14, "scaled_dot_product_attention": 2, "layer_norm": 6},
    "vit-large": {"conv2d": 1, "linear": 13, "scaled_dot_product_attention": 2},
    "mixtral-8x7b": {"routed_experts": 2, "topk": 2, "linear": 11},
}


@pytest.mark.parametrize("name", WHOLE)
def test_operators_stay_whole_when_captured(name: str) -> None:
    is_deep = zoo.entry(name).source == HF
    ops = captured(name, layers=2 if is_deep else None)
    assert {op: ops[op] for op in WHOLE[name]} == WHOLE[name]
    assert ops["cross_entropy_loss"] == 1
    junk = {"masked_fill", "index", "triu", "tril", "bitwise_and", "__and__", "item", "nonzero"}
    assert not junk & ops.keys()


def test_the_family_that_is_left_is_captured() -> None:
    """All others differ from those above in sizes only."""
    assert captured("densenet121-tiny")["cross_entropy_loss"] == 1


def write(path: Path, **fields: Any) -> str:
    path.write_text(json.dumps(fields))
    return str(path)


QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_a_configuration_file_is_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = write(tmp_path / "config.json", **QWEN)
    module, args, kwargs = zoo.from_config(path, batch=2, seq=8, layers=3, device="cpu")
    assert module(*args, **kwargs).isfinite()
    assert len(module.model.model.layers) == 3
    assert kwargs["input_ids"].shape == (2, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen22"}, "no model_type 'qwen22'. Did you mean"),
        ({"architectures": ["Qwen2ForMaskedLM"]}, "has no class 'Qwen2ForMaskedLM'"),
        ({"model_type": "vitdet"}, "no class with a loss for 'vitdet'"),
        ({"architectures": ["DetrForObjectDetection"]}, "labels of a kind of its own"),
        ({"hidden_size": "many"}, "is no configuration of 'qwen2'"),
    ],
)
def test_a_configuration_without_a_loss_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    pytest.importorskip("transformers")
    changed = QWEN | ({"architectures": None} if "model_type" in change else {}) | change
    with pytest.raises(ModelError, match=message):
        zoo.from_config(write(tmp_path / "config.json", **changed))


def test_a_configuration_that_names_no_class_with_a_loss_is_its_types(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for named in (["Qwen2Model"], None):
        path = write(tmp_path / "config.json", **(QWEN | {"architectures": named}))
        module, _, _ = zoo.from_config(path)
        assert type(module.model).__name__ == "Qwen2ForCausalLM"


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "broken.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"Cannot read the configuration .*broken\.json"):
        zoo.from_config(str(tmp_path / "broken.json"))
    with pytest.raises(ModelError, match="has no model_type"):
        zoo.from_config(write(tmp_path / "other.json", name="x"))
    with pytest.raises(ModelError, match="Cannot read"):
        zoo.from_config(str(tmp_path / "absent.json"))
