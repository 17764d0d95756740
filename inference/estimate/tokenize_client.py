"""Tokenizes for models that are not loaded, in helper processes that open only the vocabulary."""

from __future__ import annotations

import asyncio

from inference.devices.device import HIDDEN
from inference.errors import DeadlineExceeded, ModelFailed
from inference.settings import ModelSpec
from inference.workers.helper_client import HelperError, run_helper

PATHS = frozenset({"/tokenize", "/detokenize"})
MOST_AT_ONCE = 2


class Vocabulary:
    """Runs at most MOST_AT_ONCE helpers, one per request. Opening a file takes some tens of milliseconds."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MOST_AT_ONCE)

    async def ask(self, spec: ModelSpec, path: str, body: bytes, *, seconds: float) -> tuple[int, bytes]:
        """Status and body of the response. Raises DeadlineExceeded after `seconds`, ModelFailed for an invalid file."""
        job = {
            "model": spec.id,
            "file": str(spec.path),
            "context_length": spec.context_length,
            "mmproj": spec.mmproj,
            "capabilities": spec.capabilities,
            "path": path,
            "body": body.decode("utf-8", "replace"),
        }
        try:
            async with asyncio.timeout(seconds), self._places:
                answer = await run_helper("tokenize", job, seconds=seconds, environment=HIDDEN)
        except TimeoutError:
            raise DeadlineExceeded(f"tokenizing with {spec.id!r} took longer than {seconds:g} s") from None
        except HelperError as error:
            raise ModelFailed(f"the vocabulary of {spec.id!r} cannot be used: {error}") from error
        if "error" in answer:
            raise ModelFailed(f"the vocabulary of {spec.id!r} cannot be used: {answer['error']}")
        return int(answer["status"]), str(answer["body"]).encode()
