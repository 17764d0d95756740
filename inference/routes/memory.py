"""Routes about devices and memory as they are: stats, health, history, fragmentation; decide and change nothing."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from inference import figures, views
from inference.authority import Authority
<<<<<<< HEAD
from inference.core.pressure import Level
from inference.evictions import Action
from inference.protocol import DeviceState, ModelState

MIB = 2**20


class PlanRequest(BaseModel):
    """What a dry run is asked: a model, and settings of it that might be different."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1)
    context_length: int | None = Field(None, ge=16, le=2**27)
    parallel: int | None = Field(None, ge=1, le=256)
    kv_type: Literal["f16", "q8_0", "q4_0"] | None = None
    gpu_layers: int | None = Field(None, ge=-1)
    ubatch: int | None = Field(None, ge=1, le=2**20)


def health(authority: Authority) -> dict[str, Any]:
    """Whether devices are well: false at CRITICAL pressure or with a lost device."""
    devices = {}
    healthy = True
    for device, (use, level) in authority.governor.levels().items():
        reading = authority.reading(device)
        state = reading.state if reading else DeviceState.LOST
        healthy &= level < Level.CRITICAL and state is not DeviceState.LOST
        devices[device] = {"pressure": str(level), "utilization": round(use.share, 4), "state": str(state)}
    return {"healthy": healthy, "devices": devices}
=======
>>>>>>> 5e08057 (wip)


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
<<<<<<< HEAD
        balances = authority.balances()
        pressure = authority.governor.levels()
        ours = {device: balance.ours_bytes for device, balance in balances.items()}
        limit = authority.ledger.limit_bytes
        return {
            "allocated_mb": round(sum(ours.values()) / MIB, 3),
            "limit_mb": None if limit is None else round(limit / MIB, 3),
            "alerts": [alert.to_json() for alert in authority.governor.adviser.alerts()],
            "models_loaded": sum(
                model.running is not None and model.state is not ModelState.WARM for model in authority.models.values()
            ),
            "models_offloaded": len(authority.warm.offloaded()),
            "total_offloads": authority.evictions.totals[Action.OFFLOAD],
            "total_restorations": authority.warm.restorations,
            "total_unloads": authority.evictions.totals[Action.UNLOAD],
            "devices": {
                device: {
                    **views.balance_json(balance),
                    "utilization": round(pressure[device][0].share, 4),
                    "pressure": str(pressure[device][1]),
                }
                for device, balance in balances.items()
            },
        }

    @routes.get("/memory/models")
    async def models() -> dict[str, Any]:
        listed = []
        for model in authority.models.values():
            estimate = next(iter(model.estimates.values()), None)
            ready = model.running.ready if model.running else None
            listed.append(
                {
                    "id": model.id,
                    "state": str(model.state),
                    "held_bytes": dict(authority.ledger.owned_by(model.id)),
                    "estimate": estimate.to_json() if estimate else None,
                    "buffers": [
                        {"device": buffer.device, "kind": buffer.kind, "bytes": buffer.bytes}
                        for buffer in (ready.buffers if ready else ())
                    ],
                }
            )
        return {"models": listed}

    @routes.get("/memory/offloaded")
    async def offloaded() -> dict[str, Any]:
        return {"offloaded": authority.warm.offloaded()}

    @routes.post("/memory/plan")
    async def plan(wanted: PlanRequest) -> dict[str, Any]:
        model = authority.resolve(wanted.model)
        changes = wanted.model_dump(exclude={"model"}, exclude_none=True)
        decision, estimate = await authority.outlook.dry_run(model, changes)
        return {
            "model": model.id,
            **views.decision_json(decision),
            "estimate": estimate.to_json() if estimate else None,
        }
=======
        return figures.stats(authority)

    @routes.get("/memory/fragmentation")
    async def fragmentation() -> dict[str, Any]:
        return figures.fragmentation(authority)
>>>>>>> 5e08057 (wip)

    @routes.get("/memory/health")
    async def health(response: Response) -> dict[str, Any]:
        found = figures.health(authority)
        response.status_code = 200 if found["healthy"] else 503
        return found

    @routes.get("/memory/history")
    async def history(minutes: Annotated[float, Query(gt=0, le=10_000)] = 60.0) -> dict[str, Any]:
        samples = authority.governor.history.since(time.time() - 60 * minutes)
        return {"minutes": minutes, "samples": [sample.to_json() for sample in samples]}

    return routes
