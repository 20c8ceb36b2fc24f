"""The measured cost model: a profile's times, and the queue between host and device.

An operator's kernels are looked up in the profile's tables. On a GPU the host asks for kernels and
the device runs them: an operator takes the longer of the two in a sum of operators; `device` and
`host` give them apart, for whoever lets the host run ahead. On a CPU asking and doing are one. A
collective takes what its kind took on groups of its size, and what was never measured is priced by
the cluster's links: `notes` says so.

In the launch queue of a GPU, the host asks for one operator after another, the device runs them in
order:

    asked(i) = asked(i - 1) + host(i)
    done(i)  = max(done(i - 1), asked(i)) + device(i)

A step is over when both are. Where operators are short the host is the slower one, where they are
long it runs ahead. An operator inside which the host waits takes until the device has done all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from shardfold.cluster import Cluster
from shardfold.cluster.hardware import Device
from shardfold.costs.by_kernel import OTHERS, ByKernel, is_in_calls, where_any
from shardfold.costs.kernels import Datasheet
from shardfold.costs.model import Roofline
from shardfold.costs.profile import (
    RELATIONS,
    UPDATED_TOGETHER,
    CollectiveEntry,
    Interpolated,
    Profile,
)
from shardfold.costs.steps import BUCKET_BYTES, Collective, Compute, Step, Values
from shardfold.errors import ProfileError
from shardfold.graph import Graph
from shardfold.operators import Kernel

REDUCED = ("all_reduce", "reduce_scatter")
SHARED = ".shared"  # of a gather or reduction: one more in a bucket
MORE = ".more"  # of a gather or scatter: one more, of another dim of the same tensor


@dataclass(frozen=True)
class Tables:
    """The tables of a profile, ready to be asked."""

    profile: Profile
    found: dict[tuple[str, str], Interpolated] = field(default_factory=dict)

    def of(self, family: str, dtype: str) -> Interpolated | None:
        """The table of a family: in the dtype, or in the other one of its width."""
        key = (family, dtype)
        if key not in self.found:
            table = self.profile.table(*key)
            if table is None:
                return None
            self.found[key] = Interpolated(table, self.profile.rates)
        return self.found[key]


@lru_cache(maxsize=4)
def _tables(digest: str, holder: _Holder) -> Tables:
    return Tables(holder.profile)


class _Holder:
    """A profile that is equal to any other: the digest beside it tells them apart."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder)


@dataclass(frozen=True)
class Measured(ByKernel):
    """Seconds by a profile, on the devices and meshes of a cluster."""

    profile: Profile
    notes: set[str] = field(default_factory=set, compare=False)

    def __post_init__(self) -> None:
        check(self.profile, self.cluster.device)

    @property
    def tables(self) -> Tables:
        """The profile's tables; models on other meshes share them."""
        return _tables(self.profile.digest, _Holder(self.profile))

    @property
    def runs_ahead(self) -> bool:
        """Whether the host asks while the device works; on a CPU, asking and doing are one."""
        return self.profile.machine.kind != "cpu"

    def kernel_seconds(self, kernel: Kernel) -> Values:
        """Seconds of one kernel; on a CPU without what asking for it takes."""
        table = self._table(kernel)
        if table is None:
            return super().kernel_seconds(kernel)
        if table.beyond(kernel.sizes):
            self.notes.add(f"{kernel.family} in {kernel.dtype} is extrapolated beyond the profile.")
        found = table.seconds(kernel.sizes)
        if table.table.family != kernel.family:
            found = found * self._ratio(kernel, table.table.family)
        if not self.runs_ahead:
            found = np.maximum(found - table.floor, 0.0)
        return where_any(kernel, found)

    def _ratio(self, kernel: Kernel, measured: str) -> Values:
        """How much longer than a relation a kernel takes by the device's datasheet."""
        if RELATIONS.get(kernel.family) != measured:
            return np.ones(1)
        sheet = Datasheet(self.cluster.device)
        return sheet.seconds(kernel) / sheet.seconds(replace(kernel, family=measured))

    def _table(self, kernel: Kernel) -> Interpolated | None:
        """The family's table; a near relation where it was not measured, and that is said."""
        for family in _relations(kernel.family):
            for dtype in _widths(kernel.dtype):
                table = self.tables.of(family, dtype)
                if table is not None:
                    if (family, dtype) != (kernel.family, kernel.dtype):
                        self.notes.add(
                            f"{kernel.family} in {kernel.dtype} was not measured: priced as "
                            f"{family} in {dtype}."
                        )
                    return table
        self.notes.add(
            f"{kernel.family} in {kernel.dtype} was not measured, nor anything like it: priced by "
            "the device's datasheet."
        )
        return None

    def host_of(self, kinds: Sequence[str], phase: str) -> float:
        """What the host takes to ask for the first of these kinds that was measured."""
        entries = {entry.kind: entry for entry in self.profile.host}
        for kind in kinds:
            if kind in entries:
                found = entries[kind]
                return found.backward_seconds if phase == "backward" else found.forward_seconds
        return 0.0

    def is_known(self, kind: str) -> bool:
        """Whether the host was measured at operators of a kind."""
        return any(entry.kind == kind for entry in self.profile.host)

    def update_seconds(self, step: Compute) -> Values:
        """A GPU updates many parameters at once: one takes its share of a large update.

        A CPU updates one after the other: whether one stays in its cache matters.
        """
        if step.items is None:
            return self.unknown(step, "an update of unknown size")
        family = f"update.{step.optimizer}"
        kernel = Kernel(family, step.dtype, (UPDATED_TOGETHER * step.items,))
        table = self._table(kernel)
        if table is None:
            return super().update_seconds(step)
        if not self.runs_ahead:
            return self.kernel_seconds(kernel) / UPDATED_TOGETHER
        largest = np.asarray([table.table.grid[0][-1]])
        return step.items * float(table.seconds((largest,))[0] / largest[0])

    def unknown(self, step: Compute, what: str) -> Values:
        """Seconds of what is no kernel of the profile, and that is said."""
        self.notes.add(f"{what} is priced by the device's datasheet.")
        return super().unknown(step, what)

    def collective_seconds(self, step: Collective) -> Values:
        """As measured on groups of that size; by the cluster's links where none was."""
        size = math.prod(self.mesh.axes[a].size for a in step.axes)
        together = self.cluster.size // size
        measured = _nearest(self.profile.collectives, step.kind, size, together)
        if measured is None:
            if size > 1 and step.kind != "slice":
                self.notes.add(
                    f"{step.kind} on {size} devices was not measured: priced by the cluster's "
                    "links."
                )
            return Roofline(self.cluster, self.mesh).collective_seconds(step)
        return _by_bytes(measured, step.bytes)

    def takes_processor(self, step: Collective) -> bool:
        """Whether a collective takes the time of what computes: between processes of one CPU."""
        machine, mesh = self.profile.machine, self.mesh
        inner = len(self.cluster.levels) - 1
        within = all(mesh.axes[axis].level == inner for axis in step.axes)
        return machine.kind == "cpu" and machine.processes > 1 and within

    def packing(self, step: Collective) -> tuple[float, Values]:
        """What asking for a collective takes, and the copies around it, without the sending.

        Its parts are copied together before, or apart after. Where the host was not measured at it,
        it makes about ten calls for a gather or a scatter, with its views and its place in
        autograd, and about three for a sum.
        """
        if step.kind == "slice":
            return 0.0, np.zeros(len(step.rows))
        kinds: list[str] = [step.kind]
        shares = step.kind == "all_gather" or (step.kind in REDUCED and step.phase == "backward")
        if shares and float(np.max(step.bytes)) < BUCKET_BYTES:
            kinds = [step.kind + SHARED, *kinds]
        # What is gathered but still in parts, or was in parts before it is scattered.
        rest = step.before if step.kind == "reduce_scatter" else step.after
        if rest is not None and bool((rest[0] >= 0).any()):
            kinds = [step.kind + MORE, *kinds]
        if any(entry.kind in kinds for entry in self.profile.host):
            host = self.host_of(kinds, step.phase)  # which may be nothing
        else:
            host = (3 if step.kind == "all_reduce" else 10) * self.host_of([OTHERS], "forward")
        dtype = self.profile.dtypes[0]
        return host, self.kernel_seconds(Kernel("vector", dtype, (2.0 * step.bytes,)))


def check(profile: Profile, device: Device) -> None:
    """Refuse a profile of another device: its times say nothing of this one."""
    known = profile.machine.name.lower()
    is_cpu = "cpu" in device.name.lower()
    model = device.name.split()[0].lower()
    if (profile.machine.kind == "cpu") != is_cpu or (not is_cpu and model not in known):
        raise ProfileError(
            f"The profile is of {profile.machine.name} ({profile.machine.kind}), the cluster has "
            f"{device.name}. Calibrate there, or plan without a profile."
        )


def check_profile(profile: Profile, cluster: Cluster, graph: Graph) -> None:
    """Refuse a profile of another device, or without the dtype of the model's parameters."""
    check(profile, cluster.device)
    for dtype in sorted({graph.tensors[t].type.dtype for t in graph.parameters()}):
        if dtype not in profile.dtypes:
            raise ProfileError(
                f"The profile of {profile.machine.name} has no products in {dtype}; it has "
                f"{', '.join(profile.dtypes)}. Plan in one of these, or calibrate again."
            )


def _relations(family: str) -> tuple[str, ...]:
    """The family itself, then those that are most like it."""
    for suffix in (".odd", ".even"):
        if family.endswith(suffix):
            return (family, family.removesuffix(suffix))
    if family.startswith("conv."):
        phase = family.rpartition(".")[2]
        own = RELATIONS.get(family, family)
        return tuple(dict.fromkeys((family, own, f"conv.3x3.{phase}", f"conv.1x1.{phase}")))
    if family in RELATIONS:
        return (family, RELATIONS[family])
    if family.startswith("split_norm."):
        return (family, family.replace("split", "batch"))
    if family.startswith("attention."):
        phase = family.rpartition(".")[2]
        return (family, f"attention.causal.{phase}", f"attention.full.{phase}")
    return (family,)


def _widths(dtype: str) -> tuple[str, ...]:
    """The dtype itself, then those of the same width or the next."""
    if dtype in ("tf32", "float8"):
        return (dtype,)
    halves = ("bfloat16", "float16")
    if dtype in halves:
        return (dtype, *(d for d in halves if d != dtype))
    return (dtype, "float32") if dtype != "float32" else ("float32",)


def _nearest(
    entries: Sequence[CollectiveEntry], kind: str, size: int, together: int
) -> CollectiveEntry | None:
    """The entry of that kind and group size, with as many groups at once as can be."""
    found = [e for e in entries if e.kind == kind and e.size == size]
    return min(found, key=lambda e: abs(e.groups - together), default=None)


def _by_bytes(entry: CollectiveEntry, size: Values) -> Values:
    """Linear in the logarithms between sizes; beyond the largest, at its bandwidth."""
    logs, times = np.log(np.asarray(entry.bytes)), np.log(np.asarray(entry.seconds))
    found = np.exp(np.interp(np.log(np.maximum(size, 1.0)), logs, times))
    largest = entry.bytes[-1]
    return np.where(size > largest, entry.seconds[-1] * size / largest, found)


@dataclass(frozen=True, slots=True)
class Asked:
    """One operator's pass: the host's seconds, the device's, and whether the host waits."""

    host_seconds: float
    device_seconds: float
    waits: bool = False


def queued_seconds(asked: Iterable[Asked]) -> float:
    """The seconds until host and device are done with everything."""
    host = device = 0.0
    for one in asked:
        if one.waits:
            host = device = max(host, device) + one.device_seconds
            continue
        host += one.host_seconds
        device = max(device, host) + one.device_seconds
    return max(host, device)


def asked_for(step: Step, model: Measured) -> Iterator[Asked]:
    """One case of a step. Of a collective only the packing, not the sending.

    An operator is asked for at once, unless it is one of many calls: then each of its kernels is
    asked for by itself, and the host may wait for one.
    """
    if isinstance(step, Collective):
        host, device = model.packing(step)
        yield Asked(host, float(device[0]) * step.repeats)
        return
    if step.work is None or not is_in_calls(step):
        yield Asked(float(model.host_seconds(step)[0]), float(model.device_seconds(step)[0]))
        return
    for kernel, host in model.calls_of(step, step.work.kernels(step.phase)):
        device_seconds = float(model.kernel_seconds(kernel)[0])
        times = round(float(np.broadcast_to(kernel.times, (1,))[0]))
        if kernel.is_awaited:
            yield Asked(times * host, 0.0)
            yield Asked(0.0, times * device_seconds, waits=True)
        else:
            yield from [Asked(host, device_seconds)] * times
