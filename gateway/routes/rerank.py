"""`POST /v1/rerank`; the way of a request is `gateway.serve`."""

from __future__ import annotations

from gateway.core.frames import Endpoint
from gateway.runtime import Runtime
from gateway.serve import Generation

PATH = f"/v1/{Endpoint.RERANK}"


def rerank(runtime: Runtime) -> Generation:
    """The application behind the path."""
    return Generation(runtime, Endpoint.RERANK)
