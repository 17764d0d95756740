"""The one kind of helper process: `python -m inference.helper JOB`, JSON in, JSON out; decides and keeps nothing.

    estimate | tokenize | devices | checkpoint | trial | proof
                                                         one JSON object on stdin, one on stdout, then the end
    nvml                                                 one reading per line on stdin until stdin ends, and a
                                                         line of its own (NOTICE) when the next one has something new

Libraries that may abort a process (llama.cpp, NVML, CUDA) are opened here and in workers only. A helper dies with its
parent.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from headgate.shared import child_process
from inference.helpers import NOTICE

JOBS = ("estimate", "tokenize", "devices", "checkpoint", "trial", "proof", "nvml")


def main(argv: list[str] | None = None) -> int:
    """Runs one job; status 0 when an answer was written, 2 for an unknown job."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0] not in JOBS:
        sys.stderr.write(f"usage: python -m inference.helper {'|'.join(JOBS)}\n")
        return 2
    child_process.die_with_parent(os.environ)
    child_process.disable_core_dumps()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answer
    if arguments[0] == "nvml":
        _serve_nvml(answers)
        os._exit(0)  # a library in which a thread still listens is left as it is
    job = json.loads(sys.stdin.buffer.read() or b"{}")
    _answer(answers, _runner(arguments[0])(job))
    os._exit(0)  # the answer is out; a library's destructors have nothing to add


def _runner(name: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    if name == "estimate":
        from inference.estimate import estimate_job

        return estimate_job.run
    if name == "tokenize":
        from inference.estimate import tokenize_job

        return tokenize_job.run
    if name == "checkpoint":
        from inference.devices import checkpoint_job

        return checkpoint_job.run
    if name == "trial":
        from inference.devices import compute_trial_job

        return compute_trial_job.run
    if name == "proof":
        from inference.helpers import build_proof_job

        return build_proof_job.run
    from inference.devices import device_list_job

    return device_list_job.run


def _serve_nvml(answers: Any) -> None:
    from inference.devices import nvml_job

    turn = threading.Lock()

    def notice() -> None:
        with turn:
            answers.write(NOTICE)

    session = nvml_job.Session(notice)
    for _ in sys.stdin:
        reading = session.read()
        with turn:
            _answer(answers, reading)
        if "devices" not in reading:
            return


def _answer(answers: Any, data: Mapping[str, Any]) -> None:
    answers.write(json.dumps(data).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
