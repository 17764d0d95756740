"""Reads gateway.yaml, environment variables and the command line, and compares two configurations.

Precedence: command line > GATEWAY_* variables > file > default. In the name of a variable `__` separates levels:
GATEWAY_BREAKER__FAILURES=3. Lists and mappings are written as JSON, or as YAML in brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from gateway.apis.openai.route_parameters import TEMPLATE_VARIABLES, problem_of_name, problems_of_values
from gateway.breaker.outcome import LOCAL
from gateway.settings import (
    FILE,
    KEY_VARIABLES,
    PREFIX,
    TOKEN_VARIABLE,
    BudgetSettings,
    GatewayConfig,
    RouteParameterSettings,
    node_source,
)
from headgate.shared.configfile import Path_, as_written, problems_of, read_yaml
from headgate.shared.errors import ConfigError, Problem, did_you_mean
from headgate.shared.state_directory import INVALID_KEY, fits_a_header


def load(config_dir: Path, environ: Mapping[str, str], overrides: Mapping[str, Any] | None = None) -> GatewayConfig:
    """The configuration in force for `config_dir`; raises ConfigError with the problems and their places.

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
        found = problems_of(error, GatewayConfig, path, lines)
        raise ConfigError([*problems, *(_placed(problem, at, sources) for at, problem in found.items())]) from error
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
            advice = did_you_mean(name, [*known, *KEY_VARIABLES], shown=str, cutoff=0.85)
            if within is not None:
                problems.append(Problem(f"this is a section; set one of its settings, for example {within}", key=name))
            elif advice or "__" in name:
                problems.append(Problem(f"unknown setting{advice}", key=name))
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
                advice = did_you_mean(provider, known, f"known providers: {', '.join(known)}")
                yield at, f"{entry!r}: unknown provider{advice}"
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
    names = [node_source(entry).name for entry in config.inference.nodes]
    for index, name in enumerate(names):
        if name and name in names[:index]:
            yield ("inference", "nodes", index), f"two nodes are named {name!r}; write NAME=URL to name them"
    if config.inference.replicas and not names:
        where = "list the nodes in `inference.nodes`; on one machine, set `replicas` of the model in models.yaml"
        yield ("inference", "replicas"), f"it has no effect without several nodes: {where}"
    tls = config.inference.tls
    if (tls.certificate is None) != (tls.key is None):
        yield ("inference", "tls"), "`certificate` and `key` belong together; set both or none"
    deadlines = config.deadlines
    if deadlines.connect > deadlines.total:
        yield ("deadlines", "connect"), "longer than deadlines.total, so it has no effect"
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
        yield f"{at}: changed" if at.endswith(("api_key", "keys", "state")) else f"{at}: {old!r} -> {new!r}"
