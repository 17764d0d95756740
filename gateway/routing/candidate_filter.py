"""Gathers what is known about each candidate of one request and judges it; asks no tier for an answer.

Most is known beforehand (`fold`). What has to be looked into, the length of a prompt and the wait before its answer,
is looked into when a candidate's turn comes (`judge`), and only where the verdict could change anything.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Sequence

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import InferenceRequest
from gateway.errors import UpstreamError
from gateway.providers.local.candidate_facts import UNKNOWN_FACTS, Facts
from gateway.providers.local.model_speed import UNKNOWN, Speed, queue_seconds
from gateway.providers.provider_fields import ALL_TAKEN, token_ids_in
from gateway.routing import prompt_length, ttft_prediction
from gateway.routing.budget import Budget
from gateway.routing.chain import Candidate, Chain, Dropped, Wants, fold
from gateway.routing.explain_record import Considered, Record
from gateway.routing.prompt_length import Fit
from gateway.routing.request_context import GatewayState, RoutePolicy
from gateway.routing.ttft_prediction import Allowed, Prediction
from inference.protocol import Code, ModelStatus, Priority

COUNT_SECONDS = 5.0
"""How long a count is waited for, and never longer than a quarter of the time that is left."""

_ENDPOINT_NEEDS = {
    Endpoint.CHAT: frozenset(("chat",)),
    Endpoint.COMPLETIONS: frozenset(("completions",)),
    Endpoint.EMBEDDINGS: frozenset(),
    Endpoint.RERANK: frozenset(),
}
_HIGH = Priority.HIGH
_UNCOUNTED = frozenset(("vision", "audio"))
"""What else than text a prompt may hold; only the model itself knows its length then."""


class CandidateFilter:
    """Which candidates of one request are worth an attempt, as far as the gateway knows now."""

    def __init__(
        self,
        gateway: GatewayState,
        request: InferenceRequest,
        policy: RoutePolicy,
        candidates: tuple[Candidate, ...],
        record: Record,
        *,
        cloud_allowed: bool,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """`cloud_allowed`: whether the caller lets clouds answer; the `policy` may still forbid it."""
        self._gateway = gateway
        self._request = request
        self._candidates = candidates
        self._record = record
        self._priority, self._is_first = priority, priority is _HIGH
        self._ids = token_ids_in(request.body)
        self._any_vectors = policy.same_vectors or request.endpoint.streams
        self._policy = policy
        self._needs = record.needs = request.needs | _ENDPOINT_NEEDS[request.endpoint]
        self._cloud_allowed = record.cloud_allowed = cloud_allowed and policy.is_cloud_allowed
        record.size_bytes, record.max_tokens = request.size_bytes, request.max_tokens
        self._considered: list[Considered] = []
        self._counts: dict[str, int | None] = {}

    def fold(self) -> Chain:
        """The candidates in order, without those that facts or policy rule out."""
        plain = self._plain()
        self._considered = self._record.considered = (
            [Considered(self.facts(candidate)) for candidate in self._candidates] if plain is None else plain
        )
        return fold(self._candidates, self._known, self._wants) if plain is None else Chain(self._candidates, ())

    def again(self) -> Chain:
        """The same as things are now, for an answer that broke off; what was considered first stays on record."""
        return fold(self._candidates, self.facts, self._wants)

    def _plain(self) -> list[Considered] | None:
        """What is known of all where nothing speaks against any of them, which is nearly always: the same as by `facts`
        and `core.chain.fold`, in a fifth of the steps. None where those have to look closer.
        """
        gateway, request = self._gateway, self._request
        if self._ids is not None or self._is_first or not self._any_vectors:
            return None
        considered: list[Considered] = []
        for candidate in self._candidates:
            if not gateway.breakers.is_clear(candidate.provider, candidate.model, self._priority):
                return None
            facts = UNKNOWN_FACTS
            if candidate.is_local:
                told = gateway.view.plain(candidate.model)
                if told is None or (
                    told.busy_at < math.inf
                    and told.busy_at <= gateway.breakers.outstanding(candidate.provider, candidate.model)
                ):
                    return None
                facts = told.facts
                if facts.capabilities is not None and not self._needs <= facts.capabilities:
                    return None
            elif not self._cloud_allowed:
                return None
            provider = gateway.registry.get(candidate.provider)
            if provider is None or provider.unsupported_params(request.endpoint, request.body, candidate.model):
                return None
            considered.append(Considered(facts))
        return considered

    @property
    def _wants(self) -> Wants:
        return Wants(self._needs, self._cloud_allowed, self._policy.route.fit_check)

    def facts(self, candidate: Candidate) -> Facts:
        """What is known about `candidate` now."""
        breakers = self._gateway.breakers
        status = self._gateway.view.models.get(candidate.model) if candidate.is_local else None
        provider = self._gateway.registry.get(candidate.provider)
        present = provider is not None
        unsupported = (
            ALL_TAKEN if provider is None
            else provider.unsupported_params(self._request.endpoint, self._request.body, candidate.model)
        )  # fmt: skip
        is_equal = (self._any_vectors and self._ids is None) or self._is_equal(candidate)
        same_vectors, foreign_ids = self._any_vectors or is_equal, None if is_equal else self._ids
        closed_for = breakers.closed_for(candidate.provider, candidate.model)
        held_for = breakers.held_for(candidate.provider, candidate.model, self._priority)
        if status is None:
            return Facts(present, closed_for, held_for, None, unsupported, same_vectors, foreign_ids)
        capabilities = frozenset(status.capabilities) if status.capabilities else None
        context_length, speed = status.context_length or None, self._speed(candidate, status)
        ailment = self._gateway.view.ailment(status.id)
        return Facts(
            present, closed_for, held_for, capabilities, unsupported, same_vectors, foreign_ids,
            context_length, speed, status.fits, status.reason, status.retry_after_seconds, ailment,
        )  # fmt: skip

    def _known(self, candidate: Candidate) -> Facts:
        """What was known of it when the chain was folded."""
        return self._considered[candidate.position].facts

    def is_open(self, candidate: Candidate, later: Collection[Candidate]) -> bool:
        """Whether `judge` could find anything against `candidate`, with `later` still to come."""
        return candidate.is_local and bool(later or self._counts)

    async def judge(self, candidate: Candidate, later: Sequence[Candidate], budget: Budget) -> Dropped | None:
        """Why `candidate`, which `is_open`, is not asked now; None when it should be."""
        return await self._by_length(candidate, later, budget) or self._by_speed(candidate, later, budget)

    def ready_in(self, candidate: Candidate) -> float:
        """Seconds until `candidate` takes a request of somebody who comes now; 0 when nothing is known."""
        status = self._gateway.view.models.get(candidate.model) if candidate.is_local else None
        return 0.0 if status is None else self._speed(candidate, status).ready_in

    # --- length ------------------------------------------------------------------------------------------------------
    async def _by_length(self, candidate: Candidate, later: Sequence[Candidate], budget: Budget) -> Dropped | None:
        context = self._known(candidate).context_length
        if context is None:
            return None
        most = self._request.most_tokens(context)
        is_countable = self._request.endpoint.streams and not self._request.needs & _UNCOUNTED
        if not is_countable or prompt_length.is_far(self._request.size_bytes, most, context):
            return None
        if not self._counts and not self.could_hold_more(candidate, later):
            return None  # nobody else could do better: the model's own refusal says as much
        tokens = await self._count(candidate, budget)
        if tokens is None:
            return None
        match prompt_length.fit(tokens, most, context):
            case Fit.NOTHING:
                return prompt_length.too_long(candidate, tokens, most, context)
            case Fit.PROMPT if most is not None:
                better = await self._roomier(later, context, budget)
                if better is not None:
                    return prompt_length.little_room(candidate, tokens, most, context, better.name)
        return None

    def could_hold_more(self, candidate: Candidate, later: Iterable[Candidate]) -> bool:
        """Whether one of `later` may hold what the local `candidate` cannot."""
        context = self._known(candidate).context_length
        if context is None:
            return False
        return any(prompt_length.is_alternative(self._known(other).context_length, context) for other in later)

    async def _roomier(self, later: Sequence[Candidate], context: int, budget: Budget) -> Candidate | None:
        """The next local candidate that is known to hold prompt and answer.

        Clouds are not looked at: their contexts are not known here, and a bound that clients often set high is no
        reason to pay for an answer.
        """
        for other in later:
            room = self._known(other).context_length
            if room is None or room <= context:
                continue
            most = self._request.most_tokens(room)
            if prompt_length.is_far(self._request.size_bytes, most, room):
                return other
            tokens = await self._count(other, budget)
            if tokens is not None and prompt_length.fit(tokens, most, room) is Fit.WHOLE:
                return other
        return None

    async def _count(self, candidate: Candidate, budget: Budget) -> int | None:
        """The prompt's tokens for `candidate`, at least; None when nobody could say in time."""
        if candidate.model not in self._counts:
            left = budget.commit_by - asyncio.get_running_loop().time()
            self._counts[candidate.model] = await self._ask(candidate, min(COUNT_SECONDS, left / 4))
            self._considered[candidate.position].prompt_tokens = self._counts[candidate.model]
        return self._counts[candidate.model]

    async def _ask(self, candidate: Candidate, seconds: float) -> int | None:
        if seconds <= 0:
            return None
        request = self._request
        try:
            return await self._gateway.counter.count(candidate.model, request.endpoint, request.body, seconds)
        except UpstreamError as error:
            least = (error.details or {}).get("prompt_tokens")
            return least if error.code == Code.CONTEXT_LENGTH_EXCEEDED and isinstance(least, int) else None

    # --- speed -------------------------------------------------------------------------------------------------------
    def _by_speed(self, candidate: Candidate, later: Sequence[Candidate], budget: Budget) -> Dropped | None:
        if self._known(candidate).speed == UNKNOWN:
            return None
        expected = self._considered[candidate.position].expected = self._expected(candidate)
        allowed = Allowed.by(budget, asyncio.get_running_loop().time())
        if ttft_prediction.too_slow(expected, allowed) is None:
            return None
        return ttft_prediction.put_off(
            candidate, expected, allowed, [(other, self._expected(other)) for other in later]
        )

    def _expected(self, candidate: Candidate) -> Prediction:
        tokens = self._counts.get(candidate.model) or prompt_length.about_tokens(self._request.size_bytes)
        return Prediction.of(self._known(candidate).speed, tokens)

    def _is_equal(self, candidate: Candidate) -> bool:
        """Whether it is the first choice's model, wherever that is computed."""
        return candidate.model == self._candidates[0].model

    def _speed(self, candidate: Candidate, status: ModelStatus) -> Speed:
        outstanding = self._gateway.breakers.outstanding(candidate.provider, candidate.model)
        queue = queue_seconds(
            status.queue_seconds, outstanding, status.parallel, status.answer_seconds, first=self._is_first
        )
        return Speed(status.load_seconds, queue, status.prefill_tokens_per_second)
