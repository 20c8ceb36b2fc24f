"""Blocks of experts of transformers are one operator, whatever their configuration names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfold.capture import capture_program
from shardfold.capture.experts import between_of, described
from shardfold.operators import rules_of
from shardfold.runtime.lower import alone
from shardfold.runtime.parallelize import Settings, assemble
from shardfold.sharding import find_subdims

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
MODELS = {
    "Mixtral": {"intermediate_size": 12, "num_local_experts": 4},
    "Qwen3Moe": {"moe_intermediate_size": 12, "num_experts": 4, "head_dim": 8},
    "Olmoe": {"intermediate_size": 12, "num_experts": 4},
    "GptOss": {"intermediate_size": 12, "num_local_experts": 4, "head_dim": 8},
    "DeepseekV3": {
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "Llama4Text": {
        "intermediate_size": 12,
        "intermediate_size_mlp": 24,
        "num_local_experts": 4,
        "head_dim": 8,
        "pad_token_id": 0,
    },
}
CAUSAL = {"Llama4Text": "Llama4"}  # whose experts are of one implementation alone


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, labels=tokens).loss
        return loss


def built(family: str, implementation: str) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**COMMON, **MODELS[family])
    config._attn_implementation = "eager"
    if family not in CAUSAL:
        config._experts_implementation = implementation
    torch.manual_seed(0)
    return Loss(getattr(transformers, f"{CAUSAL.get(family, family)}ForCausalLM")(config)).double()


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", MODELS)
def test_a_block_is_one_operator_with_the_models_own_numbers(
    family: str, implementation: str
) -> None:
    model, tokens = built(family, implementation), torch.randint(32, (2, 6))
    program = capture_program(model, (tokens,))
    kinds = Counter(op.kind for op in program.graph.ops)
    assert kinds["shardfold.routed_experts"] == 2
    assert not {"shardfold.expert_linear", "aten._grouped_mm", "aten.bmm"} & kinds.keys()
    ours = assemble(
        model,
        program,
        alone(program, find_subdims(program.graph, rules_of(program.graph))),
        Settings(),
    )
    plain = built(family, "eager")
    found, expected = ours(tokens), plain(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    found.backward()
    expected.backward()
    theirs: dict[str, Any] = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("function", "wide", "wanted"),
    [
        (lambda rows: torch.tanh(rows.chunk(2, -1)[0]) * rows.chunk(2, -1)[1], 16, "halves"),
        (lambda rows: rows[..., ::2].clamp(max=1.0) * rows[..., 1::2], 16, "pairs"),
        (lambda rows: rows.relu().square(), 8, "own"),
        (lambda rows: torch.softmax(rows, -1), 8, "any"),
    ],
)
def test_what_stands_between_is_found_by_trial(function: Any, wide: int, wanted: str) -> None:
    found = described(function, wide, torch.float64)
    assert found is not None
    assert found.pairing == wanted
    for rows in (torch.randn(5, 3 * wide), torch.randn(0, wide)):
        torch.testing.assert_close(between_of(str(found))(rows), function(rows))


def test_what_mixes_rows_is_no_block() -> None:
    assert described(lambda rows: rows - rows.mean(0), 8, torch.float64) is None
