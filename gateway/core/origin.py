"""An inner body that remembers what it was translated from; decides nothing and translates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Translated(dict[str, Any]):
    """A body in the inner dialect, made of `origin`, the caller's own in another public API.

    A tier that speaks that API can be given the origin instead, with nothing lost on the way. Whoever makes another
    body of this one (`{**body, ...}`) gets a plain dict, and with it a request that has no origin any more.
    """

    __slots__ = ("origin",)

    def __init__(self, body: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
        super().__init__(body)
        self.origin = origin


def origin_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What `body` was translated from; None for a body that is the caller's own or was changed since."""
    return body.origin if isinstance(body, Translated) else None
