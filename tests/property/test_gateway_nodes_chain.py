"""One request over a chain of local models on several nodes and a cloud: what is tried, in which order, how often."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import parse
from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.outcome import Failure, Scope, Success
from gateway.breaker.permits import RAMP_FIRST, Rule
from gateway.errors import GatewayError, UpstreamError, UpstreamKind
from gateway.nodes.cold_placement import ColdPlacement
from gateway.nodes.fleet_view import FleetView
from gateway.nodes.node import Node
from gateway.nodes.prefixes import Prefixes
from gateway.providers.local.candidate_facts import LikelyFailure
from gateway.providers.local.local_provider import Counter
from gateway.providers.provider import Call
from gateway.providers.registry import Registry
from gateway.routing.chain import RouteMatch
from gateway.routing.chain_runner import MAX_BREAKS, ChainRunner
from gateway.routing.explain_record import Record
from gateway.routing.request_context import GatewayState, RequestContext
from gateway.settings import GatewayConfig
from gateway.telemetry.gateway_metrics import Telemetry
from inference.protocol import Code, ModelState, ModelStatus

MODELS = ("m0", "m1")
UNREACHABLE = "unreachable"
BREAKING = (Code.MODEL_FAILED, Code.DEVICE_LOST)
ANSWERS = st.sampled_from((None, None, UNREACHABLE, Code.MODEL_FAILED, Code.QUEUE_FULL, Code.MEMORY_LIMIT_EXCEEDED))
"""What a node does with a request; None: it answers."""


class Provider:
    """A node, or the cloud, that answers as planned. `tried` are model and node of all attempts."""

    def __init__(self, node: str, plan: Mapping[str, str | None], tried: list[tuple[str, str]]) -> None:
        self._node = node
        self._plan = plan
        self._tried = tried

    def unsupported_params(self, endpoint: Endpoint, body: object, model: str) -> dict[str, str]:
        return {}

    async def unary(self, call: Call) -> bytes:
        self._tried.append((call.model, self._node))
        refusal = self._plan.get(call.model)
        if refusal is None:
            return self._node.encode()
        if refusal == UNREACHABLE:
            raise UpstreamError(UpstreamKind.CONNECT, "refused")
        raise UpstreamError(UpstreamKind.STATUS, "no", status=503, code=refusal)


def _node(name: str, plan: Mapping[str, str | None], tried: list[tuple[str, str]]) -> Node:
    models = {
        model: ModelStatus(model, ModelState.READY, capabilities=("completions",), load_seconds=0.0) for model in plan
    }
    view = SimpleNamespace(models=models, likely_failure=lambda _: None, is_fresh=True, reachable=True)
    return cast(
        Node, SimpleNamespace(name=name, key=f"local@{name}", provider=Provider(name, plan, tried), view=view, url="")
    )


async def _ask(
    plans: Mapping[str, Mapping[str, str | None]],
    attempts: int,
    *,
    has_cloud: bool,
    arrange: Callable[[dict[str, Node], Breakers], None] = lambda *_: None,
) -> tuple[bytes | GatewayError, list[tuple[str, str]], Record]:
    """`arrange` changes the nodes and their breakers before the request."""
    tried: list[tuple[str, str]] = []
    nodes = {name: _node(name, plan, tried) for name, plan in plans.items()}
    breakers = Breakers(Rule(failures=1, open=0.0))
    arrange(nodes, breakers)
    config = GatewayConfig.model_validate(
        {
            "providers": {"cloud": {"kind": "openai", "api_key": "x"}},
            "routes": {"m": {"chain": [*(f"local/{model}" for model in MODELS), *(["cloud/m2"] if has_cloud else [])]}},
            "attempts": {"max": attempts},
        }
    )
    providers: Any = {node.key: node.provider for node in nodes.values()} | {"cloud": Provider("cloud", {}, tried)}
    placement = ColdPlacement(lambda: cast(Any, None), cast(Any, None))
    gateway = GatewayState(
        config, Registry(providers), breakers, FleetView(nodes), Counter(cast(Any, None)), Telemetry(), 0, nodes,
        Prefixes("secret"), placement,
    )  # fmt: skip
    request = parse(Endpoint.COMPLETIONS, b'{"model":"m","prompt":"hello"}')
    record = Record("id", 0.0, "/v1/completions")
    runner = ChainRunner(gateway, request, RouteMatch("m", "m"), RequestContext("id"), record, time.monotonic())
    try:
        return await runner.unary(), tried, record
    except GatewayError as error:
        return error, tried, record


PLANS = st.dictionaries(
    st.sampled_from(("a", "b", "c", "d")), st.fixed_dictionaries(dict.fromkeys(MODELS, ANSWERS)), min_size=1
)


@settings(max_examples=150, deadline=None)
@given(PLANS, st.integers(1, 8), st.booleans())
def test_each_model_is_tried_once_per_node_until_one_answers(
    plans: dict[str, dict[str, str | None]], attempts: int, has_cloud: bool
) -> None:
    answer, tried, record = asyncio.run(_ask(plans, attempts, has_cloud=has_cloud))
    assert len(tried) == len(set(tried)) <= attempts
    assert [f"{model} {node}" for model, node in tried] == [
        f"{one.name.partition('/')[2]} {one.node or 'cloud'}" for one in record.attempts
    ]
    order = [(*MODELS, "m2").index(model) for model, _ in tried]
    assert order == sorted(order), "no model is tried again after the next one"
    unreachable = [node for model, node in tried if plans.get(node, {}).get(model) == UNREACHABLE]
    assert len(unreachable) == len(set(unreachable)), "a node that cannot be reached gets no request for another model"
    for model in MODELS:
        broken = [node for one, node in tried if one == model and plans[node][model] in BREAKING]
        assert len(broken) <= MAX_BREAKS
    if isinstance(answer, bytes):
        model, node = tried[-1]
        assert (answer, record.node) == (node.encode(), "" if node == "cloud" else node)
    elif attempts > len(MODELS):
        assert not has_cloud, "the last candidate keeps an attempt"
    if attempts == 8 and any(plan["m0"] is None for plan in plans.values()):
        refusing = [plan["m0"] for plan in plans.values() if plan["m0"] is not None]
        if len([one for one in refusing if one in BREAKING]) < MAX_BREAKS:
            assert tried[-1][0] == "m0", "a node answers for the first candidate"


def test_node_with_a_likely_failure_is_used_if_the_recovering_node_has_no_permit() -> None:
    """The recovering node loads much faster, so it is chosen first, but its breaker has no permit left."""

    def lease(breakers: Breakers) -> Lease:
        found = breakers.acquire("local@a", "m0", time.monotonic() + 600)
        assert isinstance(found, Lease)
        return found

    def arrange(nodes: dict[str, Node], breakers: Breakers) -> None:
        lease(breakers).settle(Failure(Scope.PAIR), "it failed")
        lease(breakers).settle(Success())
        for _ in range(RAMP_FIRST):
            lease(breakers)
        view: Any = nodes["b"].view
        view.models = {id: replace(status, load_seconds=100.0) for id, status in view.models.items()}
        view.likely_failure = lambda _: LikelyFailure("its device is slow")

    answer, tried, _ = asyncio.run(_ask({"a": {"m0": None}, "b": {"m0": None}}, 4, has_cloud=False, arrange=arrange))
    assert (answer, tried) == (b"b", [("m0", "b")])
