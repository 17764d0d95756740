"""What the attempts of one request share: the gateway's state, the policy of the route, the client and the budget."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from gateway.access.key_usage import Meter
from gateway.apis.openai.generation_request import AnyRequest, ChatRequest, InferenceRequest, changed
from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.claimed_permits import acquire_claimed
from gateway.breaker.outcome import End, provider_key
from gateway.breaker.permits import Refused
from gateway.nodes.cold_placement import ColdPlacement
from gateway.nodes.fleet_view import FleetView
from gateway.nodes.node import Node
from gateway.nodes.node_selection import ClientFacts, NodeSelection
from gateway.nodes.prefix_blocks import prefix_blocks, prefix_salt
from gateway.nodes.prefixes import Prefixes
from gateway.providers.local.inference_snapshot import InferenceView
from gateway.providers.local.local_provider import Counter
from gateway.providers.provider import Call, Provider
from gateway.providers.registry import Registry
from gateway.routing.budget import Budget, Limits
from gateway.routing.chain import Candidate
from gateway.routing.explain_record import Record
from gateway.settings import GatewayConfig, RouteSettings
from gateway.telemetry.gateway_metrics import Telemetry
from headgate.shared.traces.trace_context import TRACEPARENT, SpanContext
from inference.protocol import H_CONVERSATION, H_DEADLINE, H_KV, H_PRIORITY, H_STREAM_INTERVAL, H_TENANT, Priority

WHOLE_ANSWER_INTERVAL_SECONDS = 0.25
"""Longest time between two frames of a local answer that the client gets as one object. Without frames
the deadline for silence would pass."""


_CLOUD_URLS = {"openai": "https://api.openai.com", "anthropic": "https://api.anthropic.com"}
"""Of clouds without `base_url`, by kind."""


class RequestContext(NamedTuple):
    """The client and its limits.

    `silence_seconds` is how long the client waits for the answer to begin, `gap_seconds` for its next byte. `retries`
    is how often the client has sent the same request before. `meter` counts the tokens of a key with limits.
    `counts_pieces`: each piece of an interrupted answer counts as a token, for the key's limit of tokens or its budget.
    """

    request_id: str
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    cloud_allowed: bool = True
    silence_seconds: float | None = None
    retries: int = 0
    kv: str | None = None
    gap_seconds: float | None = None
    meter: Meter | None = None
    counts_pieces: bool = False


class RoutePolicy(NamedTuple):
    """The configuration of one route. `limits` are the configured ones; those of the client are added per request.

    `stream_interval` and `whole_interval` are values of the header H_STREAM_INTERVAL; empty for none.
    """

    route: RouteSettings
    limits: Limits
    stream_interval: str
    whole_interval: str


@dataclass(frozen=True)
class GatewayState:
    """The configuration in force and the long-lived parts of the gateway. `breaker_generation` is that of `breakers`
    when the configuration was applied.

    `view` has the models of all inference services, `nodes` these services by name; the name of the only one is empty.
    """

    config: GatewayConfig
    registry: Registry
    breakers: Breakers
    view: InferenceView | FleetView
    counter: Counter
    telemetry: Telemetry
    breaker_generation: int = 0
    nodes: Mapping[str, Node] = field(default_factory=dict)
    prefixes: Prefixes | None = None
    placement: ColdPlacement | None = None

    @functools.cached_property
    def fleet_view(self) -> FleetView | None:
        """The view of the nodes, of which each local candidate gets one; None for the only service."""
        return self.view if isinstance(self.view, FleetView) else None

    def selection(
        self, request: InferenceRequest, policy: RoutePolicy, context: RequestContext
    ) -> NodeSelection | None:
        """The choice of nodes for a request; None where there is only one inference service."""
        if self.fleet_view is None or self.prefixes is None or self.placement is None:
            return None
        return NodeSelection(
            self.nodes, self.fleet_view, self.breakers, self.prefixes, self.placement, request,
            ClientFacts(context.tenant, context.priority), fit_check=policy.route.fit_check,
        )  # fmt: skip

    def view_of(self, candidate: Candidate) -> InferenceView | FleetView:
        """The models of the candidate's node, or of all nodes while none is chosen."""
        node = self.nodes.get(candidate.node) if candidate.node else None
        return self.view if node is None else node.view

    def provider_of(self, candidate: Candidate) -> Provider | None:
        """The provider of a candidate; that of any node while none is chosen, as all nodes accept the same requests."""
        found = self.registry.providers.get(candidate.provider_key)
        if found is None and candidate.is_local and not candidate.node:
            return next((node.provider for node in self.nodes.values()), None)
        return found

    def open_for(self, candidate: Candidate, model: str) -> float | None:
        """Seconds until the breakers let a candidate pass, None when now; see `Breakers.open_for`."""
        return self._least(candidate, model, self.breakers.open_for)

    def skipped_for(self, candidate: Candidate, priority: Priority) -> float | None:
        """Seconds for which requests of `priority` skip a candidate, or None; see `Breakers.skipped_for`."""
        return self._least(
            candidate, candidate.model, lambda key, model: self.breakers.skipped_for(key, model, priority)
        )

    def _least(self, candidate: Candidate, model: str, seconds_for: Callable[[str, str], float | None]) -> float | None:
        """The least wait over the nodes that could answer; None when one needs none."""
        if not candidate.is_local or candidate.node or self.fleet_view is None:
            return seconds_for(candidate.provider_key, model)
        least: float | None = None
        for name in self.fleet_view.table.listed(model) or self.nodes:
            if (seconds := seconds_for(provider_key(name), model)) is None:
                return None
            least = seconds if least is None else min(least, seconds)
        return least

    @functools.cached_property
    def policies(self) -> Mapping[str, RoutePolicy]:
        """By route."""
        deadlines, attempts = self.config.deadlines, self.config.attempts.max
        intervals = [
            _interval(seconds, deadlines.inter_token)
            for seconds in (self.config.stream_interval, WHOLE_ANSWER_INTERVAL_SECONDS)
        ]
        return {
            name: RoutePolicy(
                route,
                Limits(deadlines.first_token, deadlines.inter_token, deadlines.total, route.load_wait, attempts),
                *intervals,
            )
            for name, route in self.config.routes.items()
        }

    @functools.cached_property
    def addresses(self) -> Mapping[str, tuple[str, int]]:
        """Host and port by key of the provider."""
        urls = {name: cloud.base_url or _CLOUD_URLS[cloud.kind] for name, cloud in self.config.providers.items()}
        urls |= {node.key: node.url for node in self.nodes.values()}
        found = {name: urlsplit(url) for name, url in urls.items()}
        return {
            name: (url.hostname or "", url.port or (80 if url.scheme == "http" else 443)) for name, url in found.items()
        }


def _interval(wanted_seconds: float, silence_seconds: float) -> str:
    """Milliseconds that text of a local answer may wait for more text: well below the deadline for silence."""
    seconds = min(wanted_seconds, silence_seconds / 4)
    return str(round(seconds * 1000)) if seconds else ""


@dataclass(slots=True)
class RequestState:
    """The state of one request that its attempts need.

    The chain runner assigns `budget` and `stream_interval`, and `conversation` is a cache; everything else is fixed.
    The client has already waited `waited_seconds` for admission. `cancel_reason` returns, inside a cancelled task, why
    the task was cancelled.
    """

    gateway: GatewayState
    request: InferenceRequest
    policy: RoutePolicy
    context: RequestContext
    record: Record
    began: float
    waited_seconds: float = 0.0
    cancel_reason: Callable[[], End] = lambda: End.CLIENT_LEFT
    stream_interval: str = ""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    """Cached, because each call of `get_running_loop` costs a system call."""
    conversation: str | None = None
    nodes: NodeSelection | None = field(init=False)
    """The choice of nodes; None where there is only one inference service."""
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        limits, context = self.policy.limits, self.context
        self.nodes = self.gateway.selection(self.request, self.policy, context)
        if context.silence_seconds is not None:
            limits = limits._replace(client_silence=context.silence_seconds, client_gap=context.gap_seconds)
        self.budget = Budget(limits, self.loop.time(), waited=self.waited_seconds)

    def model_label(self, candidate: Candidate) -> str:
        """The candidate's model as a metric label; unknown names that clients send share the label `*`."""
        return candidate.model if candidate.named or candidate.model in self.gateway.view.models else "*"

    def call(
        self,
        candidate: Candidate,
        last: bool,
        budget: Budget,
        body: AnyRequest | None = None,
        span: SpanContext | None = None,
    ) -> Call:
        """The request to the provider. The local hop also gets priority, tenant and deadline as headers.

        A trace goes to every provider, the client's `tracestate` only to the local hop.
        """
        headers: dict[str, str] = {} if span is None else {TRACEPARENT: span.traceparent}
        if body is None:
            body = self.request.body
        if candidate.is_local:
            body = self._with_bounded_max_tokens(body, candidate)
            wait = budget.commit_by - self.loop.time()
            if not last:
                wait = min(wait, self.policy.limits.load_wait)
            headers = {
                H_PRIORITY: self.context.priority,
                H_TENANT: self.context.tenant,
                H_DEADLINE: str(max(1, int(wait * 1000))),
            }
            if span is not None:
                headers |= span.headers()
            if self.stream_interval:
                headers[H_STREAM_INTERVAL] = self.stream_interval
            if self.context.kv is not None:
                headers[H_KV] = self.context.kv
            if self.nodes is not None and candidate.node:
                headers |= self.nodes.headers(candidate.node, candidate.model)
            status = self.gateway.view_of(candidate).models.get(candidate.model)
            if status is not None and status.replicas and (key := self._conversation_key()) is not None:
                headers[H_CONVERSATION] = key
        connect_seconds = self.gateway.config.deadlines.connect
        return Call(self.request.endpoint, candidate.model, body, self.context.request_id, connect_seconds, headers)

    def _conversation_key(self) -> str | None:
        """The key of the conversation, computed once. It is the same for all models of a chain."""
        if self.conversation is None:
            blocks = prefix_blocks(prefix_salt(b"", self.context.tenant, ""), self.request.body)
            self.conversation = None if blocks is None else blocks.conversation
        return self.conversation

    def _with_bounded_max_tokens(self, body: AnyRequest, candidate: Candidate) -> AnyRequest:
        """`body` with `max_tokens` cut to the model's context, for requests with `clamps_max_tokens`."""
        if not self.request.clamps_max_tokens or not isinstance(body, ChatRequest):
            return body
        status = self.gateway.view_of(candidate).models.get(candidate.model)
        wanted = body.max_tokens
        if wanted is None or status is None or not status.context_length:
            return body
        bound = min(wanted, status.context_length)
        return body if bound == wanted else changed(body, max_tokens=bound)

    def acquire(self, candidate: Candidate, forced: bool) -> Awaitable[Lease | Refused]:
        """Permits for an attempt at `candidate`, or the refusal. A permit expires after `total` plus `inter_token`."""
        limits, gateway = self.budget.limits, self.gateway
        expires_at = time.monotonic() + limits.total + limits.inter_token
        return acquire_claimed(
            gateway.breakers, candidate.provider_key, candidate.model, expires_at, forced, gateway.breaker_generation
        )

    def note_first_token(self) -> None:
        """Records the time to the first token of the request; tokens of later attempts do not count."""
        self.record.note_decoding()
        if self.record.first_token_seconds is not None:
            return
        self.record.first_token_seconds = time.monotonic() - self.began
        self.gateway.telemetry.ttft.observe(self.record.first_token_seconds)
