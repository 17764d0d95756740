"""Converts images into tokens and embeddings for models with a projector, on a separate thread.

Encoding an image takes milliseconds to seconds; the engine and requests without images do not wait for it.
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
from typing import TypeVar
from weakref import WeakValueDictionary

from inference.protocol import Code
from inference.worker.backend import ImageTile
from inference.worker.engine_stats import EngineCounters
from inference.worker.llama.projector import Projector
from inference.worker.worker_errors import BadRequestError, WorkerError

MAX_REQUEST_BYTES = 2**25
"""Limit of the embeddings of one request."""
KEPT_BYTES = 2**25
"""Limit of cached embeddings; the next request of a conversation has the same images."""
MAX_CONCURRENT = 4
"""Maximum number of concurrent requests with images; others wait."""
MAX_WAITING = 64
MAX_FILES_BYTES = 2**26
"""Limit of the image files of waiting requests."""
HELD_BYTES = MAX_REQUEST_BYTES * MAX_CONCURRENT + KEPT_BYTES + MAX_FILES_BYTES
"""Host memory for images, besides the projector."""
_KNOWN_IMAGES = 2**16
_LAST_NUMBER = 2**31 - 2**20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Image:
    """An image file as tokens of a prompt, and the tiles of its negative tokens."""

    tokens: tuple[int, ...]
    tiles: tuple[ImageTile, ...]


class Vision:
    """Images of one model. Tiles live as long as their `Image`.

    `counters` reports encoding like steps of the engine, so that a hung device is detected here too.
    """

    def __init__(self, projector: Projector, most: int, concurrent: int, *, at_once: int) -> None:
        """`most`: maximum tokens of a tile. `at_once`: the same for a tile whose tokens attend to each other in both
        directions. `concurrent`: number of concurrent requests with images, at most MAX_CONCURRENT.
        """
        self.counters = EngineCounters(time.monotonic)
        self.tiles: WeakValueDictionary[int, ImageTile] = WeakValueDictionary()
        """The tiles by their first token; read by the engine thread."""
        self._projector = projector
        self._most = most
        self._at_once = min(most, at_once)
        self._places = asyncio.Semaphore(min(concurrent, MAX_CONCURRENT))
        self._waiting = 0
        self._files_bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vision")
        # Only the vision thread uses these.
        self._tenant = ""
        self._kept: OrderedDict[bytes, Image] = OrderedDict()
        self._numbers: OrderedDict[tuple[bytes, int], int] = OrderedDict()
        self._next = 1

    @contextlib.asynccontextmanager
    async def place(self, deadline: float | None, files_bytes: int) -> AsyncIterator[Callable[[], None]]:
        """Waits for a place among the concurrent requests with images, and holds it inside the `async with` block.

        Raises WorkerError (queue_full or deadline_exceeded).

        `deadline`: seconds of `time.monotonic`, None without. The caller calls the yielded function when the request's
        files (`files_bytes`) are no longer held.
        """
        if self._waiting >= MAX_WAITING:
            raise WorkerError(
                Code.QUEUE_FULL, f"{self._waiting} requests with images are already waiting for this model"
            )
        if self._files_bytes + files_bytes > MAX_FILES_BYTES:
            raise WorkerError(
                Code.QUEUE_FULL,
                f"images of {self._files_bytes} bytes are waiting for this model, and this request has images of "
                f"{files_bytes} bytes; the limit is {MAX_FILES_BYTES} bytes",
            )
        held = files_bytes
        self._files_bytes += held

        def let_go() -> None:
            nonlocal held
            self._files_bytes -= held
            held = 0

        try:
            await self._take_place(deadline)
            try:
                yield let_go
            finally:
                self._places.release()
        finally:
            let_go()

    async def _take_place(self, deadline: float | None) -> None:
        self._waiting += 1
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                await self._places.acquire()
        except TimeoutError:
            raise WorkerError(Code.DEADLINE_EXCEEDED, "the model did not start to answer within the deadline") from None
        finally:
            self._waiting -= 1

    async def off_loop(self, function: Callable[[], T], tenant: str = "") -> T:
        """Runs `function` on the vision thread. Images that it reads are cached for this tenant only, because timing
        would reveal whether another tenant has sent the same image.
        """

        def work() -> T:
            self._tenant = tenant
            return function()

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def read(self, data: bytes, param: str) -> Image:
        """An image as tokens; on the vision thread. Raises BadRequestError for an unreadable or too large image."""
        key = hashlib.sha256(self._tenant.encode() + b"\0" + data).digest()
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        try:
            parts = self._projector.read(data)
        except ValueError as error:
            raise BadRequestError(f"an image cannot be read: {error}", param) from None
        tokens: list[int] = []
        tiles: list[ImageTile] = []
        for part in parts:
            if not isinstance(part, ImageTile):
                tokens += part
                continue
            most = self._at_once if part.non_causal else self._most
            if part.n_tokens > most:
                raise BadRequestError(
                    f"an image has {part.n_tokens} tokens, but this model processes at most {most} at a time; scale "
                    "it down, or give the model a larger batch and ubatch",
                    param,
                )
            first = self._number(key, len(tiles), part.n_tokens)
            tokens += range(-first, -first - part.n_tokens, -1)
            tiles.append(self.tiles.setdefault(-first, part))
        return self._keep(key, Image(tuple(tokens), tuple(tiles)))

    def encode(self, images: Sequence[Image], param: str) -> None:
        """Computes the missing embeddings; on the vision thread. Raises WorkerError, BadRequestError for too many."""
        tiles = [tile for image in images for tile in image.tiles]
        size = sum({id(tile): tile.n_tokens for tile in tiles}.values()) * self._projector.width * 4
        if size > MAX_REQUEST_BYTES:
            raise BadRequestError(
                f"the images of this request take {size} bytes of embeddings; at most {MAX_REQUEST_BYTES} are held, so "
                "send fewer or smaller ones",
                param,
            )
        for tile in tiles:
            if tile.rows is None:
                self.counters.begin(tile.n_tokens)
                try:
                    self._projector.encode(tile)
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
        """Removes the least recently used images; those without embeddings count with their future size."""
        size = sum(tile.n_tokens for image in self._kept.values() for tile in image.tiles)
        size *= self._projector.width * 4
        while size > KEPT_BYTES and self._kept:
            _key, image = self._kept.popitem(last=False)
            size -= sum(tile.n_tokens for tile in image.tiles) * self._projector.width * 4

    def _number(self, key: bytes, index: int, count: int) -> int:
        """The first number for the tokens of a tile; the same for each use of its image, so that prefixes are found.

        Numbers start again after two billion tokens. By then no sequence contains the earlier ones.
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
