"""Actions of operators at the inference service, and what they would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args
from urllib.parse import quote

import orjson

from gateway.errors import GatewayError, PassedOnError, RefusedError, RequestError, UpstreamError, UpstreamKind
from gateway.nodes.node import Node
from gateway.runtime import Runtime
from gateway.ui import plan_sentences
from gateway.ui.plan_sentences import Action, Forecast
from inference.protocol import Code, ModelStatus

ACTION_SECONDS = 600.0
"""Time limit of an action: a large model may load for minutes."""
QUICK_SECONDS = 30.0
"""Time limit for a dry run, which may have to read the model's file first, and for reading the devices."""
VIEW_SECONDS = 1.0
ACTIONS: tuple[Action, ...] = get_args(Action)


async def plan(runtime: Runtime, node: Node, model: str, action: str, device: str | None) -> dict[str, Any]:
    """What `action` would do, as the page shows it; `plan` is the answer of `/memory/plan` to a load, else None.

    Raises GatewayError.
    """
    name, status = await _known(node, model)
    wanted = _action(action)
    answer: dict[str, Any] | None = None
    forecast: Forecast
    if wanted == "load":
        answer = await _post(runtime, node, "/memory/plan", {"model": name}, QUICK_SECONDS)
        forecast = plan_sentences.load(name, answer, await _devices(node))
    elif wanted == "move":
        devices = await _devices(node)
        if (target := devices.get(device or "")) is None:
            raise _no_device(device, devices)
        forecast = plan_sentences.move(status, target)
    elif wanted == "unload":
        forecast = plan_sentences.unload(status)
    elif wanted == "offload":
        forecast = plan_sentences.offload(status)
    else:
        forecast = plan_sentences.restart(status)
    return {"action": wanted, "model": name, **forecast._asdict(), "plan": answer}


async def act(runtime: Runtime, node: Node, model: str, action: str, device: str | None) -> dict[str, Any]:
    """The model's object in `/v1/models` after the action; raises GatewayError."""
    name, _ = await _known(node, model)
    wanted = _action(action)
    if wanted == "move" and not device:
        raise _no_device(device, await _devices(node))
    path = f"/models/{quote(name, safe='')}/{wanted}"
    return await _post(runtime, node, path, {"device": device} if wanted == "move" else None, ACTION_SECONDS)


async def recover(runtime: Runtime, node: Node, device: str) -> dict[str, Any]:
    """Tries a device now; returns its state. Raises GatewayError."""
    devices = await _devices(node)
    if device not in devices:
        raise _no_device(device, devices)
    return await _post(runtime, node, f"/devices/{quote(device, safe='')}/recover", None, ACTION_SECONDS)


def _action(name: str) -> Action:
    for action in ACTIONS:
        if action == name:
            return action
    raise RequestError(
        Code.NOT_FOUND, f"unknown action {name[:40]!r}; actions are {', '.join(ACTIONS)}", param="action"
    )


async def _known(node: Node, model: str) -> tuple[str, ModelStatus]:
    """The name and status of a model, or of one of its replicas."""
    view = node.view
    await view.ensure(VIEW_SECONDS)
    if not view.is_fresh:
        raise RefusedError(Code.NO_TIER_AVAILABLE, "the inference service does not answer; try again", retry_after=2.0)
    name = view.aliases.get(model, model)
    status = view.models.get(name) or _replica(view.models.get(name.rpartition("@")[0]), name)
    if status is None:
        known = ", ".join(view.models) or "none"
        raise RequestError(
            Code.MODEL_NOT_FOUND, f"unknown local model {model[:100]!r}; models: {known[:1000]}", param="model"
        )
    return name, status


def _replica(model: ModelStatus | None, name: str) -> ModelStatus | None:
    """The status of the replica NAME@1, NAME@2, ... of a model, as of a model of its own; None if there is none."""
    if model is None:
        return None
    for item in model.replicas:
        if name == (f"{model.id}@1" if item.id == model.id else item.id):
            return replace(
                model, id=name, state=item.state, devices=item.devices, actual_bytes=item.actual_bytes,
                in_flight=item.in_flight, queued=item.queued, replicas=(),
            )  # fmt: skip
    return None


async def _devices(node: Node) -> dict[str, dict[str, Any]]:
    """The entries of `/devices` by id."""
    try:
        answer = await node.provider.get_json("/devices", QUICK_SECONDS)
        return {item["id"]: item for item in answer["devices"]}
    except UpstreamError as error:
        raise _passed_on(error) from error


def _no_device(device: str | None, known: dict[str, dict[str, Any]]) -> RequestError:
    what = f"unknown device {device[:100]!r}" if device else "a device is required"
    return RequestError(Code.INVALID_REQUEST, f"{what}; devices: {', '.join(known)}", param="device")


async def _post(runtime: Runtime, node: Node, path: str, body: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    try:
        raw = b"" if body is None else orjson.dumps(body)
        answer = await node.provider.post_json(path, raw, seconds, runtime.operator_headers())
    except UpstreamError as error:
        raise _passed_on(error) from error
    return dict(answer)


def _passed_on(error: UpstreamError) -> GatewayError:
    """The error for the page: that of the inference service if it sent one."""
    if error.status is not None:
        return PassedOnError(error, error.status, error.param)
    if error.kind is UpstreamKind.TIMEOUT:
        return RefusedError(Code.DEADLINE_EXCEEDED, f"the inference service is still busy: {error.message}")
    return RefusedError(
        Code.NO_TIER_AVAILABLE, f"the inference service does not answer: {error.message}", retry_after=2.0
    )
