"""Both services describe themselves in OpenAPI: every path, every field, and only with a key."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES as GATEWAY_BODIES
from headgate.shared.bodies.body_decoder import HOP_FIELDS, json_schema
from inference.api.service_routes import BODIES, KEYLESS_PATHS
from inference.app import HOT_PATHS
from tests.rigs.asgi import ask, operations
from tests.rigs.authority_rig import Start, services
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import Gateway


@pytest.mark.parametrize("endpoint", Endpoint, ids=lambda endpoint: endpoint.name.lower())
def test_gateway_describes_the_fields_that_it_checks(endpoint: Endpoint) -> None:
    type_ = GATEWAY_BODIES[endpoint][0]
    described, parts = json_schema(type_)
    fields = {name for name in type_.__struct_encode_fields__ if name[0] != "$" and name not in HOP_FIELDS}
    assert set(described["properties"]) == fields
    assert set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps([described, parts]))) == set(parts)


def check(described: dict[str, Any], hot: set[str], keyless_paths: set[str]) -> None:
    assert described["openapi"].startswith("3.1")
    assert hot <= set(described["paths"])
    for path, methods in described["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"], "invalid input is 400"
            assert "default" in operation["responses"]
            assert ("security" in operation) is (path not in keyless_paths)
    assert set(described["components"]["schemas"]) & {"HTTPValidationError", "ValidationError"} == set()


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_inference_service_describes_itself(start: Start) -> None:
    service = await start({"a": {}})
    assert (await ask(service.app, "GET", "/openapi.json", key="wrong")).status == 401
    described = (await ask(service.app, "GET", "/openapi.json")).body
    check(described, set(BODIES), set(KEYLESS_PATHS))
    assert {path for _, path in operations(service.app)} | set(HOT_PATHS) == set(described["paths"])


async def test_gateway_describes_itself(tmp_path: Path) -> None:
    async with FakeInference("token") as inference, Gateway(tmp_path, inference.url) as gateway:
        async with httpx2.AsyncClient(base_url=gateway.url) as stranger:
            assert (await stranger.get("/openapi.json")).status_code == 401
        described = (await gateway.client.get("/openapi.json")).json()
        check(
            described, {f"/v1/{endpoint}" for endpoint in Endpoint}, {"/", "/livez", "/readyz", "/health", "/metrics"}
        )
