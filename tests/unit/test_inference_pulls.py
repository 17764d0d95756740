"""Downloads of the inference service: what begins, what clients see of them, and how they end."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inference.api import pull_routes
from inference.api.pull_routes import Pulls
from inference.errors import InvalidRequestError, ShuttingDown

SOURCE = "hf:org/plain:Q8_0"


def pulls(directory: Path, program: str) -> Pulls:
    """Downloads by a Python program, which gets the source and the directory; a model has the file x.gguf."""
    model = SimpleNamespace(id="x", spec=SimpleNamespace(path=directory / "x.gguf"))
    state = SimpleNamespace(settings=SimpleNamespace(models_dir=directory), models={"x": model})
    head = "import json, sys, time\ndef tell(event, **data): print(json.dumps(data | {'event': event}), flush=True)\n"
    command = (sys.executable, "-S", "-c", head + program)
    return Pulls(SimpleNamespace(state=state), command)  # type: ignore[arg-type]


async def events(frames: AsyncIterator[bytes]) -> list[tuple[str, Any]]:
    found = []
    async with asyncio.timeout(20):
        async for frame in frames:
            kind, _, data = frame.decode().strip().partition("\n")
            found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: ") or "null")))
    return found


async def test_events_of_the_process_are_passed_on_and_the_model_is_named_after_the_reload(tmp_path: Path) -> None:
    program = "tell('message', text=sys.argv[1]); tell('done', path=sys.argv[2] + '/x.gguf', bytes=3); time.sleep(30)"
    under_test, reloads = pulls(tmp_path, program), []
    under_test.reload = lambda: reloads.append(1)
    assert await events(under_test.stream(SOURCE)) == [
        ("message", {"text": SOURCE}),
        ("done", {"path": str(tmp_path / "x.gguf"), "bytes": 3, "model": "x"}),
    ]
    assert reloads == [1]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("tell('error', message='no space')", "no space"),
        ("sys.exit(3)", f"{SOURCE}: the process ended with status 3; see the log"),
    ],
)
async def test_failed_download_ends_with_the_reason(tmp_path: Path, program: str, message: str) -> None:
    under_test = pulls(tmp_path, program)
    for _ in range(2):  # the second may begin: the first has ended
        assert await events(under_test.stream(SOURCE)) == [("error", {"message": message})]


async def test_silent_process_is_ended_and_comments_come_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_routes, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(pull_routes, "SILENCE_SECONDS", 0.05)
    found = await events(pulls(tmp_path, "time.sleep(30)").stream(SOURCE))
    assert [kind for kind, _ in found[:-1]] == [": headgate downloading"] * (len(found) - 1) != []
    assert "no progress for 0.05 s" in found[-1][1]["message"]


async def test_one_download_of_a_source_at_a_time_and_none_after_the_end_of_the_service(tmp_path: Path) -> None:
    under_test = pulls(tmp_path, "tell('message', text='begun'); time.sleep(30)")
    later = under_test.stream(SOURCE)
    first = under_test.stream(SOURCE)
    assert b"begun" in await anext(first)
    with pytest.raises(InvalidRequestError, match=f"{SOURCE} is being downloaded already"):
        under_test.stream(SOURCE)
    assert "is being downloaded already" in (await events(later))[0][1]["message"]
    other = under_test.stream("hf:org/other:Q8_0")
    assert b"begun" in await anext(other)
    await other.aclose()  # type: ignore[attr-defined]
    under_test.close()
    assert "shutting down" in (await events(first))[0][1]["message"]
    with pytest.raises(ShuttingDown):
        under_test.stream(SOURCE)


async def test_source_must_be_one_of_a_hub(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="write hf:ORGANIZATION/REPOSITORY:QUANTIZATION"):
        pulls(tmp_path, "").stream("/etc/passwd")


async def test_program_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    under_test = pulls(tmp_path, "")
    under_test._command = (str(tmp_path / "none"),)
    assert f"the process that downloads {SOURCE} failed" in (await events(under_test.stream(SOURCE)))[0][1]["message"]
