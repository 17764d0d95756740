"""Extracts the images of chat messages: `data:` URLs become files within limits."""

from __future__ import annotations

import base64
import binascii

from inference.protocol import Code
from inference.worker.prompt.image_tokens import size_of
from inference.worker.worker_errors import BadRequestError

MAX_IMAGES = 16
"""Per request."""
MAX_PIXELS = 2**24
"""Decoded, an image takes three bytes per pixel, and four times that while it is scaled."""
KINDS = ("image/png", "image/jpeg", "image/jpg")


class ImageParts:
    """The images of one request, in order. In the text of a message `marker` stands for each."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.found: list[bytes] = []

    def take(self, url: str, at: str) -> str:
        """The marker, once the image of an `image_url` part was taken; raises BadRequestError."""
        where = f"{at}.image_url"
        if len(self.found) == MAX_IMAGES:
            raise BadRequestError(f"at most {MAX_IMAGES} images per request are allowed", where)
        head, comma, body = url.partition(",")
        kind, _semicolon, coding = head.removeprefix("data:").partition(";")
        if not comma or not head.startswith("data:"):
            raise BadRequestError(
                f"{where} must be a data: URL; local models do not fetch images",
                where,
                code=Code.UNSUPPORTED_PARAMETER,
            )
        if kind.lower() not in KINDS or coding != "base64":
            raise BadRequestError(f"{where} must be a PNG or JPEG in base64 (data:image/png;base64,...)", where)
        try:
            data = base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            raise BadRequestError(f"{where} is not valid base64", where) from None
        self._check(data, where)
        self.found.append(data)
        return self.marker

    @staticmethod
    def _check(data: bytes, where: str) -> None:
        size = size_of(data)
        if size is None:
            raise BadRequestError(f"{where} is not a PNG or JPEG file", where)
        width, height = size
        if not 0 < width * height <= MAX_PIXELS:
            raise BadRequestError(
                f"{where} has {width} x {height} pixels; the limit is {MAX_PIXELS} in total, so scale it down",
                where,
            )
