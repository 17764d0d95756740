"""Reads models.yaml beside INFERENCE_* into one checked configuration; never applies, loads or downloads anything.

Precedence: command line > environment (and `.env`) > file > default. What a model does not say, INFERENCE_* gives.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headgate.shared import configfile
from headgate.shared.errors import ConfigError, Problem
from headgate.shared.units import Bytes, Duration
from inference import environment_settings
from inference.demo import BUNDLED, bundled_path
from inference.environment_settings import InferenceSettings, KvType
from inference.estimate.file_stamp import Fingerprint, fingerprint

NO_MODELS = "models: {}"


class ModelEntry(BaseModel):
    """One model in models.yaml; None means: what INFERENCE_* says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    context_length: int | None = Field(None, ge=16)
    gpu_layers: int | None = Field(None, ge=-1)
    gpu_index: int | None = Field(None, ge=0)
    parallel: int | None = Field(None, ge=1, le=256)
    kv_type: KvType | None = None
    batch: int | None = Field(None, ge=1)
    ubatch: int | None = Field(None, ge=1)
    threads: int | None = Field(None, ge=1)
    flash_attention: bool | None = None
    lora: tuple[str, ...] = ()
    mmproj: str | None = None
    idle_timeout: Duration | None = None
    min_residency: Duration | None = None
    pinned: bool = False
    dedicated: bool = False
    warm: bool = True
    oom_policy: Literal["fail_fast", "reduce", "cpu"] | None = None
    memory_overhead: Bytes | None = None
    capabilities: tuple[str, ...] | None = None


class ModelsFile(BaseModel):
    """models.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: dict[str, ModelEntry]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model with every default filled in. Lengths in tokens, times in seconds, memory in bytes."""

    id: str
    path: Path
    aliases: tuple[str, ...]
    context_length: int
    gpu_layers: int
    gpu_index: int | None
    parallel: int
    kv_type: str
    batch: int
    ubatch: int
    threads: int | None
    flash_attention: bool
    lora: tuple[str, ...]
    mmproj: str | None
    idle_timeout: float
    min_residency: float
    pinned: bool
    dedicated: bool
    warm: bool
    oom_policy: str
    memory_overhead: int | None
    capabilities: tuple[str, ...] | None

    SOFT = frozenset({"aliases", "idle_timeout", "min_residency", "pinned", "warm", "oom_policy"})
    """What may change while the model stays loaded."""

    @property
    def files(self) -> Fingerprint:
        """The stamps of its files as they are now."""
        return fingerprint(self.path, ([self.mmproj] if self.mmproj else []) + list(self.lora))

    def changed(self, other: ModelSpec) -> tuple[str, ...]:
        """Names of the settings in which `other` differs."""
        return tuple(name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(other, name))


@dataclass(frozen=True, slots=True)
class InferenceConfig:
    """The whole configuration of the service. `names` maps every id and alias to its model's id."""

    settings: InferenceSettings
    models: Mapping[str, ModelSpec]
    names: Mapping[str, str]
    config_dir: Path


def load(config_dir: Path, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> InferenceConfig:
    """The configuration from `config_dir`/models.yaml, `environ` and the command line's `overrides`.

    Raises ConfigError with every problem found: file, line, key and what to write instead.
    """
    problems: list[Problem] = []
    settings = environment_settings.read(environ, overrides, problems)
    path = config_dir / "models.yaml"
    models: dict[str, ModelSpec] = {}
    names: dict[str, str] = {}
    try:
        data, lines = configfile.read_yaml(path, environ, nothing=NO_MODELS)
        if data.get("models") is None and set(data) <= {"models"}:
            message = f"no models are listed here; if that is intended, write `{NO_MODELS}`"
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
                models[name] = _spec(name, entry, settings)
    if problems:
        raise ConfigError(problems)
    return InferenceConfig(settings, models, names, config_dir)


def _claim(name: str, entry: ModelEntry, names: dict[str, str]) -> Iterator[Problem]:
    """Registers the id and aliases of a model; yields a problem for each that is taken or unusable."""
    for index, alias in enumerate((name, *entry.aliases)):
        key = f"models.{name}" if index == 0 else f"models.{name}.aliases"
        if not alias.strip() or alias != alias.strip() or alias.startswith("/") or alias.endswith("/"):
            yield Problem(f"{alias!r} cannot be a model id; no spaces or slashes at its ends", key=key)
        elif alias in names:
            yield Problem(f"the name {alias!r} is taken by the model {names[alias]!r}; choose another", key=key)
        else:
            names[alias] = name


def _check(name: str, entry: ModelEntry, settings: InferenceSettings) -> Iterator[Problem]:
    at = f"models.{name}"
    path, problem = resolve_path(entry.path, settings.models_dir)
    if problem is not None:
        yield Problem(problem, key=f"{at}.path")
    elif path is not None and (fault := _fault(path)) is not None:
        yield Problem(f"{fault}; relative paths begin at INFERENCE_MODELS_DIR", key=f"{at}.path")
    for item in entry.lora:
        if (fault := _fault(_under(item, settings.models_dir))) is not None:
            yield Problem(fault, key=f"{at}.lora")
    if entry.mmproj is not None and (fault := _fault(_under(entry.mmproj, settings.models_dir))) is not None:
        yield Problem(fault, key=f"{at}.mmproj")
    batch, ubatch = entry.batch or settings.batch, entry.ubatch or settings.ubatch
    if ubatch > batch:
        yield Problem(f"ubatch {ubatch} is larger than batch {batch}; make it {batch} or less", key=f"{at}.ubatch")
    kv_type = entry.kv_type or settings.kv_type
    flash = settings.flash_attention if entry.flash_attention is None else entry.flash_attention
    if kv_type != "f16" and not flash:
        yield Problem(f"kv_type {kv_type} needs flash_attention: true", key=f"{at}.kv_type")


def resolve_path(source: str, models_dir: Path) -> tuple[Path | None, str | None]:
    """The GGUF file that `source` names, or a sentence that says why it names none."""
    kind, separator, rest = source.partition(":")
    if separator and kind == "bundled":
        if rest not in BUNDLED:
            near = difflib.get_close_matches(rest, BUNDLED, n=1)
            hint = f"did you mean bundled:{near[0]}?" if near else f"there are: {', '.join(BUNDLED)}"
            return None, f"no bundled model {rest!r}; {hint}"
        return bundled_path(rest), None
    if separator and kind == "hf":
        return None, (
            f"pulling {source} is not possible yet; download the GGUF file yourself and give its path here instead"
        )
    if not source.endswith(".gguf"):
        return None, f"{source!r} is no model source; write bundled:NAME, FILE.gguf or /absolute/path.gguf"
    return _under(source, models_dir), None


def _fault(path: Path) -> str | None:
    """Why nothing can be read from `path`; None where that can be."""
    try:
        if not path.is_file():
            return f"no file {path}"
    except OSError as error:  # a directory that is closed to us, a name that none can have
        return f"{path} cannot be reached ({error.strerror})"
    return None if os.access(path, os.R_OK) else f"this user may not read {path}"


def _under(source: str, models_dir: Path) -> Path:
    path = Path(source).expanduser()
    return path if path.is_absolute() else (models_dir / path).absolute()


def _spec(name: str, entry: ModelEntry, settings: InferenceSettings) -> ModelSpec:
    path, _ = resolve_path(entry.path, settings.models_dir)
    assert path is not None

    def pick(own: Any, default: Any) -> Any:
        return default if own is None else own

    return ModelSpec(
        id=name,
        path=path,
        aliases=entry.aliases,
        context_length=pick(entry.context_length, settings.context_length),
        gpu_layers=pick(entry.gpu_layers, settings.gpu_layers),
        gpu_index=pick(entry.gpu_index, settings.gpu_index),
        parallel=pick(entry.parallel, settings.parallel),
        kv_type=pick(entry.kv_type, settings.kv_type),
        batch=pick(entry.batch, settings.batch),
        ubatch=pick(entry.ubatch, settings.ubatch),
        threads=pick(entry.threads, settings.threads),
        flash_attention=pick(entry.flash_attention, settings.flash_attention),
        lora=tuple(str(_under(item, settings.models_dir)) for item in entry.lora),
        mmproj=None if entry.mmproj is None else str(_under(entry.mmproj, settings.models_dir)),
        idle_timeout=pick(entry.idle_timeout, settings.model_idle_timeout_seconds),
        min_residency=pick(entry.min_residency, settings.min_residency_seconds),
        pinned=entry.pinned,
        dedicated=entry.dedicated,
        warm=entry.warm,
        oom_policy=pick(entry.oom_policy, settings.oom_policy),
        memory_overhead=entry.memory_overhead,
        capabilities=entry.capabilities,
    )


def check_devices(config: InferenceConfig, accelerators: int) -> list[Problem]:
    """Problems that only show once the machine's devices are known: a gpu_index without its device."""
    if accelerators == 0 or config.settings.force_cpu_mode:
        return []
    return [
        Problem(
            f"gpu_index {spec.gpu_index} and there are {accelerators} accelerators (0 to {accelerators - 1})",
            key=f"models.{spec.id}.gpu_index",
            file=config.config_dir / "models.yaml",
        )
        for spec in config.models.values()
        if spec.gpu_index is not None and spec.gpu_index >= accelerators
    ]


def _at(path: Path, lines: Mapping[configfile.Path_, int], problem: Problem) -> Problem:
    """`problem` with its file and the line of the deepest part of its key that the file has."""
    _, _, rest = problem.key.partition("models.")
    name, dot, last = rest.rpartition(".")
    tries: list[configfile.Path_] = [("models", name, last)] if dot else []
    tries += [("models", rest), ("models", name)]
    line = next((lines[at] for at in tries if at in lines), None)
    return Problem(problem.message, key=problem.key, file=path, line=line)
