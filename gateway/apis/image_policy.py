"""Decides which images a request may have fetched, from where and to which addresses; fetches and resolves nothing.

A client that sends a URL chooses what this machine connects to. So images are fetched from listed hosts only, over
https, from names and not from numeric addresses, and only where every address behind the name is public.
"""

from __future__ import annotations

import base64
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from msgspec.structs import replace

from gateway.apis.schema.chat_request import ChatRequest
from gateway.errors import RequestError
from headgate.shared.bodies.openai_bodies import ImagePart
from inference.protocol import Code

MAX_IMAGES = 16
"""Images fetched for one request."""
HTTPS = 443
ANY_HOST = "*"

_HOST = re.compile(r"(?=.{1,253}$)(?!.*\.\d+$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})+")
_MAGIC: Sequence[tuple[re.Pattern[bytes], str]] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)

# What ipaddress counts as global in some version of Python and yet leads somewhere of one's own: the wire server of
# Azure's machines, and IPv6 forms that carry an IPv4 address inside (RFC 4291, 6052, 8215, 3056, 4380).
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        ("168.63.129.16/32", "192.88.99.0/24", "100.64.0.0/10", "192.0.0.0/24", "198.18.0.0/15", "::/96",
         "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32", "fec0::/10", "5f00::/16"),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Remote:
    """An image of message `message`, part `part`, that is an address."""

    message: int
    part: int
    url: str

    @property
    def param(self) -> str:
        """The field it stands in."""
        return f"messages[{self.message}].content[{self.part}].image_url.url"


@dataclass(frozen=True, slots=True)
class Target:
    """Where an image is fetched: `path` with its query."""

    host: str
    port: int
    path: str


def is_host_entry(entry: str) -> bool:
    """Whether `entry` can stand in a list of hosts: NAME, *.NAME, either with :PORT, or * for every host."""
    host, _, port = entry.partition(":")
    if port and not (port.isdigit() and 0 < int(port) < 65536):
        return False
    return entry == ANY_HOST or (not entry.endswith(":") and _HOST.fullmatch(host.removeprefix("*.")) is not None)


def remote_images(body: ChatRequest) -> tuple[Remote, ...]:
    """The images of a chat that are addresses; raises RequestError when there are too many."""
    found = tuple(
        Remote(at, index, part.image_url.url)
        for at, message in enumerate(body.messages)
        for index, part in enumerate(message.parts)
        if isinstance(part, ImagePart) and not part.image_url.url.startswith("data:")
    )
    if len(found) > MAX_IMAGES:
        raise refusal(found[MAX_IMAGES], f"is one too many: at most {MAX_IMAGES} are fetched for a request")
    return found


def target_of(remote: Remote, hosts: Sequence[str]) -> Target:
    """Where `remote` is fetched; raises RequestError when `hosts` do not allow it."""
    if not hosts:
        raise refusal(remote, "must be a data: URL; this gateway fetches nothing, so send the image itself as base64")
    try:
        parts = urlsplit(remote.url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or HTTPS
    except ValueError:
        raise refusal(remote, "is no address") from None
    plain = remote.url.isascii() and remote.url.isprintable() and " " not in remote.url and "\\" not in remote.url
    if not plain or parts.scheme != "https" or "@" in parts.netloc or not _HOST.fullmatch(host):
        raise refusal(remote, "must be a data: URL or the plain https address of a host with a name")
    if not any(_allows(entry, host, port) for entry in hosts):
        raise refusal(remote, "is on a host that this gateway does not fetch from (images.hosts); send it as base64")
    return Target(host, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))


def is_public(address: str) -> bool:
    """Whether `address` is one of the public internet: not this machine, its network, or a cloud's own services."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if not parsed.is_global or parsed.is_multicast or parsed.is_reserved:
        return False
    return not any(parsed in network for network in _NOT_PUBLIC if network.version == parsed.version)


def data_url(remote: Remote, content: bytes) -> str:
    """`content` as a data: URL; raises RequestError when it is no image that models read."""
    kind = next((kind for magic, kind in _MAGIC if magic.match(content)), None)
    if kind is None:
        raise refusal(remote, "leads to something that is no PNG, JPEG, GIF or WebP")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def inlined(body: ChatRequest, urls: Mapping[Remote, str]) -> ChatRequest:
    """A copy of `body` with fetched images in place of their addresses.

    Its origin stays: a provider that is sent the origin may fetch the same addresses itself.
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
    """The error about one image."""
    return RequestError(Code.INVALID_REQUEST, f"`{remote.param}` {problem}", param=remote.param)


def _allows(entry: str, host: str, port: int) -> bool:
    name, _, number = entry.partition(":")
    if port != (int(number) if number else HTTPS):
        return False
    return name in (ANY_HOST, host) or (name.startswith("*.") and host.endswith(name[1:]))
