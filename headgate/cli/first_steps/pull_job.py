"""`python -m headgate.cli.first_steps.pull_job SOURCE DIRECTORY`: a download for the inference service.

Writes one JSON object per line, whose `event` is `message`, `progress` (at most one a second, and the last of a file),
and at the end `done` or `error`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headgate.cli.first_steps.hub import Hub, Progress
from headgate.shared import child_process
from headgate.shared.errors import HeadgateError
from headgate.shared.state_directory import load_environ
from inference.models_dir import HubSource

PROGRESS_SECONDS = 1.0


def main(arguments: Sequence[str]) -> int:
    """Downloads one source. Returns the exit status: 1 after `error`. Ends when its parent ends."""
    text, directory = arguments
    child_process.die_with_parent(os.environ)
    source = HubSource.parse(text)
    shown_at = 0.0

    def show(progress: Progress) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if now - shown_at >= PROGRESS_SECONDS or progress.done_bytes == progress.total_bytes:
            shown_at = now
            _write("progress", **asdict(progress))

    try:
        hub = Hub(load_environ(), say=lambda text: _write("message", text=text), status=show)
        with contextlib.closing(hub):
            plan = hub.plan(source, Path(directory))
            if not plan.missing():
                _write("message", text=f"{source}: complete in {plan.folder}")
            path = hub.fetch(plan).path
    except HeadgateError as error:
        _write("error", message=str(error))
        return 1
    _write("done", path=str(path), bytes=sum(file.bytes for file in plan.files))
    return 0


def _write(event: str, **data: Any) -> None:
    print(json.dumps({"event": event, **data}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
