"""Routes about dumps of everything that is known about memory, and about what differs between two; decide nothing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from inference.dumps import Dumps


class DumpRequest(BaseModel):
    """What a dump holds beside the rest: of so many types the objects in the service that take most memory."""

    model_config = ConfigDict(extra="forbid")

    large_objects: int = Field(0, ge=0, le=100)


class CompareRequest(BaseModel):
    """Ids of two dumps."""

    model_config = ConfigDict(extra="forbid")

    before: str = Field(min_length=1)
    after: str = Field(min_length=1)


def router(dumps: Dumps) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/memory/dump")
    async def dump(wanted: DumpRequest | None = None) -> dict[str, Any]:
        return await dumps.make(wanted.large_objects if wanted else 0)

    @routes.post("/memory/dump/compare")
    async def compare(wanted: CompareRequest) -> dict[str, Any]:
        return dumps.compare(wanted.before, wanted.after)

    return routes
