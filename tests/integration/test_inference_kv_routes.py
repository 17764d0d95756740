"""`/memory/kv/sequences`, `clear` and `pin` pass requests of operators on to the workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from inference.app import Service
from inference.worker.kv.sequence_control import SequenceRow
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import Start


def row(id: str, tenant: str) -> dict[str, Any]:
    return asdict(SequenceRow(id, ("ram",), 10, 1000, tenant, 1.0))


async def started(start: Start) -> Service:
    """Two loaded models with three sequences, a loaded one that is busy, and a cold one."""
    kv = {"a": [row("aa", "one"), row("bb", "two")], "b": [row("cc", "one")], "busy": None}
    models: dict[str, dict[str, Any]] = {"a": {"aliases": ["first"]}, "b": {}, "busy": {}, "cold": {}}
    service: Service = await start(models, {name: {"kv": rows} for name, rows in kv.items()})
    for name in kv:
        await service.authority.load(service.authority.resolve(name), 10)
    return service


async def body_of(service: Service, method: str, path: str, body: Any = None) -> Any:
    answer = await ask(service.app, method, path, body)
    assert answer.status == 200, answer.body
    return answer.body


async def test_sequences_of_all_loaded_models_are_listed(start: Start) -> None:
    service = await started(start)
    found = await body_of(service, "GET", "/memory/kv/sequences")
    assert [(one["model_name"], one["id"]) for one in found["sequences"]] == [("a", "aa"), ("a", "bb"), ("b", "cc")]
    assert found["sequences"][0] == {"model_name": "a", **row("aa", "one"), "tiers": ["ram"]}
    assert found["not_loaded"] == ["cold"]
    assert found["errors"] == [{"model_name": "busy", "message": "the worker of 'busy' refused: busy"}]
    found = await body_of(service, "GET", "/memory/kv/sequences?model=first&tenant=two")
    assert [one["id"] for one in found["sequences"]] == ["bb"]
    assert (found["not_loaded"], found["errors"]) == ([], [])


async def test_sequences_are_cleared_and_counted_by_model(start: Start) -> None:
    service = await started(start)
    found = await body_of(service, "POST", "/memory/kv/clear", {"tenant": "one"})
    assert found["cleared"] == 2
    assert found["models"] == [{"model_name": "a", "cleared": 1}, {"model_name": "b", "cleared": 1}]
    assert [error["model_name"] for error in found["errors"]] == ["busy"]
    assert (await body_of(service, "POST", "/memory/kv/clear"))["cleared"] == 1
    assert (await body_of(service, "GET", "/memory/kv/sequences"))["sequences"] == []


async def test_sequences_are_pinned(start: Start) -> None:
    service = await started(start)
    found = await body_of(service, "POST", "/memory/kv/pin", {"ids": ["aa", "cc"], "seconds": 60})
    assert found["pinned"] == 2
    found = await body_of(service, "POST", "/memory/kv/pin", {"tenant": "one", "model": "a", "seconds": 0})
    assert found == {
        "pinned": 1, "models": [{"model_name": "a", "pinned": 1}], "not_loaded": [], "errors": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/memory/kv/clear", {"model": "cold"}, "model", "'cold' is not loaded"),
        ("/memory/kv/clear", {"model": "unknown"}, "model", "unknown model"),
        ("/memory/kv/pin", {"seconds": 5}, "ids", "`ids` or by `tenant`"),
        ("/memory/kv/pin", {"ids": ["aa"]}, "seconds", "required"),
        ("/memory/kv/pin", {"ids": ["aa"], "seconds": 1e9}, "seconds", "less than"),
    ],
)
async def test_wrong_requests_are_refused(start: Start, path: str, body: Any, param: str, text: str) -> None:
    service = await start({"cold": {}})
    answer = await ask(service.app, "POST", path, body)
    assert answer.status in (400, 404)
    assert answer.body["error"]["param"] == param
    assert text in answer.body["error"]["message"]


async def test_named_model_whose_worker_does_not_answer_is_an_error(start: Start) -> None:
    service = await started(start)
    answer = await ask(service.app, "POST", "/memory/kv/clear", {"model": "busy"})
    assert (answer.status, answer.body["error"]["code"]) == (503, "model_failed")
