"""An answer cut off behind its first line break was gone on with by a cloud that was asked about an answer above."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import KEY, FakeProvider
from tests.rigs.gateway_rig import Gateway

CONFIG = """
providers: {{cloud: {{kind: {kind}, api_key: {key}, base_url: "{url}"}}}}
routes: {{demo: {{chain: [local/demo, cloud/m]}}}}
"""


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_the_cloud_is_asked_what_the_caller_asked(tmp_path: Path, kind: str) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud:
        url = cloud.openai_url if kind == "openai" else cloud.url
        async with Gateway(tmp_path, fake.url, CONFIG.format(kind=kind, key=KEY, url=url)) as gateway:
            fake.queue["demo"] = [Answer(words=("\n\n",), cut=True), Answer(status=500)]
            answer = await gateway.chat(stream=True)
    (message,) = (await cloud.record()).body["messages"]
    assert message["role"] == "user"
    assert "cut off" not in str(message)
    assert "headgate resumed on cloud/m after 2 characters" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
