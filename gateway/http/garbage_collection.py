"""Keeps the garbage collector away from what the process holds for good; frees nothing and decides about no request.

What a request leaves is freed by its reference counts. The collector looks for cycles among everything there is, and
what was imported and built at the start is a hundred times what requests hold: walking it takes a tenth of the
processor at full load, and stops every stream for tens of milliseconds.
"""

from __future__ import annotations

import gc

YOUNG = 10_000
"""Objects that are new before the collector looks at them. By default 700, which a few requests in flight are."""


def settle() -> None:
    """To be called once everything is imported and built: from now on only what is new is looked at."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
