"""Estimates of model files that are damaged, replaced, impossible or not regular files."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state_directory import StateDir
from inference.devices.host import CpuProbe
from inference.environment_settings import InferenceSettings
from inference.errors import ModelFailed
from inference.estimate import estimate_job, estimator
from inference.estimate.estimator import Estimator
from inference.estimate.gguf import BadGgufError, read_facts
from inference.file_stamp import NO_FILE, changed, fingerprint, parts_of
from inference.protocol import ModelState
from inference.settings import ModelEntry, _spec, load
from tests.fuzz.test_damaged_headers import CORPUS
from tests.fuzz.test_damaged_models import Fuzzed
from tests.rigs import tiny_families, tiny_gguf
from tests.rigs.authority_rig import Start, empty
from tests.rigs.processes import wait_until


class BrokenEstimator:
    """Fails with an unexpected error."""

    async def get(self, spec: Any, *devices: Any, counts: Any = ()) -> None:
        raise KeyError("weights_bytes")

    async def close(self) -> None:
        return None


async def test_unexpected_error_of_an_estimate_fails_the_waiting_requests(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    service = await start({"a": {}, "b": {}}, estimator=BrokenEstimator())
    tickets = [service.authority.ask(service.authority.resolve("a")) for _ in range(2)]
    for ticket in tickets:
        with pytest.raises(ModelFailed, match="cannot be measured"):
            await ticket.wait(5)
    with pytest.raises(ModelFailed):
        await service.authority.dry_run(service.authority.resolve("b"), {})
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("damage", ["text", [], {}, {"parts": {"cpu": {"weights_bytes": "x"}}}, {"parts": None}])
async def test_damaged_estimate_is_measured_again(tmp_path: Path, damage: Any) -> None:
    (tmp_path / "models.yaml").write_text(
        json.dumps({"models": {"a": {"path": str(tiny_gguf.generative(seed=1)), "context_length": 256}}})
    )
    spec = load(tmp_path, {}, {}).models["a"]
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})
    (device,) = CpuProbe().readings()
    first = Estimator(state, seconds=60)
    right = await first.get(spec, device)
    await first.close()
    path = state.file("estimates.json")
    kept = json.loads(path.read_bytes())
    (key,) = kept["entries"]
    whole = kept["entries"][key]
    kept["entries"][key] = {**whole, **damage} if isinstance(damage, dict) and damage else damage
    path.write_text(json.dumps(kept))
    second = Estimator(state, seconds=60)
    assert await second.get(spec, device) == right
    await second.close()
    assert json.loads(path.read_bytes())["entries"][key] == whole


def test_huge_context_is_estimated_from_the_header_without_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    job = {"path": str(tiny_gguf.generative()), "parameters": {"context_length": 2**26, "parallel": 16}}
    answer = estimate_job.run(job)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**26
    assert answer["source"] == "header"
    assert answer["note"] == "a cache of 1073741824 cells is estimated from the header; the limit is 16777216"
    assert answer["parts"]["cpu"]["kv_bytes"] >= 2**30 * 256


def test_context_beyond_the_measured_limit_is_estimated_from_the_header() -> None:
    job = {
        "path": str(tiny_gguf.generative()),
        "parameters": {"context_length": estimate_job.MAX_CELLS + 1, "parallel": 1},
    }
    assert estimate_job.run(job)["source"] == "header"


@pytest.mark.parametrize(("split_mode", "error"), [("layer", None), ("tensor", "; set split_mode: layer")])
def test_division_that_llama_cpp_does_not_measure_is_not_computed_from_the_header(
    split_mode: str, error: str | None
) -> None:
    """The formula knows whole layers only."""
    job = {
        "path": str(tiny_gguf.generative()),
        "parameters": {"context_length": 512, "parallel": 1, "gpu_layers": -1},
        "accelerators": [{"id": "0"}, {"id": "1"}],
        "counts": [2, 1],
        "split_mode": split_mode,
        "exact": False,
    }
    answer = estimate_job.run(job)
    assert answer["error"].endswith(error) if error else answer["source"] == "header"


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [_pipe, _endless, Path.mkdir], ids=["pipe", "device", "directory"])
def test_model_file_that_is_not_regular_is_not_opened(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "model.gguf")
    with pytest.raises(BadGgufError, match="it is not a regular file"):
        read_facts(tmp_path / "model.gguf")


def test_empty_model_file_is_reported_as_empty(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(BadGgufError, match="it is empty"):
        read_facts(tmp_path / "model.gguf")


NAMES = ("layers-none", "layers-too-many", "context-absurd", "experts-unused", "epsilon-nan", "rope-scaling-unknown")


@pytest.fixture
async def fuzzed(tmp_path: Path) -> AsyncIterator[Fuzzed]:
    found = Fuzzed(tmp_path, [item for item in CORPUS if item.name in NAMES])
    await found.service.authority.start()
    yield found
    async with asyncio.timeout(60):
        await found.service.authority.close()


@pytest.mark.timeout(120)
async def test_impossible_header_is_refused_before_a_worker_starts(fuzzed: Fuzzed) -> None:
    """The message names the file and the field."""
    for name in NAMES:
        answer = await fuzzed.ask(f"/models/{name}/load")
        assert answer.status == 503
        message = answer.body["error"]["message"]
        assert f"{fuzzed.files / name}.gguf is not a usable GGUF file: llama." in message
        assert fuzzed.service.authority.crashes.of(name) == []
    assert (await fuzzed.ask("/models/good/load")).status == 200


async def test_context_beyond_the_trained_length_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


S = ModelState


def replace_file(directory: Path, content: bytes = b"GGUF, another") -> Path:
    fresh = directory / "fresh"
    fresh.write_bytes(content)
    return fresh.replace(directory / "x.gguf")


@pytest.mark.parametrize("behavior", [{"load_seconds": 0.5}, {"load_seconds": 0.5, "fail": "oom_load"}])
async def test_file_replaced_during_a_load_fails_only_that_load(
    start: Start, tmp_path: Path, behavior: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the file, no overhead is learned, and the next load has no backoff."""
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


async def test_file_that_changes_during_a_measurement_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, spec = _helper(tmp_path, monkeypatch, changes=1)
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})
    own = Estimator(state, seconds=5)
    estimate = await own.get(spec, *CpuProbe().readings())
    assert len(found) == 2
    assert estimate.parts["cpu"].weights_bytes == 2
    assert (await own.get(spec, *CpuProbe().readings())).parts == estimate.parts
    assert len(found) == 2


async def test_file_that_keeps_changing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, spec = _helper(tmp_path, monkeypatch, changes=99)
    own = Estimator(StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")}), seconds=5)
    with pytest.raises(ModelFailed, match="keeps changing; try again when the file is complete"):
        await own.get(spec, *CpuProbe().readings())
    assert len(found) == 3


def _helper(directory: Path, monkeypatch: pytest.MonkeyPatch, *, changes: int) -> tuple[list[Path], Any]:
    """The n-th measurement finds n bytes of weights; the file changes during the first `changes` measurements."""
    path = directory / "x.gguf"
    path.write_bytes(b"GGUF")
    found: list[Path] = []

    async def answer(_job: str, _parameters: Any, **_more: Any) -> dict[str, Any]:
        found.append(path)
        if len(found) <= changes:
            replace_file(directory, b"GGUF" * len(found))
        facts = {"context_trained": 1, "architecture": "", "quantization": "", "experts": 0, "experts_used": 0}
        part = {"weights_bytes": len(found), "kv_bytes": 0, "compute_bytes": 0}
        sizes: dict[str, Any] = {"parts": {"cpu": part}, "source": "llama.cpp", "note": "", "output_bytes": 0}
        sizes |= {"checkpoint_bytes": 0, "host_bytes_per_second": 0.0, "split_problem": "", "draft_bytes": {}}
        return sizes | {"projector_bytes": {}, "layers": [], "facts": facts, "capabilities": []}

    monkeypatch.setattr(estimator, "run_helper", answer)
    return found, _spec("a", ModelEntry(path=str(path)), InferenceSettings())


async def test_rate_of_host_memory_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes host memory that is not booked. A stored estimate has it, too."""
    rates = iter([7.0])
    monkeypatch.setattr(estimate_job, "host_bytes_per_second", lambda _cores: next(rates))

    async def answer(_job: str, parameters: Any, **_more: Any) -> dict[str, Any]:
        return estimate_job.run({**parameters, "exact": False})

    monkeypatch.setattr(estimator, "run_helper", answer)
    path = tiny_families.path(tiny_families.Form("moe", layers=2))
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})
    for contexts in ((512, 1024), (512, 2048)):
        own = Estimator(state, seconds=5)
        for context in contexts:
            spec = _spec("a", ModelEntry(path=str(path), context_length=context), InferenceSettings())
            assert (await own.get(spec, *CpuProbe().readings())).host_bytes_per_second == 7.0


def test_fingerprint_covers_all_parts_and_extra_files(tmp_path: Path) -> None:
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
def test_names_that_do_not_match_the_pattern_of_llama_cpp_are_one_file(name: str) -> None:
    assert parts_of(Path("/models") / name) == (Path("/models") / name,)
