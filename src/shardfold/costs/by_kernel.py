"""Prices by kernel: what the device takes for each kernel, and the host to ask for it.

An operator's kernels are priced one by one. On a GPU the host asks for kernels and the device runs
them: a sum of operators is the device's time, and the simulator lets the host run ahead. Without
measurements, kernels are priced by the device's datasheet (`costs.kernels`), and the host by what
PyTorch took on the machine whose kernels those shares were read off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardfold.cluster import Cluster, Mesh
from shardfold.costs.kernels import Datasheet
from shardfold.costs.model import Roofline
from shardfold.costs.steps import Collective, Compute, Values
from shardfold.operators import Kernel, Operator
from shardfold.operators.norms import RUNNING

OTHERS = "aten.mul"
COMPILED = "aten.add"  # without autograd: what a kernel of a compiled step takes of the host
EACH = ".each"  # of an operator of many calls: one more of them
SORT = ".sort"  # of experts: what is asked for before the host waits
# Microseconds of the host for an operator, forward and backward: PyTorch 2.11 with autograd, on the
# 16 cores beside an H200, the geometric mean of two calibrations of which one took 1.7 times as
# long as the other: a host that is shared is that uncertain. A device's `host_pace` scales all.
HOST: Mapping[str, tuple[float, float]] = {
    "aten.linear": (39, 108),
    "aten.matmul": (34, 84),
    "aten.layer_norm": (22, 41),
    "aten.batch_norm": (89, 51),
    "aten.conv2d": (31, 62),
    "aten.embedding": (54, 52),
    "aten.view": (6, 7),
    "aten.transpose": (10, 8),
    "aten.slice": (5, 31),
    "aten.cat": (26, 30),
    "aten.add": (9, 3),
    "aten.mul": (15, 17),
    "aten.pow": (17, 49),
    "aten.to": (20, 15),
    "aten.gelu": (21, 30),
    "aten.relu": (20, 20),
    "aten.softmax": (13, 37),
    "aten.mean": (36, 61),
    "aten.max_pool2d": (34, 35),
    "aten.scaled_dot_product_attention": (61, 63),
    "update": (12, 12),
    "update.parts": (50, 50),
    "split_norm": (422, 215),
    "all_gather": (177, 203),
    "reduce_scatter": (121, 165),
    "all_reduce": (50, 68),
    "shardfold.expert_linear": (161, 194),
    "shardfold.expert_linear.each": (20, 54),
    "shardfold.expert_linear.sort": (172, 166),
}


@dataclass(frozen=True)
class ByKernel:
    """Seconds of every kernel by the device's datasheet, of collectives by the cluster's links."""

    cluster: Cluster
    mesh: Mesh

    @property
    def runs_ahead(self) -> bool:
        """Whether the host asks while the device works."""
        return bool(self.cluster.device.units)

    def compute_seconds(self, step: Compute) -> Values:
        """The device's time: a host that runs ahead is simulated; where they are one, both."""
        device = self.device_seconds(step)
        return device if self.runs_ahead else device + self.host_seconds(step)

    def collective_seconds(self, step: Collective) -> Values:
        """By the cluster's links."""
        return Roofline(self.cluster, self.mesh).collective_seconds(step)

    def device_seconds(self, step: Compute) -> Values:
        """Seconds of the device alone."""
        if step.phase == "update":
            return self.update_seconds(step)
        if step.turn == "later":  # gradients of passes are added up
            return self.kernel_seconds(Kernel("vector", step.dtype, (step.bytes,)))
        if step.engine == "cast":
            return self.kernel_seconds(Kernel("cast", step.dtype, (step.bytes,)))
        if step.work is None:
            return self.unknown(step, "work without an operator")
        total = np.zeros(len(step.flops))
        for kernel in map(self._as_run, step.work.kernels(step.phase)):
            total = total + kernel.times * self.kernel_seconds(kernel)
        return total

    def _as_run(self, kernel: Kernel) -> Kernel:
        """Products of experts are one kernel, where PyTorch has one for the device."""
        has_one = self.cluster.device.grouped_products and kernel.dtype == "bfloat16"
        if not (kernel.is_grouped and has_one):
            return kernel
        return Kernel("bmm", kernel.dtype, (np.asarray(kernel.times), *kernel.sizes))

    def kernel_seconds(self, kernel: Kernel) -> Values:
        """Seconds of one kernel."""
        return where_any(kernel, Datasheet(self.cluster.device).seconds(kernel))

    def update_seconds(self, step: Compute) -> Values:
        """All parameters are updated together: one takes its share of the passes."""
        return Datasheet(self.cluster.device).update_seconds(step.optimizer, step.bytes)

    def unknown(self, step: Compute, what: str) -> Values:
        """Seconds of what is no kernel."""
        return Roofline(self.cluster, self.mesh).compute_seconds(step)

    # The host

    def host_seconds(self, step: Compute) -> Values:
        """What the host takes to ask for the step."""
        found = np.full(len(step.flops), self._host(step))
        if step.work is None or _operator(step).calls == "one":
            return found
        kernels = step.work.kernels(step.phase)
        if is_in_calls(step):
            calls = self.calls_of(step, kernels)
            return sum((each * k.times + 0.0 * found for k, each in calls), 0.0 * found)
        for kernel in kernels:
            if kernel.family.startswith("split_norm"):
                parts = self.host_of(["split_norm", "aten.batch_norm"], step.phase)
                if step.phase != "backward":
                    parts += RUNNING * self.host_of([OTHERS], "forward")
                found = np.where(kernel.sizes[0] > 0, parts, found)
        return found

    def _host(self, step: Compute) -> float:
        if step.phase == "update":
            # The parameters of several devices are DTensors, which take longer to ask for.
            kinds = ["update.parts"] if self.mesh.axes else []
            return self.host_of([*kinds, "update"], step.phase)
        if step.turn == "later":
            return self.host_of([OTHERS], "forward")
        if step.engine == "cast":
            return self.host_of(["aten.to", OTHERS], "forward")
        if step.work is None or step.work.access.is_idle:
            return 0.0
        if step.work.access.is_compiled:
            calls = sum(float(np.max(k.times)) for k in step.work.kernels(step.phase))
            return calls * self.host_of([COMPILED], "forward")
        kinds = [step.work.access.kind, _operator(step).launched_as, OTHERS]
        return self.host_of(kinds, step.phase) + self._casts(step)

    def _casts(self, step: Compute) -> float:
        """What the host takes to ask for the kernels that scale and cast to float8."""
        if step.work is None or not step.work.access.is_float8:
            return 0.0
        found = [k for k in step.work.kernels(step.phase) if k.family == "vector"]
        return sum(float(np.max(k.times)) for k in found) * self.host_of([COMPILED], "forward")

    def host_of(self, kinds: Sequence[str], phase: str) -> float:
        """What the host takes to ask for the first of these kinds that is known."""
        if not self.runs_ahead:
            return 0.0
        known = next((HOST[kind] for kind in kinds if kind in HOST), (0.0, 0.0))
        return known[phase == "backward"] * 1e-6 * self.cluster.device.host_pace

    def is_known(self, kind: str) -> bool:
        """Whether the host's time for operators of a kind is known."""
        return kind in HOST

    def calls_of(self, step: Compute, kernels: Sequence[Kernel]) -> list[tuple[Kernel, float]]:
        """What the host takes for each call of kernels that are asked for one by one.

        Where such an operator is known: for what is awaited, for a product, and for all others
        together, which the first of them bears.
        """
        kernels = [self._as_run(kernel) for kernel in kernels]
        kind = step.work.access.kind if step.work is not None else ""
        as_known = _operator(step).launched_as
        if not self.is_known(kind) and as_known != OTHERS:  # it may be measured by another name
            kind = as_known
        if not self.is_known(kind):
            return [(kernel, self.host_of([OTHERS], "forward")) for kernel in kernels]
        once, each = (self.host_of([name], step.phase) for name in (kind, kind + EACH))
        found = []
        for kernel in kernels:
            if kernel.is_awaited:
                seconds = self.host_of([kind + SORT], "forward") / float(np.max(kernel.times))
            elif kernel.family.startswith("matmul") or kernel.family == "bmm":
                seconds = each
            else:
                seconds, once = once, 0.0
            found.append((kernel, seconds))
        return found


def is_in_calls(step: Compute) -> bool:
    """Whether an operator's kernels are asked for one by one: experts, of which each is a call."""
    return step.work is not None and _operator(step).calls == "many"


def _operator(step: Compute) -> Operator:
    assert step.work is not None
    return step.work.space.rule.rule.operator


def where_any(kernel: Kernel, seconds: Values) -> Values:
    """Nothing where a kernel has nothing to do."""
    return np.where(np.prod(np.stack(np.broadcast_arrays(*kernel.sizes)), axis=0) > 0, seconds, 0)
