"""Damaged model files in a running service: the error names file and cause, and other models answer.

Estimates use real helpers and loads real workers; both may end because of such a file, the service may not.
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
"""The files of the normal run: some are refused by the header check or by llama.cpp, others can be loaded."""
HELLO = {"content": "hello"}
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
    """A service on the CPU with damaged models and a good one."""

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
        """Sends all requests for the model, one after the other, and unloads it."""
        messages = [{"role": "user", **HELLO}]
        streamed = {"model": name, "prompt": "he", "max_tokens": 2, "stream": True}
        answers = {
            "plan": await self.ask("/memory/plan", {"model": name}),
            "load": await self.ask(f"/models/{name}/load"),
            "chat": await self.ask("/v1/chat/completions", {"model": name, "messages": messages, "max_tokens": 4}),
            "show": await self.ask(f"/v1/models/{name}", method="GET"),
        }
        if EXAMPLES:
            answers |= {
                "complete": await self.ask("/v1/completions", {"model": name, "prompt": "hello", "max_tokens": 4}),
                "stream": await self.ask("/v1/completions", streamed),
                "tokenize": await self.ask("/tokenize", {"model": name, **HELLO}),
            }
        await self.ask(f"/models/{name}/unload?now=true")
        return answers


@pytest.fixture
async def fuzzed(tmp_path: Path) -> AsyncIterator[Fuzzed]:
    found = Fuzzed(tmp_path, chosen())
    await found.service.authority.start()
    yield found
    async with asyncio.timeout(60):
        await found.service.authority.close()


def complaints(item: Damaged, answers: dict[str, Answer], file: Path) -> list[str]:
    """What is wrong with the answers about one damaged file."""
    found = []
    for what, answer in answers.items():
        if answer.status == 200:
            continue
        error = answer.body["error"] if isinstance(answer.body, dict) else {}
        if error.get("code") not in REFUSED or not str(error.get("message")).isprintable():
            found.append(f"{item.name}: {what} answered {answer.status} {answer.body}")
        elif answer.status == 503 and what in ("plan", "load") and str(file) not in error["message"]:
            found.append(f"{item.name}: {what} does not name the file: {error['message']}")
    if answers["show"].status != 200:
        found.append(f"{item.name}: is not listed: {answers['show'].body}")
    if not item.may_load and answers["load"].status == 200:
        found.append(f"{item.name}: was loaded")
    return found


@pytest.mark.timeout(3600 if EXAMPLES else 300)
async def test_damaged_models_fail_with_errors_that_name_them_and_affect_no_others(fuzzed: Fuzzed) -> None:
    turn = asyncio.Semaphore(3)

    async def one(item: Damaged) -> list[str]:
        async with turn:
            answers = await fuzzed.everything(item.name)
        return complaints(item, answers, fuzzed.files / f"{item.name}.gguf")

    found = await asyncio.gather(*map(one, chosen()))
    assert not any(found), "\n".join(line for lines in found for line in lines)
    listed = await fuzzed.ask("/v1/models", method="GET")
    assert {entry["id"] for entry in listed.body["data"]} == {item.name for item in chosen()} | {"good"}
    answers = await fuzzed.everything("good")
    assert {what: answer.status for what, answer in answers.items()} == dict.fromkeys(answers, 200)
    held = fuzzed.service.authority.state.ledger.holdings.values()
    assert [holding for holding in held if not holding.cache] == []
