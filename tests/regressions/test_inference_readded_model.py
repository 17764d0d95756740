"""A model removed by one reload and added again by the next while it drained disappeared for good."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference import settings
from inference.errors import ModelNotFound
from inference.protocol import ModelState
from tests.rigs.authority_rig import rewrite, services


async def test_a_model_added_again_while_it_drains_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}, "b": {}})
        authority, model = service.authority, service.authority.resolve("a")
        environ = {"INFERENCE_FORCE_CPU_MODE": "true"}

        def reload(*names: str) -> list[str]:
            rewrite(tmp_path, {name: {} for name in names})
            return authority.reload(settings.load(tmp_path, environ, {}))

        lease = await authority.ask(model).wait(10)
        assert lease is not None
        assert reload("b") == ["model a removed"]
        with pytest.raises(ModelNotFound):
            authority.resolve("a")
        assert model.state is ModelState.DRAINING
        assert reload("a", "b") == ["model a added again"]
        waiting = authority.ask(authority.resolve("a"))
        lease.release(completed=True)
        assert await waiting.wait(10) is not None
        waiting.close()
        assert (authority.resolve("a").loads, list(authority.models)) == (2, ["a", "b"])
        reload("b")
        await authority.reached(lambda: list(authority.models) == ["b"])
