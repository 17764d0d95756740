"""A chain against which nothing speaks is folded in fewer steps: whatever is known, with the same result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import parse
from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.outcome import Failure, Scope
from gateway.breaker.permits import Rule
from gateway.providers.local.inference_snapshot import STALE_SECONDS, InferenceView
from gateway.providers.local.token_count import Counter
from gateway.providers.registry import Registry
from gateway.routing.candidate_filter import CandidateFilter
from gateway.routing.chain import expand
from gateway.routing.explain_record import Record
from gateway.routing.request_context import GatewayState
from gateway.settings import GatewayConfig
from gateway.telemetry.gateway_metrics import Telemetry
from inference.protocol import DeviceState, ModelState, ModelStatus, Priority

NAMES = ("a", "b")
DEVICES = ("gpu-0", "gpu-1")
RARELY = st.sampled_from((False, False, False, True))

PLAIN = ModelStatus(
    "a", ModelState.READY, parallel=2, context_length=4096, devices=("gpu-0",), fits=True, queue_seconds=0.5,
    capabilities=("chat", "completions", "embeddings"),
)  # fmt: skip
CHANGES = st.sampled_from(
    (
        {}, {}, {}, {"id": "b"}, {"aliases": ("other",)}, {"context_length": 0}, {"devices": ("gpu-1",)},
        {"capabilities": ()}, {"capabilities": ("tools",)}, {"fits": None}, {"fits": False, "reason": "no room"},
        {"state": ModelState.BUSY}, {"state": ModelState.FAILED}, {"answer_seconds": 0.25},
        {"state": ModelState.FAILED, "retry_after_seconds": 1.0},
        {"state": ModelState.FAILED, "retry_after_seconds": 9.0},
    )
)  # fmt: skip
STATUSES = st.builds(lambda change, other: replace(PLAIN, **{**change, **other}), CHANGES, CHANGES)
DEVICE_STATES = st.tuples(st.sampled_from(DEVICES), st.sampled_from(tuple(DeviceState)))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("snapshot"), st.tuples(st.lists(STATUSES, max_size=2), st.lists(DEVICE_STATES, max_size=2))),
        st.tuples(st.just("model"), STATUSES),
        st.tuples(st.just("device"), DEVICE_STATES),
        st.tuples(st.just("removed model"), st.sampled_from(NAMES)),
        st.tuples(st.just("removed device"), st.sampled_from(DEVICES)),
        st.tuples(st.just("wait"), st.sampled_from((0.5, 5.0, STALE_SECONDS))),
        st.tuples(st.just("fail"), st.sampled_from(("local", "cloud"))),
        st.tuples(st.just("hold"), st.sampled_from(("local", "cloud"))),
        st.tuples(st.just("ask"), st.integers(1, 3)),
    ),
    max_size=6,
)
ASKED_FOR = (
    (Endpoint.CHAT, b'{"model":"a","messages":[{"role":"user","content":"x"}]}'),
    (Endpoint.CHAT, b'{"model":"a","messages":[{"role":"user","content":"x"}],"prediction":{}}'),
    (Endpoint.CHAT, b'{"model":"a","messages":[{"role":"user","content":"x"}],"logit_bias":{"1":2}}'),
    (Endpoint.COMPLETIONS, b'{"model":"a","prompt":"x"}'),
    (Endpoint.COMPLETIONS, b'{"model":"a","prompt":[1,2]}'),
    (Endpoint.EMBEDDINGS, b'{"model":"a","input":"x"}'),
)


class Cloud:
    """Takes no seed and nothing unknown; that is all it is asked here."""

    name = "cloud"
    is_local = False

    def unsupported_params(self, endpoint: Endpoint, body: Mapping[str, Any], model: str) -> Mapping[str, str]:
        return {name: "no biases" for name in body if name == "logit_bias"}


class Local(Cloud):
    """Takes no predictions."""

    name = "local"
    is_local = True

    def unsupported_params(self, endpoint: Endpoint, body: Mapping[str, Any], model: str) -> Mapping[str, str]:
        return {name: "no predictions" for name in body if name == "prediction"}


class World:
    """What a fold is made of, on a clock of its own."""

    def __init__(self, has_key: bool, **route: Any) -> None:
        self.now = 100.0
        self.breakers = Breakers(Rule(failures=2), lambda: self.now)
        self.view = InferenceView(lambda *_: None, lambda: self.now)  # type: ignore[arg-type, return-value]
        config = GatewayConfig.model_validate(
            {"providers": {"cloud": {"kind": "openai", "api_key": "x"}}, "routes": {"a": route}}
        )
        providers = {"local": Local(), **({"cloud": Cloud()} if has_key else {})}
        self.gateway = GatewayState(
            config, Registry(providers), self.breakers, self.view, Counter(lambda *_: None), Telemetry()  # type: ignore[arg-type, return-value]
        )  # fmt: skip

    def step(self, kind: str, said: Any) -> None:
        match kind:
            case "snapshot":
                models, devices = said
                self.view.hear(
                    "snapshot",
                    {
                        "models": [status.to_json() for status in {one.id: one for one in models}.values()],
                        "devices": [{"id": name, "state": state} for name, state in devices],
                        "ready": True,
                    },
                )
            case "model":
                self.view.hear("model", {"model": said.to_json()})
            case "device":
                self.view.hear("device", {"device": {"id": said[0], "state": said[1]}})
            case "removed model":
                self.view.hear("removed", {"id": said})
            case "removed device":
                self.view.hear("removed", {"device": said})
            case "wait":
                self.now += said
            case "hold":
                self.breakers.hold(said, "a", 3.0, ["normal"])
            case "ask":
                for _ in range(said):
                    self.breakers.acquire("local", "a", 1e9, forced=True)
            case "fail":
                for _ in range(2):
                    lease = self.breakers.acquire(said, "a", 1e9, forced=True)
                    if isinstance(lease, Lease):
                        lease.settle(Failure(Scope.PAIR), "it broke")


def _same_both_ways(
    world: World, entries: tuple[str, ...], asked: tuple[Endpoint, bytes], **more: Any
) -> CandidateFilter:
    record, candidates = Record("id", 0.0, "/"), expand(entries, "a", world.gateway.view.aliases)
    choice = CandidateFilter(world.gateway, parse(*asked), world.gateway.policies["a"], candidates, record, **more)
    chain = choice.fold()
    assert [considered.facts for considered in record.considered] == [choice.facts(one) for one in candidates]
    assert chain == choice.again()
    return choice


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.lists(STATUSES, min_size=1, max_size=2), st.lists(DEVICE_STATES, max_size=1)),
    STEPS, st.sampled_from(ASKED_FOR), st.booleans(), RARELY, RARELY,
    st.sampled_from((("local/a",), ("local/other", "cloud/a"), ("local/b", "local/*", "cloud/x"), ("cloud/a",))),
    st.fixed_dictionaries(
        {}, optional={"cloud": st.just("never"), "same_vectors": st.just(True), "fit_check": st.just(False)}
    ),
)  # fmt: skip
def test_the_short_way_finds_what_the_long_way_finds(
    first: Any,
    steps: list[tuple[str, Any]],
    asked: tuple[Endpoint, bytes],
    has_key: bool,
    is_high: bool,
    is_local_only: bool,
    entries: tuple[str, ...],
    route: dict[str, Any],
) -> None:
    world = World(has_key, chain=entries, **route)
    for kind, said in (("snapshot", first), *steps):
        world.step(kind, said)
        priority = Priority.HIGH if is_high else Priority.NORMAL
        _same_both_ways(world, entries, asked, cloud_allowed=not is_local_only, priority=priority)


CHAT = ASKED_FOR[0]
SLOW = replace(PLAIN, answer_seconds=0.25)


@pytest.mark.parametrize(
    ("steps", "asked", "more", "is_short"),
    [
        ([], CHAT, {}, True),
        ([("removed model", "a")], CHAT, {}, False),
        ([("wait", STALE_SECONDS)], CHAT, {}, False),
        ([("ask", 9)], CHAT, {}, True),
        ([("model", SLOW)], CHAT, {}, True),
        ([("model", SLOW), ("ask", 1)], CHAT, {}, True),
        ([("model", SLOW), ("ask", 2)], CHAT, {}, False),
        ([("model", SLOW)], CHAT, {"priority": Priority.HIGH}, False),
        ([("fail", "cloud")], CHAT, {}, False),
        ([("fail", "elsewhere")], CHAT, {}, True),
        ([("hold", "local")], CHAT, {}, False),
        ([("hold", "local"), ("wait", 5.0)], CHAT, {}, True),
        ([("device", ("gpu-0", DeviceState.LOST))], CHAT, {}, False),
        ([("device", ("gpu-1", DeviceState.LOST))], CHAT, {}, True),
        ([("removed device", "gpu-0")], CHAT, {}, False),
        ([("device", ("gpu-0", DeviceState.LOST)), ("device", ("gpu-0", DeviceState.HEALTHY))], CHAT, {}, True),
        ([("model", replace(PLAIN, fits=False))], CHAT, {}, False),
        ([("model", replace(PLAIN, fits=False)), ("model", PLAIN)], CHAT, {}, True),
        ([("model", replace(PLAIN, state=ModelState.FAILED))], CHAT, {}, False),
        ([("model", replace(PLAIN, capabilities=("tools",)))], CHAT, {}, False),
        ([], CHAT, {"cloud_allowed": False}, False),
        *(([], asked, {}, False) for asked in ASKED_FOR[1:3]),
        ([], ASKED_FOR[3], {}, True),
        *(([], asked, {}, False) for asked in ASKED_FOR[4:]),
    ],
)
def test_the_short_way_is_taken_where_nothing_speaks_against_anybody(
    steps: list[tuple[str, Any]], asked: tuple[Endpoint, bytes], more: dict[str, Any], is_short: bool
) -> None:
    world = World(has_key=True, chain=["local/a", "cloud/a"])
    for kind, said in (("snapshot", ([PLAIN], [])), *steps):
        world.step(kind, said)
    choice = _same_both_ways(world, ("local/a", "cloud/a"), asked, **{"cloud_allowed": True, **more})
    assert (choice._plain() is not None) is is_short
