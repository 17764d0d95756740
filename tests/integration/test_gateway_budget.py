"""One budget of time and attempts: timeouts of clients, retries, spent attempts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.protocol import H_DEADLINE
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import Gateway

pytestmark = pytest.mark.timeout(60)

CONFIG = """
routes:
  demo: {chain: [local/demo, local/demo-mini]}
  "*": {chain: ["local/*"]}
attempts: {max: 1}
"""


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, CONFIG) as gateway:
        yield gateway


async def test_whole_answer_ends_at_the_clients_timeout(gateway: Gateway, fake: FakeInference) -> None:
    """The answer made progress, so this is no failure. A stream is not cut: its client has the first tokens."""
    fake.answers["demo"] = Answer(words=("word ",) * 60, pause=0.02)
    headers = {"x-stainless-read-timeout": "0.5"}
    late = await gateway.chat(headers=headers)
    assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")
    assert "the client's own timeout" in late.json()["error"]["message"]
    await fake.seen[0].closed.wait()
    streamed = await gateway.chat(headers=headers, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert (await gateway.breaker("local/demo"))["failures"] == 0


@pytest.mark.parametrize(
    ("headers", "is_bounded"),
    [
        ({"x-stainless-timeout": "1"}, True),
        ({"x-stainless-timeout": "0"}, False),
        ({"x-stainless-timeout": "NOT_GIVEN"}, False),
        ({"x-stainless-timeout": "1", "x-stainless-read-timeout": "600"}, False),
    ],
)
async def test_timeout_header_is_used_without_a_read_timeout(
    gateway: Gateway, fake: FakeInference, headers: dict[str, str], is_bounded: bool
) -> None:
    """JavaScript clients send whole seconds. A read timeout takes precedence."""
    assert (await gateway.chat(headers=headers)).status_code == 200
    assert (int(fake.seen[0].headers[H_DEADLINE]) < 1000) is is_bounded


async def test_request_without_attempts_left_is_answered_with_x_should_retry_false(
    gateway: Gateway, fake: FakeInference
) -> None:
    fake.answers["demo"] = Answer(status=500)
    refused = await gateway.chat()
    assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "false")
    assert "attempts were spent" in refused.json()["error"]["message"]
    assert fake.seen_for("demo-mini") == []


@pytest.mark.parametrize(("header", "retries"), [("1", 1), ("0", 0), ("-1", 0), ("many", 0), ("9999999", 0)])
async def test_retries_are_recorded_and_answered_with_x_should_retry_false(
    gateway: Gateway, fake: FakeInference, header: str, retries: int
) -> None:
    """Each retry costs every tier an attempt."""
    fake.answers["demo-mini"] = Answer(status=500)
    refused = await gateway.chat("demo-mini", headers={"x-stainless-retry-count": header})
    assert (refused.status_code, "x-should-retry" in refused.headers) == (503, retries > 0)
    record = (await gateway.admin("GET", f"/admin/requests/{refused.headers['x-request-id']}")).json()
    assert record["retries"] == retries
