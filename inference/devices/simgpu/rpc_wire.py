"""Parses and rewrites ggml's RPC protocol between one client and its server (pure).

A request is a command byte, an 8-byte little-endian size and a payload; a reply, if the command has one, is a size and
a payload. Replies come in the order of the requests. The layouts are those of protocol version 7 (llama.cpp 0c1e57098).
Another major version or an unknown command ends the connection, because the proxy could not match replies any more.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

MAJOR_VERSION = 7


class Command(IntEnum):
    """The commands of the protocol."""

    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    BUFFER_CLEAR = 5
    SET_TENSOR = 6
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GRAPH_COMPUTE = 10
    GET_DEVICE_MEMORY = 11
    INIT_TENSOR = 12
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    GRAPH_RECOMPUTE = 16
    MEMSET_TENSOR = 17


SILENT = frozenset(
    {
        Command.FREE_BUFFER,
        Command.BUFFER_CLEAR,
        Command.SET_TENSOR,
        Command.GRAPH_COMPUTE,
        Command.INIT_TENSOR,
        Command.GRAPH_RECOMPUTE,
        Command.MEMSET_TENSOR,
    }
)
"""Commands that have no reply."""
_COMPUTES = frozenset({Command.GRAPH_COMPUTE, Command.GRAPH_RECOMPUTE})
_SIZE = struct.Struct("<Q")
_HEAD = struct.Struct("<BQ")
_ALLOC = struct.Struct("<IQ")  # device, bytes
_ALLOCATED = struct.Struct("<QQ")  # pointer, bytes
_POINTER = struct.Struct("<Q")
_MEMORY = struct.Struct("<QQ")  # free, total
_READ_WHOLE = {Command.ALLOC_BUFFER: _ALLOC.size, Command.FREE_BUFFER: _POINTER.size, Command.GET_DEVICE_MEMORY: 4}
"""Requests whose payload is parsed, and its length in bytes."""
_REPLY_READ_WHOLE = {Command.ALLOC_BUFFER: _ALLOCATED.size, Command.HELLO: 28}
_MARK, _MARKED_BYTES = Command.DEVICE_COUNT, 4
"""The smallest request, and the length of its reply."""


class WireError(Exception):
    """The stream violates the protocol; the connection must end."""


class Account(Protocol):
    """One connection's view of the device's memory."""

    def request(self, size_bytes: int) -> bool:
        """Whether `size_bytes` may be allocated; a granted request is followed by `created` or `creation_failed`."""
        ...

    def created(self, pointer: int, requested_bytes: int, size_bytes: int) -> None:
        """The granted buffer exists."""
        ...

    def creation_failed(self, requested_bytes: int) -> None:
        """The server could not make the granted buffer."""
        ...

    def free(self, pointer: int) -> None:
        """A buffer is freed."""
        ...

    def computed(self) -> None:
        """A graph is computed."""
        ...

    def memory(self) -> tuple[int, int]:
        """The (free, total) bytes that the device reports."""
        ...


def request(command: int, payload: bytes = b"") -> bytes:
    """The bytes of a request."""
    return _HEAD.pack(command, len(payload)) + payload


def reply(payload: bytes) -> bytes:
    """The bytes of a reply."""
    return _SIZE.pack(len(payload)) + payload


Piece = bytes | memoryview
"""Bytes to send; a view refers to the input of `from_client` or `from_server` and is valid as long
as the input."""


@dataclass(slots=True)
class Flow:
    """The bytes to send after a call of `from_client` or `from_server`, and the requests that began in it,
    some of which compute.
    """

    to_server: list[Piece] = field(default_factory=list)
    to_client: list[Piece] = field(default_factory=list)
    requests: int = 0
    computations: int = 0


@dataclass(slots=True)
class _Stream:
    """One direction: collects headers and parsed payloads; other payloads pass without a copy."""

    head_size: int
    wanted: int  # bytes to collect before the next decision
    gathered: bytearray = field(default_factory=bytearray)
    left: int = 0  # remaining bytes of a payload that is not parsed

    def gather(self, data: memoryview) -> memoryview:
        """Adds the missing bytes from `data`; returns the rest."""
        missing = self.wanted - len(self.gathered)
        self.gathered += data[:missing]
        return data[missing:]

    def take(self) -> bytes:
        """The collected bytes; a header follows."""
        whole = bytes(self.gathered)
        self.gathered.clear()
        self.wanted = self.head_size
        return whole


@dataclass(slots=True)
class _Awaited:
    """A pending reply of the server, or a `local` one that waits for its turn.

    Replies to a mark are not sent to the client.
    """

    command: Command
    requested_bytes: int = 0
    local: bytes | None = None
    is_mark: bool = False


class Conversation:
    """The requests and replies of one connection; `account` decides what is allocated."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._client = _Stream(_HEAD.size, _HEAD.size)
        self._server = _Stream(_SIZE.size, _SIZE.size)
        self._awaited: deque[_Awaited] = deque()

    @property
    def is_quiet(self) -> bool:
        """Whether no request is pending, as far as known: some requests have no reply."""
        return not any((self._awaited, *(stream.gathered or stream.left for stream in (self._client, self._server))))

    def mark(self) -> Flow:
        """A request of the proxy, whose reply shows that the server has completed all earlier requests.

        It must be sent between two requests of the client, which does not see it.
        """
        self._awaited.append(_Awaited(_MARK, is_mark=True))
        return Flow([request(_MARK)])

    def from_client(self, data: Piece) -> Flow:
        """Processes bytes of the client. Raises WireError for an invalid request."""
        flow, stream, rest = Flow(), self._client, memoryview(data)
        while rest:
            if stream.left:
                piece, rest = rest[: stream.left], rest[stream.left :]
                stream.left -= len(piece)
                flow.to_server.append(piece)
                continue
            rest = stream.gather(rest)
            if len(stream.gathered) == stream.wanted:
                self._begun(stream, flow)
        return flow

    def from_server(self, data: Piece) -> Flow:
        """Processes bytes of the server. Raises WireError for bytes without a request."""
        flow, stream, rest = Flow(), self._server, memoryview(data)
        while rest:
            if stream.left:
                piece, rest = rest[: stream.left], rest[stream.left :]
                stream.left -= len(piece)
                flow.to_client.append(piece)
                if not stream.left:
                    self._answered(flow)
                continue
            rest = stream.gather(rest)
            if len(stream.gathered) == stream.wanted:
                self._replied(stream, flow)
        return flow

    def _begun(self, stream: _Stream, flow: Flow) -> None:
        """Handles a header, with its payload if it is parsed."""
        command, size = self._known(bytes(stream.gathered[: _HEAD.size]))
        expected = _READ_WHOLE.get(command)
        if expected is None:
            flow.to_server.append(stream.take())
            stream.left = size
            if command not in SILENT:
                self._awaited.append(_Awaited(command))
            elif command in _COMPUTES:
                self._account.computed()
        elif size != expected:
            raise WireError(f"{command.name} has {size} bytes where {expected} are expected")
        elif stream.wanted == _HEAD.size:
            stream.wanted += size
            return
        else:
            self._read(command, stream.take()[_HEAD.size :], flow)
        flow.requests += 1
        flow.computations += command in _COMPUTES

    def _replied(self, stream: _Stream, flow: Flow) -> None:
        """Handles the size of a reply, with its payload if it is parsed."""
        if not self._awaited:
            raise WireError("the server answered without a request")
        (size,) = _SIZE.unpack_from(stream.gathered)
        awaited = self._awaited[0]
        expected = _MARKED_BYTES if awaited.is_mark else _REPLY_READ_WHOLE.get(awaited.command)
        if expected is None:
            flow.to_client.append(stream.take())
            stream.left = size
            if not size:
                self._answered(flow)
        elif size != expected:
            raise WireError(f"the reply to {awaited.command.name} has {size} bytes instead of {expected}")
        elif stream.wanted == _SIZE.size:
            stream.wanted += size
        else:
            whole = stream.take()
            if not awaited.is_mark:
                self._note(awaited, whole[_SIZE.size :])
                flow.to_client.append(whole)
            self._answered(flow)

    def _known(self, head: bytes) -> tuple[Command, int]:
        number, size = _HEAD.unpack(head)
        try:
            return Command(number), size
        except ValueError:
            raise WireError(f"command {number} is not known") from None

    def _read(self, command: Command, payload: bytes, flow: Flow) -> None:
        """Handles a request that the proxy decides or counts."""
        if command is Command.FREE_BUFFER:
            self._account.free(*_POINTER.unpack(payload))
            flow.to_server.append(request(command, payload))
            return
        if command is Command.GET_DEVICE_MEMORY:
            answer = _MEMORY.pack(*self._account.memory())
        else:
            _device, size = _ALLOC.unpack(payload)
            if self._account.request(size):
                self._awaited.append(_Awaited(command, requested_bytes=size))
                flow.to_server.append(request(command, payload))
                return
            answer = _ALLOCATED.pack(0, 0)
        self._awaited.append(_Awaited(command, local=reply(answer)))
        self._flush(flow)

    def _note(self, awaited: _Awaited, payload: bytes) -> None:
        """Handles a reply that the proxy reads."""
        if awaited.command is Command.HELLO:
            if payload[0] != MAJOR_VERSION:
                raise WireError(f"the server has protocol version {payload[0]}, not {MAJOR_VERSION}")
            return
        pointer, size = _ALLOCATED.unpack(payload)
        if pointer:
            self._account.created(pointer, awaited.requested_bytes, size)
        else:
            self._account.creation_failed(awaited.requested_bytes)

    def _answered(self, flow: Flow) -> None:
        self._awaited.popleft()
        self._flush(flow)

    def _flush(self, flow: Flow) -> None:
        flow.to_client.extend(self._local())

    def _local(self) -> Iterator[bytes]:
        while self._awaited and (local := self._awaited[0].local) is not None:
            self._awaited.popleft()
            yield local
