"""Chooses the model that `local/smaller` stands for: the largest other local chat model that is ready or fits now.

A model comes after all others if it was never measured, so that it is not known to fit, or if its capabilities are not
known. The request then measures it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from inference.protocol import ModelState, ModelStatus

CHAT = "chat"
_READY = (ModelState.READY, ModelState.BUSY)


@dataclass(frozen=True, slots=True)
class Option:
    """A model that could be chosen. `obstacle`: why it cannot answer the request now, None if it may."""

    status: ModelStatus
    obstacle: str | None = None

    @property
    def is_known_to_answer(self) -> bool:
        """Whether it is ready or known to fit, and known to be able to do what the request needs."""
        status = self.status
        return bool(status.capabilities) and (status.state in _READY or status.fits is True)

    @property
    def size_bytes(self) -> int:
        """The memory that it, or the largest of its replicas, needs; 0 while unknown."""
        if self.status.replicas:
            return max(item.predicted_bytes or item.actual_bytes or 0 for item in self.status.replicas)
        return self.status.predicted_bytes or self.status.actual_bytes or 0


def why_not_now(status: ModelStatus) -> str | None:
    """Why a model is neither ready nor known to fit now; None if it is, or if it was never measured."""
    if status.state in _READY or status.fits is True or status.predicted_bytes is None:
        return None
    return status.reason or "whether it fits now is not known"


def others(
    models: Iterable[ModelStatus], named: Collection[str], capabilities: Collection[str]
) -> tuple[ModelStatus, ...]:
    """The chat models with `capabilities`, without those that the chain names: they have turns of their own.

    Unknown capabilities do not exclude a model.
    """
    needs = {CHAT, *capabilities}
    return tuple(
        model
        for model in models
        if model.id not in named and (not model.capabilities or needs.issubset(model.capabilities))
    )


def ranked(options: Iterable[Option]) -> tuple[Option, ...]:
    """The options without an obstacle in the order in which they are chosen; equally large ones by name."""
    possible = [option for option in options if option.obstacle is None]
    return tuple(
        sorted(possible, key=lambda option: (not option.is_known_to_answer, -option.size_bytes, option.status.id))
    )
