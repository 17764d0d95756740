"""What a simulated device answers itself, without its server: chosen, not random."""

from __future__ import annotations

import struct

from inference.devices.simgpu.core.wire import Command, Conversation, reply, request


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
