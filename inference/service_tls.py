"""TLS of the port of the inference service (INFERENCE_TLS_*)."""

from __future__ import annotations

import ssl
from pathlib import Path

from headgate.shared.errors import ConfigError, Problem
from inference.environment_settings import InferenceSettings


class ServiceTls:
    """The context of the port. New connections use the files as of the last `reload`."""

    def __init__(self, settings: InferenceSettings) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._settings = settings
        self.context = _context(settings)

    def reload(self) -> None:
        """Reads certificate and key again; a changed CA needs a restart. Raises ConfigError and changes nothing."""
        _context(self._settings)
        self.context.load_cert_chain(*_chain(self._settings), password=_no_password)


def service_tls(settings: InferenceSettings) -> ServiceTls | None:
    """The TLS of a service with these settings, None without a certificate. Raises ConfigError."""
    return None if settings.tls_certificate is None else ServiceTls(settings)


def _chain(settings: InferenceSettings) -> tuple[Path, Path]:
    assert settings.tls_certificate is not None
    assert settings.tls_key is not None
    return settings.tls_certificate, settings.tls_key


def _no_password() -> str:
    raise ValueError("the key is encrypted with a password; store it without one")


def _context(settings: InferenceSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate, key = _chain(settings)
    for name, path in ("CERTIFICATE", certificate), ("KEY", key), ("CLIENT_CA", settings.tls_client_ca):
        if path is not None:
            _check(f"INFERENCE_TLS_{name}", path)
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        why = "the key does not belong to the certificate" if "MISMATCH" in str(error) else _reason(error)
        raise ConfigError([Problem(f"{certificate} and {key} cannot be used: {why}", "INFERENCE_TLS_KEY")]) from error
    if settings.tls_client_ca is not None:
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except ssl.SSLError as error:
            problem = f"{settings.tls_client_ca} is not a certificate authority in PEM format: {_reason(error)}"
            raise ConfigError([Problem(problem, "INFERENCE_TLS_CLIENT_CA")]) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _check(name: str, path: Path) -> None:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError([Problem(f"cannot read {path} ({error.strerror})", name)]) from error
    if b"-----BEGIN " not in text:
        raise ConfigError([Problem(f"{path} is not in PEM format: it has no line `-----BEGIN ...`", name)])


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else None
    return reason.replace("_", " ").lower() if reason else str(error)
