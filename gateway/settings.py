"""Settings of the gateway: gateway.yaml, environment variables and command line.

Precedence: command line > GATEWAY_* variables > file > default. In the name of a variable `__` separates levels:
GATEWAY_BREAKER__FAILURES=3. Lists and mappings are written as YAML or JSON.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from gateway.apis.image_policy import is_host_entry
from gateway.apis.openai.frames import Flavor
from gateway.apis.openai.route_parameters import TEMPLATE_VARIABLES, problem_of_name, problems_of_values
from gateway.breaker.outcome import LOCAL
from gateway.cors import why_no_origin
from headgate.shared.configfile import Bytes, Duration, Path_, as_written, problems_of, read_yaml, unset_name
from headgate.shared.errors import ConfigError, Problem
from headgate.shared.state_directory import INVALID_KEY, fits_a_header
from inference.protocol import Priority

FILE = "gateway.yaml"
PREFIX = "GATEWAY_"
KEY_VARIABLES = ("GATEWAY_API_KEY", "GATEWAY_ADMIN_KEY")
"""Secrets read by `gateway.access.authentication`; they cannot be set in the file."""

TOKEN_VARIABLE = "INFERENCE_TOKEN"

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


class InferenceSettings(_Model):
    """The address of the inference service; its token is in INFERENCE_TOKEN or the state directory."""

    url: Url = "http://127.0.0.1:8085"

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
    def _of_openais_dialect(cls, value: Flavor | None, info: ValidationInfo) -> Flavor | None:
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

    `capture`: whether bodies of requests and answers are stored, see `UsageSettings.redact`.

    `parameters` make routes with the same chain variants of one loaded model.
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
    """Seconds. `first_token` and `inter_token` bound silence, `total` the time to commit."""

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
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
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
    or left out of requests to `/v1/responses` and `/v1/messages`. `prices`: by PROVIDER/MODEL.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    drain_seconds: Duration = 30.0
    max_body: Bytes = 32_000_000
    inference: InferenceSettings = InferenceSettings()
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


def load(config_dir: Path, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> GatewayConfig:
    """The configuration in force for `config_dir`; raises ConfigError with every problem, each with file and line.

    `overrides` are top-level settings from the command line; None values are ignored.
    """
    path = config_dir / FILE
    data, lines = read_yaml(path, environ)
    sources: dict[Path_, str] = {}
    problems = _merge_environ(data, environ, sources)
    for name, value in (overrides or {}).items():
        if value is not None:
            data[name] = value
            sources[(name,)] = f"--{name}"
    try:
        config = GatewayConfig.model_validate(data)
    except ValidationError as error:
        found = zip(error.errors(include_url=False), problems_of(error, GatewayConfig, path, lines), strict=True)
        raise ConfigError(
            [*problems, *(_placed(problem, tuple(item["loc"]), sources) for item, problem in found)]
        ) from (error)
    problems += [
        Problem(as_written(message, _at(data, at)), key=".".join(map(str, at)), file=path, line=_line(lines, at))
        for at, message in _semantic_problems(config)
    ]
    if problems:
        raise ConfigError(problems)
    return config


def _placed(problem: Problem, at: Path_, sources: Mapping[Path_, str]) -> Problem:
    """`problem` with the variable or option that set the value, if one did."""
    source = next((sources[at[:end]] for end in range(len(at), 0, -1) if at[:end] in sources), None)
    return problem if source is None else Problem(problem.message, key=source)


def _at(data: Any, at: Path_) -> Any:
    """The value at `at`; None for a default."""
    try:
        for part in at:
            data = data[part]
    except (KeyError, IndexError, TypeError):
        return None
    return data


def _line(lines: Mapping[Path_, int], at: Path_) -> int | None:
    return next((lines[at[:end]] for end in range(len(at), 0, -1) if at[:end] in lines), None)


def _merge_environ(data: dict[str, Any], environ: Mapping[str, str], sources: dict[Path_, str]) -> list[Problem]:
    """Writes GATEWAY_* values into `data`; returns what was wrong with them.

    A name that is similar to a setting is a problem. Other unknown names are ignored, because container orchestrators
    create variables such as GATEWAY_SERVICE_HOST.
    """
    problems = [
        Problem(INVALID_KEY, key=name)
        for name in (*KEY_VARIABLES, TOKEN_VARIABLE)
        if (key := environ.get(name)) and not fits_a_header(key)
    ]
    known = {PREFIX + "__".join(at).upper(): at for at in _paths(GatewayConfig, ())}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in KEY_VARIABLES or not environ[name]:
            continue
        at = known.get(name.upper())
        if at is None:
            within = next((one for one in known if one.startswith(f"{name.upper()}__")), None)
            near = difflib.get_close_matches(name, [*known, *KEY_VARIABLES], n=1, cutoff=0.85)
            if within is not None:
                problems.append(Problem(f"this is a section; set one of its settings, for example {within}", key=name))
            elif near or "__" in name:
                problems.append(Problem("unknown setting" + (f"; did you mean {near[0]}?" if near else ""), key=name))
            continue
        try:
            _put(data, at, _value(environ[name]))
        except yaml.YAMLError:
            problems.append(Problem("the value must be valid YAML", key=name))
        sources[at] = name
    return problems


def _value(text: str) -> Any:
    """Parses lists and mappings; other values stay text for the type of the field."""
    return yaml.safe_load(text) if text.lstrip().startswith(("[", "{")) else text


def _put(data: dict[str, Any], at: tuple[str, ...], value: Any) -> None:
    for name in at[:-1]:
        inner = data.get(name)
        if not isinstance(inner, dict):
            inner = data[name] = {}
        data = inner
    data[at[-1]] = value


def _paths(model: type[BaseModel], at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The paths of all settings that a variable can set."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, (*at, name))
        else:
            yield (*at, name)


def _semantic_problems(config: GatewayConfig) -> Iterator[tuple[Path_, str]]:
    """Problems that types do not show: unknown names, entries without effect."""
    for name in config.providers:
        if name == LOCAL:
            yield (
                ("providers", name),
                f"`{LOCAL}` is the inference service and cannot be a provider; choose another name",
            )
        elif not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            yield ("providers", name), "a provider's name may hold letters, digits, `-`, `_` and `.`"
    known = sorted({LOCAL, *config.providers})
    for route, settings in config.routes.items():
        if "*" in route and route != "*":
            yield ("routes", route), "no request would match it: use `*` alone for all other names, or a full name"
        for index, entry in enumerate(settings.chain):
            at: Path_ = ("routes", route, "chain", index)
            provider, slash, model = entry.partition("/")
            if not slash or not model:
                yield (
                    at,
                    f"{entry!r} is not PROVIDER/MODEL; write for example local/{route if route != '*' else 'demo'}",
                )
            elif provider not in known:
                near = difflib.get_close_matches(provider, known, n=1)
                advice = f"did you mean {near[0]!r}?" if near else f"known providers: {', '.join(known)}"
                yield at, f"{entry!r}: unknown provider; {advice}"
            elif "*" in model and model != "*":
                yield at, f"{entry!r}: `*` must be the whole model name"
        yield from _parameter_problems(("routes", route, "parameters"), settings.parameters)
        if settings.load_wait == 0:
            yield ("routes", route, "load_wait"), "0 would never let a cold model load; write for example 120s"
    names, hashes = [key.name for key in config.keys], [key.hash for key in config.keys]
    for index, key in enumerate(config.keys):
        if key.name in names[:index]:
            yield ("keys", index, "name"), f"two keys are named {key.name!r}; give each its own name"
        if key.hash in hashes[:index]:
            first = names[hashes.index(key.hash)]
            yield ("keys", index, "hash"), f"the key {first!r} has the same hash; give each its own key"
        if key.budget != BudgetSettings() and not config.usage.store:
            yield ("keys", index, "budget"), "a budget needs stored usage; set `usage: {store: true}`"
    for route, settings in config.routes.items():
        if settings.capture and not config.usage.store:
            yield ("routes", route, "capture"), "nothing is stored with `usage: {store: false}`"
    for name in config.prices:
        if not all(name.partition("/")):
            yield ("prices", name), "a price is for PROVIDER/MODEL; write for example openai/gpt-4o-mini"
    deadlines = config.deadlines
    if deadlines.connect > deadlines.total:
        yield ("deadlines", "connect"), "longer than deadlines.total, so it could never pass"
    if config.max_body < 1024:
        yield ("max_body",), "too small for any request; an example is 32MB"


def _parameter_problems(at: Path_, rules: RouteParameterSettings) -> Iterator[tuple[Path_, str]]:
    for kind, values in (("defaults", rules.defaults), ("overrides", rules.overrides)):
        for name, problem in problems_of_values(values):
            yield (*at, kind, name), problem
    for name in sorted(rules.defaults.keys() & rules.overrides.keys() - {TEMPLATE_VARIABLES}):
        yield (*at, "defaults", name), "it has no effect, because `overrides` has the same parameter"
    for index, name in enumerate(rules.remove):
        if (advice := problem_of_name(name)) is not None:
            yield (*at, "remove", index), advice


def changes(old: GatewayConfig, new: GatewayConfig) -> list[str]:
    """The differences, one line per setting, without secrets."""
    return list(_diff(old.model_dump(), new.model_dump(), ""))


def _diff(old: Any, new: Any, at: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            here = f"{at}.{name}" if at else name
            if name not in new:
                yield f"{here}: removed"
            elif name not in old:
                yield f"{here}: added"
            else:
                yield from _diff(old[name], new[name], here)
    elif old != new:
        yield f"{at}: changed" if at.endswith(("api_key", "keys")) else f"{at}: {old!r} -> {new!r}"
