"""Memory that torch allocates, counted as it comes and goes."""

from __future__ import annotations

import weakref
from typing import Any

from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """The most bytes that were there at once, of what was allocated meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        results = func(*args, **(kwargs or {}))
        for each in filter(is_tensor, tree_leaves(results)):
            storage = each.untyped_storage()
            if storage._cdata not in known:
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.most = max(self.most, self.now)
        return results

    def _freed(self, size: int) -> None:
        self.now -= size
