"""ggml's RPC server on the CPU for one connection of a simulated device.

`python -m inference.devices.simgpu.rpc_server` prints its port and serves until it is killed or its parent ends. ggml's
server accepts one client at a time, so each connection has its own. Lines on stdin move unused buffers out of the
device's memory and back; the answers on stdout are `{"bytes": moved}` or `{"error": message}`:

    {"do": "suspend", "buffers": [[pointer, bytes], ...]}   {"do": "resume"}
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import socket
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

from headgate.shared import child_process
from inference.devices.simgpu.aside import Aside, AsideError
from inference.worker import ggml_backends

LISTEN_SECONDS = 20.0
THREADS = 1
"""More threads spin while they wait for each other, and workers need the cores: with two threads on two busy cores a
token of a 135 M model took 0.8 s instead of 0.014 s.
"""
_MOST_DESCRIPTORS = 64


def package() -> Path | None:
    """The folder of llama-cpp-python, found without importing it; None when it is not installed."""
    found = importlib.util.find_spec("llama_cpp")
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def main() -> int:
    """Serves. Returns only when ggml's server does not start."""
    child_process.die_with_parent(os.environ)
    child_process.disable_core_dumps()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # ggml's server prints there
    before = set(_listening())
    threading.Thread(target=_serve_for_ever, daemon=True).start()
    deadline = time.monotonic() + LISTEN_SECONDS
    while not (ports := [port for port in _listening() if port not in before]):
        if time.monotonic() > deadline:
            sys.stderr.write("ggml's RPC server does not listen\n")
            return 1
        time.sleep(0.001)
    answers.write(f"{ports[0]}\n")
    answers.flush()
    aside = Aside()
    for line in sys.stdin:
        answers.write(json.dumps(_moved(aside, json.loads(line))) + "\n")
        answers.flush()
    threading.Event().wait()
    return 1


def _moved(aside: Aside, command: dict[str, Any]) -> dict[str, Any]:
    """Runs one command."""
    try:
        if command["do"] == "resume":
            return {"bytes": aside.put_back()}
        base = library().ggml_backend_buffer_get_base
        base.restype, base.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        return {"bytes": aside.take([(base(pointer), size) for pointer, size in command["buffers"] if size])}
    except AsideError as error:
        return {"error": str(error)}


@functools.cache
def library() -> ctypes.CDLL:
    """ggml with its backends, without importing llama-cpp-python; raises OSError where there is none."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ggml_backends.load(ctypes.CDLL(str(_folder() / f"libggml.{suffix}")), _folder())


def rpc_library() -> ctypes.CDLL:
    """The library with the functions of ggml's RPC backend; raises OSError where there is none."""
    return ggml_backends.rpc(library(), _folder())


def _folder() -> Path:
    found = package()
    if found is None:
        raise OSError("llama-cpp-python is not installed")
    return found / "lib"


def _serve_for_ever() -> None:
    try:
        _serve()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
    finally:
        os._exit(1)


def _serve() -> None:
    lib = library()
    lib.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    lib.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    start = rpc_library().ggml_backend_rpc_start_server
    start.restype = None
    start.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    cpu = (ctypes.c_void_p * 1)(lib.ggml_backend_dev_by_name(b"CPU"))
    start(b"127.0.0.1:0", None, THREADS, 1, cpu)


def _listening() -> list[int]:
    """Ports of the TCP sockets on which this process listens: ggml's server does not tell which one it got."""
    ports: list[int] = []
    for number in range(3, _MOST_DESCRIPTORS):
        with contextlib.suppress(OSError):  # no such descriptor
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(number))
            try:
                if sock.family == socket.AF_INET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.append(sock.getsockname()[1])
            finally:
                sock.close()
    return ports


if __name__ == "__main__":
    sys.exit(main())
