"""The cost models by name, each with the rules that it counts in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardfold.cluster import Cluster, Mesh
from shardfold.costs.by_kernel import ByKernel
from shardfold.costs.measured import Measured
from shardfold.costs.model import PAPER_RULES, CostModel, Paper, Roofline
from shardfold.costs.profile import Profile, load
from shardfold.errors import InputError, ProfileError, nearest
from shardfold.operators import Rules


@dataclass(frozen=True, slots=True)
class Pricing:
    """A cost model for any cluster and mesh, and the rules that it replaces.

    `overlaps`: its steps can be simulated, communication beside work.
    """

    model: Callable[[Cluster, Mesh], CostModel]
    rules: Rules = field(default_factory=dict)
    overlaps: bool = True
    profile: Profile | None = None


def _without_profile(cluster: Cluster, mesh: Mesh) -> CostModel:
    raise ProfileError(
        "Prices by measurement need the profile that was measured: give it as profile=, or on the "
        "command line as --profile machine.json; shardfold calibrate makes one."
    )


def by_kernel(cluster: Cluster, mesh: Mesh) -> CostModel:
    """Prices of kernels by shape, where a device says what that takes; else the plain roofline."""
    return ByKernel(cluster, mesh) if cluster.device.units else Roofline(cluster, mesh)


MEASURED, DEFAULT = "measured", "kernels"
PRICINGS: Mapping[str, Pricing] = {
    DEFAULT: Pricing(by_kernel),
    "roofline": Pricing(Roofline),
    "paper": Pricing(Paper, PAPER_RULES, overlaps=False),
    MEASURED: Pricing(_without_profile),
}


def measured_by(profile: str | Path | Profile, notes: set[str]) -> Pricing:
    """Prices by a profile, or by the one in a file; what was not measured is noted."""
    known = profile if isinstance(profile, Profile) else load(profile)
    return Pricing(lambda cluster, mesh: Measured(cluster, mesh, known, notes), profile=known)


def pricing_of(
    name: str, profile: str | Path | Profile | None, notes: set[str]
) -> tuple[str, Pricing]:
    """The pricing by a profile, where one is given, or the one of that name; and what it is."""
    if profile is None:
        return name, pricing_named(name)
    return MEASURED, measured_by(profile, notes)


def assumed(name: str, cluster: Cluster) -> list[str]:
    """What a pricing has to assume of a cluster that does not say enough for it."""
    if name != DEFAULT or cluster.device.units is not None:
        return []
    return [
        f"{cluster.device.name} states no units, clock_hz and attention_efficiency: its kernels "
        f"are priced by their arithmetic and traffic alone, whatever their shape, and steps may be "
        f"much longer than predicted."
    ]


def pricing_named(name: str) -> Pricing:
    """The pricing of that name."""
    if name not in PRICINGS:
        raise InputError(f"Unknown cost model {name!r}. {nearest(name, PRICINGS)}")
    return PRICINGS[name]
