"""The long-lived parts of a running gateway, and their replacement on reload."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import settings_loading
from gateway.access.admission import Admission
from gateway.access.authentication import Keys
from gateway.access.key_usage import Limiter
from gateway.access.shared_limits import SharedLimits
from gateway.breaker.breaker_file import BreakerFile
from gateway.breaker.breakers import MAX_BREAKERS, Breakers
from gateway.breaker.outcome import LOCAL, Failure, provider_key
from gateway.breaker.permits import BreakerState, Rule
from gateway.http.body_memory import Bodies
from gateway.http.http_exchange import OpenRequests
from gateway.http.image_fetch import Images
from gateway.inference_nodes import InferenceNodes, Observer
from gateway.nodes.fleet import Fleet
from gateway.nodes.fleet_view import FleetView
from gateway.providers import registry
from gateway.providers.local.inference_snapshot import InferenceView
from gateway.providers.local.local_provider import Counter as TokenCounter
from gateway.providers.provider import Provider
from gateway.routing.explain_record import RecordStore
from gateway.routing.request_context import GatewayState
from gateway.settings import BreakerSettings, GatewayConfig, KeySettings
from gateway.shared_state.gateway_count import GatewayCountFile
from gateway.shared_state.shared_leases import Leases, LocalLeases, SharedLeases
from gateway.telemetry.gateway_metrics import Telemetry
from gateway.telemetry.traffic_counters import TrafficCounters
from gateway.usage.shared_budgets import SharedBudgets
from gateway.usage.usage_service import UsageService
from headgate.shared.errors import HeadgateError
from headgate.shared.state_directory import INFERENCE_TOKEN, StateDir
from headgate.shared.traces import tracing

if TYPE_CHECKING:
    from gateway.shared_state.shared_state import SharedState
    from headgate.shared.traces.otlp_tracer import Tracer

log = logging.getLogger("gateway.runtime")

NEEDS_RESTART = ("host", "port", "state")
CLOSE_SECONDS = 5.0

FIRST_CONTACT_SECONDS = 10.0
"""How long after its start the gateway is unready while the inference service has not answered."""


@dataclass(frozen=True, slots=True)
class Source:
    """The sources of the configuration, which a reload reads again."""

    config_dir: Path
    environ: Callable[[], Mapping[str, str]]
    overrides: Mapping[str, Any]

    def load(self) -> GatewayConfig:
        """The current configuration; raises ConfigError."""
        return settings_loading.load(self.config_dir, self.environ(), self.overrides)


class Runtime:
    """The parts that all requests share. `start` runs before the first request, `stop` after the last."""

    def __init__(self, source: Source, config: GatewayConfig, state: StateDir) -> None:
        self._source = source
        self._state = state
        self.config = config
        self._stored_keys: tuple[KeySettings, ...] = ()
        self.keys = self._keys(config)
        self.usage = UsageService(state.root, config, self._use_stored_keys)
        self.telemetry = Telemetry()
        self.shared_state = _shared_state(config, self.telemetry, state)
        self._breaker_file = BreakerFile(state)
        self.breakers = Breakers(
            _rule(config.breaker), on_state=self._on_breaker, on_failure=self._on_failure, store=self._breaker_file
        )
        self.leases: Leases = LocalLeases() if self.shared_state is None else SharedLeases(self.shared_state)
        self.records = RecordStore()
        self.traffic = TrafficCounters()
        self.observer: Observer | None = None
        self.open_requests = OpenRequests()
        self.admission = Admission(config.admission, self.telemetry)
        shared_limits = None if self.shared_state is None else SharedLimits(self.shared_state)
        self.limiter = Limiter(self.telemetry, shared=shared_limits)
        self.bodies = Bodies()
        self.images = Images(config.images)
        self.is_draining = False
        self.tracer: Tracer | None = None
        self.inference = InferenceNodes(
            config.inference, self.breakers, self.telemetry, self.spawn, lambda: self.leases, self.inference_token,
            self.operator_headers, lambda: self.observer, self._on_nodes,
        )  # fmt: skip
        self.counter = TokenCounter(self.fleet.ask_about)
        self.gateway_state: GatewayState
        self._clouds = self._registry = registry.Registry({})
        self._first_contact_until = math.inf
        self._started_at = time.monotonic()
        self._number = 0
        self._users: Counter[int] = Counter()
        self._retired: list[tuple[int, Provider]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()

    async def start(self) -> None:
        """Builds the providers and starts the background tasks; raises errors of invalid providers."""
        self.tracer = tracing.start("headgate-gateway", self._source.environ())
        self._clouds = await registry.build(self.config)
        inference = await self.inference.prepare(self.config.inference)
        await self.usage.start()
        await self._breaker_file.load((*map(provider_key, inference.addresses), *self.config.providers))
        self.inference.use(inference)  # after the load, which would replace the first outcomes of the nodes
        self.breakers.restore()
        if self.shared_state is not None:
            await self._share_state(self.shared_state)
        self.spawn(self._breaker_file.run(), "breaker-file")
        self._first_contact_until = time.monotonic() + FIRST_CONTACT_SECONDS

    async def _share_state(self, shared: SharedState) -> None:
        """Connects to the store; without it the gateway starts with its own state."""
        from gateway.shared_state.breaker_sync import BreakerSync

        BreakerSync(shared, self._breaker_file, self.breakers, lambda provider: provider in self._breaker_providers())
        self.usage.shared_budgets = SharedBudgets(
            shared, self._state.secret("gateway.id"), self._keys_with_budgets, self.usage.spent, time.time
        )
        await shared.start()

    def _keys_with_budgets(self) -> list[str]:
        return [key.name for key in self.keys.all if key.budget.is_any]

    def _breaker_providers(self) -> tuple[str, ...]:
        """The providers that have breakers, each node by its own key."""
        return (*(node.key for node in self.fleet.nodes.values()), *self.config.providers)

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted.

        After the start the gateway waits for the inference service, unless a route has a cloud. After
        FIRST_CONTACT_SECONDS it is ready without the service too: its errors then say what is missing.
        """
        if self.is_draining:
            return False
        return self.view.was_seen or self._has_clouds or time.monotonic() >= self._first_contact_until

    @property
    def _has_clouds(self) -> bool:
        """Whether a route has a cloud with a key."""
        entries = {entry.partition("/")[0] for route in self.config.routes.values() for entry in route.chain}
        return any(self._registry.providers.get(name) is not None for name in entries - {LOCAL})

    async def stop(self) -> None:
        """Closes all connections, after all requests have ended."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.images.aclose()
        if self.shared_state is not None:
            await self.shared_state.stop()
        await self._breaker_file.close()
        await self.usage.aclose()
        await asyncio.gather(
            *(_close(provider) for provider in self._registry.providers.values()),
            *(_close(provider) for _, provider in self._retired),
        )
        if self.tracer is not None:
            self.tracer.close()

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_at

    @property
    def fleet(self) -> Fleet:
        """All inference services."""
        return self.inference.fleet

    @property
    def view(self) -> InferenceView | FleetView:
        """The models of all inference services."""
        return self.fleet.view

    def operator_headers(self) -> dict[str, str]:
        """Headers of requests to the inference service that change something, if that needs a key of its own."""
        key = self._source.environ().get("INFERENCE_ADMIN_KEY")
        return {"authorization": f"Bearer {key}"} if key else {}

    def end_streams(self) -> None:
        """Ends the streams of open dashboards, which do not end by themselves."""
        if self.observer is not None:
            self.observer.on_stop()

    def join(self) -> int:
        """Keeps the current providers open, also after a reload, until `leave` is called with the returned number."""
        self._users[self._number] += 1
        return self._number

    def leave(self, number: int) -> None:
        """The request that joined with `number` has ended."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]
        if self._retired:
            self._close_retired()

    async def reload(self) -> dict[str, Any]:
        """Reads the configuration again and applies it; on any error the old one stays.

        Returns what changed and what of it needs a restart. Raises ConfigError or HeadgateError.
        """
        async with self._reloading:
            config = await asyncio.to_thread(self._source.load)  # parsing a large file takes a second
            clouds = await registry.build(config, self._registry, self.config.providers)
            inference = await self.inference.prepare(config.inference)
            keys = self._keys(config)  # after the last await, during which a key may be created or revoked
            changed = settings_loading.changes(self.config, config)
            restart = [line for line in changed if line.split(":")[0] in NEEDS_RESTART]
            changed_providers = _changed_providers(self.config, config)
            self.config, self.keys, self._clouds = config, keys, clouds
            self.breakers.set_rule(_rule(config.breaker))
            for name in changed_providers:
                self.breakers.forget(name)
            self.admission.apply(config.admission)
            self.limiter.apply(keys.all)
            self.images.apply(config.images)
            self.usage.apply(config)
            self.inference.use(inference)
        for line in changed or ["nothing changed"]:
            log.info("reload: %s", line)
        return {"changed": changed, "needs_restart": restart}

    def _on_nodes(self) -> None:
        """Uses the present nodes and the clouds that are configured now."""
        before, nodes = self._registry, self.fleet.nodes
        self._registry = self._clouds.with_nodes({node.key: node.provider for node in nodes.values()})
        self.breakers.max_breakers = MAX_BREAKERS * max(1, len(nodes))
        self.gateway_state = GatewayState(
            self.config, self._registry, self.breakers, self.view, self.counter, self.telemetry,
            self.breakers.generation, nodes, self.inference.prefixes, self.inference.placement,
        )  # fmt: skip
        self._retired += [(self._number, provider) for provider in before.gone(self._registry)]
        self._number += 1
        self._close_retired()

    def _on_breaker(self, provider: str, model: str, state: BreakerState | None) -> None:
        if self.observer is not None:
            self.observer.on_breaker(provider, model, state)
        self.inference.on_breaker(provider, model, state)

    def _on_failure(self, provider: str, model: str, failure: Failure) -> None:
        self.inference.on_failure(provider, failure)

    def _keys(self, config: GatewayConfig) -> Keys:
        one_tenant = config.share_prefixes == "all"
        fleet_token = self.inference_token() if config.state is not None or config.inference.nodes else None
        return Keys.load(
            config.keys, self._source.environ(), self._state, one_tenant=one_tenant, limits=config.limits,
            stored=self._stored_keys, fleet_token=fleet_token,
        )  # fmt: skip

    def _use_stored_keys(self, stored: tuple[KeySettings, ...]) -> None:
        """Accepts the keys that were created at run time, and no others of that kind."""
        if stored == self._stored_keys:
            return
        before, after = ({key.name: key.hash for key in keys} for keys in (self._stored_keys, stored))
        self._stored_keys = stored
        self.keys = self._keys(self.config)
        self.limiter.apply(self.keys.all)
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                log.info("stored key %s is now %s", name, "revoked" if name not in after else "accepted")

    def inference_token(self) -> str:
        """The secret of the gateway and the inference services."""
        return self._source.environ().get("INFERENCE_TOKEN") or self._state.secret(INFERENCE_TOKEN)

    def _close_retired(self) -> None:
        """Closes replaced providers that no running request can use."""
        oldest = min(self._users, default=self._number)
        idle = [(number, provider) for number, provider in self._retired if number < oldest]
        self._retired = [item for item in self._retired if item not in idle]
        for _, provider in idle:
            self.spawn(_close(provider), f"close {provider.name}")

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a background task that ends with the gateway; logs its error."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the background task %s failed", task.get_name(), exc_info=error)


async def _close(provider: Provider) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await provider.aclose()
    except TimeoutError:
        log.warning("provider %s did not close within %g s", provider.name, CLOSE_SECONDS)
    except Exception:
        log.exception("provider %s did not close properly", provider.name)


def _changed_providers(old: GatewayConfig, new: GatewayConfig) -> list[str]:
    """Clouds that were removed or have other settings, such as the key: their breakers are reset."""
    return [name for name, settings in old.providers.items() if new.providers.get(name) != settings]


def _shared_state(config: GatewayConfig, telemetry: Telemetry, state: StateDir) -> SharedState | None:
    """The state that is shared with other gateways, if it is configured; raises HeadgateError without the client."""
    if config.state is None:
        return None
    try:
        from gateway.shared_state.shared_state import SharedState
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "redis":
            raise
        raise HeadgateError(
            "`state:` of gateway.yaml needs the Redis client; install the extra: pip install 'headgate[redis]'"
        ) from None
    on_state, on_error = telemetry.watch_shared_state()
    return SharedState(config.state, on_state, on_error, count_file=GatewayCountFile(state))


def _rule(breaker: BreakerSettings) -> Rule:
    return Rule(**breaker.model_dump())
