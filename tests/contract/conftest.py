"""What several contracts are held against; judges nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.devices.nvml_reader import NvmlReader
from tests.rigs.nvml_stub import NvmlStub
from tests.rigs.nvml_stub.two_cards import two_cards


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvmlStub:
    """The NVML of a machine with two cards, which this process and its children would load."""
    stub = two_cards(tmp_path)
    for name, value in stub.env.items():
        monkeypatch.setenv(name, value)
    return stub


@pytest.fixture
async def reader(stub: NvmlStub) -> AsyncIterator[NvmlReader]:
    """Our child that reads it."""
    reader = NvmlReader()
    yield reader
    await reader.close()
