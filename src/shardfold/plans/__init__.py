"""Plans: what was decided, as values and as JSON."""

from shardfold.plans.files import check, dumps, load, loads, save
from shardfold.plans.plan import Estimate, MeshEntry, Plan, Provenance

__all__ = ["Estimate", "MeshEntry", "Plan", "Provenance", "check", "dumps", "load", "loads", "save"]
