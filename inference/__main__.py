"""`python -m inference`: reads arguments and configuration, takes the machine lock and the port, and serves.

Errors before it serves end the process with one message and an exit status, without a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from typing import Any

from headgate.shared import child_process, log, ports
from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.event_loop import new_event_loop
from headgate.shared.state_directory import MachineLock, config_dir, load_environ


def main(argv: list[str] | None = None) -> int:
    """Runs the inference service in the foreground. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        environ = load_environ()
        log.set_up(environ, in_background=True)
        child_process.die_with_parent(environ)
        try:
            return _serve(arguments, environ)
        finally:
            logging.shutdown()  # so that the message below comes after all log lines
    except HeadgateError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    except KeyboardInterrupt:  # before the event loop has its own handler
        return Exit.OK


def _serve(arguments: argparse.Namespace, environ: dict[str, str]) -> int:
    from inference import app, settings  # imported here to keep `--help` fast

    overrides: dict[str, Any] = {"host": arguments.host, "port": arguments.port}
    config = settings.load(config_dir(environ, arguments.config_dir), environ, overrides)
    host, port = config.settings.host, config.settings.port
    lock = MachineLock.acquire(environ, {"pid": os.getpid(), "url": f"{config.settings.scheme}://{host}:{port}"})
    try:
        with ports.listen(host, port) as sock, asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(app.serve(config, environ, overrides, sock))
    finally:
        lock.release()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inference", description="Headgate's inference service, which manages the GPUs."
    )
    parser.add_argument("--host", help="address to listen on (INFERENCE_HOST, default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (INFERENCE_PORT, default 8085)")
    parser.add_argument("--config-dir", help="directory with models.yaml (HEADGATE_CONFIG_DIR, default ./config)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
