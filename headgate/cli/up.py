"""`headgate up`: both services under one supervisor, checked before the start and announced when they answer."""

from __future__ import annotations

import argparse
import asyncio
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
from headgate.cli.supervisor import Child, Supervisor, headgate_argv
from headgate.shared import ports
from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.lines import Lines
from headgate.shared.log import FLUSH_SECONDS

DRAIN_MARGIN_SECONDS = 10.0
"""What a service gets beyond its own drain time before it is killed."""

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 30.0
"""After this long without an answer of a service, one line says what is being waited for."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Where the two services listen."""
    parser.add_argument("--host", metavar="HOST", help="address the gateway listens on (GATEWAY_HOST, 127.0.0.1)")
    parser.add_argument("--port", metavar="PORT", type=int, help="port of the gateway (GATEWAY_PORT, 8080)")
    parser.add_argument(
        "--inference-port", metavar="PORT", type=int, help="port of the inference service (INFERENCE_PORT, 8085)"
    )


@dataclass(frozen=True)
class Places:
    """Where the two services are going to listen, how long each may drain, and a model to try."""

    gateway_host: str
    gateway_port: int
    inference_host: str
    inference_port: int
    gateway_drain_seconds: float
    inference_drain_seconds: float
    model: str | None
    has_keys: bool

    @property
    def gateway_url(self) -> str:
        """Where clients reach the gateway."""
        return addresses.url_of(self.gateway_host, self.gateway_port)

    @property
    def inference_url(self) -> str:
        """Where the gateway reaches the inference service."""
        return addresses.url_of(self.inference_host, self.inference_port)


def places(args: argparse.Namespace, directory: Path, environ: Mapping[str, str]) -> Places:
    """Where both services will listen: options over environment over files; raises ConfigError, HeadgateError."""
    configured = GATEWAY.load(directory, environ, {"host": args.host, "port": args.port})
    behind = MODELS.load(directory, environ, {"port": args.inference_port})
    for name, port in ("--port", configured.port), ("--inference-port", behind.settings.port):
        if port == 0:
            raise HeadgateError(f"{name} 0 would be another port at every restart; choose one from 1 to 65535")
    if (configured.host, configured.port) == (behind.settings.host, behind.settings.port):
        raise HeadgateError(
            f"gateway and inference service cannot both listen on port {configured.port}; "
            f"choose another with --port or --inference-port"
        )
    return Places(
        configured.host,
        configured.port,
        behind.settings.host,
        behind.settings.port,
        configured.drain_seconds + DRAIN_MARGIN_SECONDS,
        behind.settings.drain_seconds + DRAIN_MARGIN_SECONDS,
        next(iter(behind.models), None),
        bool(configured.keys),
    )


def run(session: Session) -> int:
    """Checks what can be checked, then supervises until told to stop."""
    directory = session.config_dir
    where = places(session.args, directory, session.environ)
    ports.check_free(where.inference_host, where.inference_port)
    ports.check_free(where.gateway_host, where.gateway_port)
    return asyncio.run(_supervise(session, where, directory))


def _children(where: Places, directory: Path) -> list[Child]:
    """The two services; the gateway last, because the last is the first to stop."""
    # They read `.env` themselves, so that a reload sees what was changed there. The gateway is told where our inference
    # service is, whatever its file says: `up` means these two.
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "GATEWAY_INFERENCE__URL": where.inference_url}

    def argv(name: str, host: str, port: int) -> list[str]:
        return headgate_argv(name, "--config-dir", str(directory), "--host", host, "--port", str(port))

    return [
        Child(
            "inference",
            argv("inference", where.inference_host, where.inference_port),
            environ,
            where.inference_drain_seconds,
        ),
        Child("gateway", argv("gateway", where.gateway_host, where.gateway_port), environ, where.gateway_drain_seconds),
    ]


async def _supervise(session: Session, where: Places, directory: Path) -> int:
    terminal = session.terminal
    colors = {"inference": "cyan", "gateway": "green"}

    lines = Lines()  # what the services write must be read whether or not anybody reads us

    def line(name: str, text: str) -> None:
        lines.put(f"{terminal.paint_err(name.ljust(9), colors[name])} {text}")

    def note(text: str) -> None:
        lines.put(f"{terminal.paint_err('headgate ', 'bold')} {text}")

    supervisor = Supervisor(_children(where, directory), line, note)
    asked = asyncio.Event()

    def on_stop(number: signal.Signals) -> None:
        if asked.is_set():
            note("stopping at once")
            supervisor.force()
        else:
            note(f"{number.name}: running answers are finished first; once more stops at once")
            asked.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_stop, number)
    loop.add_signal_handler(signal.SIGHUP, supervisor.hang_up)
    try:
        with addresses.Record(os.getpid(), where.gateway_url, where.inference_url).published(session.state):
            announcing = asyncio.ensure_future(_announce(session, supervisor, where, note))
            ends: set[asyncio.Future[Any]] = {asyncio.ensure_future(asked.wait()), supervisor.over}
            try:
                supervisor.begin()
                await asyncio.wait({*ends, announcing}, return_when=asyncio.FIRST_COMPLETED)
                if announcing.done():
                    announcing.result()
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiting in (announcing, *ends - {supervisor.over}):
                    waiting.cancel()
                await supervisor.stop()
        if supervisor.over.done():
            return supervisor.over.result()
        note("stopped")
        return int(Exit.OK)
    finally:
        lines.flush(FLUSH_SECONDS)


async def _announce(session: Session, supervisor: Supervisor, where: Places, note: Callable[[str], None]) -> None:
    """Waits until both services are ready, each time noting it, and prints how to use them."""
    for child, url in zip(supervisor.children, (where.inference_url, where.gateway_url), strict=True):
        loop = asyncio.get_running_loop()
        patience = loop.time() + PATIENCE_SECONDS
        while not await is_ready(url):
            if loop.time() > patience:
                note(f"still waiting for {url}/readyz")
                patience += PATIENCE_SECONDS
            await asyncio.sleep(POLL_SECONDS)
        child.was_ready = True
    key = addresses.gateway_key(session.environ, session.state)
    if key is not None and key.file and where.has_keys:
        key = None  # left from a time before the configuration named keys
    if session.json:
        session.terminal.json(
            {
                "url": f"{where.gateway_url}/v1",
                "gateway": where.gateway_url,
                "inference": where.inference_url,
                "key_file": str(key.file) if key and key.file else None,
                "model": where.model,
            }
        )
        return
    for text in banner(session, where, key):
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


def banner(session: Session, where: Places, key: addresses.Key | None) -> list[str]:
    """What a person needs to go on: address, key, a line to paste, how to stop."""
    program = _program(session.environ)
    if key is None:
        told, shown = "in the configuration (keys:)", "$HEADGATE_KEY"
    elif key.variable:
        told, shown = f"the one in ${key.variable}", f"${key.variable}"
    else:
        told, shown = str(key.file), f"$({program} key show)"
    question = {"model": where.model or "MODEL", "messages": [{"role": "user", "content": "What is Headgate?"}]}
    lines = [
        "",
        f"Headgate is ready:  {session.terminal.paint(f'{where.gateway_url}/v1', 'bold')}",
        f"Key:                {told}",
    ]
    if session.terminal.out_tty and key is not None and key.file:
        lines.append(f"                    {key.value}")
    lines += [
        "Try it:",
        f"  curl {where.gateway_url}/v1/chat/completions \\",
        f'    -H "Authorization: Bearer {shown}" -H "Content-Type: application/json" \\',
        f"    -d {shlex.quote(json.dumps(question))}",
        f'  {program} run {where.model or "MODEL"} "What is a circuit breaker?"',
        f"Stop:               Ctrl-C here, or: kill {os.getpid()}",
        "",
    ]
    return lines


def _program(environ: Mapping[str, str]) -> str:
    """How to call `headgate` from another shell: by name when it is on the PATH, else by its place, with its state."""
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
    """Relative to the working directory when below it: that is where the reader's shell is."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


COMMANDS = {"up": Command(arguments, run)}
