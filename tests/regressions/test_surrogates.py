"""Half of a surrogate pair, which a JSON escape can express and UTF-8 cannot, in model names and path parameters."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.api.reruns import key_of
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import Start
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import Gateway

pytestmark = pytest.mark.timeout(60)

NAMES = (rb'"\ud800"', rb'"local/\ud800"', rb'"demo\udfff"', b'"\xed\xa0\x80"')
CHAT = b'"messages": [{"role": "user", "content": "Hi"}]'
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": b'"prompt": "Hi"',
    "/v1/embeddings": b'"input": "Hi"',
    "/v1/rerank": b'"query": "a", "documents": ["b"]',
    "/v1/responses": b'"input": "Hi"',
    "/v1/responses/input_tokens": b'"input": "Hi"',
    "/v1/messages": b'"max_tokens": 5, ' + CHAT,
    "/v1/messages/count_tokens": CHAT,
}
HALF_IN_PATH = "%ED%A0%80"
"""The bytes that UTF-8 would use for U+D800, which it does not allow."""
PATHS = (
    "GET /v1/models/{}",
    "GET /v1/responses/{}",
    "DELETE /v1/responses/{}",
    "GET /v1/responses/{}/input_items",
    "GET /admin/requests/{}",
    "POST /admin/breakers/{}/reset",
    "POST /v1/{}",
)


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway


def _no_errors(caplog: pytest.LogCaptureFixture) -> bool:
    return not any(record.exc_info or record.levelno >= logging.ERROR for record in caplog.records)


@pytest.mark.parametrize("path", BODIES)
async def test_model_with_half_a_surrogate_pair_is_invalid_json(
    gateway: Gateway, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in NAMES:
        answer = await gateway.client.post(path, content=b'{"model": ' + name + b", " + BODIES[path] + b"}")
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert "not valid JSON" in error["message"]
        if path.startswith("/v1/messages"):
            assert answer.json()["type"] == "error"
            assert error["details"] == {"error_code": "invalid_json"}
        else:
            assert (error["code"], error["param"]) == ("invalid_json", None)
    assert _no_errors(caplog)


@pytest.mark.parametrize("path", PATHS)
async def test_path_with_half_a_surrogate_pair_is_not_found(
    gateway: Gateway, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    method, target = path.split()
    answer = await gateway.admin(method, target.format(HALF_IN_PATH))
    if answer.status_code == 403:  # the admin key has no use scope
        answer = await gateway.client.request(method, target.format(HALF_IN_PATH))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] in ("not_found", "model_not_found")
    assert "\ufffd" in answer.json()["error"]["message"]
    assert _no_errors(caplog)


async def test_inference_service_refuses_half_a_surrogate_pair(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    service = await start({"a": {}})
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/tokenize"):
        for name in NAMES:
            answer = await ask(service.app, "POST", path, raw=b'{"model": ' + name + b", " + CHAT + b"}")
            assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_json")
    for method, path in (("GET", "/v1/models/{}"), ("POST", "/models/{}/load"), ("GET", "/models/{}/crashes")):
        answer = await ask(service.app, method, path.format(HALF_IN_PATH), raw=b"{}")
        assert (answer.status, answer.body["error"]["code"]) == (404, "model_not_found")
    assert _no_errors(caplog)


def test_body_that_is_not_utf8_has_a_key_for_the_quarantine() -> None:
    """The worker rejects such a body; the service has not decoded its messages."""
    body = b'{"model": "a", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}'
    assert key_of("/v1/chat/completions", body) == key_of("/v1/chat/completions", body)
    assert key_of("/v1/chat/completions", body) != key_of("/v1/chat/completions", body + b" ")
