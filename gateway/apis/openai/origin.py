"""An inner body that remembers what it was translated from; decides nothing and translates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Translated(dict[str, Any]):
    """A body in the inner dialect, made of `origin`, the caller's own in another public API.

    A tier that speaks that API can be given the origin instead, with nothing lost on the way. Whoever makes another
    body of this one (`changed`) gets a request that has no origin any more.
    """

    __slots__ = ("origin",)

    def __init__(self, body: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
        super().__init__(body)
        self.origin = origin


class Changed(dict[str, Any]):
    """A body made of a translated one: it says something else than the origin, in words that still mean the same."""

    __slots__ = ()


def changed(body: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """`body` with `more` in it, which nobody may answer by its origin any more."""
    return Changed({**body, **more}) if is_translated(body) else {**body, **more}


def is_translated(body: Mapping[str, Any]) -> bool:
    """Whether the words of `body` are to be understood as another API's, changed since or not."""
    return isinstance(body, Translated | Changed)


def origin_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What `body` was translated from; None for a body that is the caller's own or was changed since."""
    return body.origin if isinstance(body, Translated) else None
