"""A gateway in front of several inference services."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.breaker import probe_schedule
from gateway.breaker.permits import BreakerState
from gateway.breaker.probe_schedule import ProbeKind
from gateway.nodes.fleet_view import FleetView
from gateway.routing import stream_reader
from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import Gateway
from tests.rigs.stack import until

CONFIG = """
inference: {{nodes: [a={a}, b={b}]}}
routes:
  demo: {{chain: [local/demo]}}
  "*": {{chain: ["local/*", local/smaller]}}
"""


class Fleet:
    """A gateway and the services `a` and `b`, which both have the models `demo` and `demo-mini`."""

    def __init__(self, gateway: Gateway, a: FakeInference, b: FakeInference) -> None:
        self.gateway = gateway
        self.nodes = {"a": a, "b": b}

    async def ask(self, model: str = "demo", **more: Any) -> tuple[str, str]:
        """The node that answered and the text."""
        answer = await self.gateway.chat(model, **more)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-headgate-node"], answer.json()["choices"][0]["message"]["content"]

    def other(self, node: str) -> str:
        """The name of the other node."""
        return "b" if node == "a" else "a"


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(FakeInference("token")) for _ in range(2)]
        for service in (a, b):
            service.models = {name: replace(status, load_seconds=0.0) for name, status in service.models.items()}
        config = CONFIG.format(a=a.url, b=b.url)
        gateway = await stack.enter_async_context(Gateway(tmp_path, a.url, config))
        await until("both answer", lambda: gateway.runtime.view.is_complete)
        yield Fleet(gateway, a, b)


async def test_requests_are_spread_over_nodes_and_answers_name_their_node(fleet: Fleet) -> None:
    answers = await asyncio.gather(*(fleet.ask() for _ in range(30)))
    assert {node for node, _ in answers} == {"a", "b"}
    record = list(fleet.gateway.runtime.records)[-1].to_json()
    assert record["node"] in ("a", "b")
    assert [attempt["node"] for attempt in record["attempts"]] == [record["node"]]
    names = {item["name"]: item for item in fleet.gateway.runtime.breakers.describe()}
    assert (names["local@a/demo"]["provider"], names["local@a/demo"]["node"]) == ("local", "a")


async def test_request_for_a_model_on_one_node_goes_to_that_node(fleet: Fleet) -> None:
    status = ModelStatus(id="only", state=ModelState.READY, context_length=64, capabilities=("chat",))
    fleet.nodes["b"].models["only"] = status
    await fleet.gateway.look()
    fleet.gateway.runtime.view.poll_soon()
    await until("it is listed", lambda: "only" in fleet.gateway.runtime.view.models)
    assert {(await fleet.ask("only"))[0] for _ in range(5)} == {"b"}


async def test_unknown_model_is_refused(fleet: Fleet) -> None:
    answer = await fleet.gateway.chat("nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, Code.MODEL_NOT_FOUND)


@pytest.mark.parametrize("code", [Code.MODEL_FAILED, Code.QUEUE_FULL, Code.MEMORY_LIMIT_EXCEEDED])
async def test_request_that_one_node_fails_is_answered_by_another(fleet: Fleet, code: Code) -> None:
    fleet.nodes["a"].answers["demo"] = Answer(refuse=code)
    for _ in range(4):
        assert (await fleet.ask())[0] == "b"
    tried = [[attempt.node for attempt in record.attempts] for record in fleet.gateway.runtime.records]
    assert all(nodes in (["b"], ["a", "b"]) for nodes in tried)


async def test_node_that_does_not_answer_is_left_out_and_used_again(fleet: Fleet) -> None:
    port = fleet.nodes["a"].port
    await fleet.nodes["a"].stop()
    for _ in range(10):
        assert (await fleet.ask())[0] == "b"
    runtime = fleet.gateway.runtime
    await until("its breaker opens", lambda: runtime.breakers.open_for("local@a", "demo") is not None)
    await fleet.nodes["a"].start(port)
    await until("its breaker admits", lambda: runtime.breakers.open_for("local@a", "demo") is None)
    await until("it is used again", lambda: _answers(fleet, "a"))


async def _answers(fleet: Fleet, node: str) -> bool:
    return (await fleet.ask())[0] == node


async def test_error_names_each_node_that_failed(fleet: Fleet) -> None:
    for service in fleet.nodes.values():
        service.answers["demo"] = Answer(refuse=Code.MODEL_FAILED, message="no worker")
    answer = await fleet.gateway.chat()
    assert answer.status_code == 503
    assert "local/demo on a: model_failed: no worker" in answer.text
    assert "local/demo on b: model_failed: no worker" in answer.text


async def test_broken_stream_goes_on_at_another_node(fleet: Fleet) -> None:
    words = tuple(f" w{number}" for number in range(12))
    fleet.nodes["a"].answers["demo"] = Answer(words=words[:5], cut=True)
    fleet.nodes["b"].answers["demo"] = Answer(words=words)
    body = {"model": "demo", "messages": [{"role": "user", "content": "go"}], "stream": True}
    first, tries = "", 0
    while first != "a":
        text, tries = "", tries + 1
        async with fleet.gateway.client.stream("POST", "/v1/chat/completions", content=json.dumps(body)) as answer:
            first = answer.headers["x-headgate-node"]
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += "".join(one["delta"].get("content") or "" for one in json.loads(line[6:])["choices"])
        assert text == "".join(words)
        assert tries < 30
    record = list(fleet.gateway.runtime.records)[-1]
    assert [attempt.node for attempt in record.attempts] == ["a", "b"]


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe_schedule.TIMEOUT_SECONDS, ProbeKind.READY, 0.1)  # type: ignore[arg-type]
    monkeypatch.setattr(stream_reader, "DOWN_SECONDS", 0.3)


@pytest.mark.usefixtures("quick_probes")
async def test_silent_stream_of_a_node_found_down_by_probes_is_resumed_at_another_node(fleet: Fleet) -> None:
    """As after a SIGSTOP. Before `deadlines.inter_token` has passed. A stream that is only slow stays at its node."""
    gateway, words = fleet.gateway, tuple(f" w{number}" for number in range(12))
    gateway.write(CONFIG.format(a=fleet.nodes["a"].url, b=fleet.nodes["b"].url) + "breaker: {failures: 2}\n")
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
    messages = [{"role": "user", "content": "a long text " * 1000}]
    first, _ = await fleet.ask(messages=messages)  # the same prompt goes to the same node
    fleet.nodes[first].queue["demo"] = [Answer(words=words, pause=0.1), Answer(words=words[:5], stall=True)]
    fleet.nodes[fleet.other(first)].answers["demo"] = Answer(words=words)

    async def stream() -> tuple[str, float]:
        text, began = "", time.monotonic()
        body = json.dumps({"model": "demo", "messages": messages, "stream": True})
        async with gateway.client.stream("POST", "/v1/chat/completions", content=body) as answer:
            assert answer.headers["x-headgate-node"] == first
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += "".join(one["delta"].get("content") or "" for one in json.loads(line[6:])["choices"])
        return text, time.monotonic() - began

    slow = asyncio.create_task(stream())
    await until("the slow one runs", lambda: len(fleet.nodes[first].seen) == 2)
    silent = asyncio.create_task(stream())
    await until("the other one runs", lambda: len(fleet.nodes[first].seen) == 3)
    fleet.nodes[first].is_silent = True
    gateway.runtime.inference.node(first).prober.suspect()
    (text, _), (resumed, seconds) = await asyncio.gather(slow, silent)
    assert text == resumed == "".join(words)
    assert seconds < 10
    used = [[attempt.node for attempt in record.attempts] for record in gateway.runtime.records]
    assert sorted(used) == sorted([[first], [first], [first, fleet.other(first)]])


@pytest.mark.usefixtures("quick_probes")
async def test_silent_stream_continues_if_no_other_node_has_the_model(
    fleet: Fleet,
) -> None:
    """Probes find the node down, but it may continue, as after a pause of its machine."""
    gateway, service = fleet.gateway, fleet.nodes["a"]
    gateway.write(CONFIG.format(a=service.url, b=fleet.nodes["b"].url) + "breaker: {failures: 2}\n")
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
    del fleet.nodes["b"].models["demo"]
    await gateway.runtime.inference.node("b").view.refresh()
    service.answers["demo"] = Answer(words=("a", "b"), pause=1.2)
    answer = asyncio.create_task(gateway.chat(stream=True))
    await until("the stream runs", lambda: service.seen)
    service.is_silent = True
    gateway.runtime.inference.node("a").prober.suspect()
    await until("the breaker opens", lambda: gateway.runtime.breakers.states()["local@a"] is BreakerState.OPEN)
    service.is_silent = False
    assert "[DONE]" in (await answer).text
    assert [attempt.node for attempt in list(gateway.runtime.records)[-1].attempts] == ["a"]


async def test_reload_replaces_nodes(fleet: Fleet) -> None:
    gateway = fleet.gateway
    gateway.write(CONFIG.format(a=fleet.nodes["a"].url, b=fleet.nodes["a"].url))
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
    assert (await fleet.ask())[0] in ("a", "b")
    gateway.write('routes: {"*": {chain: ["local/*"]}}')
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
    answer = await gateway.chat()
    assert answer.status_code == 200
    assert "x-headgate-node" not in answer.headers
    assert set(gateway.runtime.fleet.nodes) == {""}


async def test_turns_of_a_conversation_go_to_the_node_that_has_its_beginning(fleet: Fleet) -> None:
    messages = [{"role": "user", "content": "a long text " * 1000}]
    first, _ = await fleet.ask(messages=messages)
    labels: list[set[str]] = []
    for turn in range(6):
        messages += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": f"turn {turn}"}]
        assert (await fleet.ask(messages=messages))[0] == first
        labels.append(set(fleet.nodes[first].seen[-1].headers["x-headgate-prefix"].split(",")))
    assert all(before < after for before, after in itertools.pairwise(labels))


async def _cold(fleet: Fleet) -> None:
    """Waits until the gateway knows that `demo` is not loaded."""
    view = fleet.gateway.runtime.view
    assert isinstance(view, FleetView)
    view.poll_soon()
    await until("both are cold", lambda: not view.table.loaded("demo"))


async def test_cold_model_is_loaded_where_the_plan_is_cheapest(fleet: Fleet) -> None:
    for name, service in fleet.nodes.items():
        service.models = {one: replace(status, state=ModelState.COLD) for one, status in service.models.items()}
        service.plans["demo"] = {"result": "FULL" if name == "a" else "FREE", "evict": ["x"] if name == "a" else []}
        service.plans["demo-mini"] = {"result": "CANT_ACCOMMODATE"}
    await _cold(fleet)
    answers = await asyncio.gather(*(fleet.ask() for _ in range(6)))
    assert {node for node, _ in answers} == {"b"}
    assert [service.probes.count("/memory/plan") for service in fleet.nodes.values()] == [1, 1]
    assert (await fleet.ask("demo-mini"))[0] in ("a", "b"), "the refusal of the node has the numbers"


async def test_request_goes_to_the_node_with_the_next_plan_if_a_node_refuses_the_load(fleet: Fleet) -> None:
    for service in fleet.nodes.values():
        service.models = {one: replace(status, state=ModelState.COLD) for one, status in service.models.items()}
    fleet.nodes["a"].answers["demo"] = Answer(refuse=Code.MEMORY_LIMIT_EXCEEDED)
    fleet.nodes["a"].plans["demo"] = {"result": "FREE"}
    fleet.nodes["b"].plans["demo"] = {"result": "FULL"}
    await _cold(fleet)
    assert (await fleet.ask())[0] == "b"
    assert [one.node for one in list(fleet.gateway.runtime.records)[-1].attempts] == ["a", "b"]


async def test_request_whose_model_fails_at_two_nodes_is_not_sent_to_a_third(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        services = [await stack.enter_async_context(FakeInference("token")) for _ in range(3)]
        for service in services:
            service.answers["demo"] = Answer(refuse=Code.MODEL_FAILED)
        nodes = json.dumps([service.url for service in services])
        config = f'inference: {{nodes: {nodes}}}\nroutes: {{"*": {{chain: ["local/*"]}}}}'
        gateway = await stack.enter_async_context(Gateway(tmp_path, "http://unused", config))
        await until("all answer", lambda: gateway.runtime.view.is_complete)
        answer = await gateway.chat()
        assert (answer.status_code, answer.headers["x-headgate-attempts"]) == (503, "2")


async def test_request_whose_connections_close_at_two_nodes_is_sent_to_a_third(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        services = [await stack.enter_async_context(FakeInference("token")) for _ in range(3)]
        nodes = json.dumps([service.url for service in services])
        config = f'inference: {{nodes: {nodes}}}\nroutes: {{"*": {{chain: ["local/*"]}}}}'
        gateway = await stack.enter_async_context(Gateway(tmp_path, "http://unused", config))
        await until("all answer", lambda: gateway.runtime.view.is_complete)
        sound = services[-1]
        for service in services[:-1]:
            service.answers["demo"] = Answer(words=(), cut=True)
        answers = [await gateway.chat() for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert len([one for one in sound.seen if one.path.endswith("/chat/completions")]) == 4


async def test_running_request_finishes_at_a_node_that_a_reload_removed(fleet: Fleet) -> None:
    gateway, hold = fleet.gateway, asyncio.Event()
    for service in fleet.nodes.values():
        service.answers["demo"] = Answer(hold=hold)
    asked = asyncio.create_task(fleet.ask())
    await until("a node has the request", lambda: [name for name, one in fleet.nodes.items() if one.seen])
    busy = next(name for name, one in fleet.nodes.items() if one.seen)
    other = fleet.other(busy)
    gateway.write(
        f'inference: {{nodes: ["{other}={fleet.nodes[other].url}"]}}\nroutes: {{"*": {{chain: ["local/*"]}}}}'
    )
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
    later = [asyncio.create_task(fleet.ask()) for _ in range(3)]
    await until("the other has the requests", lambda: len(fleet.nodes[other].seen) == 3)
    hold.set()
    assert await asked == (busy, "Hello there!")
    assert {node for node, _ in await asyncio.gather(*later)} == {other}
    assert [one for one in gateway.runtime.breakers.describe() if one["node"] == busy] == []


async def test_request_at_a_node_that_is_found_to_be_down_goes_to_another(fleet: Fleet) -> None:
    for service in fleet.nodes.values():
        service.answers["demo"] = Answer(stall_before_headers=True)
    asked = asyncio.create_task(fleet.ask())
    await until("a node has the request", lambda: [name for name, one in fleet.nodes.items() if one.seen])
    stuck = next(name for name, one in fleet.nodes.items() if one.seen)
    fleet.nodes[fleet.other(stuck)].answers["demo"] = Answer()
    fleet.nodes[stuck].ready = False
    fleet.gateway.runtime.inference.node(stuck).prober.suspect()
    assert await asked == (fleet.other(stuck), "Hello there!")


async def test_request_that_a_node_finds_invalid_is_not_sent_to_another(fleet: Fleet) -> None:
    answer = await fleet.gateway.chat(messages=[{"role": "user", "content": [{"type": "text", "text": 1}]}])
    assert answer.status_code == 400
    for service in fleet.nodes.values():
        service.answers["demo"] = Answer(refuse=Code.INVALID_REQUEST, status=400, message="bad")
    answer = await fleet.gateway.chat()
    assert (answer.status_code, answer.headers["x-headgate-attempts"]) == (400, "1")
    assert answer.json()["error"]["message"] == "bad"


async def test_embeddings_and_token_counts_use_the_nodes(fleet: Fleet) -> None:
    status = ModelStatus(id="vectors", state=ModelState.READY, context_length=64, capabilities=("embeddings",))
    fleet.nodes["b"].models["vectors"] = status
    fleet.nodes["b"].counts["demo"] = 7
    fleet.nodes["a"].counts["demo"] = 7
    fleet.gateway.runtime.view.poll_soon()
    await until("it is listed", lambda: "vectors" in fleet.gateway.runtime.view.models)
    answer = await fleet.gateway.client.post("/v1/embeddings", json={"model": "vectors", "input": "a"})
    assert (answer.status_code, answer.headers["x-headgate-node"]) == (200, "b")
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    counted = await fleet.gateway.client.post("/v1/messages/count_tokens", json=body)
    assert (counted.status_code, counted.json()) == (200, {"input_tokens": 7})


async def test_recovered_node_gets_a_request_although_another_has_computed_its_prompt(fleet: Fleet) -> None:
    runtime, messages = fleet.gateway.runtime, [{"role": "user", "content": "a long text " * 1000}]
    await fleet.ask(messages=messages)
    first, _ = await fleet.ask(messages=messages)
    other, port = fleet.other(first), fleet.nodes[fleet.other(first)].port
    await fleet.nodes[other].stop()
    runtime.inference.node(other).prober.suspect()
    await until("its breaker opens", lambda: runtime.breakers.states().get(f"local@{other}") is BreakerState.OPEN)
    await fleet.nodes[other].start(port)
    await until("its breaker admits", lambda: runtime.breakers.open_for(f"local@{other}", "demo") is None)
    await until("it is listed", lambda: runtime.inference.node(other).view.models)
    assert (await fleet.ask(messages=messages))[0] == other
    assert runtime.breakers.states()[f"local@{other}"] is BreakerState.CLOSED


async def test_two_names_of_one_service_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeInference("token") as service:
        config = f"inference: {{nodes: [a={service.url}, b={service.url}]}}"
        async with Gateway(tmp_path, "http://unused", config):
            await until("it is reported", lambda: "are the same inference service" in caplog.text)
    assert f"a ({service.url})" in caplog.text


async def test_wrong_token_is_reported_with_what_to_check(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeInference("another token") as service:
        config = f"inference: {{nodes: [a={service.url}]}}"
        async with Gateway(tmp_path, "http://unused", config) as gateway:
            assert (await gateway.chat()).status_code == 503
    assert "INFERENCE_TOKEN must be the same at the gateway and at each inference service" in caplog.text
