"""Excludes long-lived objects from garbage collection.

Reference counts free what a request leaves. A full collection visits all objects, and those from imports and start-up
are a hundred times as many as those of requests: it takes a tenth of the CPU at full load and stops every stream for
tens of milliseconds.
"""

from __future__ import annotations

import gc

YOUNG = 10_000
"""New objects before a collection. The default of 700 is reached by a few requests in flight."""


def settle() -> None:
    """Freezes the existing objects. Call it after start-up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
