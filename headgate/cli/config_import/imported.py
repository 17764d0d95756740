"""The result of an import: content of models.yaml and gateway.yaml, and what could not be carried over."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.apis.openai.route_parameters import problem_of_name, problems_of_values


@dataclass(frozen=True, slots=True)
class Left:
    """A setting that is not carried over: its place in the file, and the reason or what to do instead."""

    where: str
    advice: str


@dataclass
class Imported:
    """What an importer collects."""

    source: str
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    gateway: dict[str, Any] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    _parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The parameters of the first model of each route."""

    def leave(self, where: str, advice: str) -> None:
        """Reports a setting that is not carried over."""
        if (entry := Left(where, advice)) not in self.left:
            self.left.append(entry)

    def leave_unknown(self, where: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
        """Reports every key of `values` that is not `known`."""
        known = set(known)
        for name in values:
            if name not in known:
                self.leave(f"{where}{name}", "has no counterpart")

    def provider(self, name: str, settings: Mapping[str, Any]) -> str:
        """Adds a provider with these settings unless there is one. Returns its name, `name` or `name-NUMBER`."""
        providers = self.gateway.setdefault("providers", {})
        base = re.sub(r"[^A-Za-z0-9_.-]", "-", name)
        base = "local-server" if base in ("", "local") else base
        number, chosen = 1, base
        while chosen in providers and providers[chosen] != settings:
            number += 1
            chosen = f"{base}-{number}"
        providers[chosen] = dict(settings)
        return chosen

    def route(self, name: str, entry: str) -> None:
        """Adds `entry` to the chain of the route `name`. Reports an entry that the chain already has."""
        chain = self.gateway.setdefault("routes", {}).setdefault(name, {"chain": []})["chain"]
        if entry in chain:
            self.leave(f"a second {entry} of {name}", "a chain has each entry once; requests are not spread over keys")
        else:
            chain.append(entry)

    def accepted(self, where: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `values` that a route accepts as parameters. Reports the others, each as `where` and its name."""
        problems = dict(problems_of_values(values))
        for name, problem in problems.items():
            self.leave(f"{where}{name}", problem)
        return {name: value for name, value in values.items() if name not in problems}

    def accepted_names(self, where: str, names: Iterable[str]) -> list[str]:
        """Those of `names` that a route accepts as parameters. Reports the others, each as `where` and the name."""
        problems = {name: problem_of_name(name) for name in names}
        for name, problem in problems.items():
            if problem is not None:
                self.leave(f"{where}{name}", problem)
        return [name for name, problem in problems.items() if problem is None]

    def parameters(self, where: str, route: str, parameters: Mapping[str, Any]) -> None:
        """Sets the parameters of a route: those of its first model, without empty ones.

        Reports the parameters of a later model of the route if they are different.
        """
        own = {kind: value for kind, value in parameters.items() if value}
        if own != self._parameters.setdefault(route, own):
            names = ", ".join(name for values in own.values() for name in values) or "no parameters"
            self.leave(f"{where}: {names}", f"the parameters of the first model with the name {route} are used")
        elif own:
            self.gateway["routes"][route]["parameters"] = copy.deepcopy(own)

    def local_parameters(self, where: str, names: Iterable[str], parameters: Mapping[str, Any]) -> None:
        """Adds a route with `parameters` for each of the `names` of a local model, unless all parameters are empty."""
        for name in names:
            if any(parameters.values()):
                self.gateway.setdefault("routes", {}).setdefault(name, {"chain": [f"local/{name}", "local/smaller"]})
            self.parameters(where, name, parameters)

    def key(self, name: str, secret: str, scopes: Iterable[str] = ("use",)) -> None:
        """Adds the hash of `secret` as a key for clients, unless it is there."""
        digest = f"sha256:{hashlib.sha256(secret.encode()).hexdigest()}"
        keys = self.gateway.setdefault("keys", [])
        if all(known["hash"] != digest for known in keys):
            keys.append({"name": name, "hash": digest, "scopes": list(scopes)})


def as_mapping(value: Any) -> Mapping[str, Any]:
    """`value` with text as keys if it is a mapping, else an empty mapping."""
    return {str(key): inner for key, inner in value.items()} if isinstance(value, Mapping) else {}


def as_list(value: Any) -> list[Any]:
    """`value` as a list: a single value as a list of it, None as an empty one."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
