"""HTTP routes of stored sequences. Workers own them, so these routes pass the request on to the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from headgate.shared import hop
from headgate.shared.hop import BrokenError, Hop
from inference.authority.lifecycle import ACCEPTING
from inference.authority.shell import Authority
from inference.errors import InferenceError, InvalidRequestError, ModelFailed

WORKER_SECONDS = 15.0
"""Time limit for a worker, which itself waits 10 s for its engine."""
MAX_PIN_SECONDS = 30 * 86400.0

_Model = Annotated[str | None, Field(min_length=1)]
_Tenant = Annotated[str | None, Field(max_length=200)]


class ClearRequest(BaseModel):
    """Which sequences are removed: those of a model, of a tenant, or all."""

    model_config = ConfigDict(extra="forbid")

    model: _Model = None
    tenant: _Tenant = None


class PinRequest(BaseModel):
    """Which sequences are kept for `seconds`; 0 ends their pins."""

    model_config = ConfigDict(extra="forbid")

    seconds: float = Field(ge=0, le=MAX_PIN_SECONDS)
    ids: list[Annotated[str, Field(min_length=1, max_length=100)]] = Field(default=[], max_length=1000)
    tenant: _Tenant = None
    model: _Model = None


def router(authority: Authority) -> APIRouter:
    """The paths below /memory/kv/."""
    routes = APIRouter()

    @routes.get("/memory/kv/sequences")
    async def sequences(
        model: Annotated[str | None, Query(min_length=1)] = None,
        tenant: str | None = None,
    ) -> dict[str, Any]:
        found = await _ask_workers(authority, model, "/kv/sequences")
        rows = [
            {"model_name": name, **row}
            for name, answer in found.answers
            for row in answer["sequences"]
            if tenant is None or row["tenant"] == tenant
        ]
        return {"sequences": rows, **found.rest()}

    @routes.get("/memory/kv/labels")
    async def labels(model: Annotated[str | None, Query(min_length=1)] = None) -> dict[str, Any]:
        found = authority.labels.all()
        shown = found if model is None else {(name := authority.resolve(model)): found.get(name, [])}
        return {"models": [{"model_name": name, "labels": labels} for name, labels in shown.items()]}

    @routes.post("/memory/kv/clear")
    async def clear(wanted: ClearRequest | None = None) -> dict[str, Any]:
        wanted = wanted or ClearRequest()
        found = await _ask_workers(authority, wanted.model, "/kv/clear", {"tenant": wanted.tenant})
        return {**found.sums("cleared"), **found.rest()}

    @routes.post("/memory/kv/pin")
    async def pin(wanted: PinRequest) -> dict[str, Any]:
        if not wanted.ids and wanted.tenant is None:
            raise InvalidRequestError("name the sequences to pin by `ids` or by `tenant`", param="ids")
        body = wanted.model_dump(include={"seconds", "ids", "tenant"})
        found = await _ask_workers(authority, wanted.model, "/kv/pin", body)
        return {**found.sums("pinned"), **found.rest()}

    return routes


class _Found:
    """Answers and errors of workers, and the models without a worker."""

    def __init__(
        self,
        answers: Sequence[tuple[str, dict[str, Any]]],
        errors: Sequence[tuple[str, InferenceError]],
        not_loaded: Sequence[str],
    ) -> None:
        self.answers = answers
        self._errors = errors
        self._not_loaded = not_loaded

    def sums(self, name: str) -> dict[str, Any]:
        """The sum of a number over the models, and the number of each."""
        counts = [{"model_name": model, name: answer[name]} for model, answer in self.answers]
        return {name: sum(count[name] for count in counts), "models": counts}

    def rest(self) -> dict[str, Any]:
        """The models that are not part of the answer."""
        errors = [{"model_name": model, "message": error.message} for model, error in self._errors]
        return {"not_loaded": self._not_loaded, "errors": errors}


async def _ask_workers(authority: Authority, name: str | None, path: str, body: dict[str, Any] | None = None) -> _Found:
    """The answers of one model or of all loaded models. Raises the error of a model that was named.

    With a `body` the request is a POST, else a GET.
    """

    async def ask(model: str) -> dict[str, Any] | InferenceError:
        try:
            return await _ask_worker(authority, model, path, body)
        except InferenceError as error:
            return error

    def is_loaded(model: str) -> bool:
        return authority.model(model).state in ACCEPTING

    if name is not None:
        ids = authority.replicas(name)
        loaded = [id for id in ids if is_loaded(id)]
        if not loaded:
            raise InvalidRequestError(
                f"the model {ids[0]!r} is not loaded, and only its worker can read its stored sequences; load it first",
                param="model",
            )
        answers = await asyncio.gather(*(_ask_worker(authority, id, path, body) for id in loaded))
        return _Found(list(zip(loaded, answers, strict=True)), (), ())
    every = list(authority.state.models)
    loaded = [model for model in every if is_loaded(model)]
    results = list(zip(loaded, await asyncio.gather(*map(ask, loaded)), strict=True))
    return _Found(
        [(model, result) for model, result in results if not isinstance(result, InferenceError)],
        [(model, result) for model, result in results if isinstance(result, InferenceError)],
        [model for model in every if model not in loaded],
    )


async def _ask_worker(authority: Authority, model: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    process = authority.process(model)
    if process is None:
        raise ModelFailed(f"the worker of {model!r} has ended", retry_after=1.0)
    worker = Hop(hop.unix(str(process.socket_path)), "worker")
    try:
        async with asyncio.timeout(WORKER_SECONDS):
            answer = await (worker.get(path, {}) if body is None else worker.post(path, orjson.dumps(body), {}))
            try:
                data = orjson.loads(await answer.whole())
            finally:
                answer.close()
    except (OSError, BrokenError, ValueError) as error:
        message = f"the worker of {model!r} did not answer ({type(error).__name__})"
        raise ModelFailed(message, retry_after=1.0) from error
    if answer.status != 200:
        raise ModelFailed(f"the worker of {model!r} refused: {data['error']['message']}", retry_after=1.0)
    return dict(data)
