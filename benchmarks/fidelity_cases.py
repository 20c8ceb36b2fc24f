"""The cases of the fidelity benchmark: models, batches, and one device or a rank's share of eight.

None of them is measured for calibration: a profile is of kernels on a grid of sizes, these are
whole training steps.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

import shardfold as sf
from shardfold import zoo
from shardfold.api import compare
from shardfold.plans import Plan

ALONE = "one device"


@dataclass(frozen=True)
class Case:
    """One training step: a model of the zoo, its sizes, and how it is split."""

    model: str
    batch: int
    seq: int | None = None
    layers: int | None = None
    hidden: int | None = None
    method: str = ALONE  # or a method of `shardfold compare`, on eight devices
    dtype: str = "bf16"
    recompute: bool = False  # all blocks

    @property
    def name(self) -> str:
        """Such as gpt2 24x1024, 8 x 1,024 tokens, bf16, megatron of 8."""
        size = f" {self.layers}x{self.hidden}" if self.hidden else ""
        size = size or (f" {self.layers} layers" if self.layers else "")
        batch = f"batch {self.batch}" + (f" x {self.seq}" if self.seq else "")
        how = "" if self.method == ALONE else f", {self.method} of {DEVICES}"
        how += ", recomputed" if self.recompute else ""
        return f"{self.model}{size}, {batch}, {self.dtype}{how}"

    def build(self, device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model without dropout, and its batch."""
        module, args, kwargs = zoo.build(
            self.model,
            batch=self.batch,
            seq=self.seq,
            layers=self.layers,
            hidden=self.hidden,
            device=device,
            dtype=self.dtype,
        )
        return without_dropout(module), args, kwargs

    def plan(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """The plan that is run, on one device or on eight."""
        if self.method == ALONE:
            recompute: Literal["always", "never"] = "always" if self.recompute else "never"
            return sf.plan(module, args, kwargs, cluster=SINGLE, recompute=recompute)
        with tempfile.TemporaryDirectory() as folder:
            compare(
                *(module, args, kwargs),
                cluster=CLUSTER,
                methods=(self.method,),
                save_plans=folder,
                micro_batches=1,
            )
            return Plan.load(Path(folder) / f"{self.method}.json")


def choices_of(plan: Plan) -> str:
    """A digest of all that a plan decides: what was measured and what is predicted are one plan."""
    decided = (
        tuple(axis.size for axis in plan.mesh),
        [operator.config for operator in plan.operators],
        [tensor.layout for tensor in plan.tensors],
        [(entry.names, entry.layout, entry.regather) for entry in plan.parameters],
        plan.recompute,
    )
    return hashlib.sha256(repr(decided).encode()).hexdigest()[:16]


DEVICES = 8
CLUSTER = f"{DEVICES}xh200"
SINGLE = "1xh200"


def without_dropout(module: nn.Module) -> nn.Module:
    """The module with every dropout probability at zero, as large models are trained today."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for owner in (part, getattr(part, "config", None)):
            for name in list(vars(owner)) if owner is not None else ():
                if "drop" in name and isinstance(getattr(owner, name), float):
                    setattr(owner, name, 0.0)
    return module


CASES = (
    Case("gpt2", 8, 1024),
    Case("gpt2", 16, 1024),
    Case("gpt2", 64, 512),
    Case("gpt2", 16, 1024, layers=24, hidden=1024),
    Case("gpt2", 8, 1024, layers=36, hidden=1280),
    Case("llama3-8b", 8, 2048, layers=12, hidden=1024),
    Case("llama3-8b", 32, 512, layers=12, hidden=1024),
    Case("llama3-8b", 4, 2048, layers=12, hidden=2048),
    Case("llama3-8b", 2, 4096, layers=8, hidden=2048),
    Case("bert-large", 16, 512),
    Case("bert-large", 32, 512),
    Case("bert-large", 256, 128),
    Case("bert-large", 64, 512, layers=12, hidden=768),
    Case("t5-large", 16, 512),
    Case("t5-large", 64, 256),
    Case("t5-large", 64, 512, layers=6, hidden=512),
    Case("vit-large", 64),
    Case("vit-large", 128),
    Case("vit-large", 256),
    Case("vit-large", 256, layers=12, hidden=768),
    Case("resnet50", 64),
    Case("resnet50", 128),
    Case("resnet50", 256),
    Case("resnet50", 512),
    Case("inceptionv3", 128),
    Case("inceptionv3", 256),
    Case("mixtral-8x7b", 8, 2048, layers=4, hidden=1024),
    Case("mixtral-8x7b", 32, 2048, layers=4, hidden=1024),
    Case("mixtral-8x7b", 4, 2048, layers=2, hidden=2048),
    Case("mixtral-8x7b", 16, 2048, layers=2, hidden=2048),
    Case("gpt2", 16, 1024, recompute=True),
    Case("gpt2", 16, 1024, layers=24, hidden=1024, recompute=True),
    Case("llama3-8b", 8, 2048, layers=12, hidden=1024, recompute=True),
    Case("llama3-8b", 4, 2048, layers=12, hidden=2048, recompute=True),
    Case("bert-large", 32, 512, recompute=True),
    Case("t5-large", 64, 512, layers=6, hidden=512, recompute=True),
    Case("vit-large", 256, recompute=True),
    Case("gpt2", 256, 1024, method="data-parallel"),
    Case("gpt2", 256, 1024, method="fsdp"),
    Case("gpt2", 128, 1024, method="megatron"),
    Case("llama3-8b", 32, 2048, layers=8, hidden=2048, method="data-parallel"),
    Case("llama3-8b", 32, 2048, layers=8, hidden=2048, method="fsdp"),
    Case("llama3-8b", 16, 2048, layers=8, hidden=4096, method="megatron"),
    Case("bert-large", 512, 512, method="fsdp"),
    Case("bert-large", 256, 512, method="megatron"),
    Case("vit-large", 1024, method="data-parallel"),
    Case("resnet50", 2048, method="data-parallel"),
    Case("inceptionv3", 2048, method="data-parallel"),
)
