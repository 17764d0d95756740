"""Starts one worker process with its link, its listening socket and its output pipe.

A failure is one error and leaves no descriptor, socket or process behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headgate.shared.errors import HeadgateError
from inference.worker_link import KEEP_FD_ENV, LINK_FD_ENV, PARENT_ENV, SOCKET_FD_ENV
from inference.workers.child_environment import child_environment
from inference.workers.os_api import exit_descriptor


@dataclass(frozen=True, slots=True)
class Launched:
    """A process and the service's ends of its connections, all non-blocking.

    `errors` reads its output. `ended` becomes readable when it ends; None where the system has no such descriptor.
    """

    process: subprocess.Popen[bytes]
    link: socket.socket
    errors: int
    ended: int | None


def launch(name: str, path: Path, command: Sequence[str], environment: Mapping[str, str], keep: int | None) -> Launched:
    """Starts a worker for `name` that listens on the Unix socket `path` and inherits the descriptor `keep`.

    Raises HeadgateError.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        try:
            # Only the worker keeps the socket, so that it closes with the worker and no client waits in its backlog.
            listener = theirs.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            link, far_link = socket.socketpair()
            ours.enter_context(link)
            theirs.enter_context(far_link)
            errors, far_errors = os.pipe()
            ours.callback(os.close, errors)
            theirs.callback(os.close, far_errors)
            ours.callback(path.unlink, missing_ok=True)
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(1024)
            link.setblocking(False)
            os.set_blocking(errors, False)
            kept = {} if keep is None else {KEEP_FD_ENV: str(keep)}
            process = subprocess.Popen(
                command,
                env=child_environment(
                    {
                        **environment,
                        **kept,
                        LINK_FD_ENV: str(far_link.fileno()),
                        SOCKET_FD_ENV: str(listener.fileno()),
                        PARENT_ENV: str(os.getpid()),
                        "PYTHONUNBUFFERED": "1",
                    }
                ),
                stdin=subprocess.DEVNULL,
                stdout=far_errors,
                stderr=far_errors,
                pass_fds=(far_link.fileno(), listener.fileno(), *([] if keep is None else [keep])),
                process_group=0,
            )
        except OSError as error:
            raise HeadgateError(f"cannot start a worker for {name} ({error})") from error
        ours.pop_all()
    return Launched(process, link, errors, exit_descriptor(process.pid))
