"""Routes about who holds memory and who had to give it back; decide and change nothing."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from inference import figures
from inference.authority.shell import Authority
from inference.evictions import MOST_RECORDS


def router(authority: Authority) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/memory/models")
    async def models() -> dict[str, Any]:
        return {"models": [figures.model(model, authority) for model in authority.models.values()]}

    @routes.get("/memory/evictions")
    async def evictions(limit: Annotated[int, Query(ge=1, le=MOST_RECORDS)] = MOST_RECORDS) -> dict[str, Any]:
        records = list(authority.evictions.records)[-limit:]
        return {"total": authority.evictions.totals.total(), "evictions": [record.to_json() for record in records]}

    @routes.get("/memory/offloaded")
    async def offloaded() -> dict[str, Any]:
        return {"offloaded": authority.warm.offloaded()}

    return routes
