"""A constraint that lists the allowed tokens of each step, for engines without a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from inference.worker.worker_errors import ConstraintError


class FakeConstraint:
    """Allows `steps[n]` as the token after n tokens, then nothing; a step that is an error is raised by `apply`."""

    def __init__(self, steps: Sequence[Set[int] | ConstraintError]) -> None:
        self.steps = steps

    def start(self) -> FakeMask:
        """A mask at the beginning."""
        return FakeMask(self.steps)


class FakeMask:
    """Follows one answer."""

    def __init__(self, steps: Sequence[Set[int] | ConstraintError]) -> None:
        self._steps = list(steps)
        self.accepted: list[int] = []

    def _now(self) -> Set[int]:
        step = self._steps[len(self.accepted)] if len(self.accepted) < len(self._steps) else frozenset()
        if isinstance(step, ConstraintError):
            raise step
        return step

    def apply(self, logits: np.ndarray) -> None:
        """Sets everything else to -inf."""
        forbidden = np.ones(len(logits), np.bool_)
        forbidden[list(self._now())] = False
        logits[forbidden] = -np.inf

    def accept(self, token: int) -> None:
        """The token that was drawn."""
        if token not in self._now():
            raise ConstraintError(f"token {token} may not follow")
        self.accepted.append(token)
