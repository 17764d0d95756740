"""Images in messages and tiles in prompts."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.protocol import Code
from inference.worker.api import generation_body
from inference.worker.prompt.image_tokens import size_of, undivided
from inference.worker.prompt.template_messages import MAX_IMAGES
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts
from tests.rigs import tiny_projector

PNG = tiny_projector.png()
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def image(url: Any = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


VISION = Facts("m", 100, 50, 8, ("chat", "vision"), image_marker="<M>")


def read(*content: Any, facts: Facts = VISION) -> tuple[str, list[bytes]]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    request = generation_body.chat({"messages": [{"role": "user", "content": parts}]}, facts)
    return request.messages[0]["content"], list(request.images)


def test_image_is_replaced_by_a_marker() -> None:
    """Texts are joined with line breaks, images without."""
    assert read("a", "b", image(), "c", image(), image()) == ("a\nb<M>c<M><M>", [PNG] * 3)


def claimed(width: int, height: int) -> str:
    data = PNG[:16] + struct.pack(">II", width, height) + PNG[24:]
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/x.png", "do not fetch images"),
        ("data:image/png;base64", "do not fetch images"),
        ("data:image/webp;base64,AAAA", "PNG or JPEG in base64"),
        ("data:audio/wav;base64,AAAA", "PNG or JPEG in base64"),
        ("data:image/png,AAAA", "PNG or JPEG in base64"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:image/png;base64,AAAA", "not a PNG or JPEG file"),
        ("data:image/png;base64," + base64.b64encode(b"RIFF0000WAVE" * 9).decode(), "not a PNG or JPEG file"),
        (claimed(100_000, 100_000), "100000 x 100000 pixels"),
        (claimed(0, 5), "0 x 5 pixels"),
    ],
)
def test_unusable_image_is_rejected_with_its_place(url: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        read("look", image(url))
    assert caught.value.param == "messages[0].content[1].image_url"


@pytest.mark.parametrize("url", [None, 7, "http://169.254.169.254/", "file:///etc/passwd"])
def test_rejected_image_url_is_named_in_the_error(url: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        read("look", image(url))
    assert caught.value.param == "messages[0].content[1].image_url.url"


def test_number_of_images_is_limited() -> None:
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
def test_other_media_are_unsupported(part: dict[str, Any]) -> None:
    for facts, message in (
        (Facts("m", 100, 50, 8, ("chat",)), "reads text only"),
        (VISION, "reads text and images only"),
    ):
        with pytest.raises(BadRequestError, match=message) as caught:
            read(part, facts=facts)
        assert caught.value.code is Code.UNSUPPORTED_PARAMETER


def test_request_to_a_vision_model_has_the_image_files() -> None:
    request = generation_body.chat({"messages": [{"role": "user", "content": [image()]}]}, VISION)
    assert request.images == (PNG,)
    with pytest.raises(BadRequestError, match="reads text only"):
        generation_body.chat({"messages": [{"role": "user", "content": [image()]}]}, Facts("m", 100, 50, 8, ("chat",)))


#         0  1   2   3   4  5   6   7   8   9  10
PROMPT = [7, 8, -5, -6, -7, 9, -20, -21, -40, -41, 3]
"""Text, an image of three tokens, text, two adjacent images of two tokens, text."""


@pytest.mark.parametrize(
    ("start", "end", "most", "found"),
    [
        (0, 2, 99, 2),  # before an image
        (0, 3, 99, 2),  # within it: before it
        (0, 4, 99, 2),
        (0, 5, 99, 5),  # after it
        (2, 3, 99, 5),  # starts with it: all of it
        (2, 3, 3, 5),
        (2, 3, 2, 2),  # no room for it
        (5, 8, 99, 8),  # between two images
        (5, 9, 99, 8),
        (8, 9, 99, 10),
        (0, 11, 99, 11),  # everything
    ],
)
def test_image_is_not_split_between_batches(start: int, end: int, most: int, found: int) -> None:
    assert undivided(PROMPT, start, end, most) == found


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], set[int]]:
    """Tokens with images, and the places between images and texts."""
    tokens: list[int] = []
    cuts = {0}
    number = 1
    for size in draw(st.lists(st.integers(0, 6), min_size=1, max_size=12)):
        if size == 0:
            tokens.append(5)
        else:
            tokens += range(-number, -number - size, -1)
            number += size + 1
        cuts.add(len(tokens))
    return tokens, cuts


@given(prompts(), st.data())
def test_batches_end_between_images_and_an_empty_one_means_a_too_large_image(
    prompt: tuple[list[int], set[int]], data: st.DataObject
) -> None:
    tokens, cuts = prompt
    start = data.draw(st.sampled_from(sorted(cuts - {len(tokens)})))
    end = data.draw(st.integers(start + 1, len(tokens)))
    most = data.draw(st.integers(1, 8))
    found = undivided(tokens, start, end, most)
    assert found in cuts
    assert found <= max(end, start + most)
    if found == start:
        assert tokens[start] < 0
        assert min(cut for cut in cuts if cut > start) - start > most


def jpeg(*segments: tuple[int, bytes]) -> bytes:
    return b"\xff\xd8" + b"".join(
        bytes([0xFF, kind]) + (struct.pack(">H", len(data) + 2) + data if kind not in (0x01, 0xD0) else b"")
        for kind, data in segments
    )


FRAME = struct.pack(">BHH", 8, 480, 640) + bytes(10)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (tiny_projector.png(30, 20), (30, 20)),
        (tiny_projector.png()[:20], None),
        (jpeg((0xE0, bytes(14)), (0xDB, bytes(64)), (0xC0, FRAME)), (640, 480)),
        (jpeg((0x01, b""), (0xC2, FRAME)), (640, 480)),
        (b"\xff\xd8\xff" + jpeg((0xC1, FRAME))[2:], (640, 480)),  # a fill byte
        (jpeg((0xC4, bytes(30))), None),  # a table is no frame
        (jpeg((0xC0, FRAME))[:10], None),
        (b"\xff\xd8nonsense, and more of it", None),
        (b"GIF89a" + bytes(20), None),
        (b"", None),
    ],
    ids=["png", "png cut", "jpeg", "progressive", "filled", "no frame", "jpeg cut", "no marker", "gif", "nothing"],
)
def test_size_of_an_image_is_read_from_its_header(data: bytes, size: tuple[int, int] | None) -> None:
    assert size_of(data) == size
