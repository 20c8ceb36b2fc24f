"""Llama 3 8B as Meta's own code writes it, planned beside the Hugging Face one.

Rotary positions are complex numbers, key and value heads are repeated for their groups, the norm
casts with `type_as`, the mask is made by `torch.full` and `triu`. Attention is torch's, or written
out with a softmax, as is Hugging Face's ("sdpa" or "eager").

    python benchmarks/meta_llama.py --out benchmarks/results/meta-llama.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from environment import environment


@dataclass(frozen=True)
class Sizes:
    """The sizes of Llama 3 8B, unless others are given."""

    dim: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocab: int = 128256
    eps: float = 1e-5
    theta: float = 500000.0


def rotations(dim: int, length: int, theta: float) -> Tensor:
    """A complex number of length one for each position and pair of features."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    angles = torch.outer(torch.arange(length).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, turned by their positions."""
    q_ = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_ = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    turns = turns.view(1, q_.shape[1], 1, q_.shape[3])
    q_out = torch.view_as_real(q_ * turns).flatten(3)
    k_out = torch.view_as_real(k_ * turns).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


class Norm(nn.Module):
    """Root mean square, in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """As long as the square root of their number, times the weight."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.type_as(x) * self.weight


class Attention(nn.Module):
    """Grouped heads."""

    def __init__(self, sizes: Sizes, *, is_fused: bool) -> None:
        super().__init__()
        self.sizes, self.is_fused, self.head = sizes, is_fused, sizes.dim // sizes.heads
        self.wq = nn.Linear(sizes.dim, sizes.heads * self.head, bias=False)
        self.wk = nn.Linear(sizes.dim, sizes.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(sizes.dim, sizes.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(sizes.heads * self.head, sizes.dim, bias=False)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        """Every position sees those before it."""
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, self.sizes.heads, self.head)
        k = self.wk(x).view(batch, length, self.sizes.kv_heads, self.head)
        v = self.wv(x).view(batch, length, self.sizes.kv_heads, self.head)
        q, k = rotate(q, k, turns)
        times = self.sizes.heads // self.sizes.kv_heads
        k, v = (t.repeat_interleave(times, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.is_fused:
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = torch.matmul(q, k.transpose(2, 3)) / self.head**0.5 + mask
            output = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
        output = output.transpose(1, 2).contiguous()
        return self.wo(output.view(batch, length, -1))


class Block(nn.Module):
    """Attention, then a gated feed-forward."""

    def __init__(self, sizes: Sizes, *, is_fused: bool) -> None:
        super().__init__()
        self.attention = Attention(sizes, is_fused=is_fused)
        self.w1 = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.attention_norm = Norm(sizes.dim, sizes.eps)
        self.ffn_norm = Norm(sizes.dim, sizes.eps)

    def forward(self, x: Tensor, turns: Tensor, mask: Tensor) -> Tensor:
        """Both, added to what comes in."""
        h = x + self.attention(self.attention_norm(x), turns, mask)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """The model with its loss."""

    def __init__(self, sizes: Sizes, length: int, *, is_fused: bool = True) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.dim)
        self.layers = nn.ModuleList(Block(sizes, is_fused=is_fused) for _ in range(sizes.layers))
        self.norm = Norm(sizes.dim, sizes.eps)
        self.output = nn.Linear(sizes.dim, sizes.vocab, bias=False)
        self.freqs_cis = rotations(sizes.dim // sizes.heads, 2 * length, sizes.theta)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The loss of the next token."""
        length = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        turns = self.freqs_cis[:length]
        mask = torch.full((length, length), float("-inf"), device=tokens.device)
        mask = torch.triu(mask, diagonal=1).type_as(h)
        for layer in self.layers:
            h = layer(h, turns, mask)
        logits = self.output(self.norm(h)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def meta(batch: int, length: int, *, is_fused: bool) -> tuple[nn.Module, tuple[Any, ...], Any]:
    """Meta's, and a batch."""
    with torch.device("meta"):
        tokens = torch.zeros(batch, length, dtype=torch.long)
        return Llama(Sizes(), length, is_fused=is_fused), (tokens, tokens), {}


def hugging_face(batch: int, length: int, *, is_fused: bool) -> tuple[nn.Module, Any, Any]:
    """Hugging Face's; without the fused attention, with its own eager one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardfold import zoo

    if is_fused:
        return zoo.build("llama3-8b", batch=batch, seq=length)
    sizes = Sizes()
    config = LlamaConfig(
        hidden_size=sizes.dim,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        intermediate_size=sizes.hidden,
        vocab_size=sizes.vocab,
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        tokens = torch.zeros(batch, length, dtype=torch.long)
        return LlamaForCausalLM(config), (), {"input_ids": tokens, "labels": tokens}


CASES = (  # cluster, batch, length, whether attention is fused
    ("8xh100", 16, 8192, True),
    ("8x8xh100", 64, 8192, True),
    ("8xh100", 64, 2048, False),
    ("8x8xh100", 512, 2048, False),
)


def measure(cluster: str, batch: int, length: int, is_fused: bool) -> dict[str, Any]:
    """Both plans' steps."""
    import shardfold as sf

    steps = {}
    for name, make in (("meta", meta), ("hugging_face", hugging_face)):
        model, args, kwargs = make(batch, length, is_fused=is_fused)
        plan = sf.plan(model, args, kwargs, cluster=cluster, dtype="bf16")
        assert plan.simulation is not None
        steps[f"{name}_step_seconds"] = plan.estimate.step_seconds
        steps[f"{name}_mfu"] = plan.simulation.mfu
        steps[f"{name}_without_rule"] = [e.kind for e in plan.unsplit if e.reason == "no rule"]
        steps[f"{name}_by_experiment"] = sorted({entry.kind for entry in plan.experiments})
    ratio = steps["meta_step_seconds"] / steps["hugging_face_step_seconds"]
    attention = "fused" if is_fused else "written out"
    about = {"cluster": cluster, "batch": batch, "length": length, "attention": attention}
    return {**about, **steps, "ratio": ratio}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--case", "chosen", type=int, multiple=True, help="Only these, by number.")
def main(out: Path, chosen: tuple[int, ...]) -> None:
    """Plan both on every cluster, and write what came out."""
    known = json.loads(out.read_text())["cases"] if out.exists() else []
    for case in [CASES[k] for k in chosen] if chosen else CASES:
        found = measure(*case)
        click.echo(json.dumps(found, indent=2))
        keys = ("cluster", "length")
        known = [k for k in known if [k[n] for n in keys] != [found[n] for n in keys]] + [found]
        out.write_text(json.dumps({"environment": environment(), "cases": known}, indent=2) + "\n")


if __name__ == "__main__":
    main()
