"""Tokenizes for models that are not loaded, in helper processes that open only the vocabulary."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from inference.devices.device import HIDDEN
from inference.errors import DeadlineExceeded, ModelFailed
from inference.workers.helper_client import HelperError, run_helper

if TYPE_CHECKING:
    from inference.settings import ModelSpec

PATHS = frozenset({"/tokenize", "/detokenize"})
MAX_AT_ONCE = 2


class ColdTokenizer:
    """Runs at most MAX_AT_ONCE helpers, one per request. Opening a file takes some tens of milliseconds."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

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


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """The helper job, with the worker's app on a file opened without weights: responses are those of a loaded model.

    Takes `{"model", "file", "context_length", "mmproj", "capabilities", "path", "body"}`.

    Returns `{"status", "body"}` or `{"error"}`.
    """
    from inference.worker import llama, loading
    from inference.worker.api.worker_app import App
    from inference.worker.llama.llama_process import LogTail
    from inference.worker.prompt.prompts import TOKENIZER_STACK_BYTES, Prompts
    from inference.worker.worker_errors import LoadError
    from inference.worker.worker_requests import Facts
    from inference.worker_link import DeviceGrant, Grant

    llama.start(LogTail(lambda line: None))
    names = job["capabilities"]
    grant = Grant(
        job["model"],
        job["file"],
        (DeviceGrant("cpu", "cpu"),),
        gpu_layers=0,
        mmproj=job["mmproj"],
        capabilities=None if names is None else tuple(names),
    )
    try:
        model = llama.Model(grant.path, llama.model_params(grant, vocab_only=True))
        template = loading.template_of(model)[0]
        capabilities = loading.capabilities_of(grant, None, template)
    except LoadError as error:
        return {"error": error.message}
    marker = "<image>" if "vision" in capabilities else ""
    facts = Facts(
        grant.model_id,
        job["context_length"],
        model.n_vocab,
        0,
        capabilities=capabilities,
        image_marker=marker,
        family=loading.family_of(template),
    )
    prompts = Prompts(model, template, facts)
    threading.stack_size(TOKENIZER_STACK_BYTES)
    app = App(facts, prompts, model.detokenize, None, None, ThreadPoolExecutor(1))
    return asyncio.run(_call(app, job["path"], job["body"].encode()))


async def _call(app: Any, path: str, body: bytes) -> dict[str, Any]:
    sent: list[MutableMapping[str, Any]] = []
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return unread.pop() if unread else await asyncio.get_running_loop().create_future()  # never disconnects

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"content-length", str(len(body)).encode())]
    await app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    whole = b"".join(message.get("body", b"") for message in sent)
    return {"status": sent[0]["status"], "body": whole.decode()}
