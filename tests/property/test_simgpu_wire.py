"""A simulated device passes on every byte in order, except the commands that it decides itself."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.devices.simgpu.rpc_wire import MAJOR_VERSION, SILENT, Command, Conversation, WireError, reply, request

FREE, TOTAL = 123, 456
LIMIT = 1000


class Book:
    """An account that grants up to LIMIT bytes at once and records everything."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def request(self, size_bytes: int) -> bool:
        return size_bytes <= LIMIT

    def created(self, pointer: int, requested_bytes: int, size_bytes: int) -> None:
        self.events.append(("made", size_bytes))

    def creation_failed(self, requested_bytes: int) -> None:
        self.events.append(("unmade", requested_bytes))

    def free(self, pointer: int) -> None:
        self.events.append(("free", pointer))

    def computed(self) -> None:
        self.events.append(("computed", 0))

    def memory(self) -> tuple[int, int]:
        return FREE, TOTAL


def payloads(command: Command) -> st.SearchStrategy[bytes]:
    if command is Command.ALLOC_BUFFER:
        return st.integers(0, 2 * LIMIT).map(lambda size: struct.pack("<IQ", 0, size))
    if command is Command.FREE_BUFFER:
        return st.integers(0, 99).map(lambda pointer: struct.pack("<Q", pointer))
    if command is Command.GET_DEVICE_MEMORY:
        return st.just(bytes(4))
    return st.binary(max_size=60)


requests = st.lists(
    st.sampled_from(Command).flatmap(lambda command: st.tuples(st.just(command), payloads(command))), max_size=12
)


def alloc_size(payload: bytes) -> int:
    return int(struct.unpack("<IQ", payload)[1])


def is_decided_by_the_device(command: Command, payload: bytes) -> bool:
    return command is Command.GET_DEVICE_MEMORY or (command is Command.ALLOC_BUFFER and alloc_size(payload) > LIMIT)


def server_answer(command: Command, payload: bytes) -> bytes:
    """The answer of a server: an odd allocation fails although it was granted."""
    if command is Command.ALLOC_BUFFER:
        size = alloc_size(payload)
        return struct.pack("<QQ", 0, 0) if size % 2 else struct.pack("<QQ", 7, size + 2)
    if command is Command.HELLO:
        return bytes([MAJOR_VERSION]) + bytes(27)
    return payload[::-1]


def expected_answer(command: Command, payload: bytes) -> bytes:
    if command is Command.GET_DEVICE_MEMORY:
        return struct.pack("<QQ", FREE, TOTAL)
    if is_decided_by_the_device(command, payload):
        return struct.pack("<QQ", 0, 0)
    return server_answer(command, payload)


def pieces(data: bytes, sizes: Iterator[int]) -> Iterator[bytes]:
    while data:
        size = next(sizes)
        yield data[:size]
        data = data[size:]


@given(sent=requests, data=st.data())
def test_bytes_pass_in_order_in_any_pieces(sent: list[tuple[Command, bytes]], data: st.DataObject) -> None:
    """The server gets every request that is not decided here; the client gets one answer per request, in order."""
    book = Book()
    talk = Conversation(book)
    sizes = iter(lambda: data.draw(st.integers(1, 40)), None)
    to_server = b""
    to_client = b""
    begun = 0
    passed = [(command, payload) for command, payload in sent if not is_decided_by_the_device(command, payload)]
    answers = b"".join(reply(server_answer(*item)) for item in passed if item[0] not in SILENT)
    for piece in pieces(b"".join(request(*item) for item in sent), sizes):
        flow = talk.from_client(piece)
        to_server += b"".join(flow.to_server)
        to_client += b"".join(flow.to_client)
        begun += flow.requests
    for piece in pieces(answers, sizes):
        flow = talk.from_server(piece)
        assert flow.to_server == []
        to_client += b"".join(flow.to_client)
    assert begun == len(sent)
    assert to_server == b"".join(request(*item) for item in passed)
    expected = [item for item in sent if item[0] not in SILENT]
    assert to_client == b"".join(reply(expected_answer(*item)) for item in expected)
    made = [("made", alloc_size(payload) + 2) for command, payload in passed if is_made(command, payload)]
    assert [event for event in book.events if event[0] == "made"] == made
    assert sum(event[0] == "free" for event in book.events) == sum(item[0] is Command.FREE_BUFFER for item in sent)


def is_made(command: Command, payload: bytes) -> bool:
    return command is Command.ALLOC_BUFFER and alloc_size(payload) % 2 == 0


@given(sent=requests, data=st.data())
def test_client_that_waits_gets_each_answer_before_its_next_request(
    sent: list[tuple[Command, bytes]], data: st.DataObject
) -> None:
    """A client that waits for each answer, as llama.cpp does, gets it before its next request."""
    talk = Conversation(Book())
    for command, payload in sent:
        flow = talk.from_client(request(command, payload))
        received = b"".join(flow.to_client)
        if not is_decided_by_the_device(command, payload):
            assert b"".join(flow.to_server) == request(command, payload)
            if command not in SILENT:
                received += b"".join(talk.from_server(reply(server_answer(command, payload))).to_client)
        assert received == (b"" if command in SILENT else reply(expected_answer(command, payload)))


def test_payload_is_not_copied() -> None:
    """Weights are passed on without a copy."""
    talk = Conversation(Book())
    weights, answer = bytes(1000), bytes(500)
    ask = request(Command.GET_TENSOR, b"which")
    sent = request(Command.FREE_BUFFER, bytes(8)) + request(Command.SET_TENSOR, weights) + ask
    flow = talk.from_client(sent)
    views = [piece for piece in flow.to_server if isinstance(piece, memoryview)]
    assert [(view.obj is sent, bytes(view)) for view in views] == [(True, weights), (True, b"which")]
    back = reply(answer)
    views = [piece for piece in talk.from_server(back).to_client if isinstance(piece, memoryview)]
    assert [(view.obj is back, bytes(view)) for view in views] == [(True, answer)]


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (request(18), "command 18"),
        (request(255, b"x"), "command 255"),
        (request(Command.ALLOC_BUFFER, b"1234"), "ALLOC_BUFFER has 4 bytes"),
        (request(Command.FREE_BUFFER), "FREE_BUFFER has 0 bytes"),
    ],
)
def test_invalid_request_ends_the_connection(stream: bytes, words: str) -> None:
    """Also before its payload has arrived."""
    for data in (stream, stream[:9]):
        with pytest.raises(WireError, match=words):
            Conversation(Book()).from_client(data)


@pytest.mark.parametrize(
    ("expected", "answer", "words"),
    [
        (b"", reply(b"x"), "without a request"),
        (request(Command.FREE_BUFFER, bytes(8)), reply(b""), "without a request"),
        (request(Command.HELLO, bytes(24)), reply(bytes([8]) + bytes(27)), "version 8"),
        (request(Command.HELLO, bytes(24)), reply(bytes(3)), "has 3 bytes"),
    ],
)
def test_invalid_answer_ends_the_connection(expected: bytes, answer: bytes, words: str) -> None:
    talk = Conversation(Book())
    talk.from_client(expected)
    with pytest.raises(WireError, match=words):
        talk.from_server(answer)
