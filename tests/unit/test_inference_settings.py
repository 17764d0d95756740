"""models.yaml and INFERENCE_*: precedence, defaults, error messages."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from gateway.settings import GatewayConfig
from headgate.shared.errors import ConfigError
from headgate.shared.state_directory import INVALID_KEY
from inference import environment_settings, settings
from inference.authority.placement.kv_budgets import STEP_BYTES
from inference.protocol import Priority
from tests.rigs import tiny_gguf

REPOSITORY = Path(__file__).resolve().parents[2]
KEPT_NAMES = {
    "GPU_LAYERS": -1, "GPU_INDEX": None, "MEMORY_LIMIT_GB": None, "BACKEND": "llamacpp", "ENABLE_MEMORY_GOVERNOR": True,
    "GPU_MEMORY_MAX_PERCENT": 0.90, "CPU_MEMORY_MAX_PERCENT": 0.50, "GPU_MEMORY_LIMIT_MB": None,
    "GPU_MEMORY_RESERVE_MB": 512, "ENABLE_CPU_OFFLOAD": True, "EVICTION_IDLE_THRESHOLD_SECONDS": 120,
    "PRESSURE_CHECK_INTERVAL_SECONDS": 15, "PRESSURE_MODERATE": 0.60, "PRESSURE_HIGH": 0.80, "PRESSURE_CRITICAL": 0.90,
    "PRESSURE_EMERGENCY": 0.98, "ENABLE_MEMORY_ALERTS": True, "MODEL_IDLE_TIMEOUT_SECONDS": 300,
    "ENABLE_LAZY_MODEL_LOADING": True, "MAX_MODELS": None, "MAX_MODELS_PER_DEVICE": None, "QUEUE_HIGH": 10,
    "QUEUE_NORMAL": 50, "QUEUE_LOW": 100, "ACQUIRE_TIMEOUT_SECONDS": 300, "FORCE_CPU_MODE": False, "DEVICES": "auto",
    "KV_ENABLED": True, "KV_RAM_GB": None, "KV_DISK_GB": 0, "KV_POLICY": "hybrid", "KV_THRESHOLD": 0.9,
    "KV_PREFETCH": True, "KV_DIR": None,
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tiny.gguf").write_bytes(tiny_gguf.generative().read_bytes())
    return tmp_path


def load(directory: Path, text: str, environ: dict[str, str] | None = None, **overrides: Any) -> Any:
    (directory / "models.yaml").write_text(text)
    return settings.load(directory, {"INFERENCE_MODELS_DIR": str(directory), **(environ or {})}, overrides)


def problems(directory: Path, text: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(directory, text, environ)
    return str(caught.value)


@pytest.mark.parametrize(("name", "default"), list(KEPT_NAMES.items()))
def test_settings_have_their_defaults(name: str, default: Any) -> None:
    defaults = environment_settings.InferenceSettings.model_validate({})
    assert getattr(defaults, name.lower()) == default
    assert f"INFERENCE_{name}" in environment_settings.environment_names()


def test_host_memory_for_stored_sequences_is_none_or_enough_for_one_step(directory: Path) -> None:
    """Less would have no effect."""
    for value in (0.0, STEP_BYTES / 2**30):
        assert load(directory, "models: {}", {"INFERENCE_KV_RAM_GB": str(value)}).settings.kv_ram_gb == value
    text = problems(directory, "models: {}", {"INFERENCE_KV_RAM_GB": "0.01"})
    assert "INFERENCE_KV_RAM_GB" in text
    assert "must be 0 (none) or at least 0.015625 (16 MiB)" in text


def test_shipped_file_is_valid_and_contains_every_key() -> None:
    text = (REPOSITORY / "config" / "models.yaml").read_text()
    for key in settings.ModelEntry.model_fields:
        assert f"\n    {key}:" in text, key
    found = settings.load(REPOSITORY / "config", {}, {})
    assert list(found.models) == ["demo", "demo-mini"]


def test_environment_gives_the_defaults_of_models(directory: Path) -> None:
    environ = {"INFERENCE_CONTEXT_LENGTH": "1024", "INFERENCE_MODEL_IDLE_TIMEOUT_SECONDS": "2m"}
    text = "models:\n  a: {path: tiny.gguf}\n  b: {path: tiny.gguf, context_length: 99, idle_timeout: never}"
    models = load(directory, text, environ).models
    assert (models["a"].context_length, models["a"].idle_timeout) == (1024, 120)
    assert (models["b"].context_length, models["b"].idle_timeout) == (99, math.inf)
    assert models["a"].path == directory / "tiny.gguf"


def test_speculation_may_be_off_without_quotes(directory: Path) -> None:
    """YAML reads a bare `off` as false."""
    text = "models:\n  a: {path: tiny.gguf}\n  b: {path: tiny.gguf, speculation: off}"
    models = load(directory, text, {"INFERENCE_SPECULATION": "ngram"}).models
    assert (models["a"].speculation, models["b"].speculation) == ("ngram", "off")


def test_default_kv_cells_apply_only_to_models_that_have_more_cells_without_them(directory: Path) -> None:
    text = (
        "models:\n  large: {path: tiny.gguf}\n  equal: {path: tiny.gguf, parallel: 2}\n"
        "  small: {path: tiny.gguf, context_length: 512}\n  own: {path: tiny.gguf, kv_cells: 5000}"
    )
    models = load(directory, text, {"INFERENCE_KV_CELLS": "8192"}).models
    assert {name: model.kv_cells for name, model in models.items()} == {
        "large": 8192, "equal": None, "small": None, "own": 5000,
    }  # fmt: skip
    assert [models[name].cells for name in ("large", "equal", "small")] == [8192, 8192, 2048]
    message = problems(directory, "models:\n  a: {path: tiny.gguf}", {"INFERENCE_KV_CELLS": "1024"})
    assert "models.yaml:2" in message
    assert "kv_cells 1024 is less than context_length 4096" in message


def test_replicas_are_models_with_ids_of_their_own(directory: Path) -> None:
    text = "models:\n  org/a: {path: tiny.gguf, aliases: [x], replicas: 2..3}\n  b: {path: tiny.gguf, replicas: 1}"
    config = load(directory, text)
    assert list(config.models) == ["org/a", "org/a@2", "org/a@3", "b"]
    assert config.model_ids == ("org/a", "b")
    assert config.models["org/a"].replicas == config.models["org/a@3"].replicas == (2, 3)
    assert (config.models["org/a@3"].aliases, config.models["org/a@3"].configured_id) == ((), "org/a")
    for name in ("org/a", "x"):
        assert config.replicas_named(name) == ("org/a", "org/a@2", "org/a@3")
    assert config.replicas_named("org/a@1") == ("org/a",)
    assert config.replicas_named("org/a@2") == ("org/a@2",)
    assert config.replicas_named("b") == ("b",)
    assert "b@1" not in config.names


def test_path_that_is_not_utf8_is_refused(directory: Path) -> None:
    """Such a path cannot be sent to a worker, and llama.cpp cannot open it."""
    folder = directory / os.fsdecode(b"models-\xff")
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(b"x")
    message = problems(directory, "models:\n  a: {path: tiny.gguf}", {"INFERENCE_MODELS_DIR": str(folder)})
    assert "models.yaml:2" in message
    assert "not UTF-8" in message


def test_command_line_overrides_the_environment(directory: Path) -> None:
    config = load(directory, "models: {}", {"INFERENCE_PORT": "1", "INFERENCE_HOST": "::1"}, port=2, host=None)
    assert (config.settings.port, config.settings.host) == (2, "::1")
    assert list(config.models) == ["tiny"]  # the file in the directory of models


def test_models_are_found_by_alias_and_by_ids_with_slashes(directory: Path) -> None:
    config = load(directory, "models: {org/a: {path: tiny.gguf, aliases: [x, y/z]}}")
    assert config.names == {"org/a": "org/a", "x": "org/a", "y/z": "org/a"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models:\n  a:\n    pth: x", ["models.yaml:3", "did you mean 'path'"]),
        ("models:\n  a: {context_length: 1}", ["path: this key is required"]),
        ("models:\n  a: {path: tiny.gguf, idle_timeout: soon}", ["models.yaml:2", "not a duration"]),
        ("models:\n  a: {path: none.gguf}", ["models.yaml:2", "no file", "none.gguf", "INFERENCE_MODELS_DIR"]),
        ("models:\n  a: {path: 'hf:org/repo:Q4_K_M'}", ["models.yaml:2", "headgate pull hf:org/repo:Q4_K_M"]),
        ("models:\n  a: {path: 'bundled:demmo'}", ["did you mean bundled:demo"]),
        ("models:\n  a: {path: 'weights.bin'}", ["not a model source"]),
        (
            "models:\n  a: {path: tiny.gguf}\n  b: {path: tiny.gguf, aliases: [a]}",
            ["models.yaml:3", "already has the name 'a'"],
        ),
        ("models:\n  a: {path: tiny.gguf, ubatch: 4096}", ["ubatch 4096 is larger than batch 2048"]),
        ("models:\n  a: {path: tiny.gguf, kv_type: q8_0, flash_attention: false}", ["needs flash_attention"]),
        ("models:\n  a: {path: tiny.gguf, kv_type: q9}", ["f16"]),
        ("models:\n  a: {path: tiny.gguf, fit: contxt}", ["(it is 'contxt'); did you mean 'context'?"]),
        ("models:\n  a: {path: tiny.gguf, split_mode: ROWS}", ["did you mean 'row'?"]),
        ("models:\n  a: {path: tiny.gguf, capabilities: [chat, tool]}", ["did you mean 'tools'?"]),
        ("models:\n  a: {path: tiny.gguf, capabilities: []}", ["the list must have at least 1 item"]),
        ("models:\n  a: {path: tiny.gguf, speculation: ngrams}", ["did you mean 'ngram'?"]),
        ("models:\n  a: {path: tiny.gguf, experts: hosts}", ["did you mean 'host'?"]),
        ("models:\n  a: {path: tiny.gguf, oom_policy: [cleanp, cpu]}", ["did you mean 'cleanup'?"]),
        ("models:\n  a: {path: tiny.gguf, oom_policy: fail_fst}", ["did you mean 'fail_fast'?"]),
        ("models:\n  a: {path: tiny.gguf, context_length: 134217729}", ["less than or equal to 134217728"]),
        (
            "models:\n  a:\n    path: tiny.gguf\n    kv_cells: 4095",
            ["models.yaml:4", "less than context_length 4096", "make kv_cells 4096 or more"],
        ),
        (
            "models:\n  a: {path: tiny.gguf, context_length: 1000, parallel: 3, kv_cells: 3001}",
            ["more than context_length 1000 x parallel 3", "make kv_cells 3000 or less"],
        ),
        ("models:\n  a: {path: tiny.gguf, kv_cells: 8192, swa_full: true}", ["kv_cells needs swa_full: false"]),
        ("models:\n  a: {path: tiny.gguf, lora: [l.gguf]}", ["no file", "l.gguf"]),
        ("models:\n  ' a': {path: tiny.gguf}", ["is not a valid model id"]),
        ('models:\n  "a\\nb": {path: tiny.gguf}', ["is not a valid model id; remove line breaks"]),
        ("models:\n  a: {path: tiny.gguf}\n  a: {path: tiny.gguf}", ["duplicate key"]),
        ("models:\n  a: {path: tiny.gguf, mmproj: eye.gguf}", ["models.yaml:2", "no file", "eye.gguf", "mmproj"]),
        ("models:\n  a: {path: tiny.gguf, draft: small.gguf}", ["models.yaml:2", "models.a.draft", "no file"]),
        ("models:\n  a: {path: tiny.gguf, draft: 'bundled:demo-min'}", ["did you mean bundled:demo-mini?"]),
        ("models:\n  a: {path: tiny.gguf, draft: small}", ["models.a.draft", "'small' is not a model source"]),
        (
            "models:\n  a: {path: tiny.gguf, draft: 'bundled:demo-mini', speculation: ngram}",
            ["models.a.draft", "draft takes the place of speculation: ngram; remove one of them"],
        ),
        ("models: [1]", ["models"]),
        ("models:\n  a: {path: tiny.gguf, replicas: many}", ["models.yaml:2", "write N or N..M"]),
        ("models:\n  a: {path: tiny.gguf, replicas: true}", ["write N or N..M"]),
        ("models:\n  a: {path: tiny.gguf, replicas: 1..}", ["write N or N..M"]),
        ("models:\n  a: {path: tiny.gguf, replicas: 3..2}", ["1 <= N <= M <= 64"]),
        ("models:\n  a: {path: tiny.gguf, replicas: 0}", ["1 <= N <= M <= 64"]),
        ("models:\n  a: {path: tiny.gguf, replicas: 2, gpu_index: 0}", ["remove gpu_index, or make replicas 1"]),
        (
            "models:\n  a: {path: tiny.gguf, replicas: 2}\n  a@2: {path: tiny.gguf}",
            ["models.yaml:3", "the model or replica 'a@2' already has the name 'a@2'"],
        ),
        (
            "models:\n  b: {path: tiny.gguf, aliases: [a@1]}\n  a: {path: tiny.gguf, replicas: 2}",
            ["models.yaml:3", "'a@1' is the id of a replica, and already a name of 'b'"],
        ),
    ],
)
def test_errors_in_the_file_have_line_and_advice(directory: Path, text: str, words: list[str]) -> None:
    message = problems(directory, text)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"INFERENCE_MEMORY_LIMT_GB": "1"}, ["did you mean INFERENCE_MEMORY_LIMIT_GB"]),
        ({"INFERENCE_MEMORY__LIMIT_GB": "1"}, ["MEMORY__LIMIT_GB", "did you mean INFERENCE_MEMORY_LIMIT_GB"]),
        ({"INFERENCE_A__B": "1"}, ["INFERENCE_A__B", "unknown setting"]),
        ({"INFERENCE_PORT": "http"}, ["INFERENCE_PORT", "'http'"]),
        ({"INFERENCE_FIT": "layer"}, ["INFERENCE_FIT", "(it is 'layer'); did you mean 'layers'?"]),
        ({"INFERENCE_MIN_CONTEXT": "134217729"}, ["INFERENCE_MIN_CONTEXT", "less than or equal to 134217728"]),
        ({"INFERENCE_DEVICES": "tpu"}, ["INFERENCE_DEVICES", "auto, cpu, or simulated devices", "did you mean cpu"]),
        ({"INFERENCE_DEVICES": "sim:2x600"}, ["INFERENCE_DEVICES", "too small", "did you mean 600MiB"]),
        ({"INFERENCE_GPU_MEMORY_MAX_PERCENT": "90"}, ["INFERENCE_GPU_MEMORY_MAX_PERCENT"]),
        ({"INFERENCE_PRESSURE_HIGH": "0.5"}, ["must rise"]),
    ],
)
def test_errors_in_the_environment_name_the_variable(
    directory: Path, environ: dict[str, str], words: list[str]
) -> None:
    message = problems(directory, "models: {}", environ)
    for word in words:
        assert word in message


def test_variables_of_orchestrators_are_ignored(directory: Path) -> None:
    invented = {
        "INFERENCE_SERVICE_HOST": "10.0.0.1",
        "INFERENCE_SERVICE_PORT": "8085",
        "INFERENCE_PORT_8085_TCP": "tcp://10.0.0.1:8085",
        "INFERENCE_PORT_8085_TCP_ADDR": "10.0.0.1",
        "INFERENCE_URL": "http://gpu-box:8085",
        "INFERENCE_DEVICES": "",
    }
    assert load(directory, "models: {}", invented).settings == load(directory, "models: {}").settings


def test_body_limit_is_at_least_that_of_the_gateway(directory: Path) -> None:
    assert load(directory, "models: {}").settings.max_body_bytes == 32 * 2**20 >= GatewayConfig().max_body


def test_stored_sequences_are_sized_in_gib(directory: Path) -> None:
    """Without INFERENCE_KV_RAM_GB the size depends on the host; nothing is stored on disk by default."""
    found = load(directory, "models: {}").settings
    assert (found.kv_ram_bytes, found.kv_disk_bytes) == (None, 0)
    environ = {"INFERENCE_KV_RAM_GB": "0.5", "INFERENCE_KV_DISK_GB": "2"}
    found = load(directory, "models: {}", environ).settings
    assert (found.kv_ram_bytes, found.kv_disk_bytes) == (2**29, 2**31)


def test_all_errors_are_reported_together(directory: Path) -> None:
    message = problems(directory, "models:\n  a: {path: x.gguf}\n  b: {path: y.gguf}", {"INFERENCE_PORT": "x"})
    assert all(word in message for word in ("x.gguf", "y.gguf", "INFERENCE_PORT"))


def test_units_are_parsed_and_empty_values_are_ignored(directory: Path) -> None:
    environ = {"INFERENCE_MEMORY_LIMIT_GB": "0.5", "INFERENCE_MAX_BODY_MB": "2", "INFERENCE_GPU_INDEX": ""}
    found = load(directory, "models: {}", environ).settings
    assert (found.memory_limit_bytes, found.max_body_bytes, found.gpu_index) == (2**29, 2**21, None)
    assert found.queue_limits == {Priority.HIGH: 10, Priority.NORMAL: 50, Priority.LOW: 100}


def test_gpu_index_without_a_device_is_reported_when_devices_are_known(directory: Path) -> None:
    config = load(directory, "models: {a: {path: tiny.gguf, gpu_index: 2}}")
    assert settings.check_devices(config, 0) == []
    (problem,) = settings.check_devices(config, 2)
    assert "0 to 1" in str(problem)


def test_changed_keys_of_a_model_are_named(directory: Path) -> None:
    before = load(directory, "models: {a: {path: tiny.gguf}}").models["a"]
    after = load(directory, "models: {a: {path: tiny.gguf, pinned: true, parallel: 2}}").models["a"]
    assert set(before.changed(after)) == {"pinned", "parallel"}


@pytest.mark.parametrize("name", ["INFERENCE_TOKEN", "INFERENCE_ADMIN_KEY"])
@pytest.mark.parametrize("secret", ["schl\u00fcssel", "padded\r", " padded"])
def test_secret_that_cannot_be_a_header_is_rejected_without_repeating_it(
    directory: Path, name: str, secret: str
) -> None:
    assert problems(directory, "models: {}", {name: secret}) == f"{name}: {INVALID_KEY}"


@pytest.mark.parametrize("key", ["path", "mmproj", "lora", "draft"])
def test_inaccessible_path_is_reported_with_its_line(directory: Path, key: str) -> None:
    path = "/" + "a" * 300 + ".gguf"
    value = f"[{path}]" if key == "lora" else path
    own = "" if key == "path" else "path: tiny.gguf, "
    message = problems(directory, f"models:\n  a: {{{own}{key}: {value}}}\n")
    assert message.startswith(f"{directory}/models.yaml:2: models.a.{key}: ")
    assert "cannot access" in message


def test_unreadable_file_is_reported(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / "tiny.gguf").chmod(0)
    monkeypatch.setattr(os, "access", lambda path, _: bool(os.stat(path).st_mode & 0o444))  # as it is for all but root
    assert "models.a.path: " in problems(directory, "models:\n  a: {path: tiny.gguf}\n")


@pytest.mark.parametrize(
    ("value", "layers"), [("device", 0), ("auto", 0), ("host", 512), ("0", 0), ("7", 7), ("512", 512)]
)
def test_experts_are_a_place_or_a_number_of_layers(value: str, layers: int, directory: Path) -> None:
    text = "models:\n  a: {path: tiny.gguf, experts: %s}\n  b: {path: tiny.gguf}"
    models = load(directory, text % value, {"INFERENCE_EXPERTS": value}).models
    assert models["a"].experts == models["b"].experts
    assert models["a"].host_expert_layers == models["b"].host_expert_layers == layers


def test_split_by_tensor_needs_flash_attention(directory: Path) -> None:
    text = "models:\n  a: {path: tiny.gguf, split_mode: %s, flash_attention: %s}"
    assert "a.split_mode: split_mode tensor needs flash_attention" in problems(directory, text % ("tensor", "false"))
    assert load(directory, text % ("tensor", "true"), {}).models["a"].split_mode == "tensor"
    models = load(directory, text % ("layer", "false"), {"INFERENCE_SPLIT_MODE": "row"}).models
    assert models["a"].split_mode == "layer"


@pytest.mark.parametrize("value", ["gpu", "-1", "513", "1.5", "true", "[1]", "''"])
def test_invalid_value_of_experts_is_one_problem(value: str, directory: Path) -> None:
    found = problems(directory, f"models:\n  a: {{path: tiny.gguf, experts: {value}}}")
    assert found.count("write device, host, auto, or the number of layers (0 to 512)") == 1
    assert found.count("\n") <= 1


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        ("fail_fast", ()), ("reduce", ("cleanup", "reduce")), ("cpu", ("cpu",)), ("[]", ()), ("[reduce]", ("reduce",)),
        ("[cleanup, reduce, cpu]", ("cleanup", "reduce", "cpu")), ("cleanup", ("cleanup",)),
    ],
)  # fmt: skip
def test_oom_policy_is_a_word_or_a_list_of_steps(value: str, steps: tuple[str, ...], directory: Path) -> None:
    assert load(directory, f"models: {{a: {{path: tiny.gguf, oom_policy: {value}}}}}").models["a"].oom_policy == steps


def test_oom_policy_of_the_environment_has_commas(directory: Path) -> None:
    text = "models:\n  a: {path: tiny.gguf}"
    assert load(directory, text, {"INFERENCE_OOM_POLICY": "cleanup, cpu"}).models["a"].oom_policy == ("cleanup", "cpu")


@pytest.mark.parametrize(
    "value", ["[cpu, reduce]", "[cpu, cpu]", "gpu", "[fail_fast]", "3", "'cleanup,fail_fast'", "''"]
)
def test_other_oom_policies_are_one_problem(value: str, directory: Path) -> None:
    found = problems(directory, f"models: {{a: {{path: tiny.gguf, oom_policy: {value}}}}}")
    assert found.count("write fail_fast, reduce, cpu, or a list of cleanup, reduce, cpu in this order") == 1


def test_fit_may_be_off_without_quotes(directory: Path) -> None:
    text = "models: {a: {path: tiny.gguf, fit: %s, min_context: 4096}}"
    assert load(directory, text % "off").models["a"].fit == "off"
    assert load(directory, text % "auto").models["a"].min_context == 4096
    wrong = problems(directory, "models: {a: {path: tiny.gguf, fit: context, min_context: 4097}}")
    assert "min_context 4097 is more than context_length 4096; make it 4096 or less" in wrong
