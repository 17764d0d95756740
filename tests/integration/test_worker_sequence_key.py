"""Stored sequences continue with the weights that computed them, and with no others."""

from __future__ import annotations

import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from inference.file_stamp import fingerprint
from inference.worker.kv.sequence_key import (
    PIECE_BYTES,
    PIECES,
    WHOLE_BYTES,
    contents_sum,
    file_keys,
    sequence_key,
)
from inference.worker_link import Grant, KvTiers
from tests.rigs import tiny_gguf
from tests.rigs.processes import wait_until
from tests.rigs.worker_rig import WorkerRig, grant_for

PROMPT = "the water runs past the mill and the gate of the water opens in the morning " * 3


def adapter(directory: Path, seed: int) -> Path:
    """An adapter as an archive unpacks it: each has the same name, size and modification time."""
    path = directory / f"adapter-{seed}" / "adapter.gguf"
    path.parent.mkdir()
    shutil.copy(tiny_gguf.lora(seed=seed), path)
    os.utime(path, (1e9, 1e9))
    return path


def test_sequences_of_another_adapter_are_not_continued(tmp_path: Path) -> None:
    """From memory and from disk; the same adapter continues them, also from another directory."""
    handle = os.memfd_create("test-keep")
    tiers = KvTiers(ram_bytes=2**28, disk_bytes=2**28, directory=str(tmp_path / "kv"))
    first, other = adapter(tmp_path, 7), adapter(tmp_path, 8)
    assert first.stat().st_size == other.stat().st_size

    def ask(lora: Path) -> tuple[int, Any]:
        """Tokens that were not computed, and log probabilities of the first token."""
        root = tmp_path / f"worker-{len(list(tmp_path.iterdir()))}"
        root.mkdir()
        grant = grant_for(tiny_gguf.generative(), lora=(str(lora),), kv=tiers)
        with WorkerRig(root, grant, keep=handle) as worker:
            worker.ready()
            body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 20}
            status, answer = worker.post("/v1/completions", body)
            assert status == 200, answer
            wait_until("a sequence is on disk", lambda: list((tmp_path / "kv").rglob("*.kv")))
        details = answer["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens", 0), answer["choices"][0]["logprobs"]["top_logprobs"][0]

    cold, logprobs = ask(first)
    again, same = ask(first.rename(tmp_path / "adapter.gguf"))
    changed, differs = ask(other)
    os.close(handle)
    assert cold == changed == 0
    assert again > 10
    assert same == pytest.approx(logprobs, abs=0.05)
    assert differs != pytest.approx(logprobs, abs=0.1)


OTHER_STATES = {"context_length": 777, "kv_type": "q8_0", "flash_attention": False, "swa_full": True}
SAME_STATES = {
    "model_id": "other",
    "devices": (),
    "gpu_layers": 3,
    "tensor_split": (1.0, 1.0),
    "split_mode": "row",
    "host_expert_layers": 1,
    "parallel": 7,
    "kv_cells": 2048,
    "batch": 64,
    "ubatch": 32,
    "threads": 2,
    "checkpoint_bytes": 1,
    "speculation": "ngram",
    "kv": KvTiers(threshold=0.1),
    "mmproj": "m.gguf",
    "draft": "d.gguf",
    "capabilities": ("chat",),
    "queue_limit": 1,
    "reserved_bytes": {"cpu": 1},
    "environment": {"A": "b"},
}
"""A state does not depend on these. Images are not stored."""
IN_FILES = ("path", "lora")


def test_key_has_every_setting_that_a_state_depends_on() -> None:
    """A new setting of a grant belongs to one of the lists."""
    assert {*OTHER_STATES, *SAME_STATES, *IN_FILES} == {field.name for field in fields(Grant)}
    files = file_keys(fingerprint(tiny_gguf.generative()))
    grant = grant_for(tiny_gguf.generative())
    key = sequence_key(grant, files)
    for name, value in OTHER_STATES.items():
        assert sequence_key(replace(grant, **{name: value}), files) != key, name
    for name, value in SAME_STATES.items():
        assert sequence_key(replace(grant, **{name: value}), files) == key, name
    assert sequence_key(grant, [*files, *files]) != key, "an adapter"
    assert key["library"][0][0].startswith("libllama")


def test_checksum_of_a_large_file_covers_pieces_of_it(tmp_path: Path) -> None:
    """The pieces include the first and the last bytes. A small file is read whole; an unreadable one has none."""
    path = tmp_path / "model.gguf"
    path.touch()
    for size in (0, 1, PIECE_BYTES, WHOLE_BYTES // 16, WHOLE_BYTES + 1, 2**33 + 12345):
        os.truncate(path, size)
        sums = {contents_sum(str(path))}
        places = [0, size - 1, size // 2] if 0 < size <= WHOLE_BYTES else [0, size - 1] if size else []
        for place in set(places):
            with path.open("r+b") as file:
                file.seek(place)
                file.write(b"\1")
            sums.add(contents_sum(str(path)))
        assert len(sums) == 1 + len(set(places)), size
        os.truncate(path, 0)
    assert PIECES * PIECE_BYTES <= 2**20, "few enough to be read from a slow disk"
    assert contents_sum(str(tmp_path)) == contents_sum(str(tmp_path / "none")) == ""


def test_copy_in_memory_is_read_instead_of_the_file(tmp_path: Path) -> None:
    """The file may have been replaced since it was copied."""
    path, copy = tmp_path / "model.gguf", tmp_path / "copy"
    path.write_bytes(b"new")
    copy.write_bytes(b"old")
    ((name, size, _modified, content),) = file_keys(fingerprint(path), {str(path): str(copy)})
    assert (name, size, content) == ("model.gguf", 3, contents_sum(str(copy)))
