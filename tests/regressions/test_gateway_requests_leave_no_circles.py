"""Every request left objects that pointed to one another, and the collector stopped all streams to find them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from gateway.http.http_exchange import Exchange
from gateway.routing.attempt import Attempt
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import Gateway


@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_request_held_is_freed_with_its_last_reference(tmp_path: Path, stream: bool) -> None:
    async with FakeInference() as fake, Gateway(tmp_path, fake.url) as gateway:
        for _ in range(3):
            answer = await gateway.chat(stream=stream)
            assert answer.status_code == 200
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await gateway.chat(stream=stream)
            left = [type(held).__name__ for held in gc.get_objects() if isinstance(held, Attempt | Exchange)]
        finally:
            gc.enable()
    assert left in ([], ["Exchange"])  # an open connection remembers its last request
