"""Translates options of llama.cpp's llama-server into settings of a model (see its `tools/server/README.md`)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headgate.cli.config_import.imported import Imported

SHORT: Mapping[str, str] = {
    "m": "model", "hf": "hf-repo", "hfr": "hf-repo", "hff": "hf-file", "c": "ctx-size", "ngl": "n-gpu-layers",
    "gpu-layers": "n-gpu-layers", "np": "parallel", "b": "batch-size", "ub": "ubatch-size", "t": "threads",
    "fa": "flash-attn", "ctk": "cache-type-k", "ctv": "cache-type-v", "mm": "mmproj", "a": "alias", "kvu": "kv-unified",
    "cmoe": "cpu-moe", "ncmoe": "n-cpu-moe", "mg": "main-gpu", "ts": "tensor-split", "sm": "split-mode",
    "embeddings": "embedding", "rerank": "reranking", "cram": "cache-ram", "dev": "device", "tb": "threads-batch",
    "temperature": "temp", "md": "model-draft",
    "hfd": "hf-repo-draft", "hfrd": "hf-repo-draft", "ctxcp": "ctx-checkpoints", "s": "seed", "n": "n-predict",
    "predict": "n-predict", "v": "verbose", "cb": "cont-batching", "to": "timeout", "e": "escape",
}  # fmt: skip
"""Short and second names of options."""

FLAGS = frozenset(
    {
        "kv-unified", "no-kv-unified", "cpu-moe", "swa-full", "embedding", "reranking", "jinja", "no-jinja",
        "metrics", "props", "slots", "no-slots", "webui", "no-webui", "mlock", "mmap", "no-mmap", "cont-batching",
        "no-cont-batching", "verbose", "no-warmup", "warmup", "offline", "log-timestamps", "log-prefix",
        "log-colors", "no-context-shift", "context-shift", "no-perf", "escape", "no-escape", "no-kv-offload",
        "kv-offload", "no-op-offload", "no-repack",
    }
)  # fmt: skip
"""Options without a value."""

NEEDLESS = frozenset(
    {
        "host", "port", "jinja", "metrics", "props", "slots", "no-slots", "webui", "no-webui", "mlock", "mmap",
        "no-mmap", "cont-batching", "verbose", "no-warmup", "warmup", "offline", "log-timestamps", "log-prefix",
        "log-colors", "log-file", "log-verbosity", "log-disable", "no-perf", "escape", "no-context-shift",
        "version", "threads-http", "kv-offload", "no-kv-unified", "cache-prompt", "threads-batch",
    }
)  # fmt: skip
"""Options that are left out without a report: Headgate always does this, decides it by itself, or has no use for it."""

SAMPLING: Mapping[str, str] = {
    "temp": "temperature", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p", "seed": "seed",
    "repeat-penalty": "repeat_penalty", "presence-penalty": "presence_penalty",
    "frequency-penalty": "frequency_penalty", "n-predict": "max_tokens", "dry-multiplier": "dry_multiplier",
    "dry-base": "dry_base", "dry-allowed-length": "dry_allowed_length", "dry-penalty-last-n": "dry_penalty_last_n",
    "xtc-probability": "xtc_probability", "xtc-threshold": "xtc_threshold", "mirostat": "mirostat",
    "mirostat-lr": "mirostat_eta", "mirostat-ent": "mirostat_tau", "typical": "typical_p", "typical-p": "typical_p",
    "top-nsigma": "top_n_sigma", "top-n-sigma": "top_n_sigma", "chat-template-kwargs": "chat_template_kwargs",
}  # fmt: skip
"""Options that set the default of a generation parameter, and the name of the parameter."""

ADVICE: Mapping[str, str] = {
    "tensor-split": "layers are divided among the devices by their measured sizes",
    "device": "use gpu_index, or CUDA_VISIBLE_DEVICES for the service",
    "cache-ram": "INFERENCE_KV_RAM_GB bounds stored sequences of all models",
    "slot-save-path": "INFERENCE_KV_DISK_GB and INFERENCE_KV_DIR store sequences on disk",
    "ctx-checkpoints": "kv_checkpoints limits the memory of the checkpoints",
    "api-key": "run headgate key create NAME, or set GATEWAY_API_KEY",
    "api-key-file": "run headgate key create NAME, or set GATEWAY_API_KEY",
    "chat-template": "the template in the file is used",
    "chat-template-file": "the template in the file is used",
    "reasoning-format": "reasoning is always separated",
    "pooling": "it is read from the file",
    "lora-scaled": "use lora, with the scale 1",
    "load-on-startup": "`headgate preload MODEL`, or INFERENCE_ENABLE_LAZY_MODEL_LOADING=false",
    "timeout": "set `deadlines` in gateway.yaml",
    "model-url": "download it with `headgate pull`",
    "docker-repo": "download it with `headgate pull`",
    "models-max": "set INFERENCE_MAX_MODELS",
    "models-dir": "set INFERENCE_MODELS_DIR",
    "samplers": "the order of the samplers is fixed",
    "repeat-last-n": "penalties read every token of the answer",
}

KV_TYPES = ("f16", "q8_0", "q4_0")
_SIZES: Mapping[str, str] = {
    "batch-size": "batch",
    "ubatch-size": "ubatch",
    "threads": "threads",
    "parallel": "parallel",
}
ALL_LAYERS = 99
"""The smallest value of `--n-gpu-layers` that means all layers, by custom."""


def options_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(long name, value) of each option; the value is `true` for a flag, and empty if it is missing.

    Words that do not belong to an option are left out.
    """
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if not re.match(r"--?[A-Za-z]", word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = long_name(name)
        if not equals:
            value = "true" if name in FLAGS else ""
            if not value and at < len(words) and not re.match(r"--?[A-Za-z]", words[at]):
                value, at = words[at], at + 1
        yield name, value


def long_name(name: str) -> str:
    """The long name of an option, from a short one, `LLAMA_ARG_NAME` of a preset, or itself."""
    if name.startswith("LLAMA_ARG_"):
        name = name.removeprefix("LLAMA_ARG_").lower().replace("_", "-")
    return SHORT.get(name, name)


def entry_of(
    options: Mapping[str, Sequence[str]], where: str, found: Imported, path_of: Callable[[str], str] = str
) -> dict[str, Any] | None:
    """The entry of models.yaml for these options; None, with a report, without a model. `path_of` translates paths."""

    def last(name: str) -> str | None:
        values = options.get(name)
        return values[-1] if values else None

    def leave(name: str, advice: str) -> None:
        found.leave(f"{where}: {name} {' '.join(options[name])}".rstrip(), advice)

    if (source := _source(last("model"), last("hf-repo"), last("hf-file"), path_of)) is None:
        found.leave(where, "it names no model file (--model, -hf); add it by hand")
        return None
    entry: dict[str, Any] = {"path": source}
    for name, field in _SIZES.items():
        if (value := last(name)) is not None:
            if number := _positive(value):
                entry[field] = number
            elif value != "-1":
                leave(name, "not a number above 0")
    entry |= _context(last("ctx-size"), entry, "kv-unified" in options, leave)
    entry |= _layers(last("n-gpu-layers"), leave)
    entry |= _cache(last("cache-type-k"), last("cache-type-v"), leave)
    if aliases := [part.strip() for value in options.get("alias", ()) for part in value.split(",") if part.strip()]:
        entry["aliases"] = aliases
    if mmproj := last("mmproj"):
        entry["mmproj"] = path_of(mmproj)
    if draft := _source(last("model-draft"), last("hf-repo-draft"), None, path_of):
        entry["draft"] = draft
    if lora := [path_of(part) for value in options.get("lora", ()) for part in value.split(",")]:
        entry["lora"] = lora
    if last("flash-attn") in ("off", "0", "false"):
        entry["flash_attention"] = False
    if "swa-full" in options:
        entry["swa_full"] = True
    if "cpu-moe" in options:
        entry["experts"] = "host"
    elif moe := _positive(last("n-cpu-moe")):
        entry["experts"] = moe
    if (gpu := last("main-gpu")) is not None and gpu.isdecimal():
        entry["gpu_index"] = int(gpu)
    if (mode := last("split-mode")) in ("row", "tensor"):
        entry["split_mode"] = mode
    if last("fit") in ("on", "true", "1"):
        entry["fit"] = "auto"
    if seconds := _positive(last("sleep-idle-seconds")):
        entry["idle_timeout"] = f"{seconds}s"
    for name, capability in (("embedding", "embeddings"), ("reranking", "rerank")):
        if name in options:
            entry["capabilities"] = [capability]
    for name in options:
        if name not in USED | NEEDLESS | SAMPLING.keys():
            leave(name, ADVICE.get(name, "has no counterpart"))
    return entry


def defaults_of(options: Mapping[str, Sequence[str]], where: str, found: Imported) -> dict[str, Any]:
    """The defaults of generation parameters in these options."""
    values = {SAMPLING[name]: _value(given[-1]) for name, given in options.items() if name in SAMPLING}
    unlimited = {name for name in ("seed", "max_tokens") if values.get(name) == -1}
    return found.accepted(f"{where}: ", {name: value for name, value in values.items() if name not in unlimited})


USED = frozenset(
    {"model", "hf-repo", "hf-file", "ctx-size", "kv-unified", "n-gpu-layers", "cache-type-k", "cache-type-v", "alias"}
    | {"mmproj", "lora", "flash-attn", "swa-full", "cpu-moe", "n-cpu-moe", "main-gpu", "fit", "sleep-idle-seconds"}
    | {"embedding", "reranking", "split-mode", "model-draft", "hf-repo-draft", *_SIZES}
)
"""Options that `entry_of` translates."""

Leave = Callable[[str, str], None]


def _source(model: str | None, repository: str | None, file: str | None, path_of: Callable[[str], str]) -> str | None:
    if model:
        return path_of(model)
    if repository and file:
        return f"hf:{repository.partition(':')[0]}/{file}"
    return f"hf:{repository}" if repository else None


def _context(size: str | None, entry: Mapping[str, Any], unified: bool, leave: Leave) -> dict[str, Any]:
    """llama-server divides `--ctx-size` by its slots, unless the slots share it."""
    number = _positive(size)
    if number is None:
        if size is not None:
            leave("ctx-size", "not a number above 0 (0: the context of the training); write context_length")
        return {}
    parallel = int(entry.get("parallel", 0))
    if unified or not parallel:
        return {"context_length": number, **({"kv_cells": number} if parallel != 1 else {})}
    return {"context_length": max(16, number // parallel)}


def _layers(layers: str | None, leave: Leave) -> dict[str, Any]:
    if layers is None or layers in ("auto", "all", "-1"):
        return {}
    if not layers.isdecimal():
        leave("n-gpu-layers", "not a number of layers")
        return {}
    return {} if int(layers) >= ALL_LAYERS else {"gpu_layers": int(layers)}


def _cache(keys: str | None, values: str | None, leave: Leave) -> dict[str, Any]:
    if keys is None and values is None:
        return {}
    if keys == values and keys in KV_TYPES:
        return {} if keys == "f16" else {"kv_type": keys}
    name = "cache-type-k" if keys is not None else "cache-type-v"
    leave(name, f"kv_type is one of {', '.join(KV_TYPES)}, for keys and values alike")
    return {}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _positive(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None
