"""Routes about devices and memory as they are: stats, health, history, fragmentation; decide and change nothing."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from headgate.shared.openapi import NOT_NOW
from inference import figures, views
from inference.authority.shell import Authority


def router(authority: Authority) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/devices")
    async def devices() -> dict[str, Any]:
        levels = authority.governor.levels()
        return {
            "devices": [
                {
                    **reading.to_json(),
                    "pressure_level": str(levels[reading.id][1]),
                    "ledger": views.balance_json(authority.ledger.balance(reading.id)),
                }
                for reading in authority.inventory.readings()
                if reading.id in levels
            ]
        }

    @routes.get("/memory/stats")
    async def stats() -> dict[str, Any]:
        return figures.stats(authority)

    @routes.get("/memory/fragmentation")
    async def fragmentation() -> dict[str, Any]:
        await authority.inventory.refresh()  # old readings would look like a difference
        return figures.fragmentation(authority)

    @routes.get("/memory/kv")
    async def kv() -> dict[str, Any]:
        return figures.kv(authority)

    @routes.get("/memory/health", responses=NOT_NOW)
    async def health(response: Response) -> dict[str, Any]:
        found = figures.health(authority)
        response.status_code = 200 if found["healthy"] else 503
        return found

    @routes.get("/memory/history")
    async def history(minutes: Annotated[float, Query(gt=0, le=10_000)] = 60.0) -> dict[str, Any]:
        samples = authority.governor.history.since(time.time() - 60 * minutes)
        return {"minutes": minutes, "samples": [sample.to_json() for sample in samples]}

    return routes
