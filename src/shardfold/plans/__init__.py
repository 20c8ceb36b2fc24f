"""Plans: what was decided, as values, as JSON and as text; and the strategies by hand."""

from shardfold.plans.files import check, dumps, load, loads, save
from shardfold.plans.plan import Estimate, MeshEntry, Plan, Provenance

__all__ = ["Estimate", "MeshEntry", "Plan", "Provenance", "check", "dumps", "load", "loads", "save"]
