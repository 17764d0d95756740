"""Main module of helper processes: `python -m inference.helper JOB`.

    estimate | tokenize | devices | checkpoint | trial | proof
                                  reads one JSON object from stdin, writes one to stdout, and exits
    nvml                          writes one reading for each line on stdin, and NOTICE after an event that changes
                                  the next reading, until stdin ends or a reading has no devices

Libraries that can abort a process (llama.cpp, NVML, CUDA) are loaded only in helpers and workers. A helper ends with
its parent.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from headgate.shared import child_process
from inference.workers.child_environment import NOTICE

_RUNNERS = {
    "estimate": "inference.estimate.estimate_job:run",
    "tokenize": "inference.estimate.cold_tokenizer:run",
    "devices": "inference.devices.ggml_job:list_devices",
    "trial": "inference.devices.ggml_job:try_device",
    "proof": "inference.devices.build_proof_job:run",
    "checkpoint": "inference.devices.checkpoint_job:run",
}
"""The function of each job with one answer. Its module is imported when the job runs."""
JOBS = (*_RUNNERS, "nvml")


def main(argv: list[str] | None = None) -> int:
    """Runs one job and ends the process with status 0. Returns 2 for an unknown job."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0] not in JOBS:
        sys.stderr.write(f"usage: python -m inference.helper {'|'.join(JOBS)}\n")
        return 2
    child_process.die_with_parent(os.environ)
    child_process.disable_core_dumps()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of libraries must not mix with the answer
    if arguments[0] == "nvml":
        _serve_nvml(answers)
        os._exit(0)  # does not wait for threads of the library
    job = json.loads(sys.stdin.buffer.read() or b"{}")
    module, _, name = _RUNNERS[arguments[0]].partition(":")
    _answer(answers, getattr(importlib.import_module(module), name)(job))
    os._exit(0)  # skips the destructors of libraries


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
