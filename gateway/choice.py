"""Gathers what is known about each candidate of one request and folds its chain; asks no tier for an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gateway.core.chain import Candidate, Chain, Facts, Wants, fold
from gateway.core.requests import InferenceRequest
from gateway.settings import RouteSettings

if TYPE_CHECKING:
    from gateway.attempts import Tools


class Choice:
    """Which candidates of one request are worth an attempt, as far as the gateway knows now."""

    def __init__(
        self,
        tools: Tools,
        request: InferenceRequest,
        route: RouteSettings,
        candidates: Sequence[Candidate],
        *,
        cloud_allowed: bool,
    ) -> None:
        """`cloud_allowed`: whether the caller lets clouds answer; the route may still forbid it."""
        self._tools = tools
        self._request = request
        self._candidates = candidates
        self._wants = Wants(
            capabilities=request.needs,
            cloud_allowed=cloud_allowed and route.cloud == "allowed",
            fit_check=route.fit_check,
        )

    def fold(self) -> Chain:
        """The candidates in order, without those that facts or policy rule out."""
        return fold(self._candidates, self.facts, self._wants)

    def facts(self, candidate: Candidate) -> Facts:
        """What is known about `candidate` now."""
        breakers, view = self._tools.breakers, self._tools.view
        status = view.models.get(candidate.model) if candidate.is_local else None
        provider = self._tools.registry.get(candidate.provider)
        return Facts(
            present=provider is not None,
            unsupported=()
            if provider is None
            else provider.unsupported_params(self._request.endpoint, self._request.body, candidate.model),
            closed_for=breakers.closed_for(candidate.provider, candidate.model),
            held_for=breakers.held_for(candidate.provider, candidate.model),
            capabilities=frozenset(status.capabilities) if status is not None and status.capabilities else None,
            context_length=(status.context_length or None) if status is not None else None,
            fits=status.fits if status is not None else None,
            fit_reason=status.reason if status is not None else None,
            fit_in=status.retry_after_seconds if status is not None else None,
            ailment=view.ailment(candidate.model) if candidate.is_local else None,
        )
