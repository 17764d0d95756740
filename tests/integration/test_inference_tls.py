"""TLS between gateways and the inference service: refused clients and files, and new certificates."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.nodes.node_tls import read_tls
from gateway.providers.http_clients import make_hop
from gateway.providers.local.local_provider import LocalProvider
from gateway.settings import TlsSettings
from headgate.cli.main import main
from headgate.shared.errors import ConfigError
from inference import settings
from inference.service_tls import service_tls
from tests.rigs.certificates import HAS_OPENSSL, Authority, Issued
from tests.rigs.processes import inference_service, wait_until

pytestmark = pytest.mark.skipif(not HAS_OPENSSL, reason="needs the openssl command")


class Secure(NamedTuple):
    """A running service, its address, and the files of both sides."""

    process: subprocess.Popen[bytes]
    port: int
    ca: Path
    server: Issued
    client: Issued
    other: Issued

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def tls(self, client: Issued | None) -> TlsSettings:
        """Settings of a gateway."""
        if client is None:
            return TlsSettings(ca=str(self.ca))
        return TlsSettings(ca=str(self.ca), certificate=str(client.certificate), key=str(client.key))

    def serial(self) -> str:
        """The serial number of the certificate that a new connection gets."""
        context = read_tls(self.tls(self.client))
        assert context is not None
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=5) as plain,
            context.context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            found: Any = secured.getpeercert()
            return str(found["serialNumber"])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Secure]:
    root = tmp_path_factory.mktemp("tls")
    config = root / "config"
    config.mkdir()
    (config / "models.yaml").write_text(json.dumps({"models": {}}))
    server, client = authority.issue("node"), authority.issue("gateway")
    other = Authority(root, "other-ca").issue("stranger")
    files = {
        "INFERENCE_TLS_CERTIFICATE": str(server.certificate),
        "INFERENCE_TLS_KEY": str(server.key),
        "INFERENCE_TLS_CLIENT_CA": str(authority.certificate),
        "INFERENCE_TOKEN": "token",
        "INFERENCE_DEVICES": "cpu",
    }
    service = inference_service(root, config, files)
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(list(service.argv), env=dict(service.env), cwd=root, stdout=log, stderr=log)
    found = Secure(process, service.port, authority.certificate, server, client, other)

    def answers() -> bool:
        assert process.poll() is None, (root / "log").read_text()
        try:
            return bool(found.serial())
        except OSError:
            return False

    try:
        wait_until("the port is open", answers)
        yield found
    finally:
        process.kill()
        process.wait(20)


async def test_gateway_with_a_certificate_is_served(secure: Secure) -> None:
    tls = read_tls(secure.tls(secure.client))
    assert tls is not None
    provider = LocalProvider(secure.url, "token", tls.context)
    try:
        assert (await provider.get_json("/v1/models", 10))["data"] == []
        hop, _path = make_hop(secure.url, tls.context)
        headers = {"authorization": "Bearer token", "content-type": "application/json"}
        answer = await hop.post("/memory/plan", b'{"model": "x"}', headers, 5)
        assert (answer.status, b"unknown model" in await answer.whole()) == (404, True)
        answer.close()
        hop.close()
    finally:
        await provider.aclose()


@pytest.mark.parametrize("client", [None, "other"])
async def test_client_without_a_certificate_of_the_authority_is_refused(secure: Secure, client: str | None) -> None:
    tls = read_tls(secure.tls(secure.other if client else None))
    assert tls is not None
    hop, _path = make_hop(secure.url, tls.context)
    with pytest.raises(Exception, match=r"closed|alert|reset"):
        await hop.post("/livez", b"", {}, 5)
    hop.close()


def test_old_protocols_and_plain_http_are_refused(secure: Secure) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(secure.ca)
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", secure.port), timeout=5) as plain, pytest.raises(OSError, match="SSL"):
        context.wrap_socket(plain, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", secure.port), timeout=5) as plain:
        plain.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" not in plain.recv(100)


def test_command_line_uses_the_files_of_the_gateway(
    secure: Secure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    gateway: dict[str, Any] = {"inference": {"url": secure.url, "tls": secure.tls(secure.client).model_dump()}}
    (tmp_path / "gateway.yaml").write_text(json.dumps(gateway))
    monkeypatch.setenv("HEADGATE_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("INFERENCE_TOKEN", "token")
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["health", f"{secure.url}/livez"]) == 0


def test_new_certificate_is_used_after_a_reload_and_a_damaged_one_is_not(secure: Secure, authority: Authority) -> None:
    before = secure.serial()
    shutil.copy(authority.certificate, secure.server.certificate)  # does not belong to the key
    secure.process.send_signal(signal.SIGHUP)
    fresh = authority.issue("node-2")
    assert secure.serial() == before
    shutil.copy(fresh.key, secure.server.key)
    shutil.copy(fresh.certificate, secure.server.certificate)

    def is_new() -> bool:
        secure.process.send_signal(signal.SIGHUP)
        return secure.serial() != before

    wait_until("the new certificate is used", is_new, every=0.2)


# --- files ------------------------------------------------------------------------------------------------------------
def problem(tmp_path: Path, **files: Path) -> str:
    """Why the service does not start with these files."""
    (tmp_path / "models.yaml").write_text("models: {}")
    environ = {f"INFERENCE_TLS_{name.upper()}": str(path) for name, path in files.items()}
    with pytest.raises(ConfigError) as caught:
        service_tls(settings.load(tmp_path, environ, {}).settings)
    return str(caught.value)


def test_unusable_files_are_named_with_the_reason(tmp_path: Path, authority: Authority) -> None:
    one, two = authority.issue("one"), authority.issue("two")
    missing, garbage = tmp_path / "missing.pem", tmp_path / "garbage.pem"
    garbage.write_bytes(b"\x30\x82")
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", one.key, "-out", locked, "-aes128", "-passout", "pass:secret"],
        check=True, capture_output=True, timeout=20,
    )  # fmt: skip
    assert "set both or none" in problem(tmp_path, certificate=one.certificate)
    assert "INFERENCE_TLS_CLIENT_CA: needs INFERENCE_TLS_CERTIFICATE" in problem(tmp_path, client_ca=one.certificate)
    assert f"INFERENCE_TLS_KEY: cannot read {missing} (No such file or directory)" in problem(
        tmp_path, certificate=one.certificate, key=missing
    )
    assert "is not in PEM format" in problem(tmp_path, certificate=garbage, key=one.key)
    assert "the key does not belong to the certificate" in problem(tmp_path, certificate=one.certificate, key=two.key)
    assert "encrypted with a password" in problem(tmp_path, certificate=one.certificate, key=locked)
    assert "cannot be used" in problem(tmp_path, certificate=broken, key=one.key)
    assert "is not a certificate authority in PEM format" in problem(
        tmp_path, certificate=one.certificate, key=one.key, client_ca=one.key
    )
