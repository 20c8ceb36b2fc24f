"""The zoo's way of running transformers models changes nothing that they compute."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from shardfold import zoo

transformers = pytest.importorskip("transformers")


def losses(name: str, **reference: str) -> tuple[torch.Tensor, torch.Tensor, Any, Any]:
    """Losses and modules of the zoo's model and of the same weights under `reference`."""
    ours, args, kwargs = zoo.build(name, device="cpu")
    config = ours.model.config.__class__(**ours.model.config.to_dict())
    for key, value in reference.items():
        setattr(config, key, value)
    theirs = ours.model.__class__(config)
    theirs.load_state_dict(ours.model.state_dict())
    # Dropout would draw different masks; nothing else differs between the modes.
    return ours.eval()(*args, **kwargs), theirs.eval()(*args, **kwargs).loss, ours.model, theirs


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "name", ["gpt2-tiny", "llama3-8b-tiny", "bert-large-tiny", "t5-large-tiny", "vit-large-tiny"]
)
def test_attention_without_a_mask_means_the_same(name: str, implementation: str) -> None:
    ours, theirs, _, _ = losses(name, _attn_implementation=implementation)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_experts_mean_the_same_with_their_gradients(implementation: str) -> None:
    ours, theirs, module, reference = losses(
        "mixtral-8x7b-tiny", _experts_implementation=implementation, _attn_implementation="sdpa"
    )
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    for one, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_attention_is_causal() -> None:
    module, _, kwargs = zoo.build("llama3-8b-tiny", device="cpu", batch=1, seq=8)
    changed = kwargs["input_ids"].clone()
    changed[0, 5] = (changed[0, 5] + 1) % 257
    before = module.model(kwargs["input_ids"]).logits
    after = module.model(changed).logits
    same = torch.isclose(before, after).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def sliding(seq: int) -> str:
    from shardfold.zoo import huggingface
    from shardfold.zoo.construct import Draw

    config = transformers.MistralConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    huggingface.build_from(config, transformers.MistralForCausalLM, 2, seq, Draw("cpu"))
    implementation: str = config._attn_implementation
    return implementation


def test_a_sliding_window_keeps_its_mask_unless_it_covers_the_sequence() -> None:
    assert sliding(seq=16) == "sdpa"
    assert sliding(seq=8) == "shardfold_sdpa"


def test_without_transformers_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from shardfold import zoo; from shardfold.errors import ModelError\n"
        "zoo.build('rnnlm-tiny')\n"
        "try: zoo.build('gpt2')\n"
        "except ModelError as error: assert \"pip install 'shardfold[hf]'\" in str(error), error\n"
        "else: sys.exit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
