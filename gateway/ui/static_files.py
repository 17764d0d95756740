"""The files of the page, read once at the start and served from memory."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
DIRECTORY = Path(__file__).with_name("static")
INDEX = "index.html"


class StaticFile(NamedTuple):
    """One file with its content type and ETag."""

    body: bytes
    type: str
    etag: str


def read_files(directory: Path = DIRECTORY) -> dict[str, StaticFile]:
    """The files below `directory` with a known type, by relative path with `/`."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.suffix in TYPES and path.is_file():
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.relative_to(directory).as_posix()] = StaticFile(body, TYPES[path.suffix], etag)
    return found
