"""Plans: what was decided, as values, as JSON and as text; and the strategies by hand."""

from shardfold.plans.assemble import Assembly
from shardfold.plans.baselines import data_parallel, fully_sharded
from shardfold.plans.plan import Estimate, MeshEntry, Plan, Provenance
from shardfold.plans.store import check, dumps, load, loads, save

__all__ = [
    "Assembly",
    "Estimate",
    "MeshEntry",
    "Plan",
    "Provenance",
    "check",
    "data_parallel",
    "dumps",
    "fully_sharded",
    "load",
    "loads",
    "save",
]
