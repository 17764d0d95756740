"""Stores responses in memory for later requests of the same key.

Above the size limit the key with the most bytes loses its oldest response, so that no key displaces the
responses of another.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

ITEM_BYTES = 256
"""Memory per item for the index by id."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer: the Response and the items of its conversation, as JSON to save memory, and when it expires on the
    store's clock. The last `outputs` items belong to the answer.
    """

    response: bytes
    items: bytes
    until: float
    ids: tuple[str, ...] = ()
    """The ids of `items`, in order."""
    outputs: int = 0

    @property
    def size_bytes(self) -> int:
        """Its size in memory."""
        return len(self.response) + len(self.items) + ITEM_BYTES * len(self.ids)


class Store:
    """At most `limit_bytes` of answers, each for at most `seconds`. `now` is any clock that does not go back."""

    def __init__(self, limit_bytes: int, seconds: float) -> None:
        self._limit = limit_bytes
        self._seconds = seconds
        self._owners: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._by_item: dict[str, dict[str, str]] = {}
        """The last answer whose conversation contains an item, by owner and item id."""
        self._sizes: dict[str, int] = {}

    @property
    def size_bytes(self) -> int:
        """Size of all answers in bytes."""
        return sum(self._sizes.values())

    def put(
        self,
        owner: str,
        id: str,
        response: bytes,
        items: bytes,
        now: float,
        *,
        ids: tuple[str, ...] = (),
        outputs: int = 0,
        until: float | None = None,
    ) -> None:
        """Stores one answer until its time is up; one that is larger than `limit_bytes` is not stored."""
        kept = StoredResponse(response, items, now + self._seconds if until is None else until, ids, outputs)
        if kept.size_bytes > self._limit:
            return
        if id in self._owners.get(owner, ()):
            self._drop(owner, id)
        self._owners.setdefault(owner, OrderedDict())[id] = kept
        self._by_item.setdefault(owner, {}).update(dict.fromkeys(ids, id))
        self._sizes[owner] = self._sizes.get(owner, 0) + kept.size_bytes
        self._expire(now)
        while self.size_bytes > self._limit:
            most = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(most, next(iter(self._owners[most])))

    def find_by_item(self, owner: str, item: str, now: float) -> StoredResponse | None:
        """The last stored answer of `owner` whose conversation contains the item `item`."""
        id = self._by_item.get(owner, {}).get(item)
        return None if id is None else self.get(owner, id, now)

    def get(self, owner: str, id: str, now: float) -> StoredResponse | None:
        """The stored answer `id` of `owner`."""
        answers = self._owners.get(owner)
        kept = None if answers is None else answers.get(id)
        return kept if kept is not None and now < kept.until else None

    def delete(self, owner: str, id: str, now: float) -> bool:
        """Removes the answer; returns whether it existed."""
        kept = self.get(owner, id, now)
        if kept is None:
            return False
        self._drop(owner, id)
        lost = set(kept.ids) - self._by_item.get(owner, {}).keys()
        for other, earlier in self._owners.get(owner, {}).items():  # the last answer that contains an item counts
            self._by_item[owner].update(dict.fromkeys(lost.intersection(earlier.ids), other))
        return True

    def _expire(self, now: float) -> None:
        """Removes expired answers, the oldest of an owner first; copies from other gateways may stay longer."""
        for owner, answers in list(self._owners.items()):
            while answers and answers[id := next(iter(answers))].until <= now:
                self._drop(owner, id)

    def _drop(self, owner: str, id: str) -> None:
        kept = self._owners[owner].pop(id)
        self._sizes[owner] -= kept.size_bytes
        holders = self._by_item[owner]
        for item in kept.ids:
            if holders.get(item) == id:
                del holders[item]
        if not self._owners[owner]:
            del self._owners[owner], self._by_item[owner], self._sizes[owner]
