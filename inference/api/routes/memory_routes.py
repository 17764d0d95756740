"""HTTP routes that report devices and memory: readings, figures, history, evictions and dumps."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from headgate.shared.openapi import NOT_NOW
from inference.authority.events import Refresh
from inference.authority.handlers.queries import device_view, pressure_view
from inference.authority.handlers.running.endings import MOST_RECORDS
from inference.authority.shell import Authority
from inference.authority.views import figures, model_status
from inference.authority.views.dumps import Dumps


class DumpRequest(BaseModel):
    """`large_objects`: the number of Python types in the service whose objects the dump lists, largest first."""

    model_config = ConfigDict(extra="forbid")

    large_objects: int = Field(0, ge=0, le=100)


class CompareRequest(BaseModel):
    """Ids of two dumps."""

    model_config = ConfigDict(extra="forbid")

    before: str = Field(min_length=1)
    after: str = Field(min_length=1)


def router(authority: Authority, dumps: Dumps) -> APIRouter:
    """GET /devices, and the read-only paths below /memory."""
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
                    "ledger": model_status.balance_json(state.ledger.balance(reading.id)),
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
        return figures.kv(authority.state, authority.now)

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
    async def evictions(limit: Annotated[int, Query(ge=1, le=MOST_RECORDS)] = MOST_RECORDS) -> dict[str, Any]:
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

    return routes
