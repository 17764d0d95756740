"""Opens listening TCP sockets and finds the process that uses a port."""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headgate.shared.errors import HeadgateError, PortInUseError

BACKLOG = 2048
_LISTEN = "0A"
_MAX_COMMAND_CHARS = 80


def listen(host: str, port: int) -> socket.socket:
    """A non-blocking socket that listens on `host` and `port` (0: a free port). Children do not inherit it.

    Raises PortInUseError that names the process on the port, and HeadgateError when the address cannot be used.
    """
    if not 0 <= port <= 65535:  # getaddrinfo takes the number modulo 65536
        raise HeadgateError(f"{port} is not a port; use a number from 0 to 65535")
    family, address = _resolve(host, port)
    # With the protocol number asyncio recognizes TCP connections and disables Nagle's algorithm for them.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"port {port} on {host} is in use by {owner(port)}; stop it, or choose another port with --port"
            ) from None
        if error.errno == errno.EACCES:
            raise HeadgateError(
                f"not allowed to listen on port {port} ({error.strerror}); choose a port above 1023"
            ) from error
        raise HeadgateError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose an address of this machine with --host"
        ) from error
    return sock


def check_free(host: str, port: int) -> None:
    """Raises the errors of `listen` for this address; keeps no socket open."""
    listen(host, port).close()


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The address family and the socket address, which with IPv6 names the interface of a link-local address."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise HeadgateError(
            f"cannot listen on {host}:{port} ({error}); choose an address of this machine with --host"
        ) from error
    family, _, _, _, address = found[0]
    return family, address


def owner(port: int) -> str:
    """Text for messages about the process that listens on `port`, such as `pid 4711 (python -m gateway)`."""
    pid = owner_pid(port)
    if pid is None:
        return "a process that this user cannot see"
    text = command(pid)
    return f"pid {pid} ({text if len(text) <= _MAX_COMMAND_CHARS else text[: _MAX_COMMAND_CHARS - 3] + '...'})"


def owner_pid(port: int) -> int | None:
    """The id of the process that listens on `port`; None when there is none, or when this user cannot see it."""
    if Path("/proc/net/tcp").exists():
        inodes = set(_listening_inodes(port))
        return next((pid for pid in _pids() if _has_socket(pid, inodes)), None) if inodes else None
    if lsof := shutil.which("lsof"):
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):  # only used in messages
            found = subprocess.run(
                [lsof, "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-t"], capture_output=True, text=True, timeout=5
            )
            return int(found.stdout.split()[0])
    return None


def _listening_inodes(port: int) -> Iterator[str]:
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with contextlib.suppress(OSError):  # no IPv6 on this machine
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def connection_owner(port: int, peer_port: int) -> int | None:
    """The id of the process at the end `port` of an IPv4 connection between local ports; `peer_port` is the other end.

    None when /proc does not show it.
    """
    inodes = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            ends = [int(fields[at].rpartition(":")[2], 16) for at in (1, 2)]
            if ends == [port, peer_port]:
                inodes.add(fields[9])
    return next((pid for pid in _pids() if _has_socket(pid, inodes)), None) if inodes else None


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _has_socket(pid: int, inodes: set[str]) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        return not inodes.isdisjoint(socket_inodes(pid))
    return False


def socket_inodes(pid: int) -> Iterator[str]:
    """Inodes of the open sockets of a process, from /proc. Raises OSError when it ended or belongs to another user."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime
            target = str(entry.readlink())
            if target.startswith("socket:["):
                yield target[8:-1]


def arguments(pid: int) -> list[str]:
    """The program and the arguments of a process; empty when /proc does not show them."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    return []


def command(pid: int) -> str:
    """The command line of a process, else the name of its program from `ps`, else `unknown command`."""
    if text := " ".join(word for word in arguments(pid) if word):
        return text
    if ps := shutil.which("ps"):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = subprocess.run([ps, "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, timeout=5)
            if text := found.stdout.strip():
                return text
    return "unknown command"
