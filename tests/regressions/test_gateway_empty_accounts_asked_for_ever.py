"""A cloud whose account was empty was asked by every request, with one line for the operator each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.fake_inference import FakeInference
from tests.rigs.fake_provider import KEY, FakeProvider, Fault
from tests.rigs.gateway_rig import Gateway

CONFIG = """
providers: {{cloud: {{kind: {kind}, api_key: {key}, base_url: "{url}"}}}}
routes: {{demo: {{chain: [cloud/m, local/demo]}}}}
"""


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("openai", Fault("no_quota", count=None)), ("anthropic", Fault("status", status=402, count=None))],
    ids=["openai", "anthropic"],
)
async def test_it_is_asked_once_and_the_operator_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, fault: Fault
) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud:
        url = cloud.openai_url if kind == "openai" else cloud.url
        async with Gateway(tmp_path, fake.url, CONFIG.format(kind=kind, key=KEY, url=url)) as gateway:
            cloud.faults.add(fault)
            answers = [await gateway.chat() for _ in range(4)]
            breaker = await gateway.breaker("cloud/m")
    assert [answer.headers["x-headgate-model"] for answer in answers] == ["local/demo"] * 4
    assert [answer.headers["x-headgate-reason"] for answer in answers] == ["status_402"] + ["breaker_open"] * 3
    assert (breaker["state"], breaker["retry_after"]) == ("open", pytest.approx(30, abs=5))
    (told,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "check the key and the settings of provider cloud" in told.getMessage()
