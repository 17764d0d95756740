"""HTTP routes of devices, memory and the quarantine: reports, plans and operations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from headgate.shared.openapi import NOT_NOW
from inference.api.local_model_routes import load_replicas
from inference.authority.events import CaseCleared, Collect, Defragment, Evict, Plan, Recover, Refresh
from inference.authority.handlers.operating.commands import Planned
from inference.authority.handlers.queries import device_view, pressure_view
from inference.authority.handlers.running.endings import MAX_RECORDS
from inference.authority.handlers.running.request_events import cases
from inference.authority.lifecycle import Action
from inference.authority.shell import Authority
from inference.authority.views import figures, kv_figures, model_status
from inference.authority.views.dumps import Dumps
from inference.environment_settings import MAX_CONTEXT, Experts, FitPolicy, SplitMode
from inference.errors import InferenceError, InvalidRequestError
from inference.protocol import Code, Priority


class DumpRequest(BaseModel):
    """`large_objects`: the number of Python types in the service whose objects the dump lists, largest first."""

    model_config = ConfigDict(extra="forbid")

    large_objects: int = Field(0, ge=0, le=100)


class CompareRequest(BaseModel):
    """Ids of two dumps."""

    model_config = ConfigDict(extra="forbid")

    before: str = Field(min_length=1)
    after: str = Field(min_length=1)


class PlanRequest(BaseModel):
    """A dry run of a model, with settings that replace its own."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1)
    context_length: int | None = Field(None, ge=16, le=MAX_CONTEXT)
    parallel: int | None = Field(None, ge=1, le=256)
    kv_cells: int | None = Field(None, ge=16, le=2**31 - 1)
    kv_type: Literal["f16", "q8_0", "q4_0"] | None = None
    gpu_layers: int | None = Field(None, ge=-1)
    experts: Experts | None = None
    split_mode: SplitMode | None = None
    ubatch: int | None = Field(None, ge=1, le=2**20)
    fit: FitPolicy | None = None
    min_context: int | None = Field(None, ge=16, le=MAX_CONTEXT)


class PreloadRequest(BaseModel):
    """Models to load, their priority, and the timeout of each in seconds."""

    model_config = ConfigDict(extra="forbid")

    models: list[str] = Field(min_length=1, max_length=1000)
    priority: Priority = Priority.NORMAL
    seconds: float | None = Field(None, ge=0, le=86400)


def router(authority: Authority, dumps: Dumps) -> APIRouter:
    """The paths below /devices, /memory and /quarantine."""
    routes = APIRouter()

    @routes.get("/devices")
    async def devices() -> dict[str, Any]:
        authority.observe()
        state, now = authority.state, authority.now
        levels = pressure_view.levels(state, now)
        return {
            "devices": [
                {
                    **reading.to_json(),
                    "pressure_level": str(levels[reading.id][1]),
                    "ledger": asdict(state.ledger.balance(reading.id)),
                }
                for reading in device_view.readings(state, now)
                if reading.id in levels
            ]
        }

    @routes.get("/memory/stats")
    async def stats() -> dict[str, Any]:
        authority.observe()
        return figures.stats(authority.state, authority.now)

    @routes.get("/memory/fragmentation")
    async def fragmentation() -> dict[str, Any]:
        await authority.command(Refresh())  # old readings would look like differences
        return figures.fragmentation(authority.state, authority.now, authority.metrics)

    @routes.get("/memory/kv")
    async def kv() -> dict[str, Any]:
        authority.observe()
        return kv_figures.kv(authority.state)

    @routes.get("/memory/health", responses=NOT_NOW)
    async def health(response: Response) -> dict[str, Any]:
        authority.observe()
        found = figures.health(authority.state, authority.now)
        response.status_code = 200 if found["healthy"] else 503
        return found

    @routes.get("/memory/history")
    async def history(minutes: Annotated[float, Query(gt=0, le=10_000)] = 60.0) -> dict[str, Any]:
        since = time.time() - 60 * minutes
        samples = [sample for sample in authority.state.pressure.history if sample.timestamp >= since]
        return {"minutes": minutes, "samples": [sample.to_json() for sample in samples]}

    @routes.get("/memory/models")
    async def models() -> dict[str, Any]:
        state = authority.state
        return {"models": [figures.model(state, model, authority.now) for model in state.models.values()]}

    @routes.get("/memory/evictions")
    async def evictions(limit: Annotated[int, Query(ge=1, le=MAX_RECORDS)] = MAX_RECORDS) -> dict[str, Any]:
        records = authority.state.evictions[-limit:]
        return {"total": authority.state.departures.total(), "evictions": [record.to_json() for record in records]}

    @routes.get("/memory/offloaded")
    async def offloaded() -> dict[str, Any]:
        return {"offloaded": figures.offloaded(authority.state, authority.now)}

    @routes.post("/memory/dump")
    async def dump(wanted: DumpRequest | None = None) -> dict[str, Any]:
        return await dumps.make(wanted.large_objects if wanted else 0)

    @routes.post("/memory/dump/compare")
    async def compare(wanted: CompareRequest) -> dict[str, Any]:
        return dumps.compare(wanted.before, wanted.after)

    @routes.post("/memory/plan")
    async def plan(wanted: PlanRequest) -> dict[str, Any]:
        model = authority.resolve(wanted.model)
        changes = wanted.model_dump(exclude={"model"}, exclude_none=True)
        planned: Planned = await authority.command(Plan(model, changes))
        return {
            "model": model,
            **model_status.decision_json(planned.outcome, planned.lost),
            "changes": dict(planned.changes),
            "steps": list(planned.steps),
            "expected": planned.speed.to_json() if planned.speed else None,
            "load_seconds": planned.load_seconds,
            "evictions": [
                {"model_name": held.model, "bytes": sum(held.bytes.values()), "load_seconds": held.reload_seconds}
                for held in planned.evictions
            ],
            "free_bytes": dict(planned.free_bytes),
            "estimate": planned.estimate.to_json() if planned.estimate else None,
        }

    @routes.post("/memory/preload")
    async def load_ahead(wanted: PreloadRequest) -> dict[str, Any]:
        return {"results": await preload(authority, wanted.models, wanted.priority, wanted.seconds)}

    @routes.post("/memory/evict/{model_id:path}")
    async def evict(model_id: str, action: Action = Action.UNLOAD) -> Any:
        ids = authority.replicas(model_id)
        held = [id for id in ids if authority.model(id).worker is not None] or ids[:1]
        records = await asyncio.gather(*(authority.command(Evict(id, action)) for id in held))
        freed_mb = round(sum(record["memory_freed_mb"] for record in records), 3)
        evicted = [record for record in records if record["evicted"]]
        return {**(evicted or records)[0], "model_name": ids[0], "memory_freed_mb": freed_mb}

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
        return {"requests": cases(authority.state, authority.now)}

    @routes.delete("/quarantine")
    async def clear_all() -> dict[str, Any]:
        return {"cleared": _clear(authority)}

    @routes.delete("/quarantine/{key}")
    async def clear_one(key: str) -> dict[str, Any]:
        return {"cleared": _clear(authority, key)}

    return routes


def _clear(authority: Authority, key: str | None = None) -> list[dict[str, Any]]:
    """Removes one request from quarantine, or all; returns them. Raises InvalidRequestError for an unknown key."""
    found = [case for case in cases(authority.state, authority.now) if key is None or case["key"] == key]
    if key is not None and not found:
        raise InvalidRequestError(
            f"no request {key[:100]!r} is in quarantine; GET /quarantine lists them", code=Code.NOT_FOUND, param="key"
        )
    for case in found:
        authority.dispatch(CaseCleared(case["model"], case["key"]))
    return found


async def preload(
    authority: Authority, names: Sequence[str], priority: Priority = Priority.NORMAL, seconds: float | None = None
) -> list[dict[str, Any]]:
    """One result per different name, in order: `model`, `loaded`, `state`, `devices`, `seconds` (duration), and `error`
    (the error object) if it was not loaded. Each load waits at most `seconds`.
    """
    return await asyncio.gather(*(_one(authority, name, priority, seconds) for name in dict.fromkeys(names)))


async def _one(authority: Authority, name: str, priority: Priority, seconds: float | None) -> dict[str, Any]:
    began = authority.now
    error: dict[str, Any] | None = None
    try:
        await load_replicas(authority, name, seconds, priority)
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
