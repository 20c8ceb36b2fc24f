"""Precision: in which numbers a step computes, and in which parameters are kept between steps.

    fp64 fp32 fp16 bf16   all in one: weights, gradients and the optimizer's state, too
    tf32                  fp32, with products rounded to TF32
    bf16-mixed            computes in bf16; float32 master weights, gradients and optimizer state;
                          gradients are reduced in float32
    bf16-mixed/bf16       the same, with gradients reduced in bf16
    fp8-mixed  fp8        bf16-mixed, or bf16, with the products of linear layers in float8 (and
    fp8-mixed/bf16        bf16-mixed/bf16): planned and priced, not run

Mixed is what FSDP2's `MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=...)` does: a device
casts the part of a parameter that it keeps, what is gathered is bf16, and gradients land in float32
on the master weights.

In float8 each operand of a product is scaled by its largest item, row by row, and cast when it is
multiplied; what is kept for backward is in bf16. This is torchao's recipe "rowwise" (torchao 0.18,
float8/float8_linear.py). The head, the last linear layer outside all numbered blocks, stays in
bf16, as torchtitan and Megatron-LM have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfold.errors import InputError, nearest

if TYPE_CHECKING:
    from shardfold.graph.graph import TensorType


@dataclass(frozen=True, slots=True)
class Precision:
    """The numbers of a training step; without any words, the model's own throughout."""

    name: str = ""
    computes: str = ""  # the dtype of all floating tensors of the step
    master: str = ""  # that of parameters, gradients and optimizer state between steps
    reduces: str = ""  # that of gradients on their way
    is_tf32: bool = False
    is_float8: bool = False  # the products of linear layers

    def kept(self, kind: TensorType) -> str:
        """The dtype in which a parameter is kept, and its gradient and optimizer state."""
        return self.master if self.master and kind.is_floating else kind.dtype

    def sent(self, kind: TensorType) -> str:
        """The dtype in which a parameter's gradient is reduced."""
        return self.reduces if self.reduces and kind.is_floating else kind.dtype

    def product(self, dtype: str) -> str:
        """The dtype by whose rate the device multiplies numbers of a dtype."""
        return "tf32" if self.is_tf32 and dtype == "float32" else dtype

    def __str__(self) -> str:
        if not self.name:
            return "the model's own, of gradients and optimizer state, too"
        if self.is_tf32:
            return "tf32: float32 throughout, products in TF32"
        float8 = FLOAT8 if self.is_float8 else ""
        if not self.master:
            plain = "bf16" if self.is_float8 else self.name
            return f"{plain} throughout, no other master weights{float8}"
        sent = "" if self.reduces == self.master else f", gradients reduced in {self.reduces}"
        return f"{self.name}: {self.master} master weights and moments{sent}{float8}"


FLOAT8 = ", linear layers multiply in float8 (priced, neither run nor measured)"
OWN = Precision()
PRECISIONS: Mapping[str, Precision] = {
    each.name: each
    for each in (
        Precision("bf16-mixed", "bfloat16", "float32", "float32"),
        Precision("bf16-mixed/bf16", "bfloat16", "float32", "bfloat16"),
        Precision("fp8-mixed", "bfloat16", "float32", "float32", is_float8=True),
        Precision("fp8-mixed/bf16", "bfloat16", "float32", "bfloat16", is_float8=True),
        Precision("fp8", "bfloat16", is_float8=True),
        Precision("bf16", "bfloat16"),
        Precision("fp16", "float16"),
        Precision("fp32", "float32"),
        Precision("tf32", "float32", is_tf32=True),
        Precision("fp64", "float64"),
    )
}
MIXED_FP16 = "fp16-mixed needs a loss that is scaled, which the runner does not do: use bf16-mixed."


def precision_named(name: str | None) -> Precision:
    """The precision of that name; the model's own without one."""
    if name is None:
        return OWN
    if name not in PRECISIONS:
        told = MIXED_FP16 if name == "fp16-mixed" else nearest(name, PRECISIONS)
        raise InputError(f"Unknown precision {name!r}. {told}")
    return PRECISIONS[name]
