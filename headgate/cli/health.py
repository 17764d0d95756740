"""`headgate health URL`: exit 0 when the URL answers 200, for images without curl; decides no policy."""

from __future__ import annotations

import argparse
import urllib.error
import urllib.request

from headgate.cli.command import Command, Session, zero_or_more
from headgate.shared.errors import Exit, HeadgateError, NotRunningError


def arguments(parser: argparse.ArgumentParser) -> None:
    """What to ask."""
    parser.add_argument("url", metavar="URL", help="for example http://127.0.0.1:8080/livez")
    parser.add_argument("--timeout", metavar="SECONDS", type=zero_or_more, default=3.0, help="longest wait (3)")


def run(session: Session) -> int:
    """GETs the URL once."""
    url = session.args.url
    if not url.startswith(("http://", "https://")):
        raise HeadgateError(f"{url!r} is not an http address")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy's health says nothing about ours
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


COMMANDS = {"health": Command(arguments, run)}
