"""What a simulated device answers itself, without its server: chosen, not random."""

from __future__ import annotations

import struct

import pytest

from inference.devices.simgpu.rpc_wire import Command, Conversation, WireError, reply, request


class Full:
    """An account that grants nothing."""

    def ask(self, size_bytes: int) -> bool:
        return size_bytes < 0

    def made(self, pointer: int, asked_bytes: int, size_bytes: int) -> None:
        raise AssertionError("nothing was granted")

    def unmade(self, asked_bytes: int) -> None:
        raise AssertionError("nothing was granted")

    def free(self, pointer: int) -> None:
        raise AssertionError("there is nothing to give back")

    def memory(self) -> tuple[int, int]:
        return 0, 100


def test_an_allocation_without_room_never_reaches_the_server() -> None:
    """The client is told of no buffer, as by a server that has no memory; how much is free is answered here too."""
    talk = Conversation(Full())
    flow = talk.from_client(request(Command.ALLOC_BUFFER, struct.pack("<IQ", 0, 10)))
    assert (b"".join(flow.to_server), b"".join(flow.to_client)) == (b"", reply(struct.pack("<QQ", 0, 0)))
    flow = talk.from_client(request(Command.GET_DEVICE_MEMORY, bytes(4)))
    assert (b"".join(flow.to_server), b"".join(flow.to_client)) == (b"", reply(struct.pack("<QQ", 0, 100)))


def test_a_mark_is_answered_to_nobody() -> None:
    """The client sees nothing of it, also where it comes between its own requests; and what is under way is known."""
    talk = Conversation(Full())
    assert talk.is_quiet
    sent = talk.mark()
    assert (b"".join(sent.to_server), sent.to_client, sent.requests) == (request(Command.DEVICE_COUNT), [], 0)
    assert not talk.is_quiet
    assert talk.from_client(request(Command.GET_TENSOR, b"x")[:4]).to_client == []
    flow = talk.from_server(reply(bytes(4)))
    assert (flow.to_client, talk.is_quiet) == ([], False)  # of the request half is there
    talk.from_client(request(Command.GET_TENSOR, b"x")[4:])
    assert not talk.is_quiet  # it has no answer yet
    flow = talk.from_server(reply(b"tensor"))
    assert (b"".join(flow.to_client), talk.is_quiet) == (reply(b"tensor"), True)
    assert talk.from_client(request(Command.SET_TENSOR, b"abc")).to_client == []
    assert talk.is_quiet
    talk.from_client(request(Command.SET_TENSOR, b"abc")[:-1])
    assert not talk.is_quiet


def test_a_mark_answered_with_something_else_is_no_protocol() -> None:
    talk = Conversation(Full())
    talk.mark()
    with pytest.raises(WireError, match="DEVICE_COUNT is answered with 9 bytes where 4"):
        talk.from_server(reply(bytes(9)))
