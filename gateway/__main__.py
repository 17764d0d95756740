"""Starts the gateway from the command line: reads the configuration, opens the port, serves."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from gateway.app import make_app
from gateway.gateway_server import serve
from gateway.runtime import Runtime, Source
from headgate.shared import log as logs
from headgate.shared import ports
from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.event_loop import new_event_loop
from headgate.shared.state_directory import GATEWAY_KEY, StateDir, config_dir, load_environ

log = logging.getLogger("gateway")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the gateway until a signal stops it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="headgate gateway", description="The OpenAI-compatible gateway.")
    parser.add_argument("--host", metavar="HOST", help="address to listen on (GATEWAY_HOST, default 127.0.0.1)")
    parser.add_argument("--port", metavar="PORT", type=int, help="port to listen on (GATEWAY_PORT, default 8080)")
    parser.add_argument("--config-dir", metavar="DIR", help="where gateway.yaml is (HEADGATE_CONFIG_DIR)")
    args = parser.parse_args(argv)
    try:
        environ = load_environ()
        logs.set_up(environ, in_background=True)
        try:
            _serve(args, environ)
        finally:
            logging.shutdown()  # flushes the log before the last error message
    except HeadgateError as error:
        print(f"headgate: {error}", file=sys.stderr)  # noqa: T201
        return int(error.exit_code)
    return int(Exit.OK)


def _serve(args: argparse.Namespace, environ: dict[str, str]) -> None:
    source = Source(config_dir(environ, args.config_dir), load_environ, {"host": args.host, "port": args.port})
    config = source.load()
    state = StateDir.from_env(environ)
    sock = ports.listen(config.host, config.port)
    try:
        runtime = Runtime(source, config, state)
        port = sock.getsockname()[1]
        log.info(
            "listening on http://%s:%d (dashboard at /ui/), configuration in %s", config.host, port, source.config_dir
        )
        _show_key(runtime, state)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve(runtime, make_app(runtime), sock))
    finally:
        sock.close()


def _show_key(runtime: Runtime, state: StateDir) -> None:
    """Prints a generated key to a terminal, and not to a log."""
    if not runtime.keys.is_generated:
        return
    log.info("no API key is configured; clients use the generated one in %s", state.file(GATEWAY_KEY))
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), f"API key: {state.secret(GATEWAY_KEY)}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
