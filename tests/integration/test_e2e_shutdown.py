"""Shutdown and crashes: drains, exit statuses, no remaining process or socket."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import openai
import pytest

from tests.rigs.processes import Service, command_of, descendants_of, free_port, is_alive, private_env
from tests.rigs.stack import LOCAL_ROUTES, MODELS, until


def _up(tmp_path: Path) -> Service:
    config = tmp_path / "config"
    config.mkdir()
    (config / "models.yaml").write_text(MODELS)
    (config / "gateway.yaml").write_text(LOCAL_ROUTES)
    port, inference_port = free_port(), free_port()
    env = private_env(
        tmp_path,
        {
            "GATEWAY_PORT": str(port),
            "INFERENCE_PORT": str(inference_port),
            "GATEWAY_INFERENCE__URL": f"http://127.0.0.1:{inference_port}",
        },
    )
    argv = [sys.executable, "-m", "headgate", "up", "--config-dir", str(config)]
    return Service(argv, env, tmp_path, port, "up")


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM", "SIGINT"])
async def test_all_processes_end_with_the_supervisor(tmp_path: Path, signal_name: str) -> None:
    up = await asyncio.to_thread(_up(tmp_path).start, wait_for="/readyz")
    try:
        key = (tmp_path / "state" / "gateway.key").read_text().strip()
        async with openai.AsyncOpenAI(base_url=up.url + "/v1", api_key=key, max_retries=0, timeout=30) as client:
            await client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello!"}])
        await until("the address of the dashboard is printed", lambda: f"Dashboard:          {up.url}/ui/" in up.log)
        family = descendants_of(up.pid)
        assert len(family) >= 3
        if signal_name == "SIGKILL":
            up.signal(signal.SIGKILL)
            await until("all processes ended", lambda: not [pid for pid in family if is_alive(pid)], seconds=5)
        else:
            up.signal(signal.Signals[signal_name])
            assert await asyncio.to_thread(up.wait, 40) == 0
            assert not [pid for pid in family if is_alive(pid)]
            assert _sockets_left(tmp_path) == []
    finally:
        await asyncio.to_thread(up.kill)


async def test_supervisor_restarts_a_service_that_ends(tmp_path: Path) -> None:
    up = await asyncio.to_thread(_up(tmp_path).start, wait_for="/readyz")
    try:
        first = [pid for pid in descendants_of(up.pid) if "inference" in command_of(pid)]
        os.kill(first[0], signal.SIGKILL)
        key = (tmp_path / "state" / "gateway.key").read_text().strip()

        async def answered() -> bool:
            async with openai.AsyncOpenAI(base_url=up.url + "/v1", api_key=key, max_retries=0, timeout=30) as client:
                try:
                    await client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello!"}])
                except openai.APIStatusError:
                    return False
                return True

        await until("the restarted service answers", answered, seconds=30, every=0.5)
    finally:
        await asyncio.to_thread(up.kill)


def _sockets_left(root: Path) -> list[str]:
    return [str(path) for path in root.rglob("*") if path.is_socket()]
