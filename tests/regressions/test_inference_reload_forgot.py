"""A reload forgot that listeners knew a removed model, and the cap that stands in for devices of unknown size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inference import settings
from inference.devices.device import Reading
from tests.rigs.authority_rig import FakeAccelerator, rewrite, services


class Mute(FakeAccelerator):
    """A device that does not tell its size."""

    def readings(self) -> tuple[Reading, ...]:
        return (Reading("cpu", "cpu", "mute", 0, 0, 0),)


async def test_a_removed_cold_model_is_told_to_listeners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with services(tmp_path, monkeypatch) as start:
        authority = (await start({"a": {}, "b": {}})).authority
        listening = authority.bus.listen()
        assert b"snapshot" in await anext(listening)
        while b'"b"' not in (frame := await anext(listening)):
            assert b"event: model" in frame
        rewrite(tmp_path, {"a": {}})
        authority.reload(settings.load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true"}, {}))
        while b"event: removed" not in (frame := await anext(listening)):
            assert b"event: model" in frame
        data = frame.decode().partition("data: ")[2].splitlines()[0]
        assert json.loads(data)["id"] == "b"
        await listening.aclose()


async def test_the_cap_for_devices_of_unknown_size_outlives_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with services(tmp_path, monkeypatch) as start:
        authority = (await start({"a": {}}, probes=[Mute()])).authority
        for environ, limit in (({}, 16 * 2**30), ({"INFERENCE_MEMORY_LIMIT_GB": "1"}, 2**30), ({}, 16 * 2**30)):
            authority.reload(settings.load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true", **environ}, {}))
            assert authority.ledger.limit_bytes == limit
