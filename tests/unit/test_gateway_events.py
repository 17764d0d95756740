"""Events of the inference service update the gateway's view of it; polling covers the rest."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.local.candidate_facts import LikelyFailure, likely_failure
from gateway.providers.local.inference_snapshot import Events, InferenceView, model_status
from inference.protocol import DeviceState, ModelState, ModelStatus, ReplicaStatus
from tests.rigs import virtual_time

READY = ModelStatus("demo", ModelState.READY, devices=("gpu-0",), aliases=("d",))
FAILED = replace(READY, state=ModelState.FAILED, devices=(), retry_after_seconds=30.0, reason="it aborted")


def _event(number: int, kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'number': number, **data})}\n\n".encode()


def _snapshot(number: int, *models: ModelStatus, state: str = "healthy", ready: bool = True) -> bytes:
    devices = [{"id": "gpu-0", "state": state}]
    return _event(number, "snapshot", models=[model.to_json() for model in models], devices=devices, ready=ready)


class Service:
    """Serves the given streams one after the other, then 404. An exception among the pieces is raised."""

    def __init__(self, *streams: list[bytes | Exception]) -> None:
        self.streams = list(streams)
        self.opened: list[float] = []
        self.polls = 0
        self.models = [READY]
        self.answers = True

    @contextlib.asynccontextmanager
    async def events(
        self, silence_seconds: float, *, figures: bool = False, kv: bool = False
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The next stream."""
        self.opened.append(asyncio.get_running_loop().time())
        if not self.streams:
            raise UpstreamError(UpstreamKind.STATUS, "no events", status=404)
        yield self._pieces(self.streams.pop(0))

    async def _pieces(self, pieces: list[bytes | Exception]) -> AsyncIterator[bytes]:
        for piece in pieces:
            await asyncio.sleep(0.1)
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def fetch(self, path: str, seconds: float) -> Any:
        """The listing of models."""
        self.polls += 1
        if not self.answers:
            raise UpstreamError(UpstreamKind.CONNECT, "refused")
        return {"data": [model.to_json() for model in self.models]}


async def _listen(service: Service, seconds: float = 0.95) -> tuple[InferenceView, list[str]]:
    """The view after `seconds`, and the models reported as ready; an empty name stands for the service itself."""
    loop = asyncio.get_running_loop()
    notified: list[str] = []
    view = InferenceView(
        service.fetch, loop.time, on_return=lambda: notified.append(""), on_ready=lambda model: notified.append(model)
    )
    listening = asyncio.create_task(Events(lambda: service, view).run())
    await asyncio.sleep(seconds)
    listening.cancel()
    await asyncio.wait({listening})
    return view, notified


def test_snapshot_has_the_same_effect_as_a_poll() -> None:
    view, notified = virtual_time.run(_listen(Service([_snapshot(7, READY), _event(7, "beat")])))
    assert (view.is_fresh, view.reachable, view.models, view.aliases) == (True, True, {"demo": READY}, {"d": "demo"})
    assert notified == ["demo", ""]
    assert view.likely_failure("demo") is None
    unready, notified = virtual_time.run(_listen(Service([_snapshot(7, ready=False)])))
    assert (unready.reachable, notified) == (None, [])


def test_failed_model_is_unavailable_at_once_and_reported_when_ready() -> None:
    failed = _event(1, "model", model=FAILED.to_json())
    view, _ = virtual_time.run(_listen(Service([_snapshot(0, READY), failed])))
    likely_failure = view.likely_failure("demo")
    assert likely_failure is not None
    assert likely_failure.message == "the model failed: it aborted"
    assert likely_failure.retry_in == pytest.approx(29.25, abs=0.1)
    again = _event(2, "model", model=READY.to_json())
    view, notified = virtual_time.run(_listen(Service([_snapshot(0, READY), failed, again])))
    assert (view.likely_failure("demo"), notified) == (None, ["demo", "", "demo"])


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (_event(1, "device", device={"id": "gpu-0", "state": "quarantined"}), "its device gpu-0 is quarantined"),
        (_event(1, "device", device={"id": "gpu-0", "state": "suspect"}), None),
        (_event(1, "removed", device="gpu-0"), "its device gpu-0 is lost"),
        (_event(1, "load", id="demo", progress=0.5), None),
        (_event(1, "pressure", anything="else"), None),
        (b": a comment\n\nevent: nothing\n\n", None),
    ],
    ids=["quarantined", "suspect", "gone", "a load", "unknown", "no event"],
)
def test_models_on_an_unusable_device_are_unavailable(event: bytes, message: str | None) -> None:
    view, _ = virtual_time.run(_listen(Service([_snapshot(0, READY), event])))
    likely_failure = view.likely_failure("demo")
    assert (None if likely_failure is None else likely_failure.message) == message


def test_models_on_a_recovered_device_are_available() -> None:
    back = _event(2, "device", device={"id": "gpu-0", "state": "healthy"})
    view, _ = virtual_time.run(_listen(Service([_snapshot(0, READY), _event(1, "removed", device="gpu-0"), back])))
    assert view.likely_failure("demo") is None


async def _polled_after_a_loss() -> list[bool]:
    loop = asyncio.get_running_loop()
    service = Service([_snapshot(0, READY), _event(1, "removed", device="gpu-0"), *[b""] * 9])
    view = InferenceView(service.fetch, loop.time)
    listening = asyncio.create_task(Events(lambda: service, view).run())
    await asyncio.sleep(0.5)
    ails = [view.likely_failure("demo") is not None]
    await view.refresh()
    ails.append(view.likely_failure("demo") is not None)
    listening.cancel()
    await asyncio.wait({listening})
    return ails


def test_poll_after_the_loss_of_a_device_overrides_it() -> None:
    """Otherwise a model would stay unavailable if the event of the device's recovery was missed."""
    assert virtual_time.run(_polled_after_a_loss()) == [True, False]


def test_models_are_added_and_removed() -> None:
    other = replace(READY, id="other", aliases=())
    added = _event(1, "model", model=other.to_json())
    moved = _event(2, "model", model=replace(READY, state=ModelState.BUSY).to_json())
    view, _ = virtual_time.run(_listen(Service([_snapshot(0, READY), added, moved])))
    assert list(view.models) == ["demo", "other"], "the order of the listing is stable"
    service = Service([_snapshot(0, READY), added, _event(2, "removed", id="demo")])
    view, _ = virtual_time.run(_listen(service))
    assert (view.models, view.aliases) == ({"other": other}, {})
    assert view.likely_failure("demo") is None


async def _poll_under_way() -> InferenceView:
    loop = asyncio.get_running_loop()
    gate = asyncio.Event()
    service = Service([_snapshot(0, READY)])

    async def slow(path: str, seconds: float) -> Any:
        answer = await service.fetch(path, seconds)
        await gate.wait()
        return answer

    view = InferenceView(slow, loop.time)
    view.apply("snapshot", json.loads(_snapshot(0, READY).split(b"data: ")[1]))
    asking = asyncio.create_task(view.refresh())
    await asyncio.sleep(0.5)
    view.apply("model", {"model": FAILED.to_json()})
    gate.set()
    await asking
    return view


def test_poll_that_started_earlier_does_not_overwrite_an_event() -> None:
    view = virtual_time.run(_poll_under_way())
    assert view.models["demo"].state is ModelState.FAILED


async def _polled(service: Service, seconds: float) -> int:
    loop = asyncio.get_running_loop()
    view = InferenceView(service.fetch, loop.time)
    tasks = [asyncio.create_task(Events(lambda: service, view).run()), asyncio.create_task(view.run())]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return service.polls


def test_gaps_evictions_and_ends_of_the_stream_are_followed_by_a_poll() -> None:
    calm = virtual_time.run(_polled(Service([_snapshot(0, READY), _event(0, "beat"), *[b""] * 20]), 1.0))
    lost = virtual_time.run(
        _polled(Service([_snapshot(0, READY), _event(5, "load", id="demo", progress=0.1), *[b""] * 20]), 1.0)
    )
    left = virtual_time.run(
        _polled(Service([_snapshot(0, READY), _event(1, "eviction", eviction={}), *[b""] * 20]), 1.0)
    )
    ended = virtual_time.run(_polled(Service([_snapshot(0, READY)]), 1.0))
    assert (calm, lost, left, ended) == (1, 2, 2, 2)


@pytest.mark.parametrize(
    "pieces",
    [
        [_event(1, "model", model=READY.to_json())],
        [_snapshot(0, READY), b"event: model\ndata: {\n\n"],
        [_snapshot(0, READY), b"event: model\ndata: []\n\n"],
        [_snapshot(0, READY), _event(1, "model")],
        [_snapshot(0, READY), _event(1, "model", model=7)],
        [_snapshot(0, READY), _event(1, "device", device={"id": "gpu-0", "state": "odd"})],
        [_snapshot(0, READY), RuntimeError("a defect")],
        [_snapshot(0, READY), UpstreamError(UpstreamKind.TIMEOUT, "no data for 15 s")],
    ],
    ids=["no snapshot", "no JSON", "no object", "no model", "a number", "an odd state", "a defect", "silence"],
)
def test_invalid_stream_is_reopened_and_the_view_is_kept(pieces: list[bytes | Exception]) -> None:
    service = Service(pieces, [_snapshot(9, READY)])
    view, _ = virtual_time.run(_listen(service, 2.0))
    assert len(service.opened) == 2
    assert view.models == {"demo": READY}


def test_without_events_retries_back_off_and_polling_continues(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    service = Service()
    polls = virtual_time.run(_polled(service, 100.0))
    gaps = [round(after - before) for before, after in zip(service.opened, service.opened[1:], strict=False)]
    assert gaps == [1, 2, 4, 8, 16, 30, 30]
    assert polls == 50
    assert [line for line in caplog.messages if "events" in line] == [
        "no event stream from the inference service (status 404: no events); polling it every few seconds"
    ]


async def _return(service: Service) -> None:
    loop = asyncio.get_running_loop()
    view = InferenceView(service.fetch, loop.time)
    listening = Events(lambda: service, view)
    task = asyncio.create_task(listening.run())
    await asyncio.sleep(40.0)
    count = len(service.opened)
    listening.retry()
    await asyncio.sleep(0.1)
    assert len(service.opened) == count + 1
    task.cancel()
    await asyncio.wait({task})


def test_event_stream_of_a_recovered_service_is_opened_at_once() -> None:
    virtual_time.run(_return(Service()))


async def _reloaded() -> tuple[InferenceView, Service, Service]:
    loop = asyncio.get_running_loop()
    old, new = Service([_snapshot(0, READY), *[_event(1, "model", model=FAILED.to_json())] * 9]), Service()
    services = [old]
    view = InferenceView(old.fetch, loop.time)
    task = asyncio.create_task(Events(lambda: services[-1], view).run())
    await asyncio.sleep(0.15)
    services.append(new)
    await asyncio.sleep(2.0)
    task.cancel()
    await asyncio.wait({task})
    return view, old, new


def test_events_of_a_replaced_service_are_ignored() -> None:
    view, old, new = virtual_time.run(_reloaded())
    assert (len(old.opened), len(new.opened) > 0) == (1, True)
    assert view.models["demo"].state is ModelState.READY


def test_failed_model_is_avoided_until_its_pause_is_nearly_over() -> None:
    status = ModelStatus("m", ModelState.FAILED, retry_after_seconds=8.0, reason="it aborted")
    assert likely_failure(status, {}, 0.0) == LikelyFailure("the model failed: it aborted", 8.0)
    assert likely_failure(status, {}, 5.0) == LikelyFailure("the model failed: it aborted", 3.0)
    assert likely_failure(status, {}, 6.0) is None, "the service itself waits for the rest of the pause"
    assert likely_failure(ModelStatus("m", ModelState.FAILED), {}, 0.0) == LikelyFailure(
        "the model failed: no reason given", None
    )


@pytest.mark.parametrize("state", list(DeviceState))
def test_model_on_an_unusable_device_is_avoided(state: DeviceState) -> None:
    status = ModelStatus("m", ModelState.READY, devices=("gpu-0", "gpu-1"))
    failure = likely_failure(status, {"gpu-0": DeviceState.HEALTHY, "gpu-1": state}, 0.0)
    gone = state in (DeviceState.QUARANTINED, DeviceState.LOST)
    assert failure == (LikelyFailure(f"its device gpu-1 is {state}") if gone else None)


def test_model_without_known_problems_is_not_avoided() -> None:
    replicas = tuple(ReplicaStatus(f"m@{at + 1}", ModelState.READY, (f"gpu-{at}",)) for at in range(2))
    several = ModelStatus("m", ModelState.READY, devices=("gpu-0", "gpu-1"), replicas=replicas)
    assert likely_failure(several, {"gpu-0": DeviceState.LOST}, 0.0) is None, "the other replica answers"
    assert likely_failure(several, {"gpu-0": DeviceState.LOST, "gpu-1": DeviceState.LOST}, 0.0) is not None
    assert likely_failure(ModelStatus("m", ModelState.COLD), {"gpu-0": DeviceState.LOST}, 0.0) is None
    assert likely_failure(ModelStatus("m", ModelState.READY, devices=("gpu-7",)), {}, 0.0) is None


def test_a_status_is_read_as_the_service_wrote_it() -> None:
    """Unknown keys of a newer version are ignored, and missing ones have their defaults."""
    replica = ReplicaStatus("demo@2", ModelState.LOADING, ("gpu-1",), idle_seconds=2.5)
    status = replace(
        READY, capabilities=("chat",), experts=3, load_seconds=0.0, replicas=(replica,), steps=({"step": "fit"},)
    )
    written = status.to_json()
    assert model_status({**written, "headgate": {**written["headgate"], "new": 1}}) == status
    assert model_status({"id": "demo"}) == ModelStatus("demo", ModelState.COLD)
    with pytest.raises(ValueError, match="state"):
        model_status({"id": "demo", "headgate": {"state": "asleep"}})
