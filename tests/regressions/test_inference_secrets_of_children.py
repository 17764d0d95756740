"""Provider keys that were not on a short list, and every key at all in helpers, reached processes with foreign code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference.workers.child_environment import child_environment
from inference.workers.helper_client import run_helper
from tests.rigs.authority_rig import services

SECRETS = {
    "INFERENCE_TOKEN": "a",
    "GATEWAY_API_KEY": "b",
    "GATEWAY_ADMIN_KEY": "c",
    "GEMINI_API_KEY": "d",
    "hf_token": "e",
    "AWS_SECRET_ACCESS_KEY": "f",
    "PGPASSWORD": "g",
    "DB_PASSWORD": "h",
    "DATABASE_URL": "postgres://me:word@host/db",
    "HTTPS_PROXY": "http://me:word@proxy:3128",
    "CLIENT_SECRET_2": "i",
}
HARMLESS = {
    "PATH": "/bin",
    "HOME": "/root",
    "PWD": "/srv",
    "CUDA_VISIBLE_DEVICES": "GPU-1",
    "TOKENIZERS_PARALLELISM": "false",
    "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    "KEYBOARD": "us",
    "NO_PROXY": "localhost",
}


def test_secrets_are_dropped_and_everything_else_is_kept() -> None:
    found = child_environment({"X": "1"}, {**SECRETS, **HARMLESS})
    assert not set(SECRETS) & set(found)
    assert found.items() >= HARMLESS.items()
    assert found["X"] == "1"


async def test_a_worker_and_a_helper_see_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}})
        model = service.authority.resolve("a")
        await service.authority.load(model)
        assert model.running is not None
        seen = Path(f"/proc/{model.running.worker.pid}/environ")
        if not seen.exists():
            pytest.skip("reads a process's environment from /proc, which Linux has")
        names = {entry.partition(b"=")[0].decode() for entry in seen.read_bytes().split(b"\0")}
    assert "HEADGATE_WORKER_PARENT" in names
    assert not set(SECRETS) & names
    assert "devices" in await run_helper("devices", {}, seconds=30, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert set(SECRETS) <= set(os.environ)
