"""Who held on to a model across its removal waited for one that nobody looks at any more until the deadline ended it.

Requests whose worker left before it took them are asked again, and a restart asks again after it unloaded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.errors import ModelNotFound
from inference.settings import load
from tests.rigs.authority_rig import Start, rewrite, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_asking_for_a_removed_model_is_told_at_once(start: Start, tmp_path: Path) -> None:
    service = await start({"a": {}, "b": {}})
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)
    rewrite(tmp_path, {"b": {}})
    authority.reload(load(tmp_path, {"INFERENCE_FORCE_CPU_MODE": "true"}, {}))
    for _ in ("while it leaves", "when it is gone"):
        with pytest.raises(ModelNotFound, match="configured models: b"):
            authority.ask(model)
        await authority.reached(lambda: model.running is None)
