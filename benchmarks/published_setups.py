"""Where the published runs were made: the stack, the kind of model and the machines of each source.

Nothing here is by model or by row: a source's own scripts and pages say what its stack does and
what joins its devices. Sources that are not listed are taken by what their rows state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from published_models import GPT, LLAMA, Experts, Family, Latent
from published_rows import Row
from shardfold.cluster import Cluster, parse
from shardfold.cluster.catalog import hardware_names
from shardfold.cluster.cluster import Level
from shardfold.strategies.stacks import Stack, stack_named

REACHED = 0.9  # of a network's rate, as in the hardware files


@dataclass(frozen=True, slots=True)
class Site:
    """A kind of device, and the network of a node where it is not the catalog's."""

    hardware: str
    network: float | None = None  # bytes/s per node, one direction
    memory_bytes: int | None = None  # None: the catalog's
    source: str = ""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a source has in common: its stack, its models, and what its rows leave open."""

    name: str
    stack: str
    family: Family
    recompute: str | None = None  # where a row does not say; None: then it is not known
    pads_vocabulary: bool = False  # to a multiple of 128 x tp, as Megatron-LM does
    counts_context: bool = False  # its memory is nvidia-smi's
    network: float | None = None
    network_source: str = ""
    network_reached: float = REACHED  # of its rate
    network_seconds: float | None = None  # of a hop between nodes; None: the catalog's
    links: Mapping[str, float] = field(default_factory=dict)  # bytes/s between two of a node
    links_source: str = ""


GBIT = 1e9 / 8
NVLINK3 = 25e9  # bytes/s of a link, one direction
_SCORES = replace(GPT, name="gpt-scores", keeps_scores=True, dropout=0.1)
SETUPS: Mapping[str, Setup] = {  # by what a source begins with
    "mosaicml/llm-foundry": Setup(
        "MosaicML llm-foundry",
        "fsdp1",
        replace(GPT, name="mpt", float32_logits=False),  # FlashAttention's fused loss
        network=1600 * GBIT,
        network_source="scripts/train/benchmarking/README.md: 1600 Gbps RoCE between nodes",
    ),
    "NVIDIA/Megatron-LM": Setup(
        "Megatron-LM", "megatron-fp16", _SCORES, recompute="full", pads_vocabulary=True
    ),
    "calculon-ai/calculon": Setup(
        "Megatron-LM (Calculon)", "megatron", _SCORES, pads_vocabulary=True
    ),
    "NVIDIA-NeMo/Megatron-Bridge": Setup(
        "Megatron-Bridge", "megatron-bridge", LLAMA, pads_vocabulary=True
    ),
    "InternLM/InternEvo": Setup(
        "InternEvo",
        "internevo",
        replace(LLAMA, name="internlm", float32_logits=False),  # FlashAttention's fused loss
        network=400 * GBIT,
        network_source="doc/en/train_performance.md: 4 x 100 Gb/s RoCE per node",
    ),
    "bigscience-workshop/bigscience": Setup(
        "BigScience BLOOM",
        "megatron-deepspeed",
        replace(_SCORES, name="gpt-scores-embedding-norm", embedding_norm=True),
        pads_vocabulary=True,
        counts_context=True,
        network=400 * GBIT,
        network_source="Jean Zay (IDRIS): four Omni-Path links of 100 Gb/s per node",
        links={"A100": 4 * NVLINK3},
        links_source="jz/hpc-specs.md and arXiv 2211.05100: four NVLinks between GPUs",
    ),
    "alpa-projects/alpa": Setup(
        "Alpa",
        "alpa",
        replace(_SCORES, name="gpt-alpa", dropout=0.0, tied=False),
        recompute="full",
        network=25 * GBIT,
        network_source="Amazon EC2 p3.16xlarge: 25 Gb/s",
    ),
    "MooreThreads/SimuMax": Setup(
        "SimuMax", "simumax", replace(LLAMA, name="llama-fused-loss", float32_logits=False)
    ),
    "vinjn/nanotron-ultrascale-playbook": Setup(
        "Ultra-Scale Playbook",
        "nanotron",
        replace(LLAMA, name="nanotron", copies=True),
        network=3200 * GBIT,
        network_reached=0.56,
        network_seconds=0.3e-3,
        network_source="Amazon EC2 p5.48xlarge: 3200 Gb/s EFA. What the Playbook measured of "
        "all-gathers of 256 MB on 2 to 64 nodes (assets/data/benchmarks/pp_comm_bandwidth.html) "
        "is, within 18%, that of rings at 223 of 400 GB/s with 0.30 ms from node to node (least "
        "squares of relative errors)",
    ),
}
SITES: Mapping[str, Site] = {  # by what the name of a device begins with, the longest first
    "A100-40GB": Site("a100-40g"),
    "A100": Site("a100-80g"),
    "A800": Site("a100-80g"),
    "H100": Site("h100"),
    "H200": Site("h200"),
    "B200": Site("b200"),
    "V100-16GB": Site("v100", memory_bytes=16_945_512_448, source="15.78 GiB as PyTorch says"),
    "V100": Site("v100"),
}


def named(priced: Mapping[str, Any]) -> str:
    """The name of a row's source, in a few words."""
    source = str(priced["source"])
    found = (setup.name for start, setup in SETUPS.items() if source.startswith(start))
    return next(found, source.split(" ")[0])


def setup_of(row: Row) -> Setup:
    """The setup of a row's source; of one that is not known, by what the row states."""
    for start, setup in SETUPS.items():
        if row.source.startswith(start):
            return setup
    name = row.source.split(" ")[0]
    stack = "fsdp1" if row.zero.startswith("3") else "megatron"
    is_plain = row.ffn is not None and row.ffn == 4 * (row.count("hidden") or 0)
    return Setup(name, stack, GPT if is_plain else LLAMA)


def stack_of(row: Row, setup: Setup) -> Stack:
    """The stack; Composer's PURE reduces gradients in bf16."""
    pure = setup.stack == "fsdp1" and "mixed_precision PURE" in row.notes
    return stack_named("fsdp1-pure" if pure else setup.stack)


def family_of(row: Row, setup: Setup) -> Family:
    """The kind of model; whether weights are tied is in the notes, where the source says."""
    family = setup.family
    if "untied" in row.notes:
        return replace(family, tied=False)
    return replace(family, tied=True) if "tied" in row.notes else family


DEEPSEEK = Latent(queries=1536, keys=512, size=128, position=64, value=128)
# What a plain decoder of the same dims has not: by what a model's name begins with, as its makers
# published it. Letters and digits of a name count.
MIXTURES: Mapping[str, Experts] = {
    "deepseekv2": Experts(160, 6, 1536, shared=3072, dense=1),
    "deepseekv3": Experts(256, 8, 2048, shared=2048, dense=3),
    "qwen330ba3b": Experts(128, 8, 768),
    "qwen3235ba22b": Experts(128, 8, 1536),
    "mixtral8x7b": Experts(8, 2, 14336),
    "mixtral8x22b": Experts(8, 2, 16384),
}
LATENT: Mapping[str, Latent] = {"deepseekv2": DEEPSEEK, "deepseekv3": DEEPSEEK}
HEAD_SIZES: Mapping[str, int] = {"qwen3": 128}


def architecture_of(row: Row) -> dict[str, Any]:
    """The experts, the attention and the size of a head of a row's model, where they are its own.

    Raises KeyError for experts that nobody described.
    """
    name = "".join(c for c in row.model.lower() if c.isalnum())
    experts, latent, head = (_named(name, each) for each in (MIXTURES, LATENT, HEAD_SIZES))
    is_routed = "MoE" in row.model or "experts" in row.notes or row.count("ep", 1) != 1
    if experts is None and is_routed:
        raise KeyError(row.model)
    if experts is not None and "cutto" in name:
        experts = replace(experts, dense=1)  # SimuMax's releases: "formal rows use dense_layers=1"
    return {"experts": experts, "latent": latent, "head": head}


def _named(name: str, known: Mapping[str, Any]) -> Any:
    return next((known[start] for start in known if name.startswith(start)), None)


def cluster_of(row: Row, setup: Setup) -> Cluster | None:
    """The stated devices on the stated network; None where the device is not known."""
    site = _site(row.gpu)
    if site is None:
        return None
    gpus = row.count("gpus") or 1
    within = min(gpus, row.count("gpus_per_node") or 8)
    base = parse(f"2x8x{site.hardware}")
    node, gpu = base.levels
    if setup.network is not None:
        rate = setup.network / within
        node = _network(node, rate, setup)
    joined = next((setup.links[start] for start in setup.links if row.gpu.startswith(start)), None)
    if joined is not None and gpu.rated_bandwidth:
        reached = joined * gpu.bandwidth / gpu.rated_bandwidth
        source = setup.links_source
        gpu = replace(gpu, bandwidth=reached, rated_bandwidth=joined, source=source)
    levels = (replace(node, size=-(-gpus // within)), replace(gpu, size=within))
    device = base.device
    if site.memory_bytes is not None:
        device = replace(device, memory_bytes=site.memory_bytes)
    return Cluster(f"{row.gpu} x {gpus}", device, levels)


def _site(gpu: str) -> Site | None:
    """The kind of device that is stated; what is not listed, by its name in the catalog."""
    listed = next((SITES[start] for start in SITES if gpu.startswith(start)), None)
    if listed is not None:
        return listed
    name = re.sub(r"^((nvidia|amd|aws|geforce|instinct|tesla|quadro)[ -]*)+", "", gpu.lower())
    first = re.match(r"(rtx[ -]*)?\w+", name)
    plain = re.sub(r"[ -]", "", first[0]) if first else ""
    return Site(plain) if plain in hardware_names() else None


def _network(level: Level, rate: float, setup: Setup) -> Level:
    """The level with a network's rate per device, the share of it that is reached, and its hop."""
    hop = level.latency_seconds if setup.network_seconds is None else setup.network_seconds
    reached = setup.network_reached * rate
    level = replace(level, bandwidth=reached, rated_bandwidth=rate, latency_seconds=hop)
    return replace(level, source=setup.network_source)
