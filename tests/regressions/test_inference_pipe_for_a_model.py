"""A pipe or a device where a model's file was expected held the estimator up until its deadline, every time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference.estimate.gguf import BadGgufError, read_facts


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [_pipe, _endless, Path.mkdir], ids=["pipe", "device", "directory"])
def test_it_is_not_opened(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "model.gguf")
    with pytest.raises(BadGgufError, match="it is not a regular file"):
        read_facts(tmp_path / "model.gguf")


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(BadGgufError, match="it is empty"):
        read_facts(tmp_path / "model.gguf")
