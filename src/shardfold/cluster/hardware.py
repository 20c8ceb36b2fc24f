"""Hardware: a device (memory, rates) and a level of links (size, bandwidth), with their source."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shardfold.errors import ClusterError, nearest

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")
"""The names under which a device states its matrix rate; `tf32` is float32 data rounded, `float8`
what is summed up in float32."""


COMPLEX = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True, slots=True)
class Device:
    """What one device can do.

    `peak_flops` pairs a dtype with the dense FLOP/s of the device's fastest matrix unit for it,
    a multiply-add counted as two. The efficiencies are the fractions of the peak rate and of
    `memory_bandwidth` (bytes/s) that large, well-shaped work reaches. `launch_seconds` is what
    starting one kernel costs. `units` are multiprocessors at `clock_hz`, and
    `attention_efficiency` the fractions of the peak rate that attention reaches forward and
    backward, with 128 features a head: without them, a kernel's shape does not matter, and a plan
    says so; a device that has no such thing states 0 `units`. `workspace_bytes` is what PyTorch
    keeps there for matrix products, as long as it runs. With `grouped_products` one kernel of
    PyTorch runs the products of all experts, in bfloat16. `host_pace` is how many times as long the
    host beside it takes to ask for kernels as the one whose times are the default. A dtype without
    an entry is one that the device cannot be planned with: there is no figure to fall back on.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak_flops: tuple[tuple[str, float], ...]
    matmul_efficiency: float
    memory_efficiency: float
    launch_seconds: float
    source: str
    units: int | None = None
    clock_hz: float = 0.0
    attention_efficiency: tuple[float, float] = (0.0, 0.0)
    workspace_bytes: int = 0
    grouped_products: bool = False
    host_pace: float = 1.0

    def __post_init__(self) -> None:
        self._require_positive("host_pace", self.host_pace)
        if self.units or self.clock_hz or any(self.attention_efficiency):
            self._require_positive("units", self.units or 0)
            self._require_positive("clock_hz", self.clock_hz)
            for value in self.attention_efficiency:
                self._require_positive("attention_efficiency", value)
        if self.workspace_bytes < 0:
            raise ClusterError(f"Device {self.name}: workspace_bytes must not be negative.")
        for field in ("memory_bytes", "memory_bandwidth"):
            self._require_positive(field, getattr(self, field))
        for field in ("matmul_efficiency", "memory_efficiency"):
            value = getattr(self, field)
            self._require_positive(field, value)
            if value > 1:
                raise ClusterError(f"Device {self.name}: {field} is a fraction, got {value:g} > 1.")
        if not (math.isfinite(self.launch_seconds) and self.launch_seconds >= 0):
            raise ClusterError(
                f"Device {self.name}: launch_seconds must be finite and not negative, "
                f"got {self.launch_seconds:g}."
            )
        self._check_peaks()

    def _check_peaks(self) -> None:
        if not self.peak_flops:
            raise ClusterError(
                f"Device {self.name}: peak_flops is empty. "
                f"Give at least one of {', '.join(DTYPES)}."
            )
        for dtype, flops in self.peak_flops:
            if dtype not in DTYPES:
                raise ClusterError(
                    f"Device {self.name}: peak_flops has the unknown dtype {dtype!r}. "
                    f"{nearest(dtype, DTYPES)}"
                )
            self._require_positive(f"peak_flops.{dtype}", flops)
        if len(set(self.dtypes)) != len(self.dtypes):
            raise ClusterError(f"Device {self.name}: peak_flops names a dtype twice.")
        # One order, so that equal devices compare equal however they were written down.
        ordered = tuple(sorted(self.peak_flops, key=lambda peak: DTYPES.index(peak[0])))
        object.__setattr__(self, "peak_flops", ordered)

    def _require_positive(self, field: str, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            raise ClusterError(
                f"Device {self.name}: {field} must be finite and positive, got {value:g}."
            )

    @property
    def is_gpu(self) -> bool:
        """Whether kernels run beside the host: a device that states 0 `units` is the host."""
        return self.units != 0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that the device has a rate for."""
        return tuple(dtype for dtype, _ in self.peak_flops)

    def peak(self, dtype: str) -> float:
        """The dense FLOP/s of matrix products in `dtype`, before `matmul_efficiency`."""
        for known, flops in self.peak_flops:
            if known == dtype:
                return flops
        if dtype in COMPLEX:  # a product is four of real numbers
            return self.peak(COMPLEX[dtype]) / 4
        raise ClusterError(
            f"Device {self.name} has no peak rate for {dtype!r}; it has {', '.join(self.dtypes)}. "
            f"Plan in one of these, or give the rate in a cluster file."
        )


LARGEST_SIZE = 1_000_000
"""No level is wider than this; larger numbers are typing errors."""


@dataclass(frozen=True, slots=True)
class Level:
    """The links among the `size` members of one group, a member being a `name`.

    `Level("node", 4, ...)` joins four nodes; `Level("gpu", 8, ...)` joins the eight devices of a
    node. `bandwidth` is what large messages reach, in bytes/s per device and direction *while
    every device of the group communicates*: an adapter that eight devices share counts for an
    eighth. `latency_seconds` is the cost of one step of a collective, whatever its size.
    `rated_bandwidth` is the link's nominal figure on the same terms, where it is known.
    """

    name: str
    size: int
    bandwidth: float
    latency_seconds: float
    source: str
    rated_bandwidth: float | None = None

    def __post_init__(self) -> None:
        # Axis names are level names with a digit appended, so a level's own ends in none.
        if not re.fullmatch(r"[a-z](?:[a-z_]*[a-z])?", self.name):
            raise ClusterError(
                f"Level name {self.name!r} must be lower-case letters, such as node, gpu or rack."
            )
        if not 1 <= self.size <= LARGEST_SIZE:
            raise ClusterError(
                f"Level {self.name}: size must be from 1 to {LARGEST_SIZE:,}, got {self.size:,}."
            )
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ClusterError(
                f"Level {self.name}: bandwidth must be finite and positive, "
                f"got {self.bandwidth:g} bytes/s."
            )
        if not (math.isfinite(self.latency_seconds) and self.latency_seconds >= 0):
            raise ClusterError(
                f"Level {self.name}: latency_seconds must be finite and not negative, "
                f"got {self.latency_seconds:g}."
            )
        self._check_rated()

    def _check_rated(self) -> None:
        rated = self.rated_bandwidth
        if rated is not None and not (math.isfinite(rated) and rated >= self.bandwidth):
            raise ClusterError(
                f"Level {self.name}: bandwidth is what large messages reach and cannot exceed "
                f"rated_bandwidth, got {self.bandwidth:g} and {rated:g} bytes/s."
            )
