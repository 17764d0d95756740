"""A TLS server for tests: its certificate for `mill.example` is not trusted by default."""

from __future__ import annotations

import ssl
from pathlib import Path

CERTIFICATE = Path(__file__).with_name("server.pem")
"""The certificate and its key, which protects nothing. It is for `localhost` and `mill.example`."""


def server_context() -> ssl.SSLContext:
    """The TLS context of a server with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


def trusting_context() -> ssl.SSLContext:
    """The TLS context of a client that trusts it."""
    return ssl.create_default_context(cafile=str(CERTIFICATE))
