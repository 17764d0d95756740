"""Turns traces on if OpenTelemetry's variables name a collector and its SDK is installed (`headgate[otel]`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from headgate.shared.traces.otlp_tracer import Tracer

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def start(service: str, environ: Mapping[str, str]) -> Tracer | None:
    """The tracer of a service, whose `service.name` is `service` unless the environment has one; None if traces are
    off. Traces are off without a collector, and after a log line with the reason if the settings cannot be used.
    """
    endpoint = _first(environ, ENDPOINTS)
    is_disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if not endpoint or is_disabled or environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return None
    if problem := _problem(endpoint, _first(environ, _PROTOCOLS)):
        log.error("traces are off: %s", problem)
        return None
    for name, value in environ.items():  # the SDK reads the process environment, which lacks variables of `.env`
        if name.startswith("OTEL_"):
            os.environ.setdefault(name, value)
    try:
        from headgate.shared.traces.otlp_tracer import make_tracer

        tracer = make_tracer(service)
    except ImportError as error:
        log.error(  # noqa: TRY400 - the line has what to do
            "traces are off, although a collector is set: %s; install the extra: pip install 'headgate[otel]'", error
        )
        return None
    except Exception as error:
        log.error("traces are off: OpenTelemetry does not accept its settings (OTEL_*): %s", error)  # noqa: TRY400
        return None
    log.info("traces are exported to %s", urlsplit(endpoint).netloc.rpartition("@")[2])
    return tracer


def _first(environ: Mapping[str, str], names: Iterable[str]) -> str:
    return next((value for name in names if (value := environ.get(name, "").strip())), "")


def _problem(endpoint: str, protocol: str) -> str | None:
    if not endpoint.startswith(("http://", "https://")):
        return f"the address of the collector must begin with http:// or https://; it is {endpoint[:100]!r}"
    if protocol not in ("", "http/protobuf"):
        return f"the protocol {protocol[:40]!r} is not supported; set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"
    return None
