"""`headgate gateway` and `headgate inference`: one service in this process; decides nothing itself."""

from __future__ import annotations

import argparse
import importlib
import os
import signal

from headgate.cli.command import Command, Session
from headgate.shared import tether


def arguments(parser: argparse.ArgumentParser) -> None:
    """Where to listen."""
    parser.add_argument("--host", metavar="HOST", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", metavar="PORT", type=int, help="port to listen on")


def _run(session: Session, package: str) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can reload: what it is about to read is the newest already
    tether.hold(os.environ)
    words = []
    for option in ("config_dir", "host", "port"):
        if (value := getattr(session.args, option)) is not None:
            words += [f"--{option.replace('_', '-')}", str(value)]
    return int(importlib.import_module(f"{package}.__main__").main(words))


def gateway(session: Session) -> int:
    """Runs the gateway until it is told to stop."""
    return _run(session, "gateway")


def inference(session: Session) -> int:
    """Runs the inference service until it is told to stop."""
    return _run(session, "inference")


COMMANDS = {"gateway": Command(arguments, gateway), "inference": Command(arguments, inference)}
