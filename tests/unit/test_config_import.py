"""`headgate config import`: files of LiteLLM, llama-swap, llama-server and Ollama, and the report of what is left.

The inputs follow the formats of `config.example.yaml` of mostlygeek/llama-swap, `proxy_server_config.yaml` of
BerriAI/litellm, presets of ggml-org/llama.cpp (`--models-preset`), and manifests and `/api/tags` of ollama/ollama.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headgate.cli.command import UsageError
from headgate.cli.config_import.imported import Imported
from headgate.cli.config_import.importing import recognized
from headgate.cli.config_import.llama_server_args import entry_of, options_of
from headgate.cli.main import main
from tests.rigs.processes import forget_own

SWAP = """
globalTTL: 120
logLevel: info
healthCheckTimeout: 60
macros:
  server: /opt/llama-server --port ${PORT}
  ctx: 8192
  args: "-c ${ctx} -np 2"
  dir: ${env.HOME}/models
apiKeys: [sk-one, "${env.KEY_TWO}"]
models:
  big:
    macros: {ctx: 16384}
    cmd: |
      # the large one
      ${server}
      --model ${dir}/big.gguf ${args} -ngl 99 -fa on --temp 0.7 -ctk q8_0 -ctv q8_0 --no-mmap --lora a.gguf,b.gguf
      --seed -1 --top-p 5 --chat-template-kwargs '{"enable_thinking": false}'
    aliases: [gpt-4o, {id: gpt-4o-mini, name: x}]
    filters: {stripParams: "top_k, strange", setParams: {min_p: 0.1, other: 1}, setParamsByID: {a: {}}}
    env: ["CUDA_VISIBLE_DEVICES=1", "X=2"]
    ttl: 0
    name: Big
  docker:
    cmd: >
      docker run --rm -m 8g -p ${PORT}:8080 -v /mnt/m:/models ghcr.io/ggml-org/llama.cpp:server
      --model '/models/q.gguf' --ctx-size 4096 -np 1
  vllm: {cmd: "vllm serve x --port ${PORT}"}
  hub: {cmd: "llama-server -hf org/repo:Q4_K_M --embeddings", filters: {stripParams: temperature}, weird: 1}
  broken: {cmd: "llama-server 'unclosed"}
  none: {cmd: "llama-server --port 1"}
groups: {a: {swap: true, members: [big]}}
hooks: {on_startup: {preload: [big]}}
peers:
  openrouter:
    {proxy: "https://openrouter.ai/api", apiKey: "${env.OPENROUTER_API_KEY}", models: [m/a],
     filters: {stripParams: seed, x: 1}}
  lan: {proxy: "http://10.0.0.2:8080/v1", apiKey: secret, models: [b]}
  empty: {models: [c]}
"""

LITELLM = """
model_list:
  - model_name: gpt
    litellm_params: {model: gpt-5-mini, region_name: eu}
  - model_name: gpt
    litellm_params:
      {model: azure/mine, api_base: "https://x.openai.azure.com/", api_version: "1", api_key: os.environ/AZURE_API_KEY}
  - {model_name: large, rpm: 3, litellm_params: {model: openai/gpt-5, api_key: sk-secret}}
  - {model_name: large, litellm_params: {model: openai/gpt-5, api_key: sk-secret}}
  - {model_name: claude, litellm_params: {model: claude-sonnet-5, temperature: 0.2, top_p: 7}}
  - {model_name: claude, litellm_params: {model: claude-haiku-4-5, temperature: 0.3}}
  - {model_name: fake, litellm_params: {model: openai/f, api_key: my-key, api_base: "https://fake.example.org/v1"}}
  - {model_name: lan, litellm_params: {model: hosted_vllm/q, api_base: os.environ/VLLM_BASE}}
  - {model_name: llama, litellm_params: {model: ollama_chat/llama3.2}}
  - {model_name: other, litellm_params: {model: exotic/x, api_base: "http://10.0.0.3:1/v1"}}
  - {model_name: groq, litellm_params: {model: groq/qwen}}
  - {model_name: bed, litellm_params: {model: bedrock/x}}
  - {model_name: vllm, litellm_params: {model: hosted_vllm/q}}
  - {model_name: dall, litellm_params: {model: azure/, api_base: "https://x.openai.azure.com"}}
  - {model_name: "anthropic/*", litellm_params: {model: "anthropic/*"}}
  - {model_name: "*", litellm_params: {model: "openai/*"}}
  - {litellm_params: {}}
litellm_settings:
  num_retries: 5
  fallbacks: [{gpt: [claude, gone]}, {absent: [gpt]}]
  default_fallbacks: [groq]
router_settings:
  allowed_fails: 3
  redis_host: os.environ/REDIS_HOST
  cooldown_time: 60
  model_group_alias: {short: gpt, long: {model: claude, hidden: true}, bad: absent}
general_settings: {master_key: sk-1234, database_url: "postgresql://x"}
environment_variables: {A: b}
guardrails: []
"""

PRESETS = """
version = 1
stray = 2
; all models
[*]
c = 32768
parallel = 1
flash-attn = off
jinja = true
temp = 0.6

[qwen]
model = "/models/Qwen.gguf"
mmproj = /models/mmproj.gguf
gpu-layers = 20
LLAMA_ARG_CTX_SIZE = 65536
cache-type-k = q8_0
cache-type-v = f16
load-on-startup = true
cpu-moe = false

[ggml-org/gemma:Q4_K_M]
np = 4
kv-unified = true
n-cpu-moe = 12
sleep-idle-seconds = 300
fit = on

[nothing]
reranking = true
"""


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    forget_own(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def left(found: Imported) -> dict[str, str]:
    return {each.where: each.advice for each in found.left}


def test_llama_swap_models_peers_and_keys() -> None:
    found = recognized(SWAP, {})
    assert found.models["big"] == {
        "path": "${env:HOME}/models/big.gguf", "parallel": 2, "context_length": 8192, "kv_type": "q8_0",
        "lora": ["a.gguf", "b.gguf"], "idle_timeout": "never", "aliases": ["gpt-4o", "gpt-4o-mini"], "gpu_index": 1,
    }  # fmt: skip
    assert found.models["docker"] == {
        "path": "/mnt/m/q.gguf", "parallel": 1, "context_length": 4096, "idle_timeout": "120s",
    }  # fmt: skip
    assert found.models["hub"] == {
        "path": "hf:org/repo:Q4_K_M", "capabilities": ["embeddings"], "idle_timeout": "120s",
    }  # fmt: skip
    assert found.gateway["providers"] == {
        "openrouter": {
            "kind": "openai", "api_key": "${env:OPENROUTER_API_KEY}", "base_url": "https://openrouter.ai/api/v1",
        },
        "lan": {"kind": "openai", "api_key": "${env:LAN_API_KEY}", "base_url": "http://10.0.0.2:8080/v1"},
    }  # fmt: skip
    routes = found.gateway["routes"]
    parameters = {
        "defaults": {"temperature": 0.7, "chat_template_kwargs": {"enable_thinking": False}},
        "remove": ["top_k"],
        "overrides": {"min_p": 0.1},
    }
    for name in ("big", "gpt-4o", "gpt-4o-mini"):
        assert routes.pop(name) == {"chain": [f"local/{name}", "local/smaller"], "parameters": parameters}
    assert routes == {
        "hub": {"chain": ["local/hub", "local/smaller"], "parameters": {"remove": ["temperature"]}},
        "m/a": {"chain": ["openrouter/m/a"], "parameters": {"remove": ["seed"]}},
        "b": {"chain": ["lan/b"]},
    }
    assert found.gateway["keys"][0]["hash"] == f"sha256:{hashlib.sha256(b'sk-one').hexdigest()}"
    report = left(found)
    assert "only llama-server's models" in report["vllm: vllm"]
    assert "unclosed" not in json.dumps(found.models)
    assert "between 0 and 1" in report["big: top_p"]
    assert {"big: filters.stripParams strange", "big: filters.setParams other", "big: filters.setParamsByID",
            "big: env X=2", "hub: weird", "broken: cmd", "none", "groups, matrix",
            "hooks.on_startup.preload: big", "healthCheckTimeout", "peers.lan.apiKey", "peers.empty",
            "peers.openrouter: filters.x", "apiKeys: ${env.KEY_TWO}"} <= report.keys()  # fmt: skip
    assert "secret" not in json.dumps(found.gateway)


def test_llama_swap_command_has_escaped_spaces_continued_lines_and_nested_mounts() -> None:
    commands = {
        "plain": "llama-server \\\n  -m /models/My\\ Model.gguf \\",
        "docker": "docker run -v /a:/models -v /b:/models/extra image llama-server -m /models/extra/q.gguf",
    }
    found = recognized(json.dumps({"models": {name: {"cmd": command} for name, command in commands.items()}}), {})
    assert [found.models[name]["path"] for name in commands] == ["/models/My Model.gguf", "/b/q.gguf"]


def test_llama_swap_models_with_one_name_keep_the_parameters_of_the_first() -> None:
    """Parameters of further models with a name are reported; a local model comes before one of a peer."""
    found = recognized(
        """
        models:
          a: {cmd: llama-server -m a.gguf --temp 0.1, aliases: [x]}
          b: {cmd: llama-server -m b.gguf --temp 0.2 --alias x}
          plain: {cmd: llama-server -m c.gguf}
        peers:
          p: {proxy: "http://p", models: [m, x, plain], filters: {setParams: {top_k: 1}}}
          q: {proxy: "http://q", models: [m], filters: {stripParams: seed}}
        """,
        {},
    )
    routes = found.gateway["routes"]
    assert {name: route["chain"][0] for name, route in routes.items()} == {
        "a": "local/a", "x": "local/x", "b": "local/b", "m": "p/m",
    }  # fmt: skip
    assert routes["x"]["parameters"] == routes["a"]["parameters"] == {"defaults": {"temperature": 0.1}}
    assert routes["b"]["parameters"] == {"defaults": {"temperature": 0.2}}
    assert routes["m"] == {"chain": ["p/m", "q/m"], "parameters": {"overrides": {"top_k": 1}}}
    assert {"b: temperature", "peers.p.models: x", "peers.p.models: plain", "peers.q.models: m: seed"} <= left(
        found
    ).keys()


def test_litellm_routes_fallbacks_aliases_and_keys() -> None:
    found = recognized(LITELLM, {})
    chains = {name: route["chain"] for name, route in found.gateway["routes"].items()}
    claudes = ["anthropic/claude-sonnet-5", "anthropic/claude-haiku-4-5"]
    assert chains["gpt"] == ["openai/gpt-5-mini", "azure/mine", *claudes, "groq/qwen"]
    assert chains["claude"] == ["anthropic/claude-sonnet-5", "anthropic/claude-haiku-4-5", "groq/qwen"]
    for name in ("claude", "long"):
        assert found.gateway["routes"][name]["parameters"] == {"defaults": {"temperature": 0.2}}
    assert "parameters" not in found.gateway["routes"]["gpt"]
    assert chains["short"] == chains["gpt"]
    assert chains["long"] == chains["claude"]
    assert chains["*"][0] == "openai/*"
    assert chains["llama"][0] == "ollama_chat/llama3.2"
    assert chains["other"][0] == "compatible/exotic/x"
    providers = found.gateway["providers"]
    assert providers["azure"]["base_url"] == "https://x.openai.azure.com/openai/v1"
    assert providers["ollama_chat"] == {"kind": "openai", "api_key": "none", "base_url": "http://127.0.0.1:11434/v1"}
    assert providers["hosted_vllm"]["base_url"] == "${env:VLLM_BASE}"
    assert found.gateway["breaker"] == {"failures": 4, "open": "60s"}
    assert found.gateway["keys"] == [
        {
            "name": "litellm-master",
            "hash": f"sha256:{hashlib.sha256(b'sk-1234').hexdigest()}",
            "scopes": ["use", "admin"],
        }
    ]
    report = left(found)
    assert "anthropic/*" not in chains
    assert report["general_settings.database_url"] == "keys are in a file: headgate key create NAME"
    assert report["router_settings.redis_host"].startswith("`state: redis://")
    assert {"fallbacks: gpt -> gone", "fallbacks of absent", "model_group_alias.bad", "guardrails", "large: rpm",
            "environment_variables", "litellm_settings.num_retries", "model_list[12] bed",
            "model_list[5] claude: top_p", "model_list[6] claude: temperature",
            "a second openai/gpt-5 of large"} <= {key.removeprefix("model_list[3] ") for key in report}  # fmt: skip


def test_keys_in_the_file_are_not_copied_and_not_sent_to_other_hosts() -> None:
    found = recognized(LITELLM, {})
    text = yaml.safe_dump(found.gateway)
    assert "sk-secret" not in text
    assert "my-key" not in text
    assert found.gateway["providers"]["fake.example.org"]["api_key"] == "${env:KEY_OF_FAKE_EXAMPLE_ORG}"
    text = "model_list: [{model_name: a, litellm_params: {model: openai/a, api_base: os.environ/BASE, api_key: sk-x}}]"
    assert recognized(text, {}).gateway["providers"]["base"]["api_key"] == "${env:KEY_OF_BASE}"
    assert found.gateway["providers"]["openai"] == {"kind": "openai", "api_key": "${env:OPENAI_API_KEY}"}
    text = "model_list: [{model_name: a, litellm_params: {model: mistral/a, api_base: https://l.ai/v1, api_key: x}}]"
    assert recognized(text, {}).gateway["providers"]["l.ai"]["api_key"] == "${env:KEY_OF_L_AI}"


def test_presets_of_llama_server() -> None:
    found = recognized(PRESETS, {})
    assert found.models == {
        "qwen": {
            "path": "/models/Qwen.gguf", "parallel": 1, "context_length": 65536, "gpu_layers": 20,
            "mmproj": "/models/mmproj.gguf", "flash_attention": False,
        },
        "ggml-org/gemma:Q4_K_M": {
            "path": "hf:ggml-org/gemma:Q4_K_M", "parallel": 4, "context_length": 32768, "kv_cells": 32768,
            "flash_attention": False, "experts": 12, "fit": "auto", "idle_timeout": "300s",
        },
    }  # fmt: skip
    report = left(found)
    routes = {name: route["parameters"] for name, route in found.gateway["routes"].items()}
    assert routes == {name: {"defaults": {"temperature": 0.6}} for name in found.models}
    assert report["[qwen]: cache-type-k q8_0"].startswith("kv_type is one of")
    assert "headgate preload" in report["[qwen]: load-on-startup true"]
    assert "[nothing]" in report
    assert "line 3: stray" in report


@pytest.mark.parametrize(
    ("words", "entry"),
    [
        ("-m a.gguf -c 0 -ngl auto", {"path": "a.gguf"}),
        ("-m a.gguf -c 8192", {"path": "a.gguf", "context_length": 8192, "kv_cells": 8192}),
        ("-m a.gguf -c 8192 -np 4 -kvu", {"path": "a.gguf", "parallel": 4, "context_length": 8192, "kv_cells": 8192}),
        ("--model=a.gguf -ngl 0 --swa-full", {"path": "a.gguf", "gpu_layers": 0, "swa_full": True}),
        ("-hf o/r -hff f.gguf -a x,y -cmoe", {"path": "hf:o/r/f.gguf", "aliases": ["x", "y"], "experts": "host"}),
        ("-m a.gguf -md d.gguf", {"path": "a.gguf", "draft": "d.gguf"}),
        ("-hf o/r -hfd o/d:Q4_0", {"path": "hf:o/r", "draft": "hf:o/d:Q4_0"}),
        ("-hf o/r --rerank -sm row", {"path": "hf:o/r", "capabilities": ["rerank"], "split_mode": "row"}),
        ("-m", None),
        ("-m a.gguf -fa -np", {"path": "a.gguf"}),
        ("-m a.gguf -t -1 -mg 1 -ctk f16 -ctv f16 -ngl many -b x", {"path": "a.gguf", "gpu_index": 1}),
    ],
)  # fmt: skip
def test_options_of_llama_server(words: str, entry: dict[str, Any] | None) -> None:
    options: dict[str, list[str]] = {}
    for name, value in options_of(words.split()):
        options.setdefault(name, []).append(value)
    assert entry_of(options, "m", Imported("test")) == entry


# --- Ollama -----------------------------------------------------------------------------------------------------------
TABLE = """NAME                          ID              SIZE      MODIFIED
llama3.2:latest               a80c4f17acd5    2.0 GB    2 weeks ago
me/vision:7b                  b80c4f17acd5    5.0 GB    3 weeks ago
hf.co/org/X-GGUF:Q4_K_M       c80c4f17acd5    1.0 GB    4 weeks ago
gpt-oss:120b-cloud            d80c4f17acd5    -         5 weeks ago
"""


def blob(place: Path, text: str) -> dict[str, str]:
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = place / "home/.ollama/models/blobs" / f"sha256-{digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return {"digest": f"sha256:{digest}", "path": str(path)}


def manifest(place: Path, name: str, layers: dict[str, str]) -> dict[str, str]:
    paths = {}
    entries = []
    for kind, text in layers.items():
        found = blob(place, text)
        paths[kind] = found["path"]
        entries.append({"mediaType": f"application/vnd.ollama.image.{kind}", "digest": found["digest"], "size": 1})
    path = place / "home/.ollama/models/manifests" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "layers": entries}))
    return paths


def test_ollama_models_are_used_from_its_directory(place: Path) -> None:
    params = '{"num_ctx": 8192, "num_predict": -1, "top_k": 7, "stop": ["x"], "num_keep": 4}'
    plain = manifest(
        place, "registry.ollama.ai/library/llama3.2/latest",
        {"model": "GGUF1", "params": params, "template": "t", "system": "s"},
    )  # fmt: skip
    vision = manifest(place, "registry.ollama.ai/me/vision/7b", {"model": "GGUF2", "projector": "p", "adapter": "a"})
    found = recognized(TABLE, {})
    assert found.models == {
        "llama3.2": {"path": plain["model"], "context_length": 8192, "aliases": ["llama3.2:latest"]},
        "me/vision:7b": {"path": vision["model"], "mmproj": vision["projector"], "lora": [vision["adapter"]]},
        "hf.co/org/X-GGUF:Q4_K_M": {"path": "hf:org/X-GGUF:Q4_K_M"},
    }
    assert {"gpt-oss:120b-cloud", "llama3.2:latest: template", "llama3.2:latest: num_keep"} <= left(found).keys()
    for name in ("llama3.2", "llama3.2:latest"):
        assert found.gateway["routes"][name]["parameters"] == {"defaults": {"top_k": 7, "stop": ["x"]}}
    tags = json.dumps({"models": [{"name": "llama3.2:latest", "model": "llama3.2:latest", "size": 1}]})
    assert recognized(tags, {}).models == {"llama3.2": found.models["llama3.2"]}


def test_ollama_manifests_that_are_damaged_or_of_another_format(place: Path) -> None:
    manifest(place, "registry.ollama.ai/library/a/latest", {"tensor": "x"})
    path = place / "home/.ollama/models/manifests/registry.ollama.ai/library/b/latest"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    report = left(recognized("NAME ID SIZE\na:latest 1 1\nb:latest 1 1\n../../etc:x 1 1\n", {}))
    assert "no GGUF file" in report["a:latest"]
    assert "is damaged" in report["b:latest"]
    assert "ollama pull b:latest" in report["b:latest"]
    assert "../../etc:x" in report


def test_ollama_manifest_of_another_user_is_reported_with_the_reason(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    manifest(place, "registry.ollama.ai/library/a/latest", {"model": "GGUF"})
    monkeypatch.setattr(Path, "read_bytes", refuse)
    report = left(recognized("NAME ID SIZE\na:latest 1 1\n", {}))
    assert "Permission denied" in report["a:latest"]
    assert "run this as a user that may read it" in report["a:latest"]


# --- the verb ---------------------------------------------------------------------------------------------------------
def test_written_files_are_valid_once_models_are_there(place: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(place / "home/.ollama/models"))
    layers = {"model": "GGUF1", "params": '{"temperature": 0.5}'}
    manifest(place, "registry.ollama.ai/library/llama3.2/latest", layers)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"NAME ID SIZE\nllama3.2:latest 1 1\n")))
    assert main(["config", "import", "-", "--write", "new"]) == 0
    assert "1 models, 2 routes" in capsys.readouterr().err
    assert main(["config", "check", "--config-dir", "new"]) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"NAME ID SIZE\n")))
    assert main(["config", "import", "-", "--write", "new"]) == 2
    assert "already has models.yaml and gateway.yaml" in capsys.readouterr().err


def test_printed_result_names_what_is_to_correct(place: Path, capsys: Any) -> None:
    (place / "swap.yaml").write_text(SWAP)
    assert main(["config", "import", "swap.yaml"]) == 0
    output = capsys.readouterr()
    assert "# ---- gateway.yaml ----" in output.out
    assert "not carried over (" in output.err
    assert "models.docker.path: no file /mnt/m/q.gguf" in output.err
    assert main(["config", "import", "swap.yaml", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["gateway"]["routes"]["*"] == {"chain": ["local/*", "local/smaller"]}
    assert any("download it: headgate pull hf:org/repo:Q4_K_M" in each for each in answer["mistakes"])
    (place / "litellm.yaml").write_text(LITELLM.replace("os.environ/VLLM_BASE", "http://10.0.0.4/v1"))
    assert main(["config", "import", "litellm.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mistakes"] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\n", "its keys are unknown"),
        ("just text", "it has no settings"),
        ("{broken", "Expecting property name"),
        ("a: [1\n", "expected ',' or ']'"),
        ("[x]\nno setting here\n", "line 2 is neither [SECTION] nor KEY = VALUE"),
        ("", "it has no settings"),
        ("a: " + "[" * 400, ""),
    ],
)
def test_other_files_are_refused_with_the_formats(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match="it has to be LiteLLM's") as caught:
        recognized(text, {})
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "advice"), [("none.yaml", "No such file"), (".", "is not a file"), ("x.bin", "not text")]
)
def test_files_that_cannot_be_read_are_refused(place: Path, name: str, advice: str, capsys: Any) -> None:
    (place / "x.bin").write_bytes(b"\xff\xfe\x00")
    assert main(["config", "import", name]) == 2
    assert advice in capsys.readouterr().err


def test_report_is_in_the_order_of_the_file() -> None:
    names = [f"setting_{letter}" for letter in "hbgacfde"]
    swap = {"models": {"m": {"cmd": f"llama-server -m m.gguf {' '.join(f'--{name} 1' for name in names)}"}}}
    swap |= dict.fromkeys(names, 1)
    lite = {"model_list": [], "router_settings": dict.fromkeys(names, 1)}
    reports = [[each.where for each in recognized(json.dumps(data), {}).left] for data in (swap, lite)]
    assert reports[0] == [*(f"m: {name} 1" for name in names), *names]
    assert reports[1] == [f"router_settings.{name}" for name in names]
