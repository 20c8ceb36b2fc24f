"""The garbage collector, paused while many small objects are made that all stay alive.

Graphs of large models are hundreds of thousands of small tuples; scanning them again and again
for cycles that are not there takes as long as making them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection inside; the collector is left as it was found."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
