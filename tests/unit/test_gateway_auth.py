"""Authentication and scopes of API keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gateway.access.authentication import Keys
from gateway.errors import RequestError
from gateway.runtime import Runtime, Source
from gateway.settings import KeySettings
from headgate.shared.state_directory import StateDir
from inference.protocol import Code, Priority


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _setting(key: str, **more: object) -> KeySettings:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return KeySettings.model_validate({"name": f"key {key}", "hash": f"sha256:{digest}", **more})


def test_key_is_generated_when_none_is_configured(state: StateDir) -> None:
    keys = Keys.load([], {}, state)
    generated = state.read_secret("gateway.key")
    assert generated is not None
    assert generated.startswith("hg-")
    assert keys.is_generated
    for scope in ("use", "admin"):
        assert keys.admit(_bearer(generated), scope)[0].name == "generated"
    assert (state.root / "gateway.key").stat().st_mode & 0o777 == 0o600


def test_keys_of_the_environment_replace_the_generated_one(state: StateDir) -> None:
    keys = Keys.load([], {"GATEWAY_API_KEY": "u", "GATEWAY_ADMIN_KEY": "a"}, state)
    assert state.read_secret("gateway.key") is None
    assert keys.admit({"x-api-key": "u"}, "use")
    assert keys.admit(_bearer("a"), "admin")
    assert keys.admit(_bearer("a"), "use")
    with pytest.raises(RequestError, match="use another key") as caught:
        keys.admit(_bearer("u"), "admin")
    assert (caught.value.code, caught.value.status) == (Code.PERMISSION_DENIED, 403)


def test_message_without_a_key_of_the_scope_names_the_variable(state: StateDir) -> None:
    with pytest.raises(RequestError, match="set GATEWAY_ADMIN_KEY"):
        Keys.load([], {"GATEWAY_API_KEY": "u"}, state).admit(_bearer("u"), "admin")
    operators = Keys.load([_setting("o", scopes=["admin"])], {}, state)
    with pytest.raises(RequestError, match="`use`; no key with this scope is configured; set GATEWAY_API_KEY"):
        operators.admit(_bearer("o"), "use")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        _bearer("wrong"),
        {"authorization": "u"},
        {"authorization": "Bearer "},
        {"authorization": "Basic u"},
        {"x-api-key": ""},
        _bearer("u\udcff"),
    ],
)
def test_invalid_key_gets_status_401(state: StateDir, headers: dict[str, str]) -> None:
    with pytest.raises(RequestError) as caught:
        Keys.load([], {"GATEWAY_API_KEY": "u"}, state).admit(headers, "use")
    assert (caught.value.code, caught.value.status) == (Code.INVALID_API_KEY, 401)


def test_empty_key_is_rejected(state: StateDir) -> None:
    assert Keys.load([_setting("")], {}, state).identify({}) is None


def test_hashed_keys_have_scopes_and_a_maximum_priority(state: StateDir) -> None:
    keys = Keys.load([_setting("team", priority="normal"), _setting("op", scopes=["admin"])], {}, state)
    team, _ = keys.admit(_bearer("team"), "use")
    assert [team.cap(requested) for requested in Priority] == [Priority.NORMAL, Priority.NORMAL, Priority.LOW]
    with pytest.raises(RequestError):
        keys.admit(_bearer("op"), "use")


def test_tenant_is_stable_and_does_not_reveal_the_key(state: StateDir, tmp_path: Path) -> None:
    keys = Keys.load([], {"GATEWAY_API_KEY": "u", "GATEWAY_ADMIN_KEY": "a"}, state)
    tenant = keys.admit(_bearer("u"), "use")[1]
    assert tenant == Keys.load([], {"GATEWAY_API_KEY": "u"}, state).admit(_bearer("u"), "use")[1]
    assert tenant != keys.admit(_bearer("a"), "use")[1]
    other = StateDir(tmp_path / "other")
    assert tenant != Keys.load([], {"GATEWAY_API_KEY": "u"}, other).admit(_bearer("u"), "use")[1]
    assert hashlib.sha256(b"u").hexdigest()[:8] not in tenant


def test_gateways_with_the_same_token_have_the_same_tenants(state: StateDir, tmp_path: Path) -> None:
    other, environ = StateDir(tmp_path / "other"), {"GATEWAY_API_KEY": "u"}
    tenants = [
        Keys.load([], environ, where, fleet_token=token).admit(_bearer("u"), "use")[1]
        for where, token in ((state, "shared"), (other, "shared"), (state, "another"))
    ]
    assert tenants[0] == tenants[1] != tenants[2]


def test_keys_have_one_tenant_when_prefixes_are_shared(state: StateDir) -> None:
    environ = {"GATEWAY_API_KEY": "u", "GATEWAY_ADMIN_KEY": "a"}
    keys = Keys.load([], environ, state, one_tenant=True)
    (use, tenant), (admin, same) = keys.admit(_bearer("u"), "use"), keys.admit(_bearer("a"), "use")
    assert (tenant, use.name, admin.name) == (same, "GATEWAY_API_KEY", "GATEWAY_ADMIN_KEY")
    assert keys.identify(_bearer("x")) is None


@pytest.mark.parametrize(("share", "tenants"), [("tenant", 2), ("all", 1)])
def test_setting_share_prefixes_decides_whether_keys_share_a_tenant(tmp_path: Path, share: str, tenants: int) -> None:
    environ = {"GATEWAY_API_KEY": "u", "GATEWAY_ADMIN_KEY": "a"}
    (tmp_path / "gateway.yaml").write_text(f"share_prefixes: {share}\n")
    source = Source(tmp_path, lambda: environ, {})
    keys = Runtime(source, source.load(), StateDir(tmp_path)).keys
    assert len({keys.admit(_bearer(key), "use")[1] for key in ("u", "a")}) == tenants


def test_cached_key_matches_only_itself(state: StateDir) -> None:
    keys = Keys.load([_setting("one"), _setting("other", priority="low")], {}, state)
    assert keys.admit(_bearer("one"), "use") == keys.admit({"x-api-key": "one"}, "use")
    assert keys.admit(_bearer("other"), "use")[0].max_priority is Priority.LOW
    for wrong in ("one ones", "on", "", "others"):
        for _ in range(2):
            with pytest.raises(RequestError):
                keys.admit(_bearer(wrong), "use")
