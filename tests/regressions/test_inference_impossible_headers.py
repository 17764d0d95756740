"""Impossible numbers in a model's header ended a worker by SIGABRT, or were loaded; they are refused before that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fuzz.test_damaged_headers import CORPUS
from tests.fuzz.test_damaged_models import Fuzzed
from tests.rigs import tiny_gguf
from tests.rigs.processes import wait_until

NAMES = ("layers-none", "layers-too-many", "context-absurd", "experts-unused", "epsilon-nan", "rope-scaling-unknown")


@pytest.fixture
async def fuzzed(tmp_path: Path) -> AsyncIterator[Fuzzed]:
    found = Fuzzed(tmp_path, [item for item in CORPUS if item.name in NAMES])
    await found.service.authority.start()
    yield found
    async with asyncio.timeout(60):
        await found.service.authority.close()


@pytest.mark.timeout(120)
async def test_an_impossible_header_is_refused_before_a_worker_is_started(fuzzed: Fuzzed) -> None:
    """The answer names the file and the field; no process has died of it."""
    for name in NAMES:
        answer = await fuzzed.ask(f"/models/{name}/load")
        assert answer.status == 503
        message = answer.body["error"]["message"]
        assert f"{fuzzed.files / name}.gguf is not a usable GGUF file: llama." in message
        assert fuzzed.service.authority.crashes.of(name) == []
    assert (await fuzzed.ask("/models/good/load")).status == 200


async def test_a_context_beyond_the_trained_one_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model is served; the log names both lengths."""
    found = Fuzzed(tmp_path, [])
    short = tiny_gguf.generative(context=128).read_bytes()
    (found.files / "good.gguf").write_bytes(short)
    await found.service.authority.start()
    try:
        assert (await found.ask("/models/good/load")).status == 200
    finally:
        async with asyncio.timeout(60):
            await found.service.authority.close()
    wait_until("the warning is logged", lambda: "context_length 256 is more than the 128 tokens" in caplog.text)
