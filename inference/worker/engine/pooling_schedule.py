"""Decides which inputs of which requests are pooled in the next batch.

The order of service is the arrival time plus the offset of the priority (PRIORITY_OFFSET_SECONDS), plus the computed
seconds of the request so far, multiplied by the number of requests that shared them. Concurrent requests therefore make
equal progress, independent of their number of inputs. No request starves, because later requests are ordered behind it.
The inputs of a request are served in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from inference.protocol import Priority
from inference.worker.steps import PRIORITY_OFFSET_SECONDS

INPUT_TOKENS = 32
"""Memory overhead of an input, as a number of tokens: 128 bytes for the array, its allocation and its list entry."""

Owner = TypeVar("Owner")


@dataclass(frozen=True, slots=True)
class Input(Generic[Owner]):
    """The token ids of one text. `index` is its position in the request; `owner` gets the vector."""

    owner: Owner
    index: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Batch(Generic[Owner]):
    """`chosen` inputs are computed together. `late` inputs are past their deadline, `unfit` inputs are too long.

    All of them were removed from the queue.
    """

    chosen: Sequence[Input[Owner]]
    late: Sequence[Input[Owner]]
    unfit: Sequence[Input[Owner]]


@dataclass(slots=True, eq=False)
class _Request(Generic[Owner]):
    """`key`: place in the order of service, in seconds. `at`: index of the next input. `weight`: tokens that wait."""

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
    """The queue of inputs; a batch has at most `slots` inputs with at most `pool_tokens` tokens in total."""

    def __init__(self, slots: int, pool_tokens: int) -> None:
        self._slots = slots
        self._pool_tokens = pool_tokens
        self._requests: list[_Request[Owner]] = []
        self._computing: list[tuple[_Request[Owner], int]] = []
        self._sharing = 0

    @property
    def requests(self) -> int:
        """Number of waiting requests."""
        return len(self._requests)

    @property
    def inputs(self) -> int:
        """Number of waiting inputs."""
        return sum(len(request.inputs) - request.at for request in self._requests)

    def weight(self, *more: Sequence[Sequence[int]]) -> int:
        """Waiting tokens of all requests and of `more` new ones, without the largest of these requests.

        Each input counts INPUT_TOKENS more. The largest request does not count, so that a small request is accepted
        beside a large one, and a second large one is not.
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
        """Queues a request. Times are seconds on the caller's clock; no input starts after `deadline`."""
        key = arrival + PRIORITY_OFFSET_SECONDS[priority]
        self._requests.append(_Request(key, owner, inputs, deadline, _weight(inputs)))

    def drop(self, owner: Owner) -> None:
        """Removes the waiting inputs of `owner`."""
        self._requests = [request for request in self._requests if request.owner != owner]

    def clear(self) -> list[Input[Owner]]:
        """Removes and returns all waiting inputs."""
        requests, self._requests = self._requests, []
        return [item for request in requests for item in request.left()]

    def take(self, now: float) -> Batch[Owner]:
        """The next batch: inputs in the order of service up to the first one that does not fit."""
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
        """Records the duration of the last batch: each of its requests moves back in the order of service."""
        total = max(1, sum(tokens for _request, tokens in self._computing))
        for request, tokens in self._computing:
            request.key += seconds * self._sharing * tokens / total

    def _fill(self, request: _Request[Owner], room: int, chosen: list[Input[Owner]], unfit: list[Input[Owner]]) -> int:
        """Moves inputs of one request into the batch; returns the tokens that still fit."""
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
