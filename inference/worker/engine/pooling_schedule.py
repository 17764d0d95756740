"""Decides which inputs of which requests are pooled together next; never computes a vector.

The order of service is arrival plus the head start of the priority, as for answers, plus the seconds that were computed
for the request already, each as often as there were requests to share them. So requests that wait beside each other
advance alike, however many inputs they have, and one that has had its share is where one is that comes now: that one
waits for a turn of each of them. Nobody waits for ever, because whoever comes later is later in the order. Within a
request inputs are served in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from inference.protocol import Priority
from inference.worker.steps import HEAD_START_SECONDS

INPUT_TOKENS = 32
"""An input takes the memory of so many tokens beside its own: 128 bytes for an array, its allocation and its place."""

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Input(Generic[Owner]):
    """The token ids of one text, the `index`-th of its request, and whom the vector is for."""

    owner: Owner
    index: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Batch(Generic[Owner]):
    """`chosen` are computed together. `late` and `unfit` have left the queue: their deadline has passed, or they have
    more tokens than could ever be pooled.
    """

    chosen: Sequence[Input[Owner]]
    late: Sequence[Input[Owner]]
    unfit: Sequence[Input[Owner]]


@dataclass(slots=True, eq=False)
class _Request(Generic[Owner]):
    """`key` is its place in the order of service in seconds, `at` the next of its inputs, `weight` what is left."""

    key: float
    owner: Owner
    inputs: Sequence[Sequence[int]]
    deadline: float | None
    weight: int
    at: int = 0

    @property
    def has_more(self) -> bool:
        return self.at < len(self.inputs)

    def is_late(self, now: float) -> bool:
        return self.deadline is not None and self.deadline <= now

    def next(self) -> Input[Owner]:
        return Input(self.owner, self.at, self.inputs[self.at])

    def left(self) -> list[Input[Owner]]:
        return [Input(self.owner, index, self.inputs[index]) for index in range(self.at, len(self.inputs))]


class PoolQueue(Generic[Owner]):
    """What waits to be pooled, at most `slots` inputs with at most `pool_tokens` tokens at once."""

    def __init__(self, slots: int, pool_tokens: int) -> None:
        self._slots = slots
        self._pool_tokens = pool_tokens
        self._requests: list[_Request[Owner]] = []
        self._computing: list[tuple[_Request[Owner], int]] = []
        self._sharing = 0

    @property
    def requests(self) -> int:
        """How many wait."""
        return len(self._requests)

    @property
    def inputs(self) -> int:
        """How many of them all."""
        return sum(len(request.inputs) - request.at for request in self._requests)

    def weight(self, *more: Sequence[Sequence[int]]) -> int:
        """The tokens of all requests, and of `more` that may join them, but for the largest, whoever's that is: a small
        one finds room beside it, a second large one does not. An input counts as INPUT_TOKENS more.
        """
        held = [request.weight for request in self._requests] + [_weight(inputs) for inputs in more]
        return sum(held) - max(held, default=0)

    def add(
        self,
        owner: Owner,
        inputs: Sequence[Sequence[int]],
        arrival: float,
        priority: Priority = Priority.NORMAL,
        deadline: float | None = None,
    ) -> None:
        """Takes a request; times are seconds on the caller's clock. An input is not begun once `deadline` is there."""
        key = arrival + HEAD_START_SECONDS[priority]
        self._requests.append(_Request(key, owner, inputs, deadline, _weight(inputs)))

    def drop(self, owner: Owner) -> None:
        """Forgets what waits for `owner`."""
        self._requests = [request for request in self._requests if request.owner != owner]

    def clear(self) -> list[Input[Owner]]:
        """Forgets everything that waits, and returns it."""
        requests, self._requests = self._requests, []
        return [item for request in requests for item in request.left()]

    def take(self, now: float) -> Batch[Owner]:
        """The next batch, filled in the order of service up to the first input that has no room in it any more."""
        late = [request for request in self._requests if request.is_late(now)]
        waiting = sorted((request for request in self._requests if not request.is_late(now)), key=_key)
        chosen: list[Input[Owner]] = []
        unfit: list[Input[Owner]] = []
        self._computing, self._sharing = [], len(waiting)
        room = self._pool_tokens
        for request in waiting:
            room = self._fill(request, room, chosen, unfit)
            if request.has_more:
                break
        self._requests = [request for request in waiting if request.has_more]
        return Batch(chosen, [item for request in late for item in request.left()], unfit)

    def computed(self, seconds: float) -> None:
        """What the last batch took; each of its requests pays for its tokens, and for all whose time it was too."""
        total = max(1, sum(tokens for _request, tokens in self._computing))
        for request, tokens in self._computing:
            request.key += seconds * self._sharing * tokens / total

    def _fill(self, request: _Request[Owner], room: int, chosen: list[Input[Owner]], unfit: list[Input[Owner]]) -> int:
        """Moves inputs of one request into the batch; returns the tokens that it still has room for."""
        before = room
        while request.has_more:
            item = request.next()
            size = len(item.tokens)
            if size > self._pool_tokens:
                unfit.append(item)
            elif size > room or len(chosen) == self._slots:
                break
            else:
                room -= size
                chosen.append(item)
            request.at += 1
            request.weight -= _weight([item.tokens])
        self._computing.append((request, before - room))
        return room


def _key(request: _Request[Owner]) -> float:
    return request.key


def _weight(inputs: Sequence[Sequence[int]]) -> int:
    return sum(map(len, inputs)) + INPUT_TOKENS * len(inputs)
