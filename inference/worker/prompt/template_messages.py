"""Converts decoded chat messages for chat templates, and takes their images out of them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from headgate.shared.bodies.openai_bodies import CalledFunction, ImagePart, Message, RefusalPart, TextPart
from inference.protocol import Code
from inference.worker.prompt.image_tokens import size_of
from inference.worker.worker_errors import BadRequestError

MAX_MESSAGES = 4096
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
        """Adds the image of an `image_url` part to `found` and returns the marker; raises BadRequestError."""
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


def messages_of(messages: Sequence[Message], images: ImageParts | None = None) -> tuple[Mapping[str, Any], ...]:
    """Decoded messages as templates expect them: plain text contents.

    `images` takes the images out of the messages; without it they are refused. Raises BadRequestError.
    """
    if len(messages) > MAX_MESSAGES:
        raise BadRequestError(f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed", "messages")
    return tuple(_message(item, index, images) for index, item in enumerate(messages))


_SHOWN_AS = {"developer": "system", "function": "tool"}
"""Roles that have another name in templates."""

_OF_ANSWERS = ("annotations", "parsed")
"""Fields of OpenAI's answers, which clients send back with any role."""
_ANSWERS_ONLY = frozenset(
    [
        "reasoning",
        "reasoning_text",
        "reasoning_details",
        "reasoning_opaque",
        "thinking",
        "thinking_blocks",
        "provider_specific_fields",
        "extra_content",
        "citations",
        "executed_tools",
        "images",
    ]
)
"""Fields that other services and client libraries add to answers. Only a text in `reasoning` has an effect."""


def _message(item: Message, index: int, images: ImageParts | None) -> Mapping[str, Any]:
    content = item.content if isinstance(item.content, str) else _text(item, f"messages[{index}].content", images)
    message: dict[str, Any] = {"role": _SHOWN_AS.get(item.role, item.role), "content": content or item.refusal or ""}
    if item.name is not None:
        message["name"] = item.name
    if item.tool_call_id is not None:
        message["tool_call_id"] = item.tool_call_id
    if item.reasoning_content is not None:
        message["reasoning_content"] = item.reasoning_content
    if item.extra:
        _check_extra(item, item.extra, f"messages[{index}]")
        if item.role == "assistant" and isinstance(item.extra.get("reasoning"), str):  # the name at some services
            message.setdefault("reasoning_content", item.extra["reasoning"])
    if item.tool_calls:
        message["tool_calls"] = [
            _call(call.function, call.id, f"messages[{index}].tool_calls[{place}]")
            for place, call in enumerate(item.tool_calls)
        ]
    elif item.function_call is not None:
        message["tool_calls"] = [_call(item.function_call, "", f"messages[{index}]")]
    return message


def _check_extra(item: Message, extra: Mapping[str, Any], at: str) -> None:
    for name, value in extra.items():
        if name not in _OF_ANSWERS and not (item.role == "assistant" and _has_no_effect(name, value)):
            raise BadRequestError(f"unknown field {name[:80]!r} in {at}", f"{at}.{name[:80]}")


def _has_no_effect(name: str, value: Any) -> bool:
    """Whether a field of an answer that is sent back can be ignored; Mistral sends `"prefix": false`."""
    return name in _ANSWERS_ONLY or value is None or value is False


def _text(item: Message, at: str, images: ImageParts | None) -> str:
    """The text of a content in parts. As in llama.cpp, only two texts in a row have a newline between them.

    Raises BadRequestError for parts that the model cannot read.
    """
    joined = ""
    after_text = False
    for index, part in enumerate(item.parts):
        if isinstance(part, TextPart | RefusalPart):
            text = part.text if isinstance(part, TextPart) else part.refusal
            joined += "\n" + text if after_text else text
            after_text = True
        elif isinstance(part, ImagePart) and images is not None:
            joined += images.take(part.image_url.url, f"{at}[{index}]")
            after_text = False
        else:
            raise BadRequestError(
                f"this model reads text{' and images' if images else ''} only; {at}[{index}] is "
                f"{part.__struct_config__.tag}",
                f"{at}[{index}]",
                code=Code.UNSUPPORTED_PARAMETER,
            )
    return joined


def _call(function: CalledFunction | None, id: str, at: str) -> dict[str, Any]:
    """A tool call of an earlier assistant message. Its arguments are text of a model, which may be invalid JSON."""
    if function is None:
        raise BadRequestError(f"{at} must hold a function with a name", at)
    return {
        "id": id,
        "type": "function",
        "function": {"name": function.name, "arguments": function.arguments or "{}"},
    }
