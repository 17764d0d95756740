"""A TLS server of its own for tests: the name `mill.example`, by an authority that nobody trusts unless told to."""

from __future__ import annotations

import ssl
from pathlib import Path

CERTIFICATE = Path(__file__).with_name("mill.pem")
"""The certificate and, because it protects nothing, its key. It is for `localhost` and `mill.example`."""


def server_context() -> ssl.SSLContext:
    """What a server of that name speaks TLS with."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    return context


def trusting_context() -> ssl.SSLContext:
    """What a client that trusts it verifies with."""
    return ssl.create_default_context(cafile=str(CERTIFICATE))
