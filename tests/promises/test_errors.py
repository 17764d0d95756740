"""Promises of the contract about every error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.errors import RefusedError
from inference.errors import InferenceError, MemoryLimitExceededError, Shortage
from inference.protocol import CODES, Code, error_body
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import MESSAGES, Gateway

pytestmark = pytest.mark.timeout(30)

STATUS = {
    "model_not_found": 404, "context_length_exceeded": 400, "memory_limit_exceeded": 503, "queue_full": 429,
    "deadline_exceeded": 504, "model_loading": 503, "device_lost": 503, "model_failed": 503, "poison_request": 422,
    "no_tier_available": 503,
}  # fmt: skip


@pytest.mark.parametrize(("code", "status"), STATUS.items())
def test_every_code_has_the_status_of_the_contract(code: str, status: int) -> None:
    """In both services."""
    assert CODES[Code(code)].status == status
    assert InferenceError("x", code=Code(code)).status == status
    assert RefusedError(Code(code), "x").status == status


@pytest.mark.parametrize("code", Code)
def test_every_error_has_message_type_param_and_code(code: Code) -> None:
    """And nothing else but Headgate's own details."""
    for body in (
        error_body(code, "why"),
        InferenceError("why", code=code, param="model", details={"n": 1}).body(),
        RefusedError(code, "why", param="model", details={"n": 1}).body(),
    ):
        assert list(body) == ["error"]
        assert set(body["error"]) - {"headgate"} == {"message", "type", "param", "code"}
        assert (body["error"]["message"], body["error"]["code"]) == ("why", code)


def test_memory_refusal_has_its_numbers_in_the_message_and_in_the_details() -> None:
    """The device, the missing bytes, and a setting that fits."""
    shortage = Shortage("gpu-0", 300 * 2**20, 100 * 2**20, "the device")
    error = MemoryLimitExceededError("big", [shortage], fix={"context_length": 512})
    assert "gpu-0 needs 300.0 MiB and has 100.0 MiB (200.0 MiB short" in error.message
    assert "it would fit with context_length: 512" in error.message
    details = error.body()["error"]["headgate"]
    numbers = {name: details["devices"][0][f"{name}_bytes"] // 2**20 for name in ("need", "free", "short")}
    assert numbers == {"need": 300, "free": 100, "short": 200}
    assert details["fix"] == {"context_length": 512}


@pytest.mark.parametrize(
    ("code", "says_false"),
    [(Code.CONTEXT_LENGTH_EXCEEDED, True), (Code.POISON_REQUEST, True), (Code.DEVICE_LOST, False)],
)
async def test_should_retry_is_false_if_a_retry_cannot_succeed(
    gateway: Gateway, fake: FakeInference, code: Code, *, says_false: bool
) -> None:
    """Clients follow this header, whatever the status is."""
    fake.answers["demo"] = Answer(refuse=code)
    answer = await gateway.chat("demo")
    assert answer.status_code >= 400
    assert (answer.headers.get("x-should-retry") == "false") == says_false


async def test_retry_after_of_the_tier_is_passed_on(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(refuse=Code.MODEL_FAILED, retry_after=17)
    assert 16 <= float((await gateway.chat("demo")).headers["retry-after"]) <= 17


async def test_invalid_key_of_a_provider_is_not_a_401_of_the_client(
    tmp_path: Path, fake: FakeInference, caplog: pytest.LogCaptureFixture
) -> None:
    """It is an error of the configuration: it is logged, and the next tier answers, or the request is a 503."""
    async with FakeProvider() as cloud:
        config = (
            f'providers:\n  wrong: {{kind: openai, api_key: not-the-key, base_url: "{cloud.url}/v1"}}\n'
            f'  right: {{kind: openai, api_key: "{CLOUD_KEY}", base_url: "{cloud.url}/v1"}}\n'
            "routes:\n  next: {chain: [wrong/gpt, right/gpt]}\n  alone: {chain: [wrong/gpt]}\n"
        )
        async with Gateway(tmp_path, fake.url, config) as gateway:
            answer = await gateway.chat("next")
            assert (answer.status_code, answer.headers["x-headgate-model"]) == (200, "right/gpt")
            assert answer.headers["x-headgate-reason"] == "misconfigured"
            refused = await gateway.chat("alone")
    assert refused.status_code == 503
    assert "check the key and the settings of provider wrong" in caplog.text
    assert "not-the-key" not in refused.text + caplog.text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"model": 5}', b'{"model": "demo", "messages": 7}', b'{"model": "demo"}']
)
@pytest.mark.parametrize("path", ["chat/completions", "completions", "embeddings", "messages", "responses", "rerank"])
async def test_invalid_input_is_a_400(gateway: Gateway, path: str, body: bytes) -> None:
    """With a message, in the envelope of the API."""
    answer = await gateway.client.post(f"/v1/{path}", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert "detail" not in answer.json()


async def test_messages_has_anthropics_envelope(gateway: Gateway, fake: FakeInference) -> None:
    """For a refusal of the gateway and of a tier."""
    fake.answers["demo"] = Answer(refuse=Code.DEVICE_LOST)
    for body in ({"model": "demo"}, {"model": "demo", "messages": MESSAGES, "max_tokens": 5}):
        answer = await gateway.client.post("/v1/messages", content=json.dumps(body))
        assert answer.status_code >= 400
        assert answer.json()["type"] == "error"
        assert {"type", "message"} <= set(answer.json()["error"])
