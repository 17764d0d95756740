"""A question for tokens or a refused request counted as an answer: a model that computed nothing any more seemed well.

So every request that it died under was convicted, however many, and its rests began anew.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.authority.events import CrashReported
from inference.authority.quarantine import MOST_IN_A_ROW, Crash
from inference.protocol import ExitCause
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import services

CHAT = "/v1/chat/completions"
ROW = tuple(f"{number:016x}" for number in range(MOST_IN_A_ROW))
ALONE = Crash(ExitCause.ASSERT, "it aborted", alone=True)


async def test_only_what_a_model_computed_speaks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what its vocabulary knows nor what it refuses."""
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}})
        model = service.authority.resolve("a")
        await service.authority.load(model)
        for key in ROW:
            for _ in range(2):
                service.authority.dispatch(CrashReported("a", key, ALONE))
        body = {"model": "a", "messages": [{"role": "user", "content": "Hello!"}]}
        for path, more, status in (("/tokenize", {}, 200), (CHAT, {"max_tokens": -1}, 400)):
            assert (await ask(service.app, "POST", path, {**body, **more})).status == status
            assert model.docket.row == ROW
            assert not model.in_flight
        assert (await ask(service.app, "POST", CHAT, body)).status == 200
        assert model.docket.row == ()
