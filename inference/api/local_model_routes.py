"""HTTP routes of models: list, show, load, unload, offload, move, restart, crashes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from inference.authority.events import Move, Offload, Unload
from inference.authority.shell import Authority
from inference.workers.crash_records import CrashStore


class MoveRequest(BaseModel):
    """The device to move a model to."""

    model_config = ConfigDict(extra="forbid")

    device: str = Field(min_length=1, max_length=100)


def router(authority: Authority, crashes: CrashStore) -> APIRouter:
    """The routes of models."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [status.to_json() for status in authority.statuses()]}

    @routes.get("/v1/models/{model_id:path}")
    async def show_model(model_id: str) -> dict[str, Any]:
        return authority.status(authority.resolve(model_id)).to_json()

    @routes.post("/models/{model_id:path}/load")
    async def load(model_id: str, seconds: float | None = Query(None, ge=0, le=86400)) -> dict[str, Any]:
        model = authority.resolve(model_id)
        await authority.load(model, seconds)
        return authority.status(model).to_json()

    @routes.post("/models/{model_id:path}/unload")
    async def unload(model_id: str, now: bool = False) -> dict[str, Any]:
        model = authority.resolve(model_id)
        await authority.command(Unload(model, now))
        return authority.status(model).to_json()

    @routes.post("/models/{model_id:path}/offload")
    async def offload(model_id: str) -> dict[str, Any]:
        model = authority.resolve(model_id)
        await authority.command(Offload(model))
        return authority.status(model).to_json()

    @routes.post("/models/{model_id:path}/move")
    async def move(
        model_id: str, wanted: MoveRequest, seconds: float | None = Query(None, ge=0, le=86400)
    ) -> dict[str, Any]:
        model = authority.resolve(model_id)
        await authority.command(Move(model, wanted.device, seconds))
        return authority.status(model).to_json()

    @routes.post("/models/{model_id:path}/restart")
    async def restart(model_id: str, seconds: float | None = Query(None, ge=0, le=86400)) -> dict[str, Any]:
        model = authority.resolve(model_id)
        await authority.command(Unload(model))
        model = authority.resolve(model_id)  # a reload may have removed it and added it again
        await authority.load(model, seconds)
        return authority.status(model).to_json()

    @routes.get("/models/{model_id:path}/crashes")
    async def show_crashes(model_id: str) -> dict[str, Any]:
        model = authority.resolve(model_id)
        return {"id": model, "crashes": crashes.of(model)}

    return routes
