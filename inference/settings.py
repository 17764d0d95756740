"""Reads models.yaml and the INFERENCE_* variables into one validated configuration.

Precedence for the service: command line, environment (and `.env`), default. Precedence for a model: its entry in the
file, INFERENCE_*, default.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from headgate.shared import configfile
from headgate.shared.configfile import Bytes, Duration
from headgate.shared.errors import ConfigError, Problem, did_you_mean
from inference import environment_settings
from inference.demo import BUNDLED, bundled_path
from inference.environment_settings import (
    MAX_CONTEXT,
    MAX_LAYERS,
    Experts,
    FitPolicy,
    InferenceSettings,
    KvType,
    OomPolicy,
    Speculation,
    SplitMode,
)
from inference.file_stamp import Fingerprint, fingerprint
from inference.models_dir import HUB, HubSource, ModelFile, model_name, models_below

NO_MODELS = "models: {}"
MAX_REPLICAS = 64

_REPLICAS = re.compile(r"\s*(\d{1,6})(?:\.\.(\d{1,6}))?\s*", re.ASCII)
ReplicaRange = tuple[int, int]
"""The smallest and the largest number of replicas."""


def parse_replicas(value: object) -> ReplicaRange:
    """The range in `2` or `1..3`; raises ValueError."""
    if isinstance(value, tuple):
        return value
    match = None if isinstance(value, bool) else _REPLICAS.fullmatch(str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a number of replicas; write N or N..M, for example 2 or 1..3")
    found = int(match[1]), int(match[2] or match[1])
    if not 1 <= found[0] <= found[1] <= MAX_REPLICAS:
        raise ValueError(f"replicas {value} is not possible; write N or N..M with 1 <= N <= M <= {MAX_REPLICAS}")
    return found


_REPLICAS_TEXT = Annotated[str, Field(pattern=r"^\s*\d+(\.\.\d+)?\s*$")]
Replicas = Annotated[ReplicaRange, BeforeValidator(parse_replicas, json_schema_input_type=int | _REPLICAS_TEXT)]
"""A pydantic field type: a range, written as `2` or `1..3`."""


Capability = Literal["chat", "completions", "embeddings", "rerank", "tools", "vision"]
"""What a model can do."""


class ModelEntry(BaseModel):
    """One model in models.yaml. None stands for the default from INFERENCE_*, where there is one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    context_length: int | None = Field(None, ge=16, le=MAX_CONTEXT)
    gpu_layers: int | None = Field(None, ge=-1)
    experts: Experts | None = None
    split_mode: SplitMode | None = None
    gpu_index: int | None = Field(None, ge=0)
    parallel: int | None = Field(None, ge=1, le=256)
    kv_cells: int | None = Field(None, ge=16)
    kv_type: KvType | None = None
    batch: int | None = Field(None, ge=1)
    ubatch: int | None = Field(None, ge=1)
    threads: int | None = Field(None, ge=1)
    flash_attention: bool | None = None
    swa_full: bool | None = None
    kv_checkpoints: Bytes | None = None
    speculation: Speculation | None = None
    lora: tuple[str, ...] = ()
    mmproj: str | None = None
    draft: str | None = Field(None, min_length=1)
    idle_timeout: Duration | None = None
    min_residency: Duration | None = None
    pinned: bool = False
    dedicated: bool = False
    warm: bool = True
    oom_policy: OomPolicy | None = None
    fit: FitPolicy | None = None
    min_context: int | None = Field(None, ge=16, le=MAX_CONTEXT)
    memory_overhead: Bytes | None = None
    capabilities: Annotated[tuple[Capability, ...], Field(min_length=1)] | None = None
    replicas: Replicas = (1, 1)

    @field_validator("speculation", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare `off` as false


class ModelsFile(BaseModel):
    """models.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: dict[str, ModelEntry]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model with all defaults applied. Lengths in tokens, times in seconds, memory in bytes."""

    id: str
    path: Path
    aliases: tuple[str, ...]
    context_length: int
    gpu_layers: int
    experts: str | int
    split_mode: str
    gpu_index: int | None
    parallel: int
    kv_cells: int | None
    kv_type: str
    batch: int
    ubatch: int
    threads: int | None
    flash_attention: bool
    swa_full: bool
    kv_checkpoints: int
    speculation: str
    lora: tuple[str, ...]
    mmproj: str | None
    draft: str | None
    idle_timeout: float
    min_residency: float
    pinned: bool
    dedicated: bool
    warm: bool
    oom_policy: tuple[str, ...]
    fit: str
    min_context: int
    memory_overhead: int | None
    capabilities: tuple[str, ...] | None
    replicas: ReplicaRange = (1, 1)
    replica_of: str | None = None
    """for a further replica, the id of its model; the first replica has the id of the model"""

    SOFT = frozenset(
        {"aliases", "idle_timeout", "min_residency", "pinned", "warm", "oom_policy", "fit", "min_context", "replicas"}
    )
    """Settings that can change while the model stays loaded."""

    @property
    def configured_id(self) -> str:
        """The id of the model in the configuration: that of its first replica."""
        return self.replica_of or self.id

    @property
    def cells(self) -> int:
        """KV cells of all requests together."""
        return self.kv_cells or self.context_length * self.parallel

    @property
    def host_expert_layers(self) -> int:
        """The number of layers, from the first one on, whose experts are in host memory."""
        if isinstance(self.experts, int):
            return self.experts
        return MAX_LAYERS if self.experts == "host" else 0

    @property
    def files(self) -> Fingerprint:
        """The current fingerprint of the files of the model."""
        others = [self.mmproj, self.draft, *self.lora]
        return fingerprint(self.path, [path for path in others if path is not None])

    @property
    def has_extras(self) -> bool:
        """Whether the model is loaded with a projector, adapters or a draft model."""
        return self.mmproj is not None or self.draft is not None or bool(self.lora)

    def changed(self, other: ModelSpec) -> tuple[str, ...]:
        """Names of the settings that differ in `other`."""
        return tuple(name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(other, name))


@dataclass(frozen=True, slots=True)
class InferenceConfig:
    """The configuration of the service. `names` maps each id, alias and `NAME@NUMBER` to the id of a model or replica.

    Replicas of one entry are models of their own: NAME, NAME@2, NAME@3.
    """

    settings: InferenceSettings
    models: Mapping[str, ModelSpec]
    names: Mapping[str, str]
    config_dir: Path
    found: frozenset[str] = frozenset()
    """The ids of files below INFERENCE_MODELS_DIR without an entry in models.yaml."""

    @property
    def model_ids(self) -> tuple[str, ...]:
        """The ids of the configured models, without further replicas."""
        return tuple(name for name, spec in self.models.items() if spec.replica_of is None)

    def replicas_named(self, name: str) -> tuple[str, ...]:
        """The ids of the replicas that a known name stands for: all of a model, or the one in `NAME@1`, `NAME@2`."""
        spec = self.models[self.names[name]]
        if spec.replica_of is not None or name == f"{spec.id}@1":
            return (spec.id,)
        return tuple(replica_ids(spec.id, spec.replicas[1]))


def load(config_dir: Path, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> InferenceConfig:
    """The configuration from `config_dir`/models.yaml, `environ` and `overrides` of the command line.

    Files below INFERENCE_MODELS_DIR that no entry uses are models, too. Raises ConfigError with all problems.
    """
    problems: list[Problem] = []
    settings = environment_settings.read(environ, overrides, problems)
    path = config_dir / "models.yaml"
    models: dict[str, ModelSpec] = {}
    names: dict[str, str] = {}
    listed: set[str] = set()
    try:
        data, lines = configfile.read_yaml(path, environ, nothing=NO_MODELS)
        if data.get("models") is None and set(data) <= {"models"}:
            message = f"no models are configured; if that is intended, write `{NO_MODELS}`"
            raise ConfigError([Problem(message, key="models", file=path, line=lines.get(("models",)))])
        entries = configfile.validated(data, lines, path, ModelsFile).models
    except ConfigError as error:
        problems.extend(error.problems)
    else:
        for name, entry in entries.items():
            problems.extend(_at(path, lines, problem) for problem in _claim(name, entry, names))
            found = list(_check(name, entry, settings))
            problems.extend(_at(path, lines, problem) for problem in found)
            if not found:
                models |= {spec.id: spec for spec in specs_of(name, entry, settings)}
        listed = set(models)
        if not problems:
            _add_files(settings, models, names, problems)
    if problems:
        raise ConfigError(problems)
    return InferenceConfig(settings, models, names, config_dir, frozenset(models.keys() - listed))


def _add_files(
    settings: InferenceSettings, models: dict[str, ModelSpec], names: dict[str, str], problems: list[Problem]
) -> None:
    """Adds the files below INFERENCE_MODELS_DIR that no entry uses, with the default settings.

    The id is the name of the file, or its path below the directory if another model has that name.
    """
    files = [file for spec in models.values() for file in (str(spec.path), spec.draft, spec.mmproj, *spec.lora) if file]
    used = {os.path.realpath(file) for file in files}
    found = [file for file in models_below(settings.models_dir) if os.path.realpath(file.path) not in used]
    counts = Counter(model_name(file.path.name) for file in found)
    for file in found:
        path = file.path.relative_to(settings.models_dir.absolute()).as_posix()
        name = model_name(file.path.name)
        choices = [name] if counts[name] == 1 else []
        id = next((each for each in (*choices, model_name(path), path) if each not in names and is_id(each)), None)
        if id is None:
            continue
        aliases = () if path in names or path == id else (path,)
        mmproj = None if file.mmproj is None else str(file.mmproj)
        entry = ModelEntry.model_validate({"path": str(file.path), "mmproj": mmproj, "aliases": aliases})
        if wrong := list(_check(id, entry, settings)):  # the defaults do not agree with each other
            problems.append(Problem(wrong[0].message, key=f"INFERENCE_MODELS_DIR: {path}"))
            return
        names |= dict.fromkeys((id, *aliases), id)
        models |= {spec.id: spec for spec in specs_of(id, entry, settings)}


def is_id(name: str) -> bool:
    """Whether `name` can be the id or the alias of a model."""
    return bool(name) and name.isprintable() and name == name.strip() and not name.startswith("/") and name[-1] != "/"


def _claim(name: str, entry: ModelEntry, names: dict[str, str]) -> Iterator[Problem]:
    """Registers the id, aliases and replicas of a model. Yields a problem for each invalid or duplicate name."""
    for index, alias in enumerate((name, *entry.aliases)):
        key = f"models.{name}" if index == 0 else f"models.{name}.aliases"
        if not is_id(alias):
            yield Problem(
                f"{alias!r} is not a valid model id; remove line breaks, and spaces and slashes at its ends", key=key
            )
        elif alias in names:
            owner = f"the model or replica {names[alias]!r}" if "@" in alias else f"the model {names[alias]!r}"
            yield Problem(f"{owner} already has the name {alias!r}; choose another one", key=key)
        else:
            names[alias] = name
    others = replica_ids(name, entry.replicas[1])[1:]
    for replica, id in zip((f"{name}@1", *others), (name, *others), strict=True) if others else ():
        if replica in names:
            what = f"{replica!r} is the id of a replica, and already a name of {names[replica]!r}; choose another one"
            yield Problem(what, key=f"models.{name}.replicas")
        else:
            names[replica] = id


def replica_ids(name: str, most: int) -> list[str]:
    """The ids of the replicas of a model, the first of which has the id of the model."""
    return [name, *(f"{name}@{number}" for number in range(2, most + 1))]


def _check(name: str, entry: ModelEntry, settings: InferenceSettings) -> Iterator[Problem]:
    at = f"models.{name}"
    for key, source in (("path", entry.path), ("draft", entry.draft)):
        file, problem = (None, None) if source is None else resolve_path(source, settings.models_dir)
        if problem is not None:
            yield Problem(problem, key=f"{at}.{key}")
        elif file is not None and (fault := _fault(file.path)) is not None:
            yield Problem(f"{fault}; relative paths are below INFERENCE_MODELS_DIR", key=f"{at}.{key}")
    if entry.draft is not None and entry.speculation is not None:
        message = f"draft takes the place of speculation: {entry.speculation}; remove one of them"
        yield Problem(message, key=f"{at}.draft")
    for item in entry.lora:
        if (fault := _fault(_under(item, settings.models_dir))) is not None:
            yield Problem(fault, key=f"{at}.lora")
    if entry.mmproj is not None and (fault := _fault(_under(entry.mmproj, settings.models_dir))) is not None:
        yield Problem(fault, key=f"{at}.mmproj")
    if entry.replicas[1] > 1 and entry.gpu_index is not None:
        message = "replicas of one model run on different devices; remove gpu_index, or make replicas 1"
        yield Problem(message, key=f"{at}.gpu_index")
    values = {**_with_defaults(entry, settings), "min_context": entry.min_context}
    for key, message in contradictions(values):
        yield Problem(message, key=f"{at}.{key}")


def contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings of a model that contradict others, each with a message.

    `min_context` is None if it is the default, which may be more than the context.
    """
    batch, ubatch, context, least = (values[name] for name in ("batch", "ubatch", "context_length", "min_context"))
    if ubatch > batch:
        yield "ubatch", f"ubatch {ubatch} is larger than batch {batch}; make it {batch} or less"
    if values["kv_type"] != "f16" and not values["flash_attention"]:
        yield "kv_type", f"kv_type {values['kv_type']} needs flash_attention: true"
    if values["split_mode"] == "tensor" and not values["flash_attention"]:
        yield "split_mode", "split_mode tensor needs flash_attention: true; or set split_mode: layer"
    if least is not None and least > context:
        yield "min_context", f"min_context {least} is more than context_length {context}; make it {context} or less"
    if problem := pool_problem(values["kv_cells"], context, values["parallel"]):
        yield "kv_cells", problem
    if values["kv_cells"] is not None and values["swa_full"]:
        message = "kv_cells needs swa_full: false, because sliding-window layers of a pool keep only their window"
        yield "kv_cells", message


def _kv_cells(entry: ModelEntry, settings: InferenceSettings) -> int | None:
    """The pool of KV cells of a model; None without one. A default that would save no cells is not used."""
    if entry.kv_cells is not None or settings.kv_cells is None:
        return entry.kv_cells
    most = (entry.context_length or settings.context_length) * (entry.parallel or settings.parallel)
    return settings.kv_cells if settings.kv_cells < most else None


def pool_problem(kv_cells: int | None, context_length: int, parallel: int) -> str | None:
    """Why a pool of this size is not possible or not useful, or None."""
    if kv_cells is None:
        return None
    most = context_length * parallel
    if kv_cells < context_length:
        return (
            f"kv_cells {kv_cells} is less than context_length {context_length}, so the longest request would not fit; "
            f"make kv_cells {context_length} or more"
        )
    if kv_cells > most:
        return (
            f"kv_cells {kv_cells} is more than context_length {context_length} x parallel {parallel} can use; make "
            f"kv_cells {most} or less"
        )
    return None


def resolve_path(source: str, models_dir: Path) -> tuple[ModelFile | None, str | None]:
    """The files of a model source (`bundled:NAME`, `hf:...` or a path), or a message why it is invalid.

    Whether the file of a path exists is not checked.
    """
    kind, separator, rest = source.partition(":")
    if separator and kind == "bundled":
        if rest not in BUNDLED:
            otherwise = f"bundled models: {', '.join(BUNDLED)}"
            hint = did_you_mean(rest, BUNDLED, otherwise, shown=lambda near: f"bundled:{near}")
            return None, f"unknown bundled model {rest!r}{hint}"
        return ModelFile(bundled_path(rest)), None
    if source.startswith(HUB):
        try:
            return HubSource.parse(source).downloaded(models_dir), None
        except ValueError as error:
            return None, str(error)
    if not source.endswith(".gguf") and not _OLLAMA_BLOB.search(source):
        return None, (
            f"{source!r} is not a model source; write bundled:NAME, hf:ORGANIZATION/REPOSITORY:QUANTIZATION, "
            f"FILE.gguf or /absolute/path.gguf"
        )
    return ModelFile(_under(source, models_dir)), None


_OLLAMA_BLOB = re.compile(r"/blobs/sha256-[0-9a-f]{64}$")
"""The name of a GGUF file in Ollama's directory."""


def _fault(path: Path) -> str | None:
    """Why `path` cannot be read, or None."""
    try:
        str(path).encode()
        if not path.is_file():
            return f"no file {path}"
    except UnicodeEncodeError:
        return f"llama.cpp cannot open {os.fsencode(path)!r}, because it is not UTF-8"
    except OSError as error:  # an inaccessible directory, or an impossible name
        return f"cannot access {path} ({error.strerror})"
    return None if os.access(path, os.R_OK) else f"{path} is not readable by this user"


def _under(source: str, models_dir: Path) -> Path:
    path = Path(source).expanduser()
    return path if path.is_absolute() else (models_dir / path).absolute()


_DEFAULTS = {"idle_timeout": "model_idle_timeout_seconds", "min_residency": "min_residency_seconds"}
"""Settings of models whose default has another name in InferenceSettings."""


def _with_defaults(entry: ModelEntry, settings: InferenceSettings) -> dict[str, Any]:
    """The values of `entry`, with the defaults of the service where it has none."""
    values: dict[str, Any] = {field: getattr(entry, field) for field in ModelEntry.model_fields}
    for field, value in values.items():
        if value is None:
            values[field] = getattr(settings, _DEFAULTS.get(field, field), None)
    return values | {"kv_cells": _kv_cells(entry, settings)}


def _spec(name: str, entry: ModelEntry, settings: InferenceSettings) -> ModelSpec:
    values = _with_defaults(entry, settings)
    file, _ = resolve_path(entry.path, settings.models_dir)
    draft, _ = (None, None) if entry.draft is None else resolve_path(entry.draft, settings.models_dir)
    assert file is not None
    mmproj = file.mmproj if entry.mmproj is None else _under(entry.mmproj, settings.models_dir)
    values |= {
        "path": file.path,
        "lora": tuple(str(_under(item, settings.models_dir)) for item in entry.lora),
        "mmproj": None if mmproj is None else str(mmproj),
        "draft": None if draft is None else str(draft.path),
    }
    return ModelSpec(id=name, **values)


def specs_of(name: str, entry: ModelEntry, settings: InferenceSettings) -> list[ModelSpec]:
    """The settings of every replica of an entry."""
    first = _spec(name, entry, settings)
    others = replica_ids(name, entry.replicas[1])[1:]
    return [first, *(replace(first, id=id, aliases=(), replica_of=name) for id in others)]


def check_devices(config: InferenceConfig, accelerators: int) -> list[Problem]:
    """Problems that need the devices of the machine: a gpu_index without a device."""
    if accelerators == 0 or config.settings.force_cpu_mode:
        return []
    return [
        Problem(
            f"gpu_index is {spec.gpu_index}, but there are {accelerators} accelerators (0 to {accelerators - 1})",
            key=f"models.{spec.id}.gpu_index",
            file=config.config_dir / "models.yaml",
        )
        for spec in config.models.values()
        if spec.gpu_index is not None and spec.gpu_index >= accelerators
    ]


def _at(path: Path, lines: Mapping[configfile.Path_, int], problem: Problem) -> Problem:
    """`problem` with the file and the line of its key, or of the nearest parent of the key in the file."""
    _, _, rest = problem.key.partition("models.")
    name, dot, last = rest.rpartition(".")
    candidates: list[configfile.Path_] = [("models", name, last)] if dot else []
    candidates += [("models", rest), ("models", name)]
    line = next((lines[at] for at in candidates if at in lines), None)
    return Problem(problem.message, key=problem.key, file=path, line=line)
