"""How operators can be split: the rule notation, the table of rules, configurations, layouts."""

from shardfold.sharding.configs import Space, space_of
from shardfold.sharding.subdims import SubdimRule, Subdims, find_subdims

__all__ = ["Space", "SubdimRule", "Subdims", "find_subdims", "space_of"]
