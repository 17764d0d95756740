"""Frames do not depend on how the bytes were cut, and nothing is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.shared.sse import SseFrame, SseSplitter

_EOLS = st.sampled_from([b"\n", b"\r\n", b"\r"])
_TEXT = st.text("ab:é \x00{", max_size=8).map(str.encode)
_LINES = st.one_of(
    _TEXT.map(lambda text: b"data: " + text),
    _TEXT.map(lambda text: b": " + text),
    _TEXT.map(lambda text: b"event: " + text),
    st.sampled_from([b"data", b"data:", b"id: 7", b":"]),
)


@st.composite
def _streams(draw: st.DrawFn) -> bytes:
    out = b""
    for _ in range(draw(st.integers(0, 5))):
        eol = draw(_EOLS)
        out += b"".join(line + eol for line in draw(st.lists(_LINES, min_size=1, max_size=3))) + eol
    return out + draw(st.sampled_from([b"", b"data: unfinished", b"\n", b"\r"]))


def _split(pieces: list[bytes]) -> list[SseFrame]:
    splitter = SseSplitter()
    found = [frame for piece in pieces for frame in splitter.feed(piece)]
    return found + splitter.end()


@given(_streams(), st.data())
def test_frames_do_not_depend_on_how_bytes_are_split(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    whole = _split([stream])
    assert _split(pieces) == whole
    assert _split([stream[i : i + 1] for i in range(len(stream))]) == whole


@given(st.binary(max_size=200), st.data())
def test_frames_of_arbitrary_bytes_do_not_depend_on_their_pieces(stream: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(stream)))
    assert _split([stream[:cut], stream[cut:]]) == _split([stream])


def _split_quickly(pieces: list[bytes]) -> list[bytes | None]:
    """The payload of every frame, from `plain` if possible."""
    splitter = SseSplitter()
    found: list[bytes | None] = []
    for piece in pieces:
        payloads = splitter.plain(piece)
        found += [frame.data for frame in splitter.feed(piece)] if payloads is None else payloads
    return found + [frame.data for frame in splitter.end()]


@given(st.lists(_streams() | _TEXT.map(lambda text: b"data: " + text + b"\n\n"), max_size=4))
def test_plain_pieces_have_the_payloads_of_their_frames(pieces: list[bytes]) -> None:
    assert _split_quickly(pieces) == [frame.data for frame in _split(pieces)]


@pytest.mark.parametrize(
    ("before", "piece", "payloads"),
    [
        (b"", b"data: {}\n\n", [b"{}"]),
        (b"", b"data: {}\n\ndata: [DONE]\n\n", [b"{}", b"[DONE]"]),
        (b"data", b"data: {}\n\n", None),
        (b"", b"data: {}\n", None),
        (b"", b"data:{}\n\n", None),
        (b"", b"data: {}\r\n\n\n", None),
        (b"", b"data: {}\n\n: comment\n\n", None),
        (b"", b"data: a\ndata: b\n\n", None),
    ],
)
def test_only_whole_frames_of_one_line_are_plain(before: bytes, piece: bytes, payloads: list[bytes] | None) -> None:
    splitter = SseSplitter()
    splitter.feed(before)
    assert splitter.plain(piece) == payloads


@given(st.lists(st.tuples(_TEXT, _EOLS), max_size=6))
def test_every_frame_keeps_its_data_or_the_bytes_of_its_comment(items: list[tuple[bytes, bytes]]) -> None:
    frames = _split([b"".join(b"data: " + text + eol + eol for text, eol in items)])
    assert [frame.data for frame in frames] == [text for text, _ in items]
    comments = _split([b"".join(b": " + text + eol + eol for text, eol in items)])
    assert [frame.comment for frame in comments] == [b": " + text + b"\n\n" for text, _ in items]


def test_fields_are_parsed_as_the_standard_says() -> None:
    frames = _split([b"\xef", b"\xbb\xbfevent: x\r\ndata: a\r\ndata:b\r\n\r\n\n\n: hi\n\ndata\n\nid: 3\n\n"])
    assert [(frame.event, frame.data) for frame in frames] == [(b"x", b"a\nb"), (None, None), (None, b""), (None, None)]
    assert [frame.comment for frame in frames] == [None, b": hi\n\n", None, None]


def test_frame_beyond_the_limit_is_an_error() -> None:
    splitter = SseSplitter(max_frame_bytes=10)
    splitter.feed(b"data: 123")
    with pytest.raises(ValueError, match="exceeds 10 bytes"):
        splitter.feed(b"45")


def test_stream_end_completes_a_frame_after_a_blank_line_and_drops_an_unfinished_one() -> None:
    assert _split([b"data: x\r\r"])[0].data == b"x"
    assert _split([b"data: x\n\r"])[0].data == b"x"
    assert _split([b"data: x\n"]) == []
    assert _split([b"data: x\n\n\r\r"]) == [SseFrame(b"x")]
