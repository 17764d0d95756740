"""Collects the facts about each candidate of a request and decides which candidates are tried.

`select` uses known facts. `judge` runs when the turn of a candidate comes: it counts the prompt and predicts
the wait, but only if the result could change the order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from gateway.apis.openai.generation_request import InferenceRequest
from gateway.errors import UpstreamError
from gateway.nodes.node_choice import NoNode
from gateway.nodes.node_selection import NodeSelection, reasons_of
from gateway.providers.local.candidate_facts import UNKNOWN, Facts, Speed, queue_seconds
from gateway.providers.provider_fields import ALL_TAKEN, token_ids_in
from gateway.routing import candidate_checks as checks
from gateway.routing.budget import Budget
from gateway.routing.candidate_checks import Allowed, Fit, Prediction
from gateway.routing.chain import Candidate, Drop, Dropped, Requirements, Selection, select
from gateway.routing.explain_record import Considered, Record
from gateway.routing.request_context import GatewayState, RoutePolicy
from gateway.routing.smaller_model import Option, others, ranked, why_not_now
from inference.protocol import Code, ModelStatus, Priority

COUNT_SECONDS = 5.0
"""Time limit of one token count; a quarter of the remaining time is another."""

PLACEMENT_SECONDS = 5.0
"""Time limit of the decision on which node a model is loaded; a quarter of the remaining time is another."""

SMALLER_SECONDS = 0.5
"""How old the view of the models may be when a smaller model is chosen."""

_HIGH = Priority.HIGH
_UNCOUNTED = frozenset(("vision", "audio"))
"""Capabilities whose inputs only the model itself can measure in tokens."""


class CandidateFilter:
    """Selects the candidates of one request."""

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
        nodes: NodeSelection | None = None,
    ) -> None:
        """`cloud_allowed`: whether the client allows clouds; the `policy` may still forbid them. `nodes`: the choice of
        a node, where there are several.
        """
        self._gateway = gateway
        self._request = request
        self._candidates = candidates
        self._record = record
        self._priority, self._is_first = priority, priority is _HIGH
        self._token_ids = token_ids_in(request.body)
        self._any_vectors = policy.route.same_vectors or request.endpoint.streams
        record.needs = request.needs
        record.cloud_allowed = cloud_allowed and policy.route.cloud == "allowed"
        record.size_bytes, record.max_tokens = request.size_bytes, request.max_tokens
        self._requirements = Requirements(request.needs, record.cloud_allowed, policy.route.fit_check)
        self._considered: list[Considered] = []
        self._counts: dict[str, int | None] = {}
        self.nodes = nodes

    def select(self) -> Selection:
        """The candidates in order, without those that facts or policy rule out; fills the explain record."""
        self._considered = [Considered(self.facts(candidate)) for candidate in self._candidates]
        self._record.considered = self._considered
        return select(self._candidates, self._known, self._requirements)

    def select_again(self) -> Selection:
        """Like `select`, with current facts, after an answer was interrupted. The record keeps the first facts."""
        return select(self._candidates, self.facts, self._requirements)

    def facts(self, candidate: Candidate) -> Facts:
        """The current facts about `candidate`."""
        gateway, request, model = self._gateway, self._request, candidate.model
        breakers, key = gateway.breakers, candidate.provider_key
        has_fixed_provider = gateway.fleet_view is None or candidate.node or not candidate.is_local
        if candidate.is_rule:
            open_for = breakers.open_for(key, "") if has_fixed_provider else gateway.open_for(candidate, "")
            return self._facts_of_rule(open_for)
        provider = gateway.registry.providers.get(key) if has_fixed_provider else gateway.provider_of(candidate)
        is_present = provider is not None or candidate.is_local
        unsupported = (
            ALL_TAKEN if provider is None else provider.unsupported_params(request.endpoint, request.body, model)
        )
        may_replace_first = (self._any_vectors and self._token_ids is None) or model == self._candidates[0].model
        same_vectors = self._any_vectors or may_replace_first
        foreign_ids = None if may_replace_first else self._token_ids
        if has_fixed_provider:
            breaker_open_for = breakers.open_for(key, model)
            queue_full_for = breakers.skipped_for(key, model, self._priority)
        else:
            breaker_open_for = gateway.open_for(candidate, model)
            queue_full_for = gateway.skipped_for(candidate, self._priority)
        view = gateway.view_of(candidate) if candidate.node else gateway.view
        status = view.models.get(model) if candidate.is_local else None
        if status is None:
            return Facts(is_present, breaker_open_for, queue_full_for, None, unsupported, same_vectors, foreign_ids)
        return Facts(
            is_present, breaker_open_for, queue_full_for, status.capabilities or None, unsupported,
            same_vectors, foreign_ids, status.context_length or None, self._speed(candidate, status), status.fits,
            status.reason, status.retry_after_seconds, view.likely_failure(model),
        )  # fmt: skip

    def _known(self, candidate: Candidate) -> Facts:
        """The facts of `select`."""
        return self._considered[candidate.position].facts

    # --- local/smaller -----------------------------------------------------------------------------------------------
    async def resolved(self, candidate: Candidate, budget: Budget) -> Candidate | Dropped:
        """`candidate`, whose turn has come. `local/smaller` becomes the model that it stands for now, or is dropped."""
        if not candidate.is_rule:
            return candidate
        await self._gateway.view.ensure(SMALLER_SECONDS)
        requirements = self._requirements._replace(fit_check=True)
        options, too_long = [], []
        for status in self._others():
            chosen = replace(candidate, model=status.id, is_rule=False)
            options.append(Option(status, self._obstacle(chosen, requirements) or why_not_now(status)))
        reasons = [f"{option.status.id}: {option.obstacle}" for option in options if option.obstacle]
        for option in ranked(options):
            chosen = replace(candidate, model=option.status.id, is_rule=False)
            self._considered[candidate.position] = Considered(self.facts(chosen))
            if (verdict := await self._too_long(chosen, budget)) is None:
                self._candidates = self._record.chain = tuple(
                    chosen if other == candidate else other for other in self._candidates
                )
                self._record.chosen[candidate.name] = chosen.name
                return chosen
            too_long.append(replace(verdict, candidate=candidate))
            reasons.append(f"{option.status.id}: {verdict.message}")
        if too_long and len(too_long) == len(options):
            return max(too_long, key=lambda one: (one.details or {}).get("context_length") or 0)
        why = "; ".join(reasons) or "the inference service lists no other chat model"
        return Dropped(candidate, Drop.NO_CHOICE, f"no other local model is ready or fits now: {why}")

    async def placed(self, candidate: Candidate, budget: Budget) -> Candidate | Dropped:
        """`candidate` on the node that takes the request now, if there are several nodes; the reason if none does."""
        if self.nodes is None or not candidate.is_local:
            return candidate
        tokens = self._counts.get(candidate.model) or checks.about_tokens(self._request.size_bytes)
        seconds_left = budget.commit_by - asyncio.get_running_loop().time()
        found = await self.nodes.choose(candidate.model, tokens, min(PLACEMENT_SECONDS, seconds_left / 4))
        if isinstance(found, NoNode):
            return Dropped(candidate, Drop.NO_NODE, reasons_of(found), found.retry_in)
        candidate = candidate.on(found)
        if candidate.position < len(self._considered):
            self._considered[candidate.position] = Considered(self.facts(candidate))
        return candidate

    def _others(self) -> tuple[ModelStatus, ...]:
        """The models that `local/smaller` may stand for at some time; none for embeddings and scores."""
        if not self._request.endpoint.streams:
            return ()
        named = {other.model for other in self._candidates if other.is_local and not other.is_rule}
        return others(self._gateway.view.models.values(), named, self._request.needs)

    def _facts_of_rule(self, breaker_open_for: float | None) -> Facts:
        """The facts about `local/smaller` before its turn: the largest context of the models that it may stand for."""
        found = self._others()
        if not found and self._gateway.view.models:
            return Facts(True, breaker_open_for, capabilities=())
        contexts = [model.context_length for model in found]
        return Facts(True, breaker_open_for, context_length=max(contexts) if contexts and all(contexts) else None)

    def _obstacle(self, candidate: Candidate, requirements: Requirements) -> str | None:
        """Why `candidate` cannot answer the request now, by the facts."""
        known = self.facts(candidate)
        dropped = select([candidate], lambda _: known, requirements).dropped
        if dropped:
            return dropped[0].message
        return None if known.likely_failure is None else known.likely_failure.message

    async def _too_long(self, candidate: Candidate, budget: Budget) -> Dropped | None:
        """Why the context of `candidate` is too small for the prompt; None if it is not, or unknown."""
        context = self._known(candidate).context_length
        max_tokens = None if context is None else self._request.answer_limit(context)
        if context is None or not self._must_count(max_tokens, context):
            return None
        tokens = await self._count(candidate, budget)
        if tokens is None or checks.fit(tokens, max_tokens, context) is not Fit.NOTHING:
            return None
        return checks.too_long(candidate, tokens, max_tokens, context)

    def _must_count(self, max_tokens: int | None, context: int) -> bool:
        """Whether the prompt's tokens have to be counted, and can be, to know whether they fit `context`."""
        is_countable = self._request.endpoint.streams and not self._request.needs & _UNCOUNTED
        return is_countable and not checks.certainly_fits(self._request.size_bytes, max_tokens, context)

    # --- length and speed --------------------------------------------------------------------------------------------

    def may_change(self, candidate: Candidate, later: Collection[Candidate]) -> bool:
        """Whether `judge` could drop or defer `candidate` if the candidates `later` are left."""
        return candidate.is_local and bool(later or self._counts)

    async def judge(self, candidate: Candidate, later: Sequence[Candidate], budget: Budget) -> Dropped | None:
        """Why `candidate` is not tried now; None if it is tried. Call it only if `may_change` is true."""
        return await self._by_length(candidate, later, budget) or self._by_speed(candidate, later, budget)

    def ready_in(self, candidate: Candidate) -> float:
        """Seconds until `candidate` would take a new request; 0 when unknown."""
        status = self._gateway.view_of(candidate).models.get(candidate.model) if candidate.is_local else None
        return 0.0 if status is None else self._speed(candidate, status).ready_in

    # --- length ------------------------------------------------------------------------------------------------------
    async def _by_length(self, candidate: Candidate, later: Sequence[Candidate], budget: Budget) -> Dropped | None:
        context = self._known(candidate).context_length
        if context is None:
            return None
        max_tokens = self._request.answer_limit(context)
        if not self._must_count(max_tokens, context):
            return None
        if not self._counts and not self.may_hold_more(candidate, later):
            return None  # no other candidate could do better, and the model's own refusal has the numbers
        tokens = await self._count(candidate, budget)
        if tokens is None:
            return None
        match checks.fit(tokens, max_tokens, context):
            case Fit.NOTHING:
                return checks.too_long(candidate, tokens, max_tokens, context)
            case Fit.PROMPT if max_tokens is not None:
                better = await self._next_larger_context(later, context, budget)
                if better is not None:
                    return checks.little_room(candidate, tokens, max_tokens, context, better.name)
        return None

    def may_hold_more(self, candidate: Candidate, later: Iterable[Candidate]) -> bool:
        """Whether one of `later` may hold a prompt that the local `candidate` does not."""
        context = self._known(candidate).context_length
        if context is None:
            return False
        return any(checks.is_alternative(self._known(other).context_length, context) for other in later)

    async def _next_larger_context(self, later: Sequence[Candidate], context: int, budget: Budget) -> Candidate | None:
        """The next local candidate that is known to hold prompt and answer.

        Clouds do not count: their contexts are unknown, and a `max_tokens` that clients often set high is no reason to
        pay for an answer.
        """
        for other in later:
            room = self._known(other).context_length
            if room is None or room <= context or other.is_rule:
                continue
            max_tokens = self._request.answer_limit(room)
            if checks.certainly_fits(self._request.size_bytes, max_tokens, room):
                return other
            tokens = await self._count(other, budget)
            if tokens is not None and checks.fit(tokens, max_tokens, room) is Fit.WHOLE:
                return other
        return None

    async def _count(self, candidate: Candidate, budget: Budget) -> int | None:
        """The prompt's tokens for `candidate`, or a lower bound of them; None when they were not counted in time."""
        if candidate.model not in self._counts:
            seconds_left = budget.commit_by - asyncio.get_running_loop().time()
            count = await self._request_count(candidate, min(COUNT_SECONDS, seconds_left / 4))
            self._counts[candidate.model] = self._considered[candidate.position].prompt_tokens = count
        return self._counts[candidate.model]

    async def _request_count(self, candidate: Candidate, seconds: float) -> int | None:
        if seconds <= 0:
            return None
        request = self._request
        try:
            return await self._gateway.counter.count(candidate.model, request.body, seconds)
        except UpstreamError as error:
            lower_bound = (error.details or {}).get("prompt_tokens")
            is_bound = error.code == Code.CONTEXT_LENGTH_EXCEEDED and isinstance(lower_bound, int)
            return lower_bound if is_bound else None

    def _by_speed(self, candidate: Candidate, later: Sequence[Candidate], budget: Budget) -> Dropped | None:
        if self._known(candidate).speed == UNKNOWN:
            return None
        expected = self._considered[candidate.position].expected = self._expected(candidate)
        allowed = Allowed.by(budget, asyncio.get_running_loop().time())
        if checks.too_slow(expected, allowed) is None:
            return None
        return checks.deferral(candidate, expected, allowed, [(other, self._expected(other)) for other in later])

    def _expected(self, candidate: Candidate) -> Prediction:
        tokens = self._counts.get(candidate.model) or checks.about_tokens(self._request.size_bytes)
        return Prediction.of(self._known(candidate).speed, tokens)

    def _speed(self, candidate: Candidate, status: ModelStatus) -> Speed:
        outstanding = self._gateway.breakers.outstanding(candidate.provider_key, candidate.model)
        queue = queue_seconds(
            status.queue_seconds, outstanding, status.parallel, status.answer_seconds, first=self._is_first
        )
        return Speed(status.load_seconds, queue, status.prefill_tokens_per_second)
