"""Fetches the images that a request names by address and puts them into it; which ones it may is `core.images`' word.

Tiers then see data: URLs alone. Connections are made to the very addresses that were judged; no redirect is followed.
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
from gateway.apis.openai.generation_request import VISION, InferenceRequest
from gateway.apis.schema.openai_bodies import ChatRequest
from gateway.http.body_memory import Room
from gateway.providers.http_clients import make_image_session
from gateway.settings import ImageSettings

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses behind a name; raises OSError."""


class _NotPublicError(Exception):
    """A name leads to an address that is not public."""


class _TooMuchError(Exception):
    """The images of a request are together larger than they may be."""


async def _resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class _Judged(AbstractResolver):
    """Resolves a name to its addresses when all of them may be connected to, for the connection made now."""

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
        """There is nothing to close."""


class Images:
    """Fetches for every request. Use inside the running loop; `aclose` ends it. The arguments are for tests."""

    def __init__(
        self,
        settings: ImageSettings,
        resolve: Resolve = _resolve,
        is_public: Callable[[str], bool] = core.is_public,
        trust: SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._resolver = _Judged(resolve, is_public)
        self._trust = trust
        self._session: aiohttp.ClientSession | None = None

    def apply(self, settings: ImageSettings) -> None:
        """What may be fetched from now on."""
        self._settings = settings

    async def inlined(self, request: InferenceRequest, room: Room) -> InferenceRequest:
        """`request` with every image in it, for which `room` is taken as they come.

        A request whose images came with it is returned as it is. Raises RequestError naming the image at fault, and
        RefusedError when there is no memory for them now.
        """
        body = request.body
        if (
            not isinstance(body, ChatRequest)
            or VISION not in request.needs
            or not (remotes := core.remote_images(body))
        ):
            return request
        targets = [core.target_of(remote, self._settings.hosts) for remote in remotes]
        try:
            contents = await _together([self._fetch(*one, room) for one in zip(remotes, targets, strict=True)])
        except _TooMuchError:
            said = f"and the others are together larger than {room.limit} bytes (max_body)"
            raise core.refusal(remotes[-1], said) from None
        urls = {remote: core.data_url(remote, content) for remote, content in zip(remotes, contents, strict=True)}
        return request._replace(body=core.inlined(body, urls))

    async def aclose(self) -> None:
        """Ends what is under way."""
        if self._session is not None:
            await self._session.close()

    async def _fetch(self, remote: core.Remote, target: core.Target, room: Room) -> bytes:
        settings = self._settings
        try:
            async with asyncio.timeout(settings.timeout):
                return await self._get(remote, target, settings.max_bytes, room)
        except TimeoutError:
            raise core.refusal(remote, f"did not come within {settings.timeout:g} s (images.timeout)") from None
        except _NotPublicError:
            raise core.refusal(remote, "leads to an address that is not public") from None
        except (OSError, aiohttp.ClientError) as error:
            said = f"cannot be had: {target.host} is not reached or broke off ({type(error).__name__})"
            raise core.refusal(remote, said) from error

    async def _get(self, remote: core.Remote, target: core.Target, max_bytes: int, room: Room) -> bytes:
        if self._session is None:
            self._session = make_image_session(self._resolver, self._trust)
        url = f"https://{target.host}:{target.port}{target.path}"
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise core.refusal(remote, f"cannot be had: {target.host} answered {response.status}")
            if not response.content_type.startswith("image/") or "content-encoding" in response.headers:
                raise core.refusal(remote, f"leads to {response.content_type[:80]}, which is no image as it is")
            content = bytearray()
            async for piece in response.content.iter_chunked(65536):
                content += piece
                if len(content) > max_bytes:
                    raise core.refusal(remote, f"is larger than {max_bytes} bytes (images.max_bytes)")
                if not room.take(len(piece)):
                    raise _TooMuchError
            return bytes(content)


async def _together(works: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """What all of `works` return; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
