"""Certificates for tests, made with the `openssl` command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

HAS_OPENSSL = shutil.which("openssl") is not None


class Issued(NamedTuple):
    """Files in PEM format."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority in `root`."""

    def __init__(self, root: Path, name: str = "ca") -> None:
        self._root = root
        self._own = Issued(root / f"{name}.pem", root / f"{name}.key")
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", self._own.key, "-out", self._own.certificate),
        )

    @property
    def certificate(self) -> Path:
        """The authority's own certificate."""
        return self._own.certificate

    def issue(self, name: str) -> Issued:
        """A certificate for this machine with the common name `name`."""
        issued = Issued(self._root / f"{name}.pem", self._root / f"{name}.key")
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-CA", self._own.certificate, "-CAkey", self._own.key, "-keyout", issued.key, "-out", issued.certificate),
        )
        return issued


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=20)
