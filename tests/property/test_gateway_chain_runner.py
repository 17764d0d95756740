"""With any measurements, counts and refusals no candidate is tried twice, and each that could answer is tried."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import parse
from gateway.breaker.breakers import Breakers
from gateway.breaker.permits import Rule
from gateway.errors import GatewayError, UpstreamError, UpstreamKind
from gateway.providers.local.inference_snapshot import InferenceView
from gateway.providers.local.local_provider import Counter
from gateway.providers.provider import Call
from gateway.providers.registry import Registry
from gateway.routing.chain import RouteMatch
from gateway.routing.chain_runner import ChainRunner
from gateway.routing.explain_record import Record
from gateway.routing.request_context import GatewayState, RequestContext
from gateway.settings import GatewayConfig
from gateway.telemetry.gateway_metrics import Telemetry
from inference.protocol import Code, ModelState, ModelStatus

TEXT = "the water of the mill " * 60
SECONDS = st.none() | st.sampled_from((0.0, 1.0, 30.0, 500.0))


@dataclass(frozen=True)
class Tier:
    """One candidate: its status, its token count, and whether it would answer."""

    local: bool
    context_length: int
    tokens: int | None
    load_seconds: float | None
    queue_seconds: float | None
    prefill_tokens_per_second: float | None
    answers: bool


TIERS = st.lists(
    st.builds(
        Tier, st.booleans(), st.sampled_from((100, 1000, 4000)), st.none() | st.sampled_from((50, 99, 100, 990, 2000)),
        SECONDS, SECONDS, st.none() | st.sampled_from((1.0, 1000.0)), st.booleans(),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


@dataclass
class Provider:
    """Answers as its tiers would; `tried` has the models in order."""

    name: str
    tiers: Mapping[str, Tier]
    tried: list[str] = field(default_factory=list)

    @property
    def is_local(self) -> bool:
        return self.name == "local"

    def unsupported_params(self, endpoint: Endpoint, body: Mapping[str, Any], model: str) -> tuple[str, ...]:
        return ()

    async def unary(self, call: Call) -> bytes:
        self.tried.append(f"{self.name}/{call.model}")
        if not self.tiers[call.model].answers:
            raise UpstreamError(
                UpstreamKind.STATUS, "busy", status=503, code=Code.MODEL_LOADING if self.is_local else None
            )
        return call.model.encode()


async def _ask(tiers: Mapping[str, Tier], max_tokens: int | None) -> tuple[bytes | GatewayError, list[str], Record]:
    tried: list[str] = []
    providers = {name: Provider(name, tiers, tried) for name in ("local", "cloud")}
    chain = [f"{'local' if tier.local else 'cloud'}/{name}" for name, tier in tiers.items()]
    config = GatewayConfig.model_validate(
        {
            "providers": {"cloud": {"kind": "openai", "api_key": "x"}},
            "routes": {"m": {"chain": chain, "load_wait": 20}},
            "attempts": {"max": 9},
        }
    )

    async def fetch(path: str, seconds: float) -> Any:
        statuses = (
            ModelStatus(
                id=name, state=ModelState.READY, context_length=tier.context_length, load_seconds=tier.load_seconds,
                queue_seconds=tier.queue_seconds, prefill_tokens_per_second=tier.prefill_tokens_per_second,
            )
            for name, tier in tiers.items()
        )  # fmt: skip
        return {"data": [status.to_json() for status in statuses]}

    async def count(path: str, body: bytes, seconds: float) -> Any:
        name = next(name for name in tiers if f'"model":"{name}"'.encode() in body)
        if (tokens := tiers[name].tokens) is None:
            raise UpstreamError(UpstreamKind.TIMEOUT, "nothing")
        return {"count": tokens}

    view = InferenceView(fetch)
    await view.refresh()
    gateway = GatewayState(config, Registry(providers), Breakers(Rule()), view, Counter(lambda _: count), Telemetry())  # type: ignore[arg-type]
    limit = "" if max_tokens is None else f',"max_tokens":{max_tokens}'
    request = parse(Endpoint.COMPLETIONS, f'{{"model":"m","prompt":"{TEXT}"{limit}}}'.encode())
    record = Record("id", 0.0, "/v1/completions")
    runner = ChainRunner(gateway, request, RouteMatch("m", "m"), RequestContext("id"), record, time.monotonic())
    try:
        return await runner.unary(), tried, record
    except GatewayError as error:
        return error, tried, record


@settings(max_examples=60, deadline=None)
@given(TIERS, st.none() | st.sampled_from((1, 10, 500, 5000)))
def test_each_remaining_candidate_is_tried_once_until_one_answers(found: list[Tier], most: int | None) -> None:
    tiers = {f"m{at}": tier for at, tier in enumerate(found)}
    answer, tried, record = asyncio.run(_ask(tiers, most))
    names = [f"{'local' if tier.local else 'cloud'}/{name}" for name, tier in tiers.items()]
    assert len(tried) == len(set(tried))
    too_small = {name for name, why in record.dropped.items() if why.startswith("context_too_small")}
    for name in too_small:
        tier = tiers[name.partition("/")[2]]
        assert tier.local
        assert tier.tokens is not None
        assert tier.tokens >= tier.context_length or (most or 0) > tier.context_length
        assert name not in tried
    if isinstance(answer, GatewayError):
        assert set(tried) == set(names) - too_small, "slow and small candidates are tried as a last resort"
        assert answer.status in ((400,) if not tried else (503,))
    else:
        assert tried[-1].endswith("/" + answer.decode())
        skipped = set(names[: names.index(tried[-1])]) - set(tried)
        assert all(record.dropped[name].partition(":")[0] in _REASONS for name in skipped)
    if len(names) == 1:
        assert tried == names, "the only tier is always tried"


_REASONS = {"context_too_small", "little_room", "predicted_too_slow"}
