"""gateway.yaml: precedence, defaults, error messages with lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import GatewayConfig, node_source
from gateway.settings_loading import changes, load
from headgate.shared.configfile import unset_name
from headgate.shared.errors import ConfigError
from headgate.shared.state_directory import packaged_defaults


def _load(
    tmp_path: Path, text: str, environ: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None
) -> GatewayConfig:
    (tmp_path / "gateway.yaml").write_text(text)
    return load(tmp_path, environ or {}, overrides)


def _problems(tmp_path: Path, text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text, environ)
    return [str(problem).removeprefix(f"{tmp_path}/") for problem in caught.value.problems]


def test_shipped_file_has_the_defaults_and_the_demo_route() -> None:
    shipped = load(packaged_defaults(), {})
    other = {"routes", "providers"}
    assert shipped.model_dump(exclude=other) == GatewayConfig().model_dump(exclude=other)
    assert shipped.routes["demo"].chain == ("local/demo", "local/demo-mini")
    assert shipped.routes["*"].chain == ("local/*", "local/smaller")
    assert {name: provider.kind for name, provider in shipped.providers.items()} == {
        "anthropic": "anthropic", "openai": "openai", "google": "openai",
    }  # fmt: skip
    assert {entry.partition("/")[0] for route in shipped.routes.values() for entry in route.chain} == {"local"}
    assert [unset_name(provider.api_key) for provider in shipped.providers.values()] == [
        "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY",
    ]  # fmt: skip


def test_command_line_overrides_environment_overrides_file_overrides_default(tmp_path: Path) -> None:
    assert _load(tmp_path, "{}") == GatewayConfig()
    text = "port: 1\nbreaker: {failures: 2, open: 1s}\n"
    environ = {"GATEWAY_PORT": "2", "GATEWAY_BREAKER__OPEN": "2m", "GATEWAY_HOST": ""}
    config = _load(tmp_path, text, environ, {"port": 3, "host": None})
    assert (config.port, config.breaker.open, config.breaker.failures, config.host) == (3, 120.0, 2, "127.0.0.1")


def test_variable_may_contain_a_mapping_or_list(tmp_path: Path) -> None:
    routes = '{"a": {"chain": ["local/a"], "resume": "off"}}'
    assert _load(tmp_path, "breaker: 7\n", {"GATEWAY_BREAKER__FAILURES": "3"}).breaker.failures == 3
    assert _load(tmp_path, "{}", {"GATEWAY_ROUTES": routes}).routes["a"].resume == "off"


def test_unquoted_off_of_yaml_is_accepted(tmp_path: Path) -> None:
    assert _load(tmp_path, "routes: {a: {chain: [local/a], resume: off}}").routes["a"].resume == "off"


def test_key_from_an_unset_variable_is_marked(tmp_path: Path) -> None:
    text = 'providers: {o: {kind: openai, api_key: "${env:NO_SUCH}"}}'
    assert unset_name(_load(tmp_path, text).providers["o"].api_key) == "NO_SUCH"
    assert _load(tmp_path, text, {"NO_SUCH": "sk"}).providers["o"].api_key == "sk"


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ("http://gpu-1:8085/", ("url", "http://gpu-1:8085", "gpu-1:8085")),
        ("big=https://10.0.0.7:8085", ("url", "https://10.0.0.7:8085", "big")),
        ("http://[::1]:8085", ("url", "http://[::1]:8085", "[::1]:8085")),
        ("dns:headgate-inference:8085", ("dns", "headgate-inference:8085", "")),
        ("ray:", ("ray", "", "")),
        ("ray:10.0.0.1:6379", ("ray", "10.0.0.1:6379", "")),
    ],
)
def test_entry_of_nodes_names_its_source(tmp_path: Path, entry: str, source: tuple[str, str, str]) -> None:
    assert node_source(entry) == source
    assert _load(tmp_path, f"inference: {{nodes: '{entry}'}}").inference.nodes == (entry,)


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("inference: {nodes: [gpu-1]}", "inference.nodes.0", "or write NAME=URL, dns:NAME:PORT or ray:ADDRESS"),
        ("inference: {nodes: ['dns:gpu']}", "inference.nodes.0", "write dns:NAME:PORT"),
        ("inference: {nodes: ['dns:gpu:0']}", "inference.nodes.0", "write dns:NAME:PORT"),
        ("inference: {nodes: ['=http://gpu-1:1']}", "inference.nodes.0", "the name before `=` is missing"),
        ("inference: {nodes: ['ü=http://gpu-1:1']}", "inference.nodes.0", "is not a name of a node"),
        ("inference: {nodes: ['a=http://b:1', 'a=http://c:1']}", "inference.nodes.1", "two nodes are named 'a'"),
        ("inference: {replicas: {m: 2}}", "inference.replicas", "list the nodes in `inference.nodes`"),
        ("inference: {tls: {key: k.pem}}", "inference.tls", "set both or none"),
        ("state: http://redis", "state", "not the address of a Redis or Valkey server"),
        ("state: redis://redis/main", "state", "invalid port or database number"),
        ("state: redis://redis:99999/0", "state", "Port out of range"),
        ("routes: {a: {chain: []}}", "routes.a.chain", "the list must have at least 1 item"),
        (f"keys: [{{name: a, hash: 'sha256:{'0' * 64}', scopes: [root]}}]", "keys.0.scopes.0", "'use' or 'admin'"),
        ("usage: {redact: ['x*']}", "usage.redact", "matches an empty text"),
        ("providers: {o: {kind: openai, api_key: '${env:FOO'}}", "providers.o.api_key", "write ${env:NAME}"),
    ],
)
def test_single_problem_is_reported_at_its_key(tmp_path: Path, text: str, key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert message in problem.message


def test_changed_password_of_the_shared_state_is_not_shown(tmp_path: Path) -> None:
    before, after = (_load(tmp_path, f"state: redis://:{password}@redis") for password in ("old", "new"))
    assert changes(before, after) == ["state: changed"]


def test_errors_have_line_and_advice(tmp_path: Path) -> None:
    text = "breaker:\n  failures: 5\n  opn: 30s\nroutes:\n  a: {chain: [], load_wait: soon}\n"
    text += "keys:\n- {name: x, hash: abc}\n"
    problems = _problems(tmp_path, text)
    assert "gateway.yaml:3: breaker.opn: unknown key; did you mean 'open'?" in problems
    assert any(problem.startswith("gateway.yaml:5: routes.a.chain") for problem in problems)
    assert any(text.startswith("gateway.yaml:5: routes.a.load_wait: 'soon' is not a duration") for text in problems)
    assert any(problem.startswith("gateway.yaml:7: keys.0.hash: write sha256:") for problem in problems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'routes:\n  "local/*": {chain: ["local/*"]}',
            "gateway.yaml:2: routes.local/*: no request would match it: use `*` alone",
        ),
        ("routes:\n  a: {chain: [demo]}", "gateway.yaml:2: routes.a.chain.0: 'demo' is not PROVIDER/MODEL"),
        (
            "routes:\n  a: {chain: [opnai/x]}\nproviders: {openai: {kind: openai, api_key: k}}",
            "gateway.yaml:2: routes.a.chain.0: 'opnai/x': unknown provider; did you mean 'openai'?",
        ),
        ("routes: {a: {chain: [cloud/x]}}", "known providers: local"),
        ("routes: {a: {chain: [local/x*]}}", "`*` must be the whole model name"),
        ("routes: {a: {chain: [local/x], load_wait: 0}}", "never let a cold model load"),
        (
            "providers:\n  local: {kind: openai, api_key: k}",
            "gateway.yaml:2: providers.local: `local` is the inference",
        ),
        ("providers: {a/b: {kind: openai, api_key: k}}", "may hold letters"),
        ("providers: {a: {kind: anthropic, api_key: k, flavor: openai}}", "only providers of kind `openai`"),
        ("providers: {a: {kind: openai, api_key: k, flavor: azure}}", "'compatible'"),
        ("inference: {url: localhost}", "not a URL"),
        ("inference: {url: 'http://a:b@localhost'}", "must not contain a user name or password"),
        ("inference: {url: 'http://localhost/v1?key=a'}", "must not contain `?` or `#`"),
        ("providers: {a: {kind: openai, api_key: k, base_url: 'https://h/v1#x'}}", "must not contain `?` or `#`"),
        ("deadlines: {first_token: never}", "not `never`"),
        ("deadlines: {connect: 400s}", "longer than deadlines.total"),
        ("max_body: 10", "too small for any request"),
        ("limits: {concurrent: 99999999999999999999}", "less than or equal to 9007199254740992"),
        (
            f"keys: [{{name: a, hash: 'sha256:{'0' * 64}'}}, {{name: a, hash: 'sha256:{'1' * 64}'}}]",
            "two keys are named",
        ),
        (
            f"keys: [{{name: a, hash: 'sha256:{'0' * 64}'}}, {{name: b, hash: 'sha256:{'0' * 64}', scopes: [admin]}}]",
            "keys.1.hash: the key 'a' has the same hash",
        ),
        (
            f"usage: {{store: false}}\nkeys: [{{name: a, hash: 'sha256:{'0' * 64}', budget: {{tokens_per_month: 5}}}}]",
            "a budget needs stored usage",
        ),
    ],
)
def test_invalid_and_contradictory_settings_are_errors(tmp_path: Path, text: str, message: str) -> None:
    assert any(message in problem for problem in _problems(tmp_path, text)), _problems(tmp_path, text)


def test_errors_in_variables_name_the_variable(tmp_path: Path) -> None:
    environ = {
        "GATEWAY_PORT": "many",
        "GATEWAY_BREAKER__FAILURS": "3",
        "GATEWAY_SERVICE_HOST": "10.0.0.1",
        "GATEWAY_ROUTES": "{a",
        "GATEWAY_BREAKER": "{open: 1s}",
    }
    problems = _problems(tmp_path, "{}", environ)
    assert any(problem.startswith("GATEWAY_PORT: ") for problem in problems)
    assert "GATEWAY_BREAKER__FAILURS: unknown setting; did you mean GATEWAY_BREAKER__FAILURES?" in problems
    assert "GATEWAY_ROUTES: the value must be valid YAML" in problems
    section = "GATEWAY_BREAKER: this is a section; set one of its settings, for example GATEWAY_BREAKER__FAILURES"
    assert section in problems
    assert not any("SERVICE_HOST" in problem for problem in problems)


def test_changed_settings_are_named_without_secrets(tmp_path: Path) -> None:
    old = _load(tmp_path, "port: 1\nproviders: {o: {kind: openai, api_key: secret-1}}")
    new = _load(tmp_path, "port: 2\nproviders: {o: {kind: openai, api_key: secret-2}}\nroutes: {a: {chain: [o/x]}}")
    expected = ["port: 1 -> 2", "providers.o.api_key: changed", "routes.*: removed", "routes.a: added"]
    assert changes(old, new) == expected


@pytest.mark.parametrize("name", ["GATEWAY_API_KEY", "GATEWAY_ADMIN_KEY", "INFERENCE_TOKEN"])
@pytest.mark.parametrize("key", ["schl\u00fcssel", " padded", "padded\n", " ", "a\tb", "\udcff"])
def test_key_that_cannot_be_a_header_is_rejected(tmp_path: Path, name: str, key: str) -> None:
    assert _problems(tmp_path, "{}", {name: key}) == [
        f"{name}: a key must be printable ASCII without spaces at its ends, because clients send it in a header"
    ]
    assert _load(tmp_path, "{}", {name: "a good key-1"}) == GatewayConfig()
