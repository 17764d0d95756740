"""`headgate gateway` and `headgate inference`: one service in this process; `headgate health`: a health check."""

from __future__ import annotations

import argparse
import importlib
import os
import signal

from headgate.cli.command import Command, Session, zero_or_more
from headgate.shared import child_process
from headgate.shared.errors import Exit, HeadgateError, NotRunningError


def _service_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", metavar="HOST", help="address to listen on (default: as configured, or 127.0.0.1)")
    parser.add_argument("--port", metavar="PORT", type=int, help="port to listen on (default: as configured)")


def _run_service(session: Session, package: str) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the service can reload; it has yet to read its files
    child_process.die_with_parent(os.environ)
    argv = []
    for option in ("config_dir", "host", "port"):
        if (value := getattr(session.args, option)) is not None:
            argv += [f"--{option.replace('_', '-')}", str(value)]
    return int(importlib.import_module(f"{package}.__main__").main(argv))


def gateway(session: Session) -> int:
    """Runs the gateway until it is stopped."""
    return _run_service(session, "gateway")


def inference(session: Session) -> int:
    """Runs the inference service until it is stopped."""
    return _run_service(session, "inference")


def _health_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="for example http://127.0.0.1:8080/livez")
    parser.add_argument("--timeout", metavar="SECONDS", type=_timeout, default=3.0, help="longest wait (3)")


def _timeout(text: str) -> float:
    seconds = zero_or_more(text)
    if not 0 < seconds <= 3600:  # a socket with a timeout of 0 does not wait for an answer
        raise argparse.ArgumentTypeError(f"{text} is out of range; use more than 0 and at most 3600 seconds")
    return seconds


def health(session: Session) -> int:
    """Returns 0 when a GET of the URL answers 200, else raises. Uses the certificates of `inference.tls`."""
    import urllib.error  # the services do not need it
    import urllib.request

    from headgate.cli.addresses import inference_tls

    url = session.args.url
    if not url.startswith(("http://", "https://")):
        raise HeadgateError(f"{url!r} is not an HTTP or HTTPS address; write for example http://127.0.0.1:8080")
    secure = [urllib.request.HTTPSHandler(context=inference_tls(session))] if url.startswith("https:") else []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *secure)  # no proxy
    try:
        with opener.open(url, timeout=session.args.timeout) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    except (OSError, ValueError) as error:
        raise NotRunningError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
    if session.json:
        session.terminal.json({"url": url, "status": status})
    if status != 200:
        raise HeadgateError(f"{url} answered {status}")
    return Exit.OK


COMMANDS = {
    "gateway": Command(_service_arguments, gateway),
    "inference": Command(_service_arguments, inference),
    "health": Command(_health_arguments, health),
}
