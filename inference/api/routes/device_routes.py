"""Routes that ask for something to be done about a device: recover; decide nothing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from inference.authority.shell import Authority


def router(authority: Authority) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/devices/{id}/recover")
    async def recover(id: str) -> dict[str, Any]:
        return {"device": (await authority.health.recover(id)).to_json()}

    return routes
