"""Decides how many threads each model that computes on the CPU may use; tells nobody.

Threads that wait for each other spin: more of them than cores make every model slow, not only the one that came last.
"""

from __future__ import annotations

from collections.abc import Mapping


def shares(cores: int, busy: Mapping[str, int | None]) -> Mapping[str, int]:
    """Threads for every model of `busy` (id to the number its configuration fixes, or None), in order.

    What is fixed is kept whatever it is. The others divide what is left of `cores` evenly, those who came first get the
    odd ones, and each has one thread at least.
    """
    fixed = {name: count for name, count in busy.items() if count is not None}
    others = [name for name in busy if name not in fixed]
    left = max(0, cores - sum(fixed.values()))
    each, odd = divmod(left, len(others)) if others else (0, 0)
    return {**fixed, **{name: max(1, each + (at < odd)) for at, name in enumerate(others)}}
