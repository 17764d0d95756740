"""HTTP routes of models: list, show, load, unload, offload, move, restart, crashes.

The name of a model with several replicas stands for all of them, NAME@1, NAME@2, ... for one.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from pydantic import BaseModel, ConfigDict, Field

from inference.authority.events import Move, Offload, Unload
from inference.authority.lifecycle import ACCEPTING
from inference.authority.shell import Authority
from inference.errors import InvalidRequestError
from inference.protocol import H_FENCE, Priority
from inference.workers.crash_records import CrashStore

MAX_FENCE = 2**53
"""Larger numbers are not exact in Lua and JavaScript. The fences of gateways are microseconds of Unix time."""


class LoadFence:
    """The largest fence of a load since the start of the service."""

    def __init__(self) -> None:
        self._largest = 0

    def check(self, fence: int) -> None:
        """Raises InvalidRequestError for a load that was decided under an earlier lease than another load."""
        if fence < self._largest:
            raise InvalidRequestError(
                f"not loaded: lease {fence} has ended, because the newer lease {self._largest} was used for a load; "
                f"acquire a new lease, or send no {H_FENCE}",
                param=H_FENCE,
            )
        self._largest = fence


class MoveRequest(BaseModel):
    """The device to move a model to."""

    model_config = ConfigDict(extra="forbid")

    device: str = Field(min_length=1, max_length=100)


def router(authority: Authority, crashes: CrashStore) -> APIRouter:
    """The routes of models."""
    routes = APIRouter()
    load_fence = LoadFence()

    @routes.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        data = [status.to_json() for status in authority.statuses()]
        return {"object": "list", "data": data, **authority.identity}

    @routes.get("/v1/models/{model_id:path}")
    async def show_model(model_id: str) -> dict[str, Any]:
        return authority.status(authority.resolve(model_id)).to_json()

    @routes.post("/models/{model_id:path}/load")
    async def load(
        model_id: str,
        seconds: float | None = Query(None, ge=0, le=86400),
        evict: bool = True,
        fence: Annotated[int | None, Header(alias=H_FENCE, ge=1, le=MAX_FENCE)] = None,
    ) -> dict[str, Any]:
        if fence is not None:
            load_fence.check(fence)
        await load_replicas(authority, model_id, seconds, evicts=evict)
        return authority.status(authority.resolve(model_id)).to_json()

    @routes.post("/models/{model_id:path}/unload")
    async def unload(model_id: str, now: bool = False) -> dict[str, Any]:
        await asyncio.gather(*(authority.command(Unload(id, now)) for id in authority.replicas(model_id)))
        return authority.status(authority.resolve(model_id)).to_json()

    @routes.post("/models/{model_id:path}/offload")
    async def offload(model_id: str) -> dict[str, Any]:
        ids = authority.replicas(model_id)
        loaded = [id for id in ids if authority.model(id).state in ACCEPTING]
        await asyncio.gather(*(authority.command(Offload(id)) for id in loaded or ids[:1]))
        return authority.status(authority.resolve(model_id)).to_json()

    @routes.post("/models/{model_id:path}/move")
    async def move(
        model_id: str, wanted: MoveRequest, seconds: float | None = Query(None, ge=0, le=86400)
    ) -> dict[str, Any]:
        ids = authority.replicas(model_id)
        if len(ids) > 1:
            names = ", ".join((f"{ids[0]}@1", *ids[1:]))
            raise InvalidRequestError(f"{ids[0]!r} has several replicas; move one of them: {names}", param="model")
        await authority.command(Move(ids[0], wanted.device, seconds))
        return authority.status(ids[0]).to_json()

    @routes.post("/models/{model_id:path}/restart")
    async def restart(model_id: str, seconds: float | None = Query(None, ge=0, le=86400)) -> dict[str, Any]:
        ids = authority.replicas(model_id)
        for id in [id for id in ids if authority.model(id).worker is not None] or ids[:1]:  # the others keep serving
            await authority.command(Unload(id))
            await authority.load(authority.resolve(id), seconds)  # a reload may have removed it and added it again
        return authority.status(authority.resolve(model_id)).to_json()

    @routes.get("/models/{model_id:path}/crashes")
    async def show_crashes(model_id: str) -> dict[str, Any]:
        ids = authority.replicas(model_id)
        found = sorted((crash for id in ids for crash in crashes.of(id)), key=lambda crash: -crash["time"])
        return {"id": ids[0], "crashes": found}

    return routes


async def load_replicas(
    authority: Authority,
    name: str,
    seconds: float | None = None,
    priority: Priority = Priority.HIGH,
    *,
    evicts: bool = True,
) -> None:
    """Loads the configured minimum of replicas of a model, or the named replica. Raises the error if none is loaded."""
    ids = authority.replicas(name)
    least = authority.model(ids[0]).spec.replicas[0]
    first, *others = await asyncio.gather(
        *(authority.load(id, seconds, priority, evicts=evicts) for id in ids[:least]), return_exceptions=True
    )
    if first is not None and None not in others:
        raise first
