"""Model files that are replaced at their paths while the service runs: the next load reads and plans the new files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_inference_service import Rig
from tests.rigs import tiny_gguf, tiny_projector
from tests.rigs.processes import wait_until

SETTINGS = {"context_length": 256, "parallel": 1, "warm": False}


def put(source: Path, target: Path) -> None:
    """Replaces the file at `target` in one step, as a download does."""
    fresh = target.with_name(f"{target.name}.new")
    shutil.copy(source, fresh)
    fresh.replace(target)


class Replacing(Rig):
    """A service with the model `a`, with shortcuts for these tests."""

    def __init__(self, root: Path, path: Path, **more: Any) -> None:
        super().__init__(root, {"a": {"path": str(path), **SETTINGS, **more}})

    @property
    def log(self) -> str:
        return self.service.log_path.read_text()

    def planned_bytes(self) -> int:
        status, answer, _ = self.ask("/memory/plan", {"model": "a"})
        assert status == 200, answer
        return int(answer["estimate"]["total_bytes"])

    def load(self) -> int:
        """Loads the model; returns the bytes that its worker allocated."""
        status, answer, _ = self.ask("/models/a/load", method="POST")
        assert status == 200, answer
        return int(answer["headgate"]["actual_bytes"])

    def unload(self) -> None:
        assert self.ask("/models/a/unload", method="POST")[1]["headgate"]["state"] == "cold"

    def text(self) -> str:
        status, answer, _ = self.chat("a", temperature=0, max_tokens=12)
        assert status == 200, answer
        return str(answer["choices"][0]["message"]["content"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture
def started(tmp_path: Path, file: Path) -> Iterator[Any]:
    """A function that starts the service with the given model file and settings."""
    rigs: list[Replacing] = []

    def start(path: Path = file, **more: Any) -> Replacing:
        rigs.append(Replacing(tmp_path, path, **more))
        rigs[-1].start()
        return rigs[-1]

    yield start
    for rig in rigs:
        rig.service.kill()


@dataclass
class Replacement:
    """A model and the replacement of one of its files, with which it needs more than `grown_bytes` more.

    With negative `grown_bytes` it needs less.
    """

    path: Path
    changed: Path
    replace: Callable[[], None]
    grown_bytes: int
    settings: Mapping[str, Any] = field(default_factory=dict)


def larger_model(root: Path) -> Replacement:
    file = root / "model.gguf"
    put(tiny_gguf.generative(), file)
    return Replacement(file, file, lambda: put(tiny_gguf.slow(), file), 2**24)


def smaller_model(root: Path) -> Replacement:
    file = root / "model.gguf"
    put(tiny_gguf.slow(), file)
    return Replacement(file, file, lambda: put(tiny_gguf.generative(), file), -(2**24))


def projector(root: Path) -> Replacement:
    eye = root / "eye.gguf"
    put(tiny_projector.projector(), eye)
    larger = tiny_projector.projector(width=256, feed=1024)
    return Replacement(tiny_gguf.generative(), eye, lambda: put(larger, eye), 2**22, {"mmproj": str(eye)})


def lora(root: Path) -> Replacement:
    adapter = root / "lora.gguf"
    put(tiny_gguf.lora(), adapter)
    larger = tiny_gguf.lora(rank=64)
    return Replacement(tiny_gguf.generative(), adapter, lambda: put(larger, adapter), 2**16, {"lora": [str(adapter)]})


def all_parts(root: Path) -> Replacement:
    old, new = root / "old", root / "new"
    old.mkdir()
    new.mkdir()
    parts, larger = tiny_gguf.in_parts(old), tiny_gguf.in_parts(new, width=256, feed=512)

    def replace() -> None:
        for source, target in zip(larger, parts, strict=True):
            put(source, target)

    return Replacement(parts[0], parts[2], replace, 2**21)


@pytest.mark.parametrize("prepare", [larger_model, smaller_model, projector, lora, all_parts])
def test_a_replaced_file_is_planned_and_loaded(
    started: Any, tmp_path: Path, prepare: Callable[[Path], Replacement]
) -> None:
    replacement = prepare(tmp_path)
    rig = started(replacement.path, **replacement.settings)
    before = rig.planned_bytes()
    loaded_before = rig.load()
    rig.unload()
    replacement.replace()
    after = rig.planned_bytes()
    assert (after - before) / replacement.grown_bytes > 1
    loaded = rig.load()
    assert loaded == pytest.approx(after, abs=2**23)
    assert (loaded - loaded_before) / replacement.grown_bytes > 1
    assert "the file of a changed: " in rig.log
    assert str(replacement.changed) in rig.log


def test_a_loaded_model_serves_its_old_file_until_it_is_unloaded(started: Any, file: Path) -> None:
    put(tiny_gguf.generative(seed=1, scale=3.0), file)
    rig = started()
    before = rig.text()
    put(tiny_gguf.generative(seed=2, scale=3.0), file)
    notice = f"the file of a changed: {file}; the loaded model is served until it is unloaded"
    wait_until("the change is logged", lambda: notice in rig.log)
    assert rig.text() == before
    trace = " ".join(rig.ask("/memory/plan", {"model": "a"})[1]["trace"])
    assert "the next load reads the new file" in trace
    rig.unload()
    assert rig.text() != before
    assert rig.log.count(notice) == 1


def test_a_later_part_alone_counts_as_a_change(started: Any, tmp_path: Path) -> None:
    """A missing part is named when the load fails."""
    parts = tiny_gguf.in_parts(tmp_path)
    rig = started(parts[0])
    rig.load()
    rig.unload()
    put(parts[1], parts[1])
    rig.load()
    assert f"the file of a changed: {parts[1]}; it is measured again" in rig.log
    parts[2].unlink()
    rig.unload()
    status, answer, _ = rig.ask("/models/a/load", method="POST")
    assert status == 503
    assert f"has no file {parts[2]}" in answer["error"]["message"]
