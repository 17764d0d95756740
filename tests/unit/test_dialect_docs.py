"""docs/providers.md agrees with the tables in the code."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES
from gateway.errors import UpstreamKind
from gateway.providers import provider_fields
from gateway.providers.anthropic import anthropic_events
from headgate.shared.bodies.body_decoder import json_schema
from tests.rigs.fake_provider.faults import KINDS

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "providers.md").read_text(encoding="utf-8")


def fields_of(endpoint: Endpoint) -> set[str]:
    """The names that the gateway accepts."""
    return {*json_schema(BODIES[endpoint][0])[0]["properties"]}


PROFILES = (provider_fields.OPENAI_CHAT, provider_fields.GOOGLE_CHAT, provider_fields.ANTHROPIC_CHAT)
FATES = {"sent": "takes", "translated": "takes", "unsuitable": "refuses", "dropped": "drops"}


def _rows(columns: int) -> dict[str, tuple[str, ...]]:
    cell = r" ([^|]+) \|"
    found = re.findall(r"^\| `([^`|]+)` \|" + cell * (columns - 1) + "$", DOCS, re.MULTILINE)
    return {row[0]: tuple(row[1:]) for row in found}


def test_documented_fields_agree_with_the_profiles() -> None:
    rows = _rows(4)
    assert len(rows) > 30
    for name, fates in rows.items():
        for profile, fate in zip(PROFILES, fates, strict=False):
            if fate in FATES:
                assert name in getattr(profile, FATES[fate]), f"{name}: {fate}"


def test_fields_with_different_treatment_are_documented() -> None:
    rows = _rows(4)
    same = {"model", "messages", "stream", "stream_options"}
    hosting = {name for name, why in provider_fields.GOOGLE_CHAT.drops.items() if "hosting" in why}
    samplers = set(provider_fields.EXTENSIONS_DROPPED)
    assert fields_of(Endpoint.CHAT) - same - hosting - samplers <= set(rows)


def test_documented_stop_reasons_agree_with_the_code() -> None:
    rows = {name: cells[0].strip("`") for name, cells in _rows(2).items() if name in anthropic_events.FINISH_REASONS}
    assert rows == dict(anthropic_events.FINISH_REASONS)


def test_kinds_of_failures_are_documented() -> None:
    assert {str(kind) for kind in UpstreamKind} <= set(_rows(2))


def test_documented_faults_exist() -> None:
    named = re.findall(r"`fault-([a-z-]+)(?:=[\d.]+)?`", DOCS)
    assert named
    assert {name.replace("-", "_") for name in named} <= set(KINDS)
