"""A short body that built on an earlier answer brought back as much as the store held: no bound on bodies saw it."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway

pytestmark = pytest.mark.timeout(60)


async def test_a_conversation_grows_no_longer_than_a_body_may_be(tmp_path: Path) -> None:
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url, CONFIG + "max_body: 3KB\n") as gateway:

        async def ask(earlier: str | None) -> httpx2.Response:
            body = {"model": "demo", "input": "mill " * 200, "previous_response_id": earlier}
            return await gateway.client.post("/v1/responses", json=body)

        first = await ask(None)
        second = await ask(first.json()["id"])
        assert (first.status_code, second.status_code) == (200, 200)
        third = await ask(second.json()["id"])
    error = third.json()["error"]
    assert (third.status_code, error["code"], error["param"]) == (413, "body_too_large", "previous_response_id")
    assert "begin a new one" in error["message"]
    assert len(fake.seen) == 2
