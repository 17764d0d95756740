"""Damaged model files in a running service: it names the file and what is wrong, nothing leaks, other models answer.

Estimates come from real helpers and loads go to real workers; both may die of such a file, the service may not.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state_directory import StateDir
from inference import settings
from inference.app import Service
from tests.fuzz import EXAMPLES
from tests.fuzz.test_damaged_headers import CORPUS, GOOD
from tests.rigs.asgi import Answer, ask
from tests.rigs.damaged_gguf import Damaged

CHOSEN = ("cut-tensor-list", "tensor-missing", "tokens-fewer", "merges-in-a-circle")
"""With all tests: what the header refuses, what llama.cpp refuses or aborts on, what is taken."""
SAID = {"content": "hello"}
SECONDS = 120.0
REFUSED = {
    "model_failed",
    "memory_limit_exceeded",
    "invalid_request",
    "unsupported_parameter",
    "context_length_exceeded",
}


def chosen() -> Sequence[Damaged]:
    only = os.environ.get("FUZZ_ONLY", "")
    return [item for item in CORPUS if (EXAMPLES and only in item.name) or (not EXAMPLES and item.name in CHOSEN)]


class Fuzzed:
    """A service on the CPU whose models are damaged files, and one good one; every model is asked everything."""

    def __init__(self, root: Path, damaged: Sequence[Damaged]) -> None:
        self.files = root / "files"
        self.files.mkdir()
        (self.files / "good.gguf").write_bytes(GOOD)
        for item in damaged:
            (self.files / f"{item.name}.gguf").write_bytes(item.content)
        entries = {
            path.stem: {"path": str(path), "context_length": 256, "parallel": 1, "min_residency": 0}
            for path in sorted(self.files.iterdir())
        }
        (root / "models.yaml").write_text(json.dumps({"models": entries}))
        environ = {"INFERENCE_FORCE_CPU_MODE": "true", "INFERENCE_STEP_TIMEOUT_SECONDS": "20"}
        self.service = Service(
            settings.load(root, environ, {}), StateDir.from_env({"HEADGATE_STATE_DIR": str(root / "state")}), "token"
        )

    async def ask(self, path: str, body: Any = None, method: str = "POST") -> Answer:
        try:
            return await asyncio.wait_for(ask(self.service.app, method, path, body), SECONDS)
        except TimeoutError:
            return Answer(0, {}, f"did not answer within {SECONDS} s")

    async def everything(self, name: str) -> dict[str, Answer]:
        """What the model is asked, one after the other, and unloaded at the end."""
        messages = [{"role": "user", **SAID}]
        streamed = {"model": name, "prompt": "he", "max_tokens": 2, "stream": True}
        said = {
            "plan": await self.ask("/memory/plan", {"model": name}),
            "load": await self.ask(f"/models/{name}/load"),
            "chat": await self.ask("/v1/chat/completions", {"model": name, "messages": messages, "max_tokens": 4}),
            "show": await self.ask(f"/v1/models/{name}", method="GET"),
        }
        if EXAMPLES:
            said |= {
                "complete": await self.ask("/v1/completions", {"model": name, "prompt": "hello", "max_tokens": 4}),
                "stream": await self.ask("/v1/completions", streamed),
                "tokenize": await self.ask("/tokenize", {"model": name, **SAID}),
            }
        await self.ask(f"/models/{name}/unload?now=true")
        return said


@pytest.fixture
async def fuzzed(tmp_path: Path) -> AsyncIterator[Fuzzed]:
    found = Fuzzed(tmp_path, chosen())
    await found.service.authority.start()
    yield found
    async with asyncio.timeout(60):
        await found.service.authority.close()


def complaints(item: Damaged, said: dict[str, Answer], file: Path) -> list[str]:
    """What is wrong with the answers about one damaged file."""
    found = []
    for what, answer in said.items():
        if answer.status == 200:
            continue
        error = answer.body["error"] if isinstance(answer.body, dict) else {}
        if error.get("code") not in REFUSED or not str(error.get("message")).isprintable():
            found.append(f"{item.name}: {what} answered {answer.status} {answer.body}")
        elif answer.status == 503 and what in ("plan", "load") and str(file) not in error["message"]:
            found.append(f"{item.name}: {what} does not name the file: {error['message']}")
    if said["show"].status != 200:
        found.append(f"{item.name}: is not listed: {said['show'].body}")
    if not item.may_load and said["load"].status == 200:
        found.append(f"{item.name}: was loaded")
    return found


@pytest.mark.timeout(3600 if EXAMPLES else 300)
async def test_damaged_models_fail_by_name_and_nobody_else_does(fuzzed: Fuzzed) -> None:
    turn = asyncio.Semaphore(3)

    async def one(item: Damaged) -> list[str]:
        async with turn:
            said = await fuzzed.everything(item.name)
        return complaints(item, said, fuzzed.files / f"{item.name}.gguf")

    found = await asyncio.gather(*map(one, chosen()))
    assert not any(found), "\n".join(line for lines in found for line in lines)
    listed = await fuzzed.ask("/v1/models", method="GET")
    assert {entry["id"] for entry in listed.body["data"]} == {item.name for item in chosen()} | {"good"}
    said = await fuzzed.everything("good")
    assert {what: answer.status for what, answer in said.items()} == dict.fromkeys(said, 200)
    assert not fuzzed.service.authority.state.ledger.holdings
