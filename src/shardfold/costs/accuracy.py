"""How far predicted steps have been from measured ones: the range that every prediction has.

The figures are those of `benchmarks/results`; a test holds them against the rows there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardfold.cluster import Cluster
from shardfold.costs.registry import DEFAULT, MEASURED


@dataclass(frozen=True, slots=True)
class Spread:
    """What measured steps were, in times of their prediction, in eight of ten `cases`."""

    low: float
    high: float
    cases: str

    def of(self, step: float) -> tuple[float, float]:
        """The range of a predicted step."""
        return self.low * step, self.high * step

    def __str__(self) -> str:
        return (
            f"Of {self.cases}, eight in ten took {self.low:.2f} to {self.high:.2f} times the step "
            f"that was predicted."
        )


Kind = Literal["one device", "compiled", "several", "pipeline"]
# By cost model, and by what runs. Of published pipelines, nanotron's are left out: half of them
# took 3 to 80 times as long as predicted, and nobody knows why (docs/results/published.md).
SPREADS: Mapping[tuple[str, Kind], Spread] = {
    (DEFAULT, "one device"): Spread(1.0, 1.44, "112 models on one H200"),
    (DEFAULT, "compiled"): Spread(1.02, 2.55, "51 compiled models on one H200"),
    (DEFAULT, "several"): Spread(0.89, 1.19, "269 published runs of other stacks"),
    (DEFAULT, "pipeline"): Spread(0.95, 1.12, "83 published pipelines of other stacks"),
    (MEASURED, "one device"): Spread(0.92, 1.25, "112 models on one H200"),
    (MEASURED, "several"): Spread(0.95, 1.52, "64 plans on 2 and 4 processes"),
}


def spread_of(
    cost: str, cluster: Cluster, devices: int, stages: int = 1, *, compiled: bool = False
) -> Spread | None:
    """How far such predictions were off, where some have been measured."""
    if cost == DEFAULT and not cluster.device.units:
        return None
    kind: Kind = "several" if devices > 1 else "compiled" if compiled else "one device"
    return SPREADS.get((cost, kind if stages == 1 else "pipeline"))
