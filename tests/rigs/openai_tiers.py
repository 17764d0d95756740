"""A gateway with a fake local tier and fake clouds, and OpenAI's client for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from inference.protocol import ModelState, ModelStatus
from tests.rigs.fake_inference import FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import KEY, Gateway

_CONFIG = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1, flavor: openai}}
  anthropic: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
routes:
  gpt: {{chain: [openai/gpt]}}
  gpt-5: {{chain: [openai/gpt-5]}}
  claude: {{chain: [anthropic/claude-sonnet-4-5]}}
  cut: {{chain: [openai/fault-cut=2]}}
  busy: {{chain: [openai/fault-429=7]}}
  vectors: {{chain: [openai/embed]}}
  "*": {{chain: ["local/*"]}}
breaker: {{failures: 1000, min_requests: 1000}}
"""


@dataclass(frozen=True)
class Tiers:
    """`local` answers `demo` and others, `cloud` answers `gpt`, `gpt-5` and `claude`; `vectors` embeds; `cut` breaks
    off, `busy` answers 429.
    """

    local: FakeInference
    cloud: FakeProvider
    gateway: Gateway
    client: openai.AsyncOpenAI

    def forget(self) -> None:
        """Every tier has its default behaviour again."""
        self.local.answers.clear()
        self.local.queue.clear()
        self.cloud.answers.clear()

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for a separate client."""
        return {"base_url": f"{self.gateway.url}/v1", "api_key": KEY, "max_retries": 0, "timeout": 20}


@contextlib.asynccontextmanager
async def tiers(root: Path) -> AsyncIterator[Tiers]:
    """All of them, running."""
    async with FakeInference("token") as local, FakeProvider() as cloud:
        can = ("chat", "completions", "embeddings", "vision")
        for name in ("demo", "crowded", "busier", "hurried"):
            local.models[name] = ModelStatus(id=name, state=ModelState.READY, context_length=4096, capabilities=can)
        async with Gateway(root, local.url, _CONFIG.format(url=cloud.url), {"CLOUD": CLOUD_KEY}) as gateway:
            options: dict[str, Any] = {"base_url": f"{gateway.url}/v1", "max_retries": 0, "timeout": 20}
            async with openai.AsyncOpenAI(api_key=KEY, **options) as client:
                yield Tiers(local, cloud, gateway, client)
