"""Decides how many checkpoints a slot may have, at which positions they are taken, and which one is dropped first."""

from __future__ import annotations

from collections.abc import Sequence

from inference.worker.steps import Job, Limits

MAX_CHECKPOINTS = 16


def max_checkpoints(checkpoint_bytes: int, room_bytes: int) -> int:
    """How many checkpoints of this size a slot may have; 0 for a model that needs none."""
    return min(MAX_CHECKPOINTS, room_bytes // checkpoint_bytes) if checkpoint_bytes else 0


def checkpoint_stops(job: Job, start: int, limits: Limits) -> list[int]:
    """Positions in the prompt of `job` for checkpoints, if it is computed from `start` on.

    The last two are at the beginning of its last two messages, because the next prompt often differs from there on. A
    prompt without messages has one before its last token, whose logits are needed. Before these there is one every
    `checkpoint_tokens` tokens.
    """
    gap = limits.checkpoint_gap
    stops: list[int] = []
    limit = len(job.prompt) - 1
    for position in reversed(job.message_starts or (limit,)):
        if start + gap <= position <= limit and len(stops) < 2:
            stops.append(position)
            limit = position - gap
    last = min(stops, default=len(job.prompt))
    apart = limits.checkpoint_tokens
    return [*range(start + apart, last - gap, apart), *reversed(stops)]


def least_useful(positions: Sequence[int], end: int) -> int:
    """The index of the checkpoint to drop from a sequence of `end` tokens.

    Most prompts differ from the sequence only near its end, so the distances between checkpoints grow with the distance
    from the end. The function chooses the checkpoint with the smallest ratio of the distance between its two neighbors
    to its own distance from the end.
    """
    places = [0, *positions, end]
    return min(range(len(positions)), key=lambda at: (places[at + 2] - places[at]) / max(1, end - positions[at]))
