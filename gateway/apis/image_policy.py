"""Which image URLs the gateway may fetch for a request.

A client that sends a URL chooses what this machine connects to. So images are fetched from listed hosts only, over
https, from host names and not from numeric addresses, and only if every address of the name is public.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from msgspec.structs import replace

from gateway.apis.openai.generation_request import ChatRequest
from gateway.errors import RequestError
from headgate.shared.bodies.openai_bodies import ImagePart
from inference.protocol import Code

MAX_IMAGES = 16
"""Limit of fetched images per request."""
HTTPS = 443
ANY_HOST = "*"

_HOST = re.compile(r"(?=.{1,253}$)(?!.*\.\d+$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})+")
_MAGIC: Sequence[tuple[re.Pattern[bytes], str]] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)

# Addresses that some versions of `ipaddress` call global but that may be internal: Azure's wire server, and IPv6 forms
# that contain an IPv4 address (RFC 4291, 6052, 8215, 3056, 4380).
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        ("168.63.129.16/32", "192.88.99.0/24", "100.64.0.0/10", "192.0.0.0/24", "198.18.0.0/15", "::/96",
         "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "fec0::/10", "5f00::/16"),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Remote:
    """An image URL in part `part` of message `message`."""

    message: int
    part: int
    url: str

    @property
    def param(self) -> str:
        """The field of the request with this URL."""
        return f"messages[{self.message}].content[{self.part}].image_url.url"


@dataclass(frozen=True, slots=True)
class Target:
    """The address of an image; `path` includes the query."""

    host: str
    port: int
    path: str


def is_host_entry(entry: str) -> bool:
    """Whether `entry` can stand in a list of hosts: NAME, *.NAME, either with :PORT, or * for every host."""
    host, _, port = entry.partition(":")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return False
    return entry == ANY_HOST or (not entry.endswith(":") and _HOST.fullmatch(host.removeprefix("*.")) is not None)


def remote_images(body: ChatRequest) -> tuple[Remote, ...]:
    """The image URLs of a chat; raises RequestError when there are too many."""
    found = tuple(
        Remote(at, index, part.image_url.url)
        for at, message in enumerate(body.messages)
        for index, part in enumerate(message.parts)
        if isinstance(part, ImagePart) and not part.image_url.url.startswith("data:")
    )
    if len(found) > MAX_IMAGES:
        raise refusal(found[MAX_IMAGES], f"exceeds the limit: at most {MAX_IMAGES} images are fetched for a request")
    return found


def target_of(remote: Remote, hosts: Sequence[str]) -> Target:
    """Where `remote` is fetched; raises RequestError when `hosts` do not allow it."""
    if not hosts:
        raise refusal(remote, "must be a data: URL; this gateway does not fetch images, so send the image as base64")
    try:
        parts = urlsplit(remote.url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or HTTPS
    except ValueError:
        raise refusal(remote, "is not a valid URL") from None
    plain = remote.url.isascii() and remote.url.isprintable() and " " not in remote.url and "\\" not in remote.url
    if not plain or parts.scheme != "https" or "@" in parts.netloc or not _HOST.fullmatch(host):
        raise refusal(remote, "must be a data: URL or an https URL with a host name and without a user name")
    if not any(_allows(entry, host, port) for entry in hosts):
        raise refusal(remote, "is on a host that this gateway does not fetch from (images.hosts); send it as base64")
    return Target(host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def is_public(address: str) -> bool:
    """Whether `address` is on the public internet: not this machine, its network, or internal services of a cloud."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if not parsed.is_global or parsed.is_multicast or parsed.is_reserved:
        return False
    return not any(parsed in network for network in _NOT_PUBLIC if network.version == parsed.version)


def data_url(remote: Remote, content: bytes) -> str:
    """`content` as a data: URL; raises RequestError if it is not an image of a supported format."""
    kind = next((kind for magic, kind in _MAGIC if magic.match(content)), None)
    if kind is None:
        raise refusal(remote, "is not a PNG, JPEG, GIF or WebP image")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def inlined(body: ChatRequest, urls: Mapping[Remote, str]) -> ChatRequest:
    """A copy of `body` with fetched images in place of their URLs.

    `origin`, the client's Messages request, keeps its URLs: a provider that gets it may fetch them itself.
    """
    messages = list(body.messages)
    for remote, url in urls.items():
        message = messages[remote.message]
        parts = list(message.parts)
        part = parts[remote.part]
        assert isinstance(part, ImagePart), "`remote_images` found an image there"
        parts[remote.part] = replace(part, image_url=replace(part.image_url, url=url))
        messages[remote.message] = replace(message, content=parts)
    found: ChatRequest = replace(body, messages=messages)
    return found


def refusal(remote: Remote, problem: str) -> RequestError:
    """The error for one image."""
    return RequestError(Code.INVALID_REQUEST, f"`{remote.param}` {problem}", param=remote.param)


def _allows(entry: str, host: str, port: int) -> bool:
    name, _, number = entry.partition(":")
    if port != (int(number) if number else HTTPS):
        return False
    return name in (ANY_HOST, host) or (name.startswith("*.") and host.endswith(name[1:]))
