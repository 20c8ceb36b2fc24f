"""How many examples a property draws: fewer in `make quick`, more in `make fuzz`."""

from __future__ import annotations

from hypothesis import settings

SHARES = {"quick": 0.2, "fuzz": 4.0}


def draws(count: int) -> settings:
    """The settings of a property that draws `count` examples in `make test`."""
    share = SHARES.get(settings.get_current_profile_name(), 1.0)
    return settings(max_examples=max(1, round(share * count)))
