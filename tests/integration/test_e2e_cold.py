"""A model that loads for 40 s answers its first request without an open breaker."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest

from inference.demo import bundled_path
from tests.rigs.slowdisk import slow_disk_env
from tests.rigs.stack import LOCAL_ROUTES, MODELS, Stack

LOAD_SECONDS = 40


@pytest.mark.slow
def test_model_that_loads_for_forty_seconds_answers_its_first_request(tmp_path: Path) -> None:
    rate = 2 * bundled_path("demo").stat().st_size // LOAD_SECONDS  # read once for its checksum, once for its weights
    stack = Stack(
        tmp_path,
        models=MODELS,
        gateway=LOCAL_ROUTES.replace("[local/demo, local/demo-mini]", "[local/demo]"),
        inference_env=slow_disk_env(tmp_path, rate),
    ).start()
    try:
        began = time.monotonic()
        with openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0, timeout=100) as client:
            raw = client.chat.completions.with_raw_response.create(
                model="demo", messages=[{"role": "user", "content": "Hello!"}], temperature=0
            )
        took = time.monotonic() - began
        assert took >= LOAD_SECONDS * 0.8, "the disk was not slow, so the test proves nothing"
        assert raw.parse().choices[0].message.content
        assert raw.headers["x-headgate-tier"] == "local"
        assert raw.headers["x-headgate-attempts"] == "1"
        assert all(entry["state"] == "closed" and entry["failures"] == 0 for entry in stack.breakers())
    finally:
        stack.kill()
