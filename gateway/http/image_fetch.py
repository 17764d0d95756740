"""Fetches the images that a request links to and inlines them as data: URLs; `gateway.apis.image_policy` decides which.

Connections are made only to addresses that were checked. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from ssl import SSLContext
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from gateway.apis import image_policy as core
from gateway.apis.openai.generation_request import ChatRequest, InferenceRequest
from gateway.http.body_memory import Room
from gateway.providers.http_clients import make_image_session
from gateway.settings import ImageSettings

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host name; raises OSError."""


class _NotPublicError(Exception):
    """A name resolves to an address that is not public."""


class _TooLargeError(Exception):
    """The images of a request are together too large."""


async def _resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class _CheckedResolver(AbstractResolver):
    """Resolves a name when all its addresses are allowed, for the connection that is being made."""

    def __init__(self, resolve: Resolve, is_public: Callable[[str], bool]) -> None:
        self._resolve = resolve
        self._is_public = is_public

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._resolve(host, port)
        if not all(map(self._is_public, addresses)):
            raise _NotPublicError
        return [
            ResolveResult(
                hostname=host, host=address, port=port, proto=0, flags=socket.AI_NUMERICHOST,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            )
            for address in addresses
        ]  # fmt: skip

    async def close(self) -> None:
        """Does nothing."""


class Images:
    """Fetches images for all requests. Use it inside the running loop; `aclose` closes its connections."""

    def __init__(
        self,
        settings: ImageSettings,
        resolve: Resolve = _resolve,
        is_public: Callable[[str], bool] = core.is_public,
        trust: SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._resolver = _CheckedResolver(resolve, is_public)
        self._trust = trust
        self._session: aiohttp.ClientSession | None = None

    def apply(self, settings: ImageSettings) -> None:
        """Applies new settings."""
        self._settings = settings

    async def inlined(self, request: InferenceRequest, room: Room) -> InferenceRequest:
        """`request` with all images inlined; their bytes are reserved in `room` as they arrive.

        Raises RequestError that names an image, and RefusedError when there is no memory for them now.
        """
        body = request.body
        if not isinstance(body, ChatRequest) or not (remotes := core.remote_images(body)):
            return request
        targets = [core.target_of(remote, self._settings.hosts) for remote in remotes]
        try:
            contents = await _together([self._fetch(*one, room) for one in zip(remotes, targets, strict=True)])
        except _TooLargeError:
            larger = "is larger" if len(remotes) == 1 else "and the others are together larger"
            problem = f"{larger} than {room.limit} bytes (max_body)"
            raise core.refusal(remotes[-1], problem) from None
        urls = {remote: core.data_url(remote, content) for remote, content in zip(remotes, contents, strict=True)}
        return request._replace(body=core.inlined(body, urls))

    async def aclose(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()

    async def _fetch(self, remote: core.Remote, target: core.Target, room: Room) -> bytes:
        settings = self._settings
        try:
            async with asyncio.timeout(settings.timeout):
                return await self._get(remote, target, settings.max_bytes, room)
        except TimeoutError:
            raise core.refusal(remote, f"did not arrive within {settings.timeout:g} s (images.timeout)") from None
        except _NotPublicError:
            raise core.refusal(remote, "resolves to an address that is not public") from None
        except (OSError, aiohttp.ClientError) as error:
            problem = f"cannot be fetched: the connection to {target.host} failed ({type(error).__name__})"
            raise core.refusal(remote, problem) from error

    async def _get(self, remote: core.Remote, target: core.Target, max_bytes: int, room: Room) -> bytes:
        if self._session is None:
            self._session = make_image_session(self._resolver, self._trust)
        url = f"https://{target.host}:{target.port}{target.path}"
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise core.refusal(remote, f"cannot be fetched: {target.host} answered {response.status}")
            if not response.content_type.startswith("image/"):
                raise core.refusal(remote, f"is {response.content_type[:80]}, not an image")
            if "content-encoding" in response.headers:
                raise core.refusal(remote, "was sent with Content-Encoding; only responses without it are accepted")
            content = bytearray()
            async for piece in response.content.iter_chunked(65536):
                content += piece
                if len(content) > max_bytes:
                    raise core.refusal(remote, f"is larger than {max_bytes} bytes (images.max_bytes)")
                if not room.take(len(piece)):
                    raise _TooLargeError
            return bytes(content)


async def _together(works: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """The results of all `works`; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
