"""`headgate config check`, the start and a reload accept the same configuration files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.runtime import Runtime, Source
from gateway.settings import GatewayConfig
from headgate.cli.main import main
from headgate.shared.errors import ConfigError
from headgate.shared.state_directory import StateDir
from inference import settings
from inference.app import Service, _reload
from tests.rigs.authority_rig import COMMAND, FakeEstimator
from tests.rigs.processes import forget_own

pytestmark = pytest.mark.unmeasured

MODELS = "# the models\nmodels:\n  demo:\n    path: bundled:demo\n  mini: {path: bundled:demo-mini}\n"
GATEWAY = 'providers: {}\nroutes:\n  demo: {chain: [local/demo]}\n  "*": {chain: ["local/*"]}\nbreaker: {failures: 5}\n'
CUT = st.integers(0, 200)
EMPTY = [
    "",
    "\n",
    "# only a comment\n",
    "~",
    "null\n",
    "---\n",
    "---\n...\n",
    "{}",
    "[]",
    "text",
    "\ufeff",
    "\x00",
    "\t",
]
NOTHING = st.sampled_from(
    ["", " ~", " null", " {}", " []", " # later", " ''", " 0", " false", " {demo: }", " {demo: ~}"]
)
KEYS = st.sampled_from(["models", "routes", "providers", "keys", "breaker", "deadlines", "limits", "host", "modles"])
LINES = st.lists(st.tuples(KEYS, NOTHING), max_size=3).map(lambda items: "".join(f"{k}:{v}\n" for k, v in items))


def texts(whole: str) -> st.SearchStrategy[str]:
    """Files: half-saved, empty, with empty sections, and complete ones."""
    half = CUT.map(lambda count: whole[:count])
    return st.one_of(half, st.sampled_from(EMPTY), LINES, LINES.map(lambda more: whole + more))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A configuration directory for the command, without settings of the developer."""
    path = tmp_path_factory.mktemp("config")
    with pytest.MonkeyPatch.context() as patch:
        forget_own(patch)
        patch.setenv("INFERENCE_FORCE_CPU_MODE", "true")
        patch.setenv("HEADGATE_STATE_DIR", str(path / "state"))
        patch.chdir(path)
        yield path


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def write(directory: Path, models: str = MODELS, gateway: str = GATEWAY) -> None:
    (directory / "models.yaml").write_text(models)
    (directory / "gateway.yaml").write_text(gateway)


def check_accepts(directory: Path) -> bool:
    """Whether `headgate config check` finds no problem."""
    return main(["config", "check", "--config-dir", str(directory)]) == 0


@pytest.fixture(scope="module")
def service(directory: Path, runner: asyncio.Runner) -> Iterator[Service]:
    """A running inference service that loads nothing."""
    write(directory)

    async def start() -> Service:
        state = StateDir.from_env({"HEADGATE_STATE_DIR": str(directory / "state")})
        service = Service(settings.load(directory, {}, {}), state, "token", command=COMMAND)
        service.estimator = FakeEstimator()  # type: ignore[assignment]
        await service.authority.start()
        return service

    service = runner.run(start())
    yield service
    runner.run(service.authority.close())


def test_config_check_and_start_and_reload_agree_about_models_yaml(
    directory: Path, service: Service, runner: asyncio.Runner
) -> None:
    """Models are removed only by a file that all three accept, and all of them only by `models: {}`."""

    async def reloaded() -> set[str]:
        _reload(service, directory, {}, None)
        return {name for name, model in service.authority.state.models.items() if not model.removed}

    @given(texts(MODELS))
    @example("models: {}\n")
    @example("models:\n")
    @example(MODELS)
    def agree(text: str) -> None:
        write(directory)
        assert runner.run(reloaded()) == {"demo", "mini"}
        write(directory, models=text)
        try:
            started = set(settings.load(directory, {"INFERENCE_FORCE_CPU_MODE": "true"}, {}).models)
        except ConfigError:
            assert not check_accepts(directory)
            assert runner.run(reloaded()) == {"demo", "mini"}
            return
        assert check_accepts(directory)
        assert runner.run(reloaded()) == started
        assert started or yaml.safe_load(text) == {"models": {}}

    agree()


def test_config_check_and_start_and_reload_agree_about_gateway_yaml(directory: Path, runner: asyncio.Runner) -> None:
    """A file that is refused changes nothing; empty sections are refused."""
    write(directory)
    source = Source(directory, lambda: {"GATEWAY_API_KEY": "key", "INFERENCE_TOKEN": "token"}, {})
    runtime = Runtime(source, source.load(), StateDir.from_env({"HEADGATE_STATE_DIR": str(directory / "state")}))
    runner.run(runtime.start())

    def reloaded() -> GatewayConfig | None:
        try:
            runner.run(runtime.reload())
        except ConfigError:
            return None
        return runtime.config

    @given(texts(GATEWAY))
    @example("{}")
    @example("routes:\n")
    @example(GATEWAY)
    def agree(text: str) -> None:
        write(directory)
        before = reloaded()
        write(directory, gateway=text)
        try:
            started = source.load()
        except ConfigError:
            assert not check_accepts(directory)
            assert reloaded() is None
            assert runtime.config == before
            return
        assert check_accepts(directory)
        assert reloaded() == started
        content = yaml.safe_load(text)
        assert isinstance(content, dict), "an empty file would drop every route and key"
        assert None not in content.values(), json.dumps(content)

    try:
        agree()
    finally:
        runner.run(runtime.stop())


@pytest.mark.parametrize("text", ["", "# models: {}\n", "models:\n", "models: ~\n", "models: null\n", "{}\n"])
def test_file_without_models_is_an_error_with_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "models.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"if that is intended, write `models: \{\}`"):
        settings.load(tmp_path, {}, {})


def test_empty_mapping_configures_no_models(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("models: {}\n")
    assert settings.load(tmp_path, {}, {}).models == {}
