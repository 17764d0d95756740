"""The fake inference service behind the gateway; a module may define its own `fake`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.rigs.fake_inference import FakeInference


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    """Requires a token and has the models `demo` and `demo-mini`."""
    async with FakeInference("token") as fake:
        yield fake
