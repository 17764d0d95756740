"""A chunk that a writer could not read cut the connection in the middle: nobody was told that the answer broke off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import MESSAGES, Gateway

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("path", "ending"), [("/v1/messages", "event: error\n"), ("/v1/responses", "event: response.failed\n")]
)
async def test_it_ends_in_an_error_that_clients_can_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str, ending: str
) -> None:
    body = {"model": "demo", "stream": True, "max_tokens": 9, "messages": MESSAGES}
    if path == "/v1/responses":
        body = {"model": "demo", "stream": True, "input": "Hello!"}
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        fake.answers["demo"] = Answer(garbage=b'data: {"choices":[{"delta":{"content":"a}]}\n\n')
        answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 200
    assert ending in answer.text and "internal error of the gateway" in answer.text
    assert "defect in the gateway or its adapter" in caplog.text
