"""Which images in messages are taken, which are refused and how, and what takes their place in the text."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from inference.protocol import Code
from inference.worker.api import generation_body
from inference.worker.prompt.message_images import MAX_IMAGES
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts
from tests.rigs import tiny_projector

PNG = tiny_projector.png()
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def image(url: Any = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


SEES = Facts("m", 100, 50, 8, ("chat", "vision"), image_marker="<M>")


def read(*content: Any, facts: Facts = SEES) -> tuple[str, list[bytes]]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    request = generation_body.chat({"messages": [{"role": "user", "content": parts}]}, facts)
    return request.messages[0]["content"], list(request.images)


def test_a_marker_takes_the_place_of_an_image() -> None:
    """Texts are joined by newlines, an image to its neighbors without."""
    assert read("a", "b", image(), "c", image(), image()) == ("a\nb<M>c<M><M>", [PNG] * 3)


def claimed(width: int, height: int) -> str:
    data = PNG[:16] + struct.pack(">II", width, height) + PNG[24:]
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.com/x.png", "fetches nothing"),
        ("data:image/png;base64", "fetches nothing"),
        ("data:image/webp;base64,AAAA", "PNG or JPEG in base64"),
        ("data:audio/wav;base64,AAAA", "PNG or JPEG in base64"),
        ("data:image/png,AAAA", "PNG or JPEG in base64"),
        ("data:image/png;base64,!!!!", "no valid base64"),
        ("data:image/png;base64,AAAA", "no PNG or JPEG file"),
        ("data:image/png;base64," + base64.b64encode(b"RIFF0000WAVE" * 9).decode(), "no PNG or JPEG file"),
        (claimed(100_000, 100_000), "100000 x 100000 pixels"),
        (claimed(0, 5), "0 x 5 pixels"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(url: Any, says: str) -> None:
    with pytest.raises(BadRequestError, match=says) as caught:
        read("look", image(url))
    assert caught.value.param == "messages[0].content[1].image_url"


@pytest.mark.parametrize("url", [None, 7, "http://169.254.169.254/", "file:///etc/passwd"])
def test_what_is_no_address_of_an_image_is_refused_by_name(url: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        read("look", image(url))
    assert caught.value.param == "messages[0].content[1].image_url.url"


def test_only_so_many_images() -> None:
    with pytest.raises(BadRequestError, match=f"at most {MAX_IMAGES} images"):
        read(*[image()] * (MAX_IMAGES + 1))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AAAA"}},
    ],
    ids=lambda part: part["type"],
)
def test_other_media_are_refused_with_and_without_sight(part: dict[str, Any]) -> None:
    for facts, says in ((Facts("m", 100, 50, 8, ("chat",)), "reads text only"), (SEES, "reads text and images only")):
        with pytest.raises(BadRequestError, match=says) as caught:
            read(part, facts=facts)
        assert caught.value.code is Code.UNSUPPORTED_PARAMETER


def test_a_body_for_a_model_that_sees_holds_the_files() -> None:
    facts = Facts("m", 100, 50, 8, ("chat", "vision"), image_marker="<M>")
    request = generation_body.chat({"messages": [{"role": "user", "content": [image()]}]}, facts)
    assert request.images == (PNG,)
    with pytest.raises(BadRequestError, match="reads text only"):
        generation_body.chat({"messages": [{"role": "user", "content": [image()]}]}, Facts("m", 100, 50, 8, ("chat",)))
