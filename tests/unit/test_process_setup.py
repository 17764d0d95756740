"""Environment of the services, listening ports, and children that end with their parent."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headgate.shared import child_process, ports
from headgate.shared.errors import ConfigError, HeadgateError, PortInUseError
from headgate.shared.state_directory import load_environ
from tests.rigs.processes import free_port, is_alive, wait_until

_NOT_READY = 0x48
"""Flags of an IPv6 address that is checked for duplicates (tentative) or is one (dadfailed)."""


def test_environment_overrides_the_env_file(tmp_path: Path) -> None:
    assert load_environ({"A": "own"}, tmp_path) == {"A": "own"}
    (tmp_path / ".env").write_text("A=file\nB='two words'\nexport C=three # a comment\nLONELY\n")
    assert load_environ({"A": "own", "EMPTY": ""}, tmp_path) == {
        "A": "own", "EMPTY": "", "B": "two words", "C": "three",
    }  # fmt: skip


def test_binary_env_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"\.env: cannot be read"):
        load_environ({}, tmp_path)


def test_error_of_a_port_in_use_names_its_owner() -> None:
    with ports.listen("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"port {port} on 127\.0\.0\.1 is in use by pid {os.getpid()} \("):
            ports.listen("127.0.0.1", port)
    ports.check_free("127.0.0.1", port)


def test_unknown_owner_of_a_port_is_described() -> None:
    assert ports.owner(free_port()) == "a process that this user cannot see"


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "127.0.0.256"])
def test_address_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(HeadgateError, match="choose an address of this machine"):
        ports.listen(host, free_port())


def test_link_local_address_with_its_interface_is_accepted() -> None:
    """Such an address is the same on several interfaces, so the system needs the number of one."""
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    own = next(((row[0], row[5]) for row in rows if row[3] == "20" and not int(row[4], 16) & _NOT_READY), None)
    if own is None:
        pytest.skip("needs an interface with a link-local address")
    host = str(ipaddress.IPv6Address(int(own[0], 16)))
    with ports.listen(f"{host}%{own[1]}", 0) as held:
        assert held.getsockname()[3] == socket.if_nametoindex(own[1])


@pytest.mark.parametrize("port", [-1, 65536, 2**16 + 8080, 10**30])
def test_number_that_is_no_port_is_an_error(port: int) -> None:
    """The system would listen on the rest of a division by 65536."""
    with pytest.raises(HeadgateError, match=f"{port} is not a port; use a number from 0 to 65535"):
        ports.listen("127.0.0.1", port)


def test_listening_sockets_are_not_inherited() -> None:
    with ports.listen("127.0.0.1", 0) as held:
        assert not held.get_inheritable()


_PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]],
                         env={**os.environ, "HEADGATE_PARENT": str(os.getpid())}, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
_CHILD = """
import os, time
from headgate.shared import child_process
child_process.die_with_parent(os.environ)
print("tied", flush=True)
time.sleep(60)
"""


def test_child_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, _CHILD], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        wait_until("the child is gone", lambda: not is_alive(child), seconds=5)


def test_child_of_an_ended_parent_exits_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(10)
    ended = subprocess.run(
        [sys.executable, "-c", _CHILD], env={**os.environ, "HEADGATE_PARENT": str(gone.pid)}, timeout=10
    )
    assert ended.returncode == 1


def test_without_a_parent_variable_nothing_happens() -> None:
    child_process.die_with_parent({})
    child_process.die_with_parent({"HEADGATE_PARENT": "nonsense"})


def test_service_links_of_kubernetes_are_ignored(tmp_path: Path) -> None:
    linked = {"INFERENCE_PORT": "tcp://10.0.0.7:8085", "GATEWAY_PORT_8080_TCP": "tcp://10.0.0.8:8080", "A": "own"}
    assert load_environ(linked, tmp_path) == {"A": "own"}
