"""Promises of the contract about decisions of the gateway that have no other test."""

from __future__ import annotations

import ast
import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

import gateway as package
from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import Gateway

pytestmark = pytest.mark.timeout(30)
ROOT = Path(package.__file__).parent
BREAKERS = ("breaker/breakers.py", "breaker/breaker.py", "breaker/permits.py", "breaker/outcome.py")
HTTP_CLIENTS = {"ClientSession", "TCPConnector", "AsyncClient", "Client", "AsyncHTTPTransport"}


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", BREAKERS)
def test_outcomes_are_recorded_synchronously_and_no_breaker_is_held_across_an_await(name: str) -> None:
    """These modules never suspend, so a cancelled request cannot leave a permit half acquired."""
    waits = (ast.AsyncFunctionDef, ast.Await, ast.AsyncWith, ast.AsyncFor)
    assert not [node.lineno for node in ast.walk(tree(ROOT / name)) if isinstance(node, waits)]


def test_http_clients_are_created_in_one_module() -> None:
    """Timeouts, proxies and limits are decided in one place."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(tree(path)):
            name = node.func if isinstance(node, ast.Call) else None
            called = name.attr if isinstance(name, ast.Attribute) else name.id if isinstance(name, ast.Name) else ""
            if called in HTTP_CLIENTS:
                found.add(str(path.relative_to(ROOT)))
    assert found == {"providers/http_clients.py"}


async def test_total_deadline_does_not_apply_after_the_commit(tmp_path: Path, fake: FakeInference) -> None:
    """An answer may take as long as its tokens arrive."""
    fake.answers["demo"] = Answer(words=("a",) * 12, pause=0.1)
    config = 'routes:\n  demo: {chain: [local/demo], resume: "off"}\ndeadlines: {total: 500ms, connect: 400ms}\n'
    async with Gateway(tmp_path, fake.url, config) as gateway:
        text = (await gateway.chat(stream=True)).text
    assert text.endswith("data: [DONE]\n\n")


async def test_silence_after_the_commit_is_limited_by_inter_token(tmp_path: Path, fake: FakeInference) -> None:
    """The stream ends in an error frame."""
    fake.answers["demo"] = Answer(stall=True)
    config = 'routes:\n  demo: {chain: [local/demo], resume: "off"}\ndeadlines: {inter_token: 300ms}\n'
    async with Gateway(tmp_path, fake.url, config) as gateway, asyncio.timeout(5):
        text = (await gateway.chat(stream=True)).text
    assert '"code":"deadline_exceeded"' in text
    assert "[DONE]" not in text


async def test_tier_skipped_by_the_fit_check_has_no_outcome(gateway: Gateway, fake: FakeInference) -> None:
    """No attempt is made, and no breaker counts it."""
    fake.models["demo"] = replace(fake.models["demo"], fits=False)
    await gateway.look()
    answer = await gateway.chat("both")
    assert answer.headers["x-headgate-model"] == "local/demo-mini"
    assert (answer.headers["x-headgate-reason"], answer.headers["x-headgate-attempts"]) == ("cannot_fit", "1")
    assert fake.seen_for("demo") == []
    assert (await gateway.breaker("local/demo"))["failures"] == 0


@pytest.mark.parametrize("code", [Code.MODEL_LOADING, Code.QUEUE_FULL, Code.CONTEXT_LENGTH_EXCEEDED])
async def test_errors_that_are_not_failures_of_the_tier_open_no_breaker(
    gateway: Gateway, fake: FakeInference, code: Code
) -> None:
    """Ten in a row, where five failures would open it."""
    fake.answers["demo"] = Answer(refuse=code, retry_after=0.01)
    for _ in range(10):
        await gateway.chat("demo")
    assert (await gateway.breaker("local/demo"))["state"] == "closed"
