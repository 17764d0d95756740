"""A model file was replaced at its path and the service went on with the estimate of the old file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state import StateDir
from inference.authority.placement.plan import Refusal
from inference.devices.host import CpuProbe
from inference.environment_settings import InferenceSettings
from inference.errors import ModelFailed
from inference.estimate import estimator
from inference.estimate.estimator import Estimator
from inference.file_stamp import NO_FILE, changed, fingerprint, parts_of
from inference.protocol import ModelState
from inference.settings import ModelEntry, _spec
from tests.rigs.authority_rig import FakeEstimator, Start, empty, services

S = ModelState


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


def replace_file(directory: Path, content: bytes = b"GGUF, another") -> Path:
    fresh = directory / "fresh"
    fresh.write_bytes(content)
    return fresh.replace(directory / "x.gguf")


@pytest.mark.parametrize("behavior", [{"load_seconds": 0.5}, {"load_seconds": 0.5, "fail": "oom_load"}])
async def test_a_file_replaced_during_its_load_fails_that_load_only(
    start: Start, tmp_path: Path, behavior: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the file, nothing is learned of its memory, and the next load begins without a pause."""
    service = await start({"a": {}}, {"a": behavior})
    authority, model = service.authority, service.authority.resolve("a")
    loading = asyncio.create_task(authority.load(model))
    await model.becomes(S.LOADING)
    path = replace_file(tmp_path)
    with pytest.raises(ModelFailed, match=f"{path} changed while the model was loaded") as caught:
        await loading
    assert caught.value.retry_after == 1.0
    assert model.backoff.failures == 0
    assert model.shortages == ()
    assert empty(service)
    monkeypatch.setenv("FAKE_WORKER", "{}")
    await authority.load(model)
    assert model.state is S.READY


async def test_a_model_that_did_not_fit_is_measured_again_once_its_file_changes(start: Start, tmp_path: Path) -> None:
    """Nobody asks for it while the service says that it cannot fit, so the service looks at the file by itself."""
    fake = FakeEstimator()
    fake.sizes["a"] = 500
    service = await start({"a": {}}, estimator=fake, MEMORY_LIMIT_GB="0.25")
    authority, model = service.authority, service.authority.resolve("a")
    await authority.reached(lambda: bool(model.estimates))
    assert isinstance(authority.prospect("a"), Refusal)
    fake.sizes["a"] = 100
    replace_file(tmp_path)
    await authority.reached(lambda: authority.prospect(model.id) is True)


async def test_a_failed_model_is_tried_at_once_when_its_file_changes(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backoff belonged to the old file."""
    service = await start({"a": {}}, {"a": {"fail": "startup"}})
    authority, model = service.authority, service.authority.resolve("a")
    for _ in range(6):
        with pytest.raises(ModelFailed):
            await authority.load(model)
        await service.clock.advance(model.retry_at - authority.now)
    with pytest.raises(ModelFailed):
        await authority.load(model)
    assert model.backoff.failures == 7
    monkeypatch.setenv("FAKE_WORKER", "{}")
    replace_file(tmp_path)
    await authority.reached(lambda: model.backoff.failures == 0)
    await authority.load(model)


async def test_a_file_that_changes_while_it_is_measured_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured of the old file is neither used nor remembered for the new one."""
    found, spec = _helper(tmp_path, monkeypatch, changes=1)
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})
    own = Estimator(state, seconds=5)
    estimate = await own.get(spec, *CpuProbe().readings())
    assert len(found) == 2
    assert estimate.parts["cpu"].weights_bytes == 2
    assert (await own.get(spec, *CpuProbe().readings())).parts == estimate.parts
    assert len(found) == 2


async def test_a_file_that_never_stops_changing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to do; there is no endless measuring."""
    found, spec = _helper(tmp_path, monkeypatch, changes=99)
    own = Estimator(StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")}), seconds=5)
    with pytest.raises(ModelFailed, match="keeps changing; try again when it is written"):
        await own.get(spec, *CpuProbe().readings())
    assert len(found) == 3


def _helper(directory: Path, monkeypatch: pytest.MonkeyPatch, *, changes: int) -> tuple[list[Path], Any]:
    """Estimates of so many bytes of weights as there were measurements; the file changes during the first `changes`."""
    path = directory / "x.gguf"
    path.write_bytes(b"GGUF")
    found: list[Path] = []

    async def answer(_job: str, _parameters: Any, **_more: Any) -> dict[str, Any]:
        found.append(path)
        if len(found) <= changes:
            replace_file(directory, b"GGUF" * len(found))
        facts = {"context_trained": 1, "architecture": "", "quantization": ""}
        part = {"weights_bytes": len(found), "kv_bytes": 0, "compute_bytes": 0}
        said: dict[str, Any] = {"parts": {"cpu": part}, "source": "llama.cpp", "note": "", "output_bytes": 0}
        return said | {"projector_bytes": {}, "layers": [], "facts": facts, "capabilities": []}

    monkeypatch.setattr(estimator, "run_helper", answer)
    return found, _spec("a", ModelEntry(path=str(path)), InferenceSettings())


def test_a_fingerprint_covers_every_file(tmp_path: Path) -> None:
    """The parts of a split file, and the others that are named; it changes with each of them."""
    first = tmp_path / "m-00001-of-00003.gguf"
    for path in (*parts_of(first)[:2], tmp_path / "eye.gguf"):
        path.write_bytes(b"1")
    before = fingerprint(first, [str(tmp_path / "eye.gguf")])
    assert [Path(path).name for path, _ in before] == [
        "m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf", "eye.gguf",
    ]  # fmt: skip
    assert [seen == NO_FILE for _, seen in before] == [False, False, True, False]
    for path in (parts_of(first)[2], parts_of(first)[1], tmp_path / "eye.gguf"):
        path.write_bytes(b"22")
        os.utime(path, ns=(1, 1))
        now = fingerprint(first, [str(tmp_path / "eye.gguf")])
        assert changed(before, now) == str(path)
        before = now
    assert changed(before, before) == ""


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00001.gguf", "m-00001-of-99999.gguf", "m-1-of-2.gguf"])
def test_other_names_are_one_file(name: str) -> None:
    """Only llama.cpp's own pattern names parts, and only as many as can be."""
    assert parts_of(Path("/models") / name) == (Path("/models") / name,)
