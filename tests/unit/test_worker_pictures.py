"""Where a batch may end so that no image is divided, and the sizes that image files claim."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.worker.prompt.image_tokens import size_of, undivided
from tests.rigs import tiny_projector

#         0  1   2   3   4  5   6   7   8   9  10
PROMPT = [7, 8, -5, -6, -7, 9, -20, -21, -40, -41, 3]
"""Two texts, an image of three, a text, an image of two, another of two behind it, a text."""


@pytest.mark.parametrize(
    ("start", "end", "most", "found"),
    [
        (0, 2, 99, 2),  # before an image
        (0, 3, 99, 2),  # inside it: before it
        (0, 4, 99, 2),
        (0, 5, 99, 5),  # behind it
        (2, 3, 99, 5),  # begins with it: all of it
        (2, 3, 3, 5),
        (2, 3, 2, 2),  # no room for it
        (5, 8, 99, 8),  # between two images
        (5, 9, 99, 8),
        (8, 9, 99, 10),
        (0, 11, 99, 11),  # everything
    ],
)
def test_no_image_is_divided(start: int, end: int, most: int, found: int) -> None:
    assert undivided(PROMPT, start, end, most) == found


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], set[int]]:
    """Tokens with images in them, and the places where none is divided."""
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
def test_from_any_cut_on_the_next_end_is_a_cut_and_an_empty_batch_means_an_image_is_too_large(
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
def test_a_file_says_how_large_it_is(data: bytes, size: tuple[int, int] | None) -> None:
    assert size_of(data) == size
