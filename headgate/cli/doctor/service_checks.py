"""Checks of the configuration, the state directory, keys, ports, running services, and proxies in the environment."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headgate.cli import addresses
from headgate.cli.client import ApiError
from headgate.cli.command import Session
from headgate.cli.config import FILES, unknown_models, unmet_needs
from headgate.cli.doctor.findings import Finding, note, ok, problem, warning
from headgate.cli.nodes import ONLY, Nodes
from headgate.shared import ports
from headgate.shared.configfile import unset_name
from headgate.shared.errors import ConfigError, HeadgateError, NotRunningError
from headgate.shared.state_directory import GATEWAY_KEY, INFERENCE_TOKEN, lock_path
from headgate.shared.units import GIB, format_bytes, format_duration

MIN_DISK_BYTES = GIB
PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
LOOPBACK = ("127.0.0.1", "localhost", "*")


def configuration(session: Session) -> tuple[list[Finding], list[Any]]:
    """The findings of `headgate config check`, and the two configurations if both are valid."""
    directory = session.config_dir
    found: list[Finding] = []
    loaded: list[Any] = []
    seen = set()
    for file in FILES:
        try:
            loaded.append(file.load(directory, session.environ, {}))
        except ConfigError as error:
            for each in error.problems:
                if each not in seen:
                    seen.add(each)
                    found.append(
                        problem("configuration", str(each), "correct it; `headgate config check` checks it again")
                    )
    if found:
        return found, []
    inference, gateway = loaded
    warnings = [warning("configuration", text, "correct gateway.yaml") for text in unknown_models(inference, gateway)]
    warnings += [warning("configuration", text, "") for text in unmet_needs(gateway)]
    models = len(inference.model_ids)
    summary = ok("configuration", f"{directory.absolute()}: {models} models, {len(gateway.routes)} routes")
    if not models:
        summary = warning(
            "configuration", f"{directory.absolute()}: no models", "headgate add FILE.gguf, or headgate pull hf:..."
        )
    return [summary, *warnings], loaded


def directories(session: Session, models_dir: Path | None) -> Iterator[Finding]:
    """State directory, key files, lock, and the directory of models."""
    try:
        state = session.state
    except HeadgateError as error:
        yield problem("state directory", str(error), "")
        return
    status = state.root.stat()
    if status.st_uid != os.geteuid() or not os.access(state.root, os.W_OK):
        yield problem(
            "state directory",
            f"{state.root} cannot be used: it has the owner {status.st_uid} and the mode "
            f"{stat.S_IMODE(status.st_mode):04o}, and this is user {os.geteuid()}",
            f"run as its owner, or: sudo chown -R $USER {state.root}",
        )
    else:
        yield _space("state directory", state.root, f"{state.root}, mode {stat.S_IMODE(status.st_mode):04o}")
    for name in (GATEWAY_KEY, INFERENCE_TOKEN):
        try:
            state.read_secret(name)
        except HeadgateError as error:
            yield problem("key files", str(error), "")
    lock = lock_path(session.environ)
    if not os.access(lock if lock.exists() else lock.parent, os.R_OK if lock.exists() else os.W_OK):
        yield problem("lock", f"{lock} cannot be opened", "set HEADGATE_LOCK_DIR to a writable directory")
    if models_dir is not None and models_dir.is_dir():
        yield _space("models directory", models_dir, str(models_dir))


def _space(check: str, path: Path, text: str) -> Finding:
    free = shutil.disk_usage(path).free
    text = f"{text}, {format_bytes(free)} free"
    if free < MIN_DISK_BYTES:
        return warning(check, text, "make room on this disk; estimates, crash records and downloads need it")
    return ok(check, text)


def services(session: Session, loaded: list[Any]) -> Iterator[Finding]:
    """Whether each service accepts the keys of this user or, if it does not run, its port is free."""
    record = addresses.Record.read(session.state)
    if record is not None:
        yield ok("headgate up", f"runs (pid {record.pid}) with {record.config_dir or 'an unknown configuration'}")
    inference, gateway = loaded
    for api, host, port in (
        (addresses.inference(session), inference.settings.host, inference.settings.port),
        (addresses.gateway(session), gateway.host, gateway.port),
    ):
        try:
            api.get("/v1/models")
        except NotRunningError:
            yield _free_port(api.name, host, port)
        except ApiError as error:
            if error.status in (401, 403):
                yield problem(
                    api.name,
                    f"it answers at {api.url} and refuses the key of this user",
                    "use the HEADGATE_STATE_DIR of the service, or set GATEWAY_API_KEY and INFERENCE_TOKEN",
                )
            else:
                yield problem(api.name, str(error), "its log says more")
        else:
            yield ok(api.name, f"answers at {api.url}")


def nodes(session: Session) -> Iterator[Finding]:
    """Whether each node of `inference.nodes` accepts the token of this user; nothing without such nodes."""
    try:
        found = Nodes.of(session)
        if ONLY in found.apis:
            return
        answers = found.get("/v1/models")
    except HeadgateError as error:
        yield problem(
            "nodes", str(error), "start the nodes (`headgate nodes`), and for dns: or ray: sources also the gateway"
        )
        return
    for name, api in found.apis.items():
        check, failure = f"node {name}", answers.errors.get(name)
        if failure is None:
            yield ok(check, f"answers at {api.url}")
        elif isinstance(failure, ApiError) and failure.status in (401, 403):
            yield problem(
                check, f"it refuses the token of this user at {api.url}", "give all nodes the same INFERENCE_TOKEN"
            )
        else:
            yield problem(check, str(failure), "its log says more")


def _free_port(name: str, host: str, port: int) -> Finding:
    try:
        ports.check_free(host, port)
    except HeadgateError as error:
        return problem(name, str(error), "")
    return ok(name, f"does not run; port {port} on {host} is free")


def keys(session: Session, gateway: Any) -> Iterator[Finding]:
    """The keys for clients of the gateway, and the gateway's keys for the providers in its chains."""
    if gateway.keys:
        yield ok("keys", f"{len(gateway.keys)} in gateway.yaml")
    else:
        found = addresses.gateway_key(session.environ, session.state)
        source = (
            "none yet; the first start of the gateway generates one"
            if found is None
            else f"from {found.variable or found.file}"
        )
        yield ok("keys", source)
    used = {entry.partition("/")[0] for route in gateway.routes.values() for entry in route.chain}
    for name, provider in gateway.providers.items():
        if name in used and (variable := unset_name(provider.api_key)):
            yield note(
                "providers",
                f"{name} has no key, so that chains skip it",
                f"set {variable} in the environment or in .env to use this provider",
            )


def proxies(session: Session, gateway: Any) -> Iterator[Finding]:
    """The proxy of clients on this machine, and what a proxy in front of the gateway has to allow."""
    named = next((name for name in PROXIES if session.environ.get(name)), None)
    excluded = (session.environ.get("NO_PROXY") or session.environ.get("no_proxy") or "").split(",")
    if named and not set(LOOPBACK) & {each.strip() for each in excluded}:
        yield warning(
            "outgoing proxy",
            f"{named} is set, and clients on this machine would send requests for the gateway to it",
            "set NO_PROXY=127.0.0.1,localhost for the clients; Headgate's own local requests use no proxy",
        )
    total = gateway.deadlines.total
    yield note(
        "proxy in front",
        f"the first byte of an answer may take {format_duration(total)} (deadlines.total), and streams are open longer",
        f"if there is one: a read time-out of {format_duration(total)} or more (nginx: proxy_read_timeout, 60 s by "
        f"default; AWS load balancers: idle time-out, 60 s), no buffering and no compression of text/event-stream, and "
        f"a body limit of {format_bytes(gateway.max_body)}. `headgate doctor --url URL` streams an answer through it",
    )
