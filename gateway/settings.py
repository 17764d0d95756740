"""The settings of the gateway: names, types, defaults and the checks of single values."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from gateway.apis.image_policy import is_host_entry
from gateway.apis.openai.frames import Flavor
from gateway.cors import why_no_origin
from headgate.shared.configfile import Bytes, Duration, unset_name
from inference.protocol import Priority

FILE = "gateway.yaml"
PREFIX = "GATEWAY_"
KEY_VARIABLES = ("GATEWAY_API_KEY", "GATEWAY_ADMIN_KEY")
"""Secrets read by `gateway.access.authentication`; they cannot be set in the file."""

TOKEN_VARIABLE = "INFERENCE_TOKEN"

_NODE_NAME = re.compile(r"[A-Za-z0-9_.:-]+|\[[0-9A-Fa-f:]+\](:\d+)?")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def _http_url(value: str) -> str:
    if "@" in value:
        raise ValueError("the address must not contain a user name or password; credentials have their own settings")
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or re.search(r"\s", value):
        raise ValueError("not a URL; write for example http://127.0.0.1:8085")
    if "?" in value or "#" in value:
        raise ValueError("the address must not contain `?` or `#`, because paths are appended to it")
    return value


def _some_time(value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError("must be a duration above zero and not `never`, for example 30s")
    return value


def _short(value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError("must be between 0 and 1s; 0 sends every token separately")
    return value


Url = Annotated[str, AfterValidator(_http_url)]
SomeTime = Annotated[Duration, AfterValidator(_some_time)]
Positive = Annotated[int, Field(ge=1, le=2**53)]
Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class NodeSource(NamedTuple):
    """An entry of `inference.nodes`. `address` is a URL, HOST:PORT of a DNS name, or the address of a Ray cluster
    (empty for the one of this machine). `name` is that of a single node, else empty.
    """

    kind: Literal["url", "dns", "ray"]
    address: str
    name: str = ""


def node_source(entry: str) -> NodeSource:
    """The source that an entry of `inference.nodes` means; raises ValueError."""
    kind, _, address = entry.partition(":")
    if kind == "ray":
        return NodeSource("ray", address)
    if kind == "dns":
        host, _, port = address.rpartition(":")
        if not host or re.search(r"[\s/@]", host) or not (port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError(f"{entry!r}: write dns:NAME:PORT, for example dns:headgate-inference:8085")
        return NodeSource("dns", address)
    name, separator, url = entry.partition("=")
    if not separator or "/" in name:
        name, url = "", entry
    elif not name:
        raise ValueError(f"{entry!r}: the name before `=` is missing")
    try:
        url = _http_url(url).rstrip("/")
    except ValueError as error:
        raise ValueError(f"{entry!r}: {error}; or write NAME=URL, dns:NAME:PORT or ray:ADDRESS") from error
    name = name or urlsplit(url).netloc
    if not _NODE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name of a node: use letters, digits, `-`, `_`, `.` and `:`")
    return NodeSource("url", url, name)


def _node_entry(value: str) -> str:
    node_source(value)
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _redis_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("redis", "rediss", "unix") or not (parts.hostname or parts.path):
        raise ValueError("not the address of a Redis or Valkey server; write for example redis://127.0.0.1:6379/0")
    if parts.scheme != "unix" and (parts.port == 0 or not re.fullmatch(r"/?\d*", parts.path)):
        raise ValueError("invalid port or database number; write for example redis://127.0.0.1:6379/0")
    return value


class TlsSettings(_Model):
    """Files in PEM format for https to the inference services. `ca` replaces the system's certificate authorities;
    `certificate` and `key` identify this gateway.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


class NodeSettings(_Model):
    """The address of the inference service, or of several (`nodes`, then `url` has no effect); their token is in
    INFERENCE_TOKEN or the state directory.

    `nodes`: URL, NAME=URL, dns:NAME:PORT (one node per address) or ray:[ADDRESS]. `replicas`: on how many nodes a model
    is kept loaded.
    """

    url: Url = "http://127.0.0.1:8085"
    nodes: Annotated[tuple[Annotated[str, AfterValidator(_node_entry)], ...], BeforeValidator(_as_list)] = ()
    tls: TlsSettings = TlsSettings()
    replicas: dict[str, Positive] = {}

    @field_validator("url")
    @classmethod
    def _no_slash(cls, value: str) -> str:
        return value.rstrip("/")


class ProviderSettings(_Model):
    """One cloud. Without its key the provider is absent. `flavor` names the variant of OpenAI's API where the
    address does not show it, for example behind a proxy.
    """

    kind: Literal["openai", "anthropic"]
    api_key: str
    base_url: Url | None = None
    flavor: Flavor | None = None

    @field_validator("api_key")
    @classmethod
    def _fits_a_header(cls, value: str) -> str:
        """Strips white space around a key; rejects characters that a header cannot hold."""
        if unset_name(value) is not None:
            return value
        if not (value := value.strip()).isascii() or not value.isprintable() or " " in value or not value:
            raise ValueError("not an API key: it is empty or contains white space or characters outside of ASCII")
        return value

    @field_validator("flavor")
    @classmethod
    def _flavor_is_for_openai(cls, value: Flavor | None, info: ValidationInfo) -> Flavor | None:
        if value is not None and info.data.get("kind") == "anthropic":
            raise ValueError("only providers of kind `openai` have a flavor")
        return value


class RouteParameterSettings(_Model):
    """Parameters of the requests of one route: `defaults` for absent ones, `overrides` instead of the client's, names
    to `remove`. Template variables (`chat_template_kwargs`) are merged.
    """

    defaults: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    remove: tuple[str, ...] = ()


class RouteSettings(_Model):
    """One model name and its chain of PROVIDER/MODEL, `load_wait` in seconds. `local/smaller` in a chain stands for a
    model that is chosen for each request. `same_vectors`: all models of the chain give the same vectors and scores, so
    that one may replace another.

    `resume`: which candidates resume an interrupted answer: any, local ones, or none. Without a resume the answer
    ends in an error frame. `whole_answers`: how a cloud is asked for an answer that the client does not stream.

    `fit_check`: whether a local candidate is skipped while the inference service says that it cannot be loaded.
    `capture`: whether bodies of requests and answers are stored, see `UsageSettings.redact`.

    With `parameters`, routes that share a chain serve variants of one loaded model.
    """

    chain: Annotated[tuple[str, ...], Field(min_length=1)]
    resume: Literal["any", "local", "off"] = "any"
    cloud: Literal["allowed", "never"] = "allowed"
    load_wait: Duration = 120.0
    fit_check: bool = True
    same_vectors: bool = False
    whole_answers: Literal["stream", "whole"] = "stream"
    capture: bool = False
    parameters: RouteParameterSettings = RouteParameterSettings()

    @field_validator("resume", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare `off` as false


class BreakerSettings(_Model):
    """When a breaker opens and for how long; `open` and `window` in seconds."""

    failures: Positive = 5
    open: SomeTime = 30.0
    probes: Positive = 1
    window: SomeTime = 60.0
    failure_ratio: Annotated[float, Field(gt=0, le=1)] = 0.5
    min_requests: Positive = 20


class DeadlineSettings(_Model):
    """Seconds. `first_token` and `inter_token` bound silence. `total` bounds the time to commit: despite its name, it
    ends at the first content.
    """

    connect: SomeTime = 5.0
    first_token: SomeTime = 30.0
    inter_token: SomeTime = 15.0
    total: SomeTime = 300.0


class AttemptSettings(_Model):
    """How many attempts one request may make."""

    max: Positive = 4


class AdmissionSettings(_Model):
    """How many requests run and wait; `queue_timeout` in seconds."""

    max_in_flight: Positive = 256
    queue: Annotated[int, Field(ge=0)] = 512
    queue_timeout: SomeTime = 30.0


class ImageSettings(_Model):
    """Https hosts for images: NAME, *.NAME, either with :PORT, or * for all. Empty: no image is fetched.

    `max_bytes` of one image; `timeout` in seconds.
    """

    hosts: tuple[str, ...] = ()
    max_bytes: Bytes = 10_000_000
    timeout: SomeTime = 10.0

    @field_validator("hosts")
    @classmethod
    def _are_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        hosts = tuple(host.lower() for host in value)
        for host in hosts:
            if not is_host_entry(host):
                raise ValueError(f"{host!r} is not a host name; write example.org, *.example.org, or either with :PORT")
        return hosts


class CorsSettings(_Model):
    """The origins (SCHEME://HOST[:PORT]) of web pages that may call the gateway from a browser, or * for all.
    Empty: none may.
    """

    origins: tuple[str, ...] = ()

    @field_validator("origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        origins = tuple(origin.lower() for origin in value)
        if problem := next(filter(None, map(why_no_origin, origins)), None):
            raise ValueError(problem)
        return origins


class LimitSettings(_Model):
    """The limits of one key; None is no limit."""

    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    concurrent: Positive | None = None


class BudgetSettings(_Model):
    """What a key may use in a calendar month (UTC); None is no limit."""

    dollars_per_month: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    tokens_per_month: Positive | None = None


class PriceSettings(_Model):
    """US dollars per million tokens. Without `cached_input`, cached prompt tokens cost as much as others."""

    input: Dollars
    output: Dollars
    cached_input: Dollars | None = None


class UsageSettings(_Model):
    """Whether usage is stored, for how long, and in how many bytes.

    `redact`: regular expressions of text that is left out of captured bodies, besides secrets.
    """

    store: bool = True
    keep: Annotated[Duration, AfterValidator(_some_time)] = 90 * 86400.0
    max_bytes: Annotated[Bytes, Field(ge=2**20)] = 256 * 2**20
    redact: tuple[str, ...] = ()

    @field_validator("redact")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                found = re.compile(pattern).search("")
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
            if found is not None:
                raise ValueError(f"{pattern!r} matches an empty text, so everywhere; write what it must contain")
        return value


class KeySettings(_Model):
    """One key, as its hash. `priority` is the highest priority of its requests; `limits` replace the common ones.

    `models`: the names that it may use, NAME or PREFIX*; empty: all. `budget`: see `BudgetSettings`.
    """

    name: Annotated[str, Field(min_length=1)]
    hash: str
    scopes: Annotated[tuple[Literal["use", "admin"], ...], Field(min_length=1)] = ("use",)
    priority: Priority = Priority.HIGH
    limits: LimitSettings | None = None
    models: tuple[str, ...] = ()
    budget: BudgetSettings = BudgetSettings()

    @field_validator("models")
    @classmethod
    def _are_names_or_prefixes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not name or "*" in name[:-1]:
                raise ValueError(f"{name!r} is neither a model name nor PREFIX*, for example gpt-*")
        return value

    @field_validator("hash")
    @classmethod
    def _is_sha256(cls, value: str) -> str:
        if not _SHA256.fullmatch(value):
            raise ValueError("write sha256: and 64 hex digits; `printf %s KEY | sha256sum` prints them")
        return value


class GatewayConfig(_Model):
    """All settings of gateway.yaml.

    `drain_seconds`: time for open answers at shutdown. `share_prefixes`: which requests may reuse computed prefixes,
    those of the same key (`tenant`) or `all`. `limits`: for keys without their own. `stream_interval`: shortest time in
    seconds between two pieces of a local answer. `hosted_tools`: whether tools that run at another provider are refused
    or left out of requests to `/v1/responses` and `/v1/messages`. `prices`: by PROVIDER/MODEL. `state`: the address of
    the Redis or Valkey server that gateways share; without one a gateway keeps its own state.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    drain_seconds: Duration = 30.0
    max_body: Bytes = 32_000_000
    inference: NodeSettings = NodeSettings()
    providers: dict[str, ProviderSettings] = {}
    routes: dict[str, RouteSettings] = {"*": RouteSettings(chain=("local/*", "local/smaller"))}
    breaker: BreakerSettings = BreakerSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    attempts: AttemptSettings = AttemptSettings()
    admission: AdmissionSettings = AdmissionSettings()
    stream_interval: Annotated[Duration, AfterValidator(_short)] = 0.016
    share_prefixes: Literal["tenant", "all"] = "tenant"
    images: ImageSettings = ImageSettings()
    cors: CorsSettings = CorsSettings()
    limits: LimitSettings = LimitSettings()
    hosted_tools: Literal["refuse", "leave_out"] = "refuse"
    keys: tuple[KeySettings, ...] = ()
    usage: UsageSettings = UsageSettings()
    prices: dict[str, PriceSettings] = {}
    state: Annotated[str, AfterValidator(_redis_url)] | None = None
