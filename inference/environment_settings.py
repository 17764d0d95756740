"""The INFERENCE_* settings of the service. Options of the command line override variables.

Some settings are defaults for models in models.yaml.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from headgate.shared.configfile import Bytes, Duration, meant
from headgate.shared.errors import Problem, did_you_mean
from headgate.shared.state_directory import INVALID_KEY, fits_a_header
from headgate.shared.units import GIB, MIB, format_bytes, parse_bytes
from inference.protocol import Priority

PREFIX = "INFERENCE_"
OTHER_NAMES = frozenset({"INFERENCE_URL"})
"""Variables with the same prefix for clients of the service."""

AT_START = frozenset(
    {
        "host",
        "port",
        "node",
        "token",
        "admin_key",
        "tls_certificate",
        "tls_key",
        "tls_client_ca",
        "backend",
        "devices",
        "enable_lazy_model_loading",
        "warm_checkpoint",
        "max_body_mb",
        "load_timeout_seconds",
        "estimate_timeout_seconds",
        "worker_start_seconds",
        "worker_silence_seconds",
        "step_timeout_seconds",
        "step_timeout_seconds_per_token",
    }
)
"""Settings that a reload does not apply to the running service."""

KvType = Literal["f16", "q8_0", "q4_0"]
Speculation = Literal["off", "ngram"]
MAX_LAYERS = 512
"""LLAMA_MAX_LAYERS of llama.cpp."""
MAX_CONTEXT = 2**27
"""The largest context_length in tokens; the longest contexts of published models are about 10 million."""

MIN_KV_RAM_GB = 1 / 64
"""`placement.kv_budgets` divides host memory for stored sequences in steps of 16 MiB."""

SIMULATED = "sim:"
SIMULATED_EXAMPLE = "sim:2x600MiB"
MAX_SIMULATED = 16
"""The number of servers that ggml's RPC backend supports in one process."""
MIN_SIMULATED_BYTES = MIB
DEVICE_CHOICES = ("auto", "cpu")
_SIMULATED_ITEM = re.compile(r"(?:(\d{1,4})\s*[x*×]\s*)?(.+)", re.IGNORECASE)  # noqa: RUF001 - people write it


def _empty_is_unset(value: Any) -> Any:
    return None if isinstance(value, str) and not value.strip() else value


def _experts(value: Any) -> Any:
    """A word or a number of layers, also as text, as in the environment; raises ValueError."""
    found = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    is_number = isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= MAX_LAYERS
    words = ("device", "host", "auto")
    if not is_number and found not in words:
        raise ValueError(
            f"write device, host, auto, or the number of layers (0 to {MAX_LAYERS}) whose experts are in host memory"
            + did_you_mean(value, words)
        )
    return found


Experts = Annotated[
    Literal["device", "host", "auto"] | Annotated[int, Field(ge=0, le=MAX_LAYERS)], BeforeValidator(_experts)
]
"""Where the experts of a model are: with their layers, in host memory, or those of the first N layers in host memory;
`auto` takes the smallest N with which the model fits."""
OOM_STEPS = ("cleanup", "reduce", "cpu")
_OOM_WORDS = {"fail_fast": (), "reduce": ("cleanup", "reduce")}


def _oom_policy(value: Any) -> Any:
    """The steps in a list, in a text with commas, or in one word; raises ValueError."""
    if isinstance(value, str):
        words = tuple(word.strip() for word in value.split(","))
        value = _OOM_WORDS.get(words[0], words) if len(words) == 1 else words
    steps = tuple(value) if isinstance(value, list | tuple) else (value,)
    if steps != tuple(step for step in OOM_STEPS if step in steps):
        known = (*_OOM_WORDS, *OOM_STEPS)
        unknown = next((step for step in steps if step not in known), None)
        raise ValueError(
            "write fail_fast, reduce, cpu, or a list of cleanup, reduce, cpu in this order"
            + did_you_mean(unknown, known)
        )
    return steps


OomPolicy = Annotated[
    tuple[Literal["cleanup", "reduce", "cpu"], ...],
    BeforeValidator(_oom_policy),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["fail_fast", "reduce", "cpu"], "type": "string"},
                {"items": {"enum": list(OOM_STEPS), "type": "string"}, "type": "array"},
            ]
        }
    ),
]
"""What is done when a model runs out of memory, in this order; nothing for `fail_fast`."""
FitPolicy = Annotated[
    Literal["off", "context", "experts", "layers", "auto"],
    BeforeValidator(lambda value: "off" if value is False else value),  # YAML reads off as false
]
SplitMode = Literal["layer", "row", "tensor"]
"""How a model on several accelerators is divided: by layers, or each matrix by its rows or by attention heads."""
OptionalInt = Annotated[int | None, BeforeValidator(_empty_is_unset)]
OptionalPath = Annotated[Path | None, BeforeValidator(_empty_is_unset)]
OptionalFloat = Annotated[float | None, BeforeValidator(_empty_is_unset)]


class InferenceSettings(BaseSettings):
    """One field per INFERENCE_* variable.

    Names ending in GB are in GiB (2**30 bytes), MB in MiB, SECONDS in seconds; percentages are shares of 1.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", validate_default=True)

    # the service
    host: str = "127.0.0.1"
    port: int = Field(8085, ge=0, le=65535)
    node: Annotated[str | None, BeforeValidator(_empty_is_unset)] = Field(
        None, pattern=r"^[A-Za-z0-9_.:-]{1,100}$", description="name of this service; default: the host name"
    )
    token: str | None = Field(None, description="shared with the gateway; generated into the state directory if unset")
    admin_key: str | None = Field(
        None, min_length=1, description="key for requests that change something; default: the token"
    )
    tls_certificate: OptionalPath = Field(
        None, description="certificate of the service (PEM, with its chain); unset: no TLS"
    )
    tls_key: OptionalPath = Field(None, description="its private key (PEM, without a password)")
    tls_client_ca: OptionalPath = Field(
        None, description="clients need a certificate of one of these authorities (PEM)"
    )
    models_dir: Path = Field(Path("models"), description="directory of relative GGUF paths")
    backend: Literal["llamacpp"] = "llamacpp"
    drain_seconds: float = Field(30.0, ge=0, le=3600)
    max_body_mb: float = Field(32.0, gt=0, le=1024)

    # defaults of models
    gpu_layers: int = Field(-1, ge=-1)
    experts: Experts = Field(
        "device", description="experts on the device, in host memory, of the first N layers in host memory, or auto"
    )
    split_mode: SplitMode = Field(
        "layer", description="how a model on several accelerators is divided: by layer, row or tensor"
    )
    gpu_index: OptionalInt = Field(None, ge=0)
    context_length: int = Field(4096, ge=16, le=MAX_CONTEXT)
    parallel: int = Field(4, ge=1, le=256)
    kv_cells: OptionalInt = Field(
        None, ge=16, description="KV cells that all requests of a model share; unset: context_length for each request"
    )
    kv_type: KvType = "f16"
    batch: int = Field(2048, ge=1)
    ubatch: int = Field(512, ge=1)
    threads: OptionalInt = Field(None, ge=1)
    flash_attention: bool = True
    swa_full: bool = Field(False, description="sliding-window layers keep the whole context instead of their window")
    kv_checkpoints: Bytes = Field(
        2**29, ge=0, description="host memory per sequence for checkpoints of recurrent and sliding-window layers"
    )
    speculation: Speculation = Field(
        "off", description="ngram: verify several next tokens at once where earlier text repeats itself"
    )
    model_idle_timeout_seconds: Duration = 300.0
    min_residency_seconds: Duration = 5.0
    oom_policy: OomPolicy = Field((), description="steps when memory runs out: cleanup, reduce, cpu")
    fit: FitPolicy = Field("off", description="what is changed when a model does not fit as configured")
    min_context: int = Field(2048, ge=16, le=MAX_CONTEXT, description="the shortest context that fit may choose")

    # memory
    memory_limit_gb: OptionalFloat = Field(None, gt=0)
    gpu_memory_max_percent: float = Field(0.90, gt=0, le=1)
    cpu_memory_max_percent: float = Field(0.50, gt=0, le=1)
    gpu_memory_limit_mb: OptionalFloat = Field(None, gt=0)
    gpu_memory_reserve_mb: float = Field(512.0, ge=0)
    max_models: OptionalInt = Field(None, ge=1)
    max_models_per_device: OptionalInt = Field(None, ge=1)
    enable_cpu_offload: bool = Field(True, description="keep evicted models warm in host memory")
    warm_checkpoint: Literal["off", "simulated", "auto"] = Field(
        "simulated",
        description="devices that keep warm models as checkpoints of their processes, if the test at start succeeds: "
        "none, simulated ones, or (experimental) also NVIDIA GPUs",
    )
    force_cpu_mode: bool = False
    devices: str = Field("auto", description="auto, cpu, or simulated devices such as sim:2x600MiB or sim:600MiB,1GiB")

    # queues and deadlines
    enable_lazy_model_loading: bool = True
    queue_high: int = Field(10, ge=0)
    queue_normal: int = Field(50, ge=0)
    queue_low: int = Field(100, ge=0)
    acquire_timeout_seconds: Duration = 300.0
    load_timeout_seconds: Duration = 1800.0
    estimate_timeout_seconds: Duration = 60.0

    # supervision
    worker_start_seconds: Duration = 60.0
    worker_silence_seconds: Duration = 10.0
    step_timeout_seconds: Duration = 60.0
    step_timeout_seconds_per_token: float = Field(1.0, ge=0)

    # memory pressure
    enable_memory_governor: bool = True
    enable_memory_alerts: bool = True
    eviction_idle_threshold_seconds: Duration = 120.0
    pressure_eager: bool = False
    pressure_check_interval_seconds: Annotated[Duration, Field(ge=0.1)] = 15.0
    pressure_moderate: float = Field(0.60, gt=0, le=1)
    pressure_high: float = Field(0.80, gt=0, le=1)
    pressure_critical: float = Field(0.90, gt=0, le=1)
    pressure_emergency: float = Field(0.98, gt=0, le=1)

    # sequences outside the context
    kv_enabled: bool = Field(True, description="store sequences that have no slot in host memory and on disk")
    kv_ram_gb: OptionalFloat = Field(
        None, ge=0, description="host memory for them; default: a tenth of the host memory for models, at most 8 GiB"
    )
    kv_disk_gb: float = Field(0.0, ge=0, description="disk space for them; 0: not on disk")
    kv_policy: Literal["lru", "priority", "hybrid"] = Field("hybrid", description="which sequences are removed first")
    kv_threshold: float = Field(
        0.9, gt=0, le=1, description="share of slots in use from which on idle sequences are saved ahead of need"
    )
    kv_prefetch: bool = Field(True, description="read sequences of waiting requests from disk")
    kv_dir: OptionalPath = Field(None, description="directory of stored sequences; default: kv in the state directory")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only the values from `read`, so that pydantic does not read the environment."""
        return (init_settings,)

    @field_validator("token", "admin_key")
    @classmethod
    def _fits_a_header(cls, value: str | None) -> str | None:
        if value is not None and not fits_a_header(value):
            raise ValueError(INVALID_KEY)
        return value

    @field_validator("tls_key")
    @classmethod
    def _belongs_to_a_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if (value is None) != (info.data.get("tls_certificate") is None):
            raise ValueError("INFERENCE_TLS_CERTIFICATE and INFERENCE_TLS_KEY belong together; set both or none")
        return value

    @field_validator("tls_client_ca")
    @classmethod
    def _needs_a_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("tls_certificate") is None:
            raise ValueError("needs INFERENCE_TLS_CERTIFICATE and INFERENCE_TLS_KEY")
        return value

    @field_validator("devices")
    @classmethod
    def _known_devices(cls, value: str) -> str:
        parse_choice(value)
        return value.strip()

    @field_validator("kv_ram_gb")
    @classmethod
    def _is_used(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < MIN_KV_RAM_GB:
            raise ValueError(f"must be 0 (none) or at least {MIN_KV_RAM_GB} (16 MiB), because less is not used")
        return value

    @model_validator(mode="after")
    def _levels_rise(self) -> InferenceSettings:
        levels = [self.pressure_moderate, self.pressure_high, self.pressure_critical, self.pressure_emergency]
        if levels != sorted(levels):
            raise ValueError("the pressure levels must rise: MODERATE <= HIGH <= CRITICAL <= EMERGENCY")
        return self

    @property
    def scheme(self) -> str:
        """`https` with a certificate, else `http`."""
        return "http" if self.tls_certificate is None else "https"

    @property
    def simulated_bytes(self) -> tuple[int, ...]:
        """Sizes of the simulated devices in INFERENCE_DEVICES; empty for real devices."""
        return parse_choice(self.devices) or ()

    @property
    def node_name(self) -> str:
        """INFERENCE_NODE, or the name of this host."""
        return self.node or socket.gethostname()

    @property
    def memory_limit_bytes(self) -> int | None:
        """INFERENCE_MEMORY_LIMIT_GB in bytes."""
        return None if self.memory_limit_gb is None else int(self.memory_limit_gb * GIB)

    @property
    def kv_ram_bytes(self) -> int | None:
        """INFERENCE_KV_RAM_GB in bytes."""
        return None if self.kv_ram_gb is None else int(self.kv_ram_gb * GIB)

    @property
    def kv_disk_bytes(self) -> int:
        """INFERENCE_KV_DISK_GB in bytes."""
        return int(self.kv_disk_gb * GIB)

    @property
    def max_body_bytes(self) -> int:
        """INFERENCE_MAX_BODY_MB in bytes."""
        return int(self.max_body_mb * 2**20)

    @property
    def queue_limits(self) -> dict[Priority, int]:
        """Longest queue of a model per priority."""
        return {Priority.HIGH: self.queue_high, Priority.NORMAL: self.queue_normal, Priority.LOW: self.queue_low}


def read(environ: Mapping[str, str], overrides: Mapping[str, Any], problems: list[Problem]) -> InferenceSettings:
    """The settings from `environ` and `overrides`. Appends mistakes to `problems`.

    With an invalid value the result has only defaults. An unknown name that resembles a setting or contains `__` is a
    problem. Other unknown names are ignored, because container orchestrators set variables such as
    INFERENCE_SERVICE_HOST. An empty variable counts as unset.
    """
    values: dict[str, Any] = {}
    known = {variable: variable.removeprefix(PREFIX).lower() for variable in environment_names()}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in OTHER_NAMES or not environ[variable]:
            continue
        if name := known.get(variable.upper()):
            values[name] = environ[variable]
            continue
        flat = "_".join(part for part in variable.split("_") if part)
        advice = did_you_mean(flat, known, shown=str, cutoff=0.85)
        if advice or "__" in variable:
            problems.append(Problem(f"unknown setting{advice}", key=variable))
    values.update({name: value for name, value in overrides.items() if value is not None})
    try:
        return InferenceSettings.model_validate(values)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            key = PREFIX + str(item["loc"][0]).upper() if item["loc"] else PREFIX + "PRESSURE_*"
            message = str(item["msg"]).removeprefix("Value error, ")
            wrong = "" if item["type"] == "value_error" else f" (it is {item.get('input')!r}){meant(item)}"
            problems.append(Problem(message + wrong, key=key))
        return InferenceSettings.model_validate({})


def environment_names() -> list[str]:
    """All INFERENCE_* variables."""
    return [PREFIX + name.upper() for name in InferenceSettings.model_fields]


def parse_choice(text: str) -> tuple[int, ...] | None:
    """Sizes in bytes of the simulated devices in `text`, None for `auto` and `cpu`.

    Raises ValueError with the choices and a suggestion.
    """
    choice = text.strip()
    if choice in DEVICE_CHOICES:
        return None
    if choice.lower().startswith(SIMULATED):
        return simulated_sizes(choice[len(SIMULATED) :])
    known = {choice: choice for choice in DEVICE_CHOICES} | {"sim": SIMULATED_EXAMPLE}
    advice = did_you_mean(choice.partition(":")[0], known, shown=known.__getitem__, cutoff=0.5)
    raise ValueError(
        f"{text!r} is not a valid list of devices; write auto, cpu, or simulated devices such as {SIMULATED_EXAMPLE}"
        f"{advice}"
    )


def simulated_sizes(text: str) -> tuple[int, ...]:
    """Bytes of each device in a list such as `2x600MiB,1GiB`. Raises ValueError with the wrong part."""
    found: list[int] = []
    for item in (part.strip() for part in text.split(",")):
        match = _SIMULATED_ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"simulated devices need a size; write for example {SIMULATED_EXAMPLE}")
        try:
            size = parse_bytes(match[2])
        except ValueError as error:
            raise ValueError(f"simulated devices: {error}") from None
        if size < MIN_SIMULATED_BYTES:
            bare = match[2].strip()
            meant = f"; did you mean {bare}MiB?" if bare.isdigit() else ""
            raise ValueError(f"a simulated device of {format_bytes(size)} is too small for a model{meant}")
        count = int(match[1] or 1)
        if count == 0:
            raise ValueError(
                f"write cpu for no simulated devices, or a number above 0, for example {SIMULATED_EXAMPLE}"
            )
        found += [size] * count
    if len(found) > MAX_SIMULATED:
        raise ValueError(f"there can be at most {MAX_SIMULATED} simulated devices, not {len(found)}")
    return tuple(found)
