"""The TLS context of requests to the inference services (`inference.tls`)."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from gateway.settings import TlsSettings
from headgate.shared.errors import HeadgateError


@dataclass(frozen=True, slots=True)
class NodeTls:
    """A context. Two with the same files are equal: `digest` is that of their contents."""

    digest: bytes
    context: ssl.SSLContext = field(compare=False)


def read_tls(settings: TlsSettings) -> NodeTls | None:
    """The context for the files of `settings`, None without any. Raises HeadgateError for files that cannot be used."""
    names = [name for name in (settings.ca, settings.certificate, settings.key) if name is not None]
    if not names:
        return None
    try:
        digest = blake2b(b"\0".join(Path(name).read_bytes() for name in names)).digest()
        context = ssl.create_default_context(cafile=settings.ca)
        if settings.certificate is not None:
            context.load_cert_chain(settings.certificate, settings.key)
    except (OSError, ssl.SSLError) as error:
        raise HeadgateError(f"inference.tls in gateway.yaml cannot be used: {error}") from error
    return NodeTls(digest, context)
