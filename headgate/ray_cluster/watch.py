"""`python -m headgate.ray_cluster.watch [ADDRESS]`: prints the membership of a Ray cluster, one JSON line per change.

The gateway starts it. It ends with status 0 when its stdin is closed, and with an error status when it cannot connect
to the cluster. It is killed when its parent (HEADGATE_PARENT) ends. While the controller does not answer, the last line
stays valid.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, TextIO

from headgate.ray_cluster import cluster
from headgate.ray_cluster.cluster_errors import ClusterError, NoClusterError
from headgate.shared.child_process import die_with_parent
from headgate.shared.errors import HeadgateError

LONG_POLL_SECONDS = 20.0
"""How long the controller waits for a change before it answers."""
RETRY_SECONDS = 1.0


def main(argv: list[str]) -> int:
    """Prints changes until stdin is closed, which ends the process. Returns the exit status of a failed connection."""
    die_with_parent(os.environ)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Ray prints goes to stderr
    try:
        cluster.connect(argv[0] if argv else "")
    except HeadgateError as error:
        sys.stderr.write(f"{error}\n")
        return int(error.exit_code)
    _follow(out)
    return 0


def _end_with_stdin() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock would abort the end of the interpreter
        continue
    os._exit(0)


def _follow(out: TextIO) -> None:
    """Prints changes. Ends only with the process."""
    seen: Any = None
    problem = ""
    while True:
        try:
            members = cluster.answer(
                cluster.controller().membership.remote(seen, LONG_POLL_SECONDS), 2 * LONG_POLL_SECONDS
            )
        except (ClusterError, NoClusterError) as error:
            if str(error) != problem:
                problem = str(error)
                sys.stderr.write(f"{problem}; the last list of nodes, if there was one, stays in use\n")
            time.sleep(RETRY_SECONDS)
            continue
        problem = ""
        if members is not None and members != seen:
            out.write(json.dumps({"nodes": members}) + "\n")
            out.flush()
            seen = members


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
