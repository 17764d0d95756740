"""Installs the gateways that Headgate is compared with, outside the repository.

`python -m benchmarks.gateway_peers` installs LiteLLM's proxy from PyPI and Portkey's gateway from npm, each into a
directory of its own below HEADGATE_PEERS_DIR (default: the user's cache). Missing ones are not measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LITELLM, PORTKEY = "litellm", "portkey"
"""Portkey's gateway answers streamed requests with 500 on Node 20, so only whole answers are measured."""

_PORTKEY_PACKAGE = "@portkey-ai/gateway"


@dataclass(frozen=True, slots=True)
class Peer:
    """An installed gateway. `argv` starts it; options follow."""

    name: str
    version: str
    argv: tuple[str, ...]


def root() -> Path:
    """The directory of the installed gateways."""
    chosen = os.environ.get("HEADGATE_PEERS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else cache / "headgate-peers" / "gateways"


def litellm() -> Peer | None:
    """LiteLLM's proxy, if it is installed."""
    python = root() / LITELLM / "bin" / "python"
    command = python.with_name("litellm")
    if not command.exists():
        return None
    asked = [str(python), "-c", "from importlib.metadata import version; print(version('litellm'))"]
    version = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    return Peer(LITELLM, version, (str(python), str(command)))


def portkey() -> Peer | None:
    """Portkey's gateway, if it is installed and node is."""
    package = root() / PORTKEY / "node_modules" / _PORTKEY_PACKAGE
    node = shutil.which("node")
    if node is None or not (package / "package.json").exists():
        return None
    about = json.loads((package / "package.json").read_text())
    return Peer(PORTKEY, about["version"], (node, str(package / about["bin"])))


def install() -> None:
    """Installs missing gateways; the output of the tools goes to stderr. Raises CalledProcessError."""
    if litellm() is None:
        place = root() / LITELLM
        _run([sys.executable, "-m", "venv", str(place)])
        _run([str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "litellm[proxy]"])
    if portkey() is None and (npm := shutil.which("npm")) is not None:
        place = root() / PORTKEY
        place.mkdir(parents=True, exist_ok=True)
        _run([npm, "install", "--no-fund", "--no-audit", "--prefix", str(place), _PORTKEY_PACKAGE])


def _run(argv: list[str]) -> None:
    print(" ".join(argv), file=sys.stderr, flush=True)
    subprocess.run(argv, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    install()
    for name, found in ((LITELLM, litellm()), (PORTKEY, portkey())):
        print(f"{name}: {found.version if found else 'not installed'}")
