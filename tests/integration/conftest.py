"""The inference service that tests of the gateway put behind it; a module may have one of its own by the same name."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.rigs.fake_inference import FakeInference


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    """One that asks for a token, and has `demo` and `demo-mini`."""
    async with FakeInference("token") as fake:
        yield fake
