"""Routes about requests that may end their worker: list them, let them go; decide nothing."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from inference.authority.shell import Authority


def router(authority: Authority) -> APIRouter:
    """The routes."""
    routes = APIRouter()

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
