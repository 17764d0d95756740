"""HTTP routes that plan and change memory: plan, preload, evict, gc, defragment, device recovery, quarantine."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from inference import cleanup, views
from inference.authority.shell import Authority
from inference.evictions import Action
from inference.preload import preload
from inference.protocol import Priority
from inference.wishes import lost_for


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


def router(authority: Authority) -> APIRouter:
    """The operations on memory, devices and the quarantine."""
    routes = APIRouter()

    @routes.post("/memory/plan")
    async def plan(wanted: PlanRequest) -> dict[str, Any]:
        model = authority.resolve(wanted.model)
        changes = wanted.model_dump(exclude={"model"}, exclude_none=True)
        decision, estimate = await authority.outlook.dry_run(model, changes)
        lost, _ = lost_for(model.effective, authority.inventory.readings())
        return {
            "model": model.id,
            **views.decision_json(decision, lost),
            "estimate": estimate.to_json() if estimate else None,
        }

    @routes.post("/memory/preload")
    async def load_ahead(wanted: PreloadRequest) -> dict[str, Any]:
        return {"results": await preload(authority, wanted.models, wanted.priority, wanted.seconds)}

    @routes.post("/memory/evict/{model_id:path}")
    async def evict(model_id: str, action: Action = Action.UNLOAD) -> dict[str, Any]:
        return await cleanup.evict(authority, authority.resolve(model_id), action)

    @routes.post("/memory/gc")
    async def collect() -> dict[str, Any]:
        return await cleanup.collect(authority)

    @routes.post("/memory/defragment")
    async def defragment() -> dict[str, Any]:
        return await cleanup.defragment(authority)

    @routes.post("/devices/{id}/recover")
    async def recover(id: str) -> dict[str, Any]:
        return {"device": (await authority.health.recover(id)).to_json()}

    @routes.get("/quarantine")
    async def show_quarantine() -> dict[str, Any]:
        return {"requests": authority.quarantine.listing()}

    @routes.delete("/quarantine")
    async def clear_all() -> dict[str, Any]:
        return {"cleared": authority.quarantine.clear()}

    @routes.delete("/quarantine/{key}")
    async def clear_one(key: str) -> dict[str, Any]:
        return {"cleared": authority.quarantine.clear(key)}

    return routes
