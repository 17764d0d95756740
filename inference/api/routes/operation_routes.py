"""HTTP routes that plan and change memory: plan, preload, evict, gc, defragment, device recovery, quarantine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from inference.authority.events import CaseCleared, Collect, Defragment, Evict, Plan, Recover
from inference.authority.handlers.operating.commands import Planned
from inference.authority.handlers.queueing.poison_cases import listing
from inference.authority.lifecycle.departures import Action
from inference.authority.shell import Authority
from inference.authority.views import model_status
from inference.errors import InferenceError, InvalidRequestError
from inference.protocol import Code, Priority


class PlanRequest(BaseModel):
    """A dry run of a model, with settings that replace its own."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1)
    context_length: int | None = Field(None, ge=16, le=2**27)
    parallel: int | None = Field(None, ge=1, le=256)
    kv_type: Literal["f16", "q8_0", "q4_0"] | None = None
    gpu_layers: int | None = Field(None, ge=-1)
    ubatch: int | None = Field(None, ge=1, le=2**20)


class PreloadRequest(BaseModel):
    """Models to load, their priority, and the timeout of each in seconds."""

    model_config = ConfigDict(extra="forbid")

    models: list[str] = Field(min_length=1, max_length=1000)
    priority: Priority = Priority.NORMAL
    seconds: float | None = Field(None, ge=0, le=86400)


def _clear(authority: Authority, key: str | None = None) -> list[dict[str, Any]]:
    """Removes one request from quarantine, or all; returns them. Raises InvalidRequestError for an unknown key."""
    found = [case for case in listing(authority.state, authority.now) if key is None or case["key"] == key]
    if key is not None and not found:
        raise InvalidRequestError(
            f"no request {key[:100]!r} is in quarantine; GET /quarantine lists them", code=Code.NOT_FOUND, param="key"
        )
    for case in found:
        authority.dispatch(CaseCleared(case["model"], case["key"]))
    return found


def router(authority: Authority) -> APIRouter:
    """The operations on memory, devices and the quarantine."""
    routes = APIRouter()

    @routes.post("/memory/plan")
    async def plan(wanted: PlanRequest) -> dict[str, Any]:
        model = authority.resolve(wanted.model)
        changes = wanted.model_dump(exclude={"model"}, exclude_none=True)
        planned: Planned = await authority.command(Plan(model, changes))
        return {
            "model": model,
            **model_status.decision_json(planned.outcome, planned.lost),
            "estimate": planned.estimate.to_json() if planned.estimate else None,
        }

    @routes.post("/memory/preload")
    async def load_ahead(wanted: PreloadRequest) -> dict[str, Any]:
        return {"results": await preload(authority, wanted.models, wanted.priority, wanted.seconds)}

    @routes.post("/memory/evict/{model_id:path}")
    async def evict(model_id: str, action: Action = Action.UNLOAD) -> Any:
        return await authority.command(Evict(authority.resolve(model_id), action))

    @routes.post("/memory/gc")
    async def collect() -> Any:
        return await authority.command(Collect())

    @routes.post("/memory/defragment")
    async def defragment() -> Any:
        return await authority.command(Defragment())

    @routes.post("/devices/{id}/recover")
    async def recover(id: str) -> dict[str, Any]:
        return {"device": (await authority.command(Recover(id))).to_json()}

    @routes.get("/quarantine")
    async def show_quarantine() -> dict[str, Any]:
        return {"requests": listing(authority.state, authority.now)}

    @routes.delete("/quarantine")
    async def clear_all() -> dict[str, Any]:
        return {"cleared": _clear(authority)}

    @routes.delete("/quarantine/{key}")
    async def clear_one(key: str) -> dict[str, Any]:
        return {"cleared": _clear(authority, key)}

    return routes


async def preload(
    authority: Authority, names: Sequence[str], priority: Priority = Priority.NORMAL, seconds: float | None = None
) -> list[dict[str, Any]]:
    """One result per name, in order: `model`, `loaded`, `state`, `devices`, `seconds` (duration), and `error` (the
    error object) if it was not loaded. Each load waits at most `seconds`.
    """
    return await asyncio.gather(*(_one(authority, name, priority, seconds) for name in dict.fromkeys(names)))


async def _one(authority: Authority, name: str, priority: Priority, seconds: float | None) -> dict[str, Any]:
    began = authority.now
    error: dict[str, Any] | None = None
    try:
        with authority.ask(authority.resolve(name), priority=priority, seconds=seconds) as ticket:
            await ticket.wait()
    except InferenceError as raised:
        error = raised.body()["error"]
    id = authority.state.config.names.get(name, "")
    status = authority.status(id) if id in authority.state.models else None
    return {
        "model": name if status is None else status.id,
        "loaded": error is None,
        "state": None if status is None else str(status.state),
        "devices": [] if status is None else list(status.devices),
        "seconds": round(authority.now - began, 3),
        "error": error,
    }
