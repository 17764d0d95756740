"""Fixtures of the promise tests: a gateway and an inference service in the test process, over fakes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import Gateway
from tests.rigs.service_fixtures import fake, start

__all__ = ["fake", "start"]

CONFIG = """
routes:
  demo: {chain: [local/demo], resume: "off"}
  both: {chain: [local/demo, local/demo-mini], resume: "off"}
  resumed: {chain: [local/demo, local/demo-mini]}
"""


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    """A gateway with a route with one tier, one with two, and one that resumes."""
    async with Gateway(tmp_path, fake.url, CONFIG) as gateway:
        yield gateway
