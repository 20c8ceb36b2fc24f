"""How operators can be split: sub-dims across reshapes, configs, and the layouts they imply."""

from shardfold.sharding.configs import Space, space_of
from shardfold.sharding.subdims import SubdimRule, Subdims, find_subdims

__all__ = ["Space", "SubdimRule", "Subdims", "find_subdims", "space_of"]
