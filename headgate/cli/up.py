"""`headgate up`: downloads missing models, checks configuration and ports, and supervises both services."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.cli import addresses
from headgate.cli.command import Command, Session
from headgate.cli.config import GATEWAY, MODELS
from headgate.cli.first_steps import pull
from headgate.shared import ports
from headgate.shared.errors import ConfigError, Exit, HeadgateError
from headgate.shared.log import FLUSH_SECONDS, LineWriter
from headgate.supervisor import Child, Supervisor, headgate_argv

DRAIN_MARGIN_SECONDS = 10.0
"""How much longer than its drain time a service may take to end before it is killed."""

POLL_SECONDS = 0.1
WAIT_NOTE_SECONDS = 30.0
"""Interval of the line that says which service is not ready yet."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options for the addresses of the two services."""
    parser.add_argument("--host", metavar="HOST", help="address the gateway listens on (GATEWAY_HOST, 127.0.0.1)")
    parser.add_argument("--port", metavar="PORT", type=int, help="port of the gateway (GATEWAY_PORT, 8080)")
    parser.add_argument(
        "--inference-port", metavar="PORT", type=int, help="port of the inference service (INFERENCE_PORT, 8085)"
    )


@dataclass(frozen=True)
class UpPlan:
    """What `up` starts: addresses of the two services, seconds from stop to kill, directories.

    `model` is an example for the banner, None without models. `has_keys`: gateway.yaml configures keys. `nodes` is
    `inference.nodes`.
    """

    gateway_host: str
    gateway_port: int
    inference_host: str
    inference_port: int
    gateway_kill_seconds: float
    inference_kill_seconds: float
    model: str | None
    has_keys: bool
    config_dir: Path
    models_dir: Path
    nodes: tuple[str, ...] = ()

    @property
    def gateway_url(self) -> str:
        """The gateway's URL for clients."""
        return addresses.url_of(self.gateway_host, self.gateway_port)

    @property
    def inference_url(self) -> str:
        """The inference service's URL for the gateway."""
        return addresses.url_of(self.inference_host, self.inference_port)


def make_plan(args: argparse.Namespace, directory: Path, environ: Mapping[str, str]) -> UpPlan:
    """The plan from options, environment and files, in this precedence. Raises ConfigError, HeadgateError."""
    gateway = GATEWAY.load(directory, environ, {"host": args.host, "port": args.port})
    inference = MODELS.load(directory, environ, {"port": args.inference_port})
    for name, port in ("--port", gateway.port), ("--inference-port", inference.settings.port):
        if port == 0:
            raise HeadgateError(
                f"{name} is 0, so that every restart would use another port; choose one from 1 to 65535"
            )
    if inference.settings.tls_certificate is not None:
        raise HeadgateError(
            "`headgate up` connects its two services on this machine without TLS; unset INFERENCE_TLS_CERTIFICATE, "
            "or run `headgate inference` and `headgate gateway` with `inference.url: https://...`"
        )
    if (gateway.host, gateway.port) == (inference.settings.host, inference.settings.port):
        raise HeadgateError(
            f"gateway and inference service cannot both listen on port {gateway.port}; "
            f"choose another with --port or --inference-port"
        )
    return UpPlan(
        gateway.host,
        gateway.port,
        inference.settings.host,
        inference.settings.port,
        gateway.drain_seconds + DRAIN_MARGIN_SECONDS,
        inference.settings.drain_seconds + DRAIN_MARGIN_SECONDS,
        next(iter(inference.models), None),
        bool(gateway.keys),
        directory.absolute(),
        inference.settings.models_dir.absolute(),
        tuple(gateway.inference.nodes),
    )


def run(session: Session) -> int:
    """Downloads missing models, checks configuration and ports, then supervises the services until it is stopped."""
    directory = session.config_dir
    with contextlib.suppress(ConfigError):  # `make_plan` reports all problems
        pull.fetch_missing(session, directory, session.environ)
    plan = make_plan(session.args, directory, session.environ)
    ports.check_free(plan.inference_host, plan.inference_port)
    ports.check_free(plan.gateway_host, plan.gateway_port)
    return asyncio.run(_supervise(session, plan, directory))


def _children(plan: UpPlan, directory: Path) -> list[Child]:
    """The two services. The gateway is last, so that it stops first."""
    # The services read `.env` themselves, so that a reload sees changes. The gateway gets the address of this
    # inference service, regardless of its configuration file.
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "GATEWAY_INFERENCE__URL": plan.inference_url}

    def argv(name: str, host: str, port: int) -> list[str]:
        return headgate_argv(name, "--config-dir", str(directory), "--host", host, "--port", str(port))

    return [
        Child(
            "inference",
            argv("inference", plan.inference_host, plan.inference_port),
            environ,
            plan.inference_kill_seconds,
        ),
        Child("gateway", argv("gateway", plan.gateway_host, plan.gateway_port), environ, plan.gateway_kill_seconds),
    ]


async def _supervise(session: Session, plan: UpPlan, directory: Path) -> int:
    terminal = session.terminal
    colors = {"inference": "cyan", "gateway": "green"}

    lines = LineWriter()  # a slow reader of stderr must not block the services

    def line(name: str, text: str) -> None:
        lines.put(f"{terminal.paint_err(name.ljust(9), colors[name])} {text}")

    def note(text: str) -> None:
        lines.put(f"{terminal.paint_err('headgate ', 'bold')} {text}")

    supervisor = Supervisor(_children(plan, directory), line, note)
    stop_requested = asyncio.Event()
    stop_by = signal.SIGTERM

    def on_stop(number: signal.Signals) -> None:
        nonlocal stop_by
        if stop_requested.is_set():
            note("stopping immediately")
            supervisor.force()
        else:
            note(f"{number.name}: finishing running requests; send it again to stop immediately")
            stop_by = number
            stop_requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_stop, number)
    loop.add_signal_handler(signal.SIGHUP, supervisor.hang_up)
    try:
        record = addresses.Record(
            os.getpid(), plan.gateway_url, plan.inference_url, str(plan.config_dir), str(plan.models_dir), plan.nodes
        )
        with record.published(session.state):
            announcing = asyncio.ensure_future(_announce(session, supervisor, plan, note))
            ends: set[asyncio.Future[Any]] = {asyncio.ensure_future(stop_requested.wait()), supervisor.over}
            try:
                supervisor.begin()
                await asyncio.wait({*ends, announcing}, return_when=asyncio.FIRST_COMPLETED)
                if announcing.done():
                    announcing.result()
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiting in (announcing, *ends - {supervisor.over}):
                    waiting.cancel()
                await supervisor.stop(stop_by)
        if supervisor.over.done():
            return supervisor.over.result()
        note("stopped")
        return int(Exit.OK)
    finally:
        lines.flush(FLUSH_SECONDS)


async def _announce(session: Session, supervisor: Supervisor, plan: UpPlan, note: Callable[[str], None]) -> None:
    """Waits until both services are ready, then prints how to use them."""
    for child, url in zip(supervisor.children, (plan.inference_url, plan.gateway_url), strict=True):
        loop = asyncio.get_running_loop()
        next_note = loop.time() + WAIT_NOTE_SECONDS
        while not await is_ready(url):
            if loop.time() > next_note:
                note(f"still waiting for {url}/readyz")
                next_note += WAIT_NOTE_SECONDS
            await asyncio.sleep(POLL_SECONDS)
        child.was_ready = True
    key = addresses.gateway_key(session.environ, session.state)
    if key is not None and key.file and plan.has_keys:
        key = None  # an old generated key, which the gateway ignores: gateway.yaml configures keys
    if session.json:
        session.terminal.json(
            {
                "url": f"{plan.gateway_url}/v1",
                "gateway": plan.gateway_url,
                "dashboard": f"{plan.gateway_url}/ui/",
                "inference": plan.inference_url,
                "key_file": str(key.file) if key and key.file else None,
                "model": plan.model,
            }
        )
        return
    for text in banner(session, plan, key):
        session.terminal.data(text)


async def is_ready(url: str) -> bool:
    """Whether GET `url`/readyz answers 200 within a second."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            try:
                writer.write(f"GET /readyz HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def banner(session: Session, plan: UpPlan, key: addresses.Key | None) -> list[str]:
    """The lines that explain the running system: address, key, example calls, how to stop."""
    program, run_key = _program(session.environ), ""
    if key is None:
        source, in_shell = "one of `keys:` in gateway.yaml; set HEADGATE_KEY to it", "$HEADGATE_KEY"
        run_key = 'GATEWAY_API_KEY="$HEADGATE_KEY" '
    elif key.variable:
        source, in_shell = f"the one in ${key.variable}", f"${key.variable}"
    else:
        source, in_shell = str(key.file), f"$({program} key show)"
    question = {"model": plan.model or "MODEL", "messages": [{"role": "user", "content": "What is Headgate?"}]}
    lines = [
        "",
        f"Headgate is ready:  {session.terminal.paint(f'{plan.gateway_url}/v1', 'bold')}",
        f"Dashboard:          {plan.gateway_url}/ui/",
        f"Key:                {source}",
    ]
    if session.terminal.out_tty and key is not None and key.file:
        lines.append(f"                    {key.value}")
    lines += [
        "Try it:",
        f"  curl {plan.gateway_url}/v1/chat/completions \\",
        f'    -H "Authorization: Bearer {in_shell}" -H "Content-Type: application/json" \\',
        f"    -d {shlex.quote(json.dumps(question))}",
        f'  {run_key}{program} run {plan.model or "MODEL"} "What is a circuit breaker?"',
        f"Stop:               Ctrl-C here, or: kill {os.getpid()}",
        "",
    ]
    return lines


def _program(environ: Mapping[str, str]) -> str:
    """The command `headgate` for another shell: its name if it is on the PATH, else its path or `python -m headgate`.

    HEADGATE_STATE_DIR precedes it if it is set.
    """
    script = Path(sys.executable).parent / "headgate"
    found = shutil.which("headgate", path=environ.get("PATH"))
    if found and Path(found).resolve() == script.resolve():
        program = "headgate"
    elif script.is_file():
        program = shlex.quote(_short(script))
    else:
        program = f"{shlex.quote(sys.executable)} -m headgate"
    state = environ.get("HEADGATE_STATE_DIR")
    return f"HEADGATE_STATE_DIR={shlex.quote(str(Path(state).expanduser().absolute()))} {program}" if state else program


def _short(path: Path) -> str:
    """`path` relative to the working directory when it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


COMMANDS = {"up": Command(arguments, run)}
