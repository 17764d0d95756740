"""Shared fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.devices.nvml_reader import NvmlReader
from tests.rigs.nvml_stub import NvmlStub
from tests.rigs.nvml_stub.two_cards import two_cards
from tests.rigs.service_fixtures import fake, server, start

__all__ = ["fake", "server", "start"]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlStub:
    """The NVML of a machine with two cards, for this process and its children."""
    stub = two_cards(tmp_path)
    for name, value in stub.env.items():
        monkeypatch.setenv(name, value)
    return stub


@pytest.fixture
async def reader(stub: NvmlStub) -> AsyncIterator[NvmlReader]:
    """The child process that reads it."""
    reader = NvmlReader()
    yield reader
    await reader.close()
