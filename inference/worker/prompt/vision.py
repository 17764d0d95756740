"""Turns images into tokens and embeddings for models with a projector, on a thread of its own.

Encoding an image takes milliseconds to seconds. The engine and requests without images do not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from inference.protocol import Code
from inference.worker.backend import ImageTile
from inference.worker.engine_stats import EngineCounters
from inference.worker.worker_errors import BadRequestError, WorkerError

MAX_REQUEST_BYTES = 2**25
"""Embeddings of one request's images."""
KEPT_BYTES = 2**25
"""Embeddings kept for requests to come: the next turn of a chat shows the same image."""
MAX_TURNS = 4
"""Requests with images that are under way at once; others wait."""
MAX_WAITING = 64
MAX_FILES_BYTES = 2**26
"""Image files of requests that wait for their turn or are being read."""
HELD_BYTES = MAX_REQUEST_BYTES * MAX_TURNS + KEPT_BYTES + MAX_FILES_BYTES
"""Host memory that images can take beside the projector's own."""
_KNOWN_IMAGES = 2**16
_LAST_NUMBER = 2**31 - 2**20

T = TypeVar("T")


class Eye(Protocol):
    """A projector."""

    width: int

    def read(self, data: bytes) -> list[Sequence[int] | ImageTile]:
        """Text tokens and pictures that stand for an image file; raises ValueError."""
        ...

    def encode(self, picture: ImageTile) -> None:
        """Computes a picture's embeddings; raises RuntimeError."""
        ...


@dataclass(frozen=True, slots=True)
class Image:
    """An image file as tokens of a prompt, and the pictures that the numbers below zero among them stand for."""

    tokens: tuple[int, ...]
    pictures: tuple[ImageTile, ...]


class Sight:
    """`most` is how many tokens an image may have. Pictures live as long as a reference to
    their `Image`.

    `counters` reports encoding as an engine's pulse reports steps, so that a hung device is noticed here too.
    """

    def __init__(
        self, eye: Eye, most: int, turns: int, *, at_once: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`at_once`: how many tokens an image may have that sees all of itself."""
        self.counters = EngineCounters(clock)
        self.pictures: WeakValueDictionary[int, ImageTile] = WeakValueDictionary()
        """By the first of their tokens; read by the engine's thread."""
        self._eye = eye
        self._most = most
        self._at_once = min(most, at_once)
        self._turns = asyncio.Semaphore(min(turns, MAX_TURNS))
        self._waiting = 0
        self._files_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sight")
        # Only the thread uses these.
        self._tenant = ""
        self._kept: OrderedDict[bytes, Image] = OrderedDict()
        self._numbers: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        self._next = 1

    @contextlib.asynccontextmanager
    async def turn(self, deadline: float | None, files_bytes: int) -> AsyncIterator[Callable[[], None]]:
        """A place among the requests with images; raises WorkerError(queue_full or deadline_exceeded). What it gives is
        to be called once the request's files, `files_bytes` of them, are held no more.
        """
        if self._waiting >= MAX_WAITING:
            raise WorkerError(Code.QUEUE_FULL, f"{self._waiting} requests with images wait for this model")
        if self._files_bytes + files_bytes > MAX_FILES_BYTES:
            raise WorkerError(
                Code.QUEUE_FULL,
                f"images of {self._files_bytes} bytes wait for this model, and at most {MAX_FILES_BYTES} bytes may",
            )
        held = files_bytes
        self._files_bytes += held

        def let_go() -> None:
            nonlocal held
            self._files_bytes -= held
            held = 0

        try:
            await self._turn(deadline)
            try:
                yield let_go
            finally:
                self._turns.release()
        finally:
            let_go()

    async def _turn(self, deadline: float | None) -> None:
        self._waiting += 1
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await self._turns.acquire()
        except TimeoutError:
            raise WorkerError(Code.DEADLINE_EXCEEDED, "the model did not start to answer within the deadline") from None
        finally:
            self._waiting -= 1

    async def off_loop(self, function: Callable[[], T], tenant: str = "") -> T:
        """What `function` returns, on the thread that sees. What it reads is remembered for that tenant only: the time
        that an image takes would reveal whether another tenant has sent it.
        """

        def work() -> T:
            self._tenant = tenant
            return function()

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def read(self, data: bytes, param: str) -> Image:
        """An image as tokens; on the thread that sees. Raises BadRequestError for one that cannot be read."""
        key = hashlib.sha256(self._tenant.encode() + b"\0" + data).digest()
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        try:
            parts = self._eye.read(data)
        except ValueError as error:
            raise BadRequestError(f"an image cannot be read: {error}", param) from None
        tokens: list[int] = []
        pictures: list[ImageTile] = []
        for part in parts:
            if not isinstance(part, ImageTile):
                tokens += part
                continue
            most = self._at_once if part.non_causal else self._most
            if part.n_tokens > most:
                raise BadRequestError(
                    f"an image takes {part.n_tokens} tokens, and this model reads at most {most} at once; scale "
                    "it down, or give the model a larger batch and ubatch",
                    param,
                )
            first = self._number(key, len(pictures), part.n_tokens)
            tokens += range(-first, -first - part.n_tokens, -1)
            pictures.append(self.pictures.setdefault(-first, part))
        return self._keep(key, Image(tuple(tokens), tuple(pictures)))

    def encode(self, images: Sequence[Image], param: str) -> None:
        """Computes what is missing of the embeddings; on the thread that sees. Raises WorkerError."""
        pictures = [picture for image in images for picture in image.pictures]
        size = sum({id(picture): picture.n_tokens for picture in pictures}.values()) * self._eye.width * 4
        if size > MAX_REQUEST_BYTES:
            raise BadRequestError(
                f"the images of this request take {size} bytes of embeddings; at most {MAX_REQUEST_BYTES} are held, so "
                "send fewer or smaller ones",
                param,
            )
        for picture in pictures:
            if picture.rows is None:
                self.counters.begin(picture.n_tokens)
                try:
                    self._eye.encode(picture)
                except RuntimeError as error:
                    raise WorkerError(Code.MODEL_FAILED, str(error)) from None
                finally:
                    self.counters.end()
        self._trim()

    def _keep(self, key: bytes, image: Image) -> Image:
        self._kept[key] = image
        self._trim()
        return image

    def _trim(self) -> None:
        """Forgets images that were not asked for longest; those without embeddings count as what they will take."""
        size = sum(picture.n_tokens for image in self._kept.values() for picture in image.pictures)
        size *= self._eye.width * 4
        while size > KEPT_BYTES and self._kept:
            _key, image = self._kept.popitem(last=False)
            size -= sum(picture.n_tokens for picture in image.pictures) * self._eye.width * 4

    def _number(self, key: bytes, index: int, count: int) -> int:
        """The first number of an image's tokens, the same whenever it is seen, so that prefixes are found again.

        After two thousand million tokens of images numbers come again; no sequence still holds the old ones then.
        """
        if (known := self._numbers.get((key, index))) is not None:
            self._numbers.move_to_end((key, index))
            return known
        first = self._next
        self._next += count + 1
        if self._next > _LAST_NUMBER:
            self._next = 1
        self._numbers[key, index] = first
        if len(self._numbers) > _KNOWN_IMAGES:
            self._numbers.popitem(last=False)
        return first
