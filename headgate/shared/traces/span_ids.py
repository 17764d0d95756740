"""Random ids of traces and spans."""

from __future__ import annotations

import random

_ids = random.Random()  # noqa: S311 - ids are unique, not secret


def new_trace_id() -> int:
    """A random id of a trace, which is not 0."""
    return _ids.getrandbits(128) or 1


def new_span_id() -> int:
    """A random id of a span, which is not 0."""
    return _ids.getrandbits(64) or 1
