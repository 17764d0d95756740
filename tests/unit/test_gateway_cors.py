"""CORS: allowed origins and response headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway import cors, settings_loading
from headgate.shared.errors import ConfigError

PAGE = "https://app.example.org"


def lines(origins: tuple[str, ...], origin: str | None) -> dict[str, str]:
    pairs = (line.split(": ", 1) for line in cors.response_lines(origins, origin).decode().split("\r\n")[:-1])
    return dict(pairs)


def test_no_header_is_sent_while_no_origin_is_allowed() -> None:
    assert lines((), PAGE) == {}


def test_allowed_origin_reads_answers_and_headers_of_headgate() -> None:
    found = lines((PAGE, "http://localhost:5173"), PAGE)
    assert (found["access-control-allow-origin"], found["vary"]) == (PAGE, "Origin")
    exposed = found["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "request-id", "x-headgate-tier", "x-headgate-model", "retry-after"} <= set(exposed)
    assert "x-ratelimit-remaining-tokens" in exposed
    assert "access-control-allow-credentials" not in found


@pytest.mark.parametrize("origin", [None, "https://other.example.org", "https://app.example.org.evil.test", "null"])
def test_other_origins_get_no_permission_and_separate_cache_entries(origin: str | None) -> None:
    assert lines((PAGE,), origin) == {"vary": "Origin"}


def test_all_origins_are_allowed_without_cookies() -> None:
    found = lines(("*",), PAGE)
    assert found["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in found
    assert lines(("*",), None) == {}


def test_preflight_allows_headers_of_clients_only() -> None:
    names = "authorization, X-Api-Key,anthropic-version, anthropic-dangerous-direct-browser-access, x-stainless-os, "
    found = dict(cors.preflight_headers(names + "x-headgate-policy, openai-beta, cookie, x-odd, x-headgate-\tq"))
    allowed = found[b"access-control-allow-headers"].decode().split(", ")
    assert {"authorization", "x-api-key", "content-type", "anthropic-version", "x-stainless-os"} <= set(allowed)
    assert {"anthropic-dangerous-direct-browser-access", "x-headgate-policy", "openai-beta"} <= set(allowed)
    assert not {"cookie", "x-odd"} & set(allowed)
    assert b"\t" not in found[b"access-control-allow-headers"]
    assert found[b"access-control-allow-methods"] == b"GET, POST, DELETE"


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ("app.example.org", "is not an origin"),
        ("https://app.example.org/", "no path"),
        ("https://*.example.org", "is not an origin"),
        ("null", "is not an origin"),
        ("https://app.example.org:443", "default port"),
        ("http://app.example.org:80", "default port"),
    ],
)
def test_invalid_origin_is_an_error_of_the_configuration(tmp_path: Path, origin: str, message: str) -> None:
    (tmp_path / "gateway.yaml").write_text(f"cors: {{origins: ['{origin}']}}\n")
    with pytest.raises(ConfigError, match=message):
        settings_loading.load(tmp_path, {})


def test_origins_come_from_the_file_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("cors: {origins: ['https://App.example.org', 'app://obsidian.md']}\n")
    assert settings_loading.load(tmp_path, {}).cors.origins == (PAGE, "app://obsidian.md")
    assert settings_loading.load(tmp_path, {"GATEWAY_CORS__ORIGINS": '["*"]'}).cors.origins == ("*",)
