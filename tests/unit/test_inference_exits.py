"""Causes of worker exits: abort messages of backends, exit statuses, and the worker's own report."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.protocol import ExitCause
from inference.workers.exit_cause import ExitEvidence, cause_of_text, classify, is_silent_abort, most_telling_line

ABORT, KILL, SEGV, ILL = -6, -9, -11, -4
CORPUS = Path(__file__).parent / "golden" / "abort_texts.txt"


def _corpus() -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(cause, backend, start of the most telling line, lines) of each block."""
    found = []
    for block in CORPUS.read_text(encoding="utf-8").split("\n== ")[1:]:
        head, *lines = block.rstrip().splitlines()
        cause, backend, _, line = head.split(" | ")
        found.append((cause, backend, line, tuple(lines)))
    return found


TEXTS = _corpus()


@pytest.mark.parametrize(("cause", "line", "lines"), [(text[0], *text[2:]) for text in TEXTS], ids=range(len(TEXTS)))
def test_corpus_of_abort_messages(cause: str, line: str, lines: tuple[str, ...]) -> None:
    earlier = ("llama_context: n_ctx_per_seq (4096) < n_ctx_train (40960)", "", "a warning of another library")
    output = (*earlier, *lines)
    loads = cause in ("oom_load", "startup")
    remains = ExitEvidence(1 if loads else ABORT, ready=not loads, last_text="\n".join(output))
    assert classify(remains) == cause
    assert loads or not is_silent_abort(remains)
    if cause != "startup":
        assert most_telling_line(output).startswith(line)


def test_all_backends_are_in_the_corpus() -> None:
    backends = " ".join(text[1] for text in TEXTS)
    for name in ("CUDA", "device-side assert", "cuBLAS", "Metal, initialisation", "ROCm", "RPC", "Vulkan", "host"):
        assert name in backends


def test_abort_without_a_message_is_silent() -> None:
    assert is_silent_abort(ExitEvidence(ABORT, last_text="a warning"))
    assert not is_silent_abort(ExitEvidence(ABORT, last_text="a warning\nggml.c:1: GGML_ASSERT(false) failed"))
    assert not is_silent_abort(ExitEvidence(SEGV))
    assert most_telling_line(["", "first", "last", " "]) == "last"
    assert most_telling_line([]) == ""
    assert cause_of_text("nothing to see") is None


@pytest.mark.parametrize(
    ("remains", "cause"),
    [
        (ExitEvidence(KILL, hang=True, requested=True), ExitCause.HANG),
        (ExitEvidence(1, failed_cause="oom_load", ready=False), ExitCause.OOM_LOAD),
        (ExitEvidence(1, failed_cause="something new", ready=False), ExitCause.STARTUP),
        (ExitEvidence(0, requested=True), ExitCause.REQUESTED),
        (ExitEvidence(KILL, requested=True), ExitCause.REQUESTED),
        (ExitEvidence(0), ExitCause.REQUESTED),
        (ExitEvidence(0, ready=False), ExitCause.STARTUP),
        (ExitEvidence(KILL), ExitCause.KILLED),
        (ExitEvidence(KILL, ready=False, last_text="GGML_ASSERT"), ExitCause.KILLED),
        (ExitEvidence(ABORT), ExitCause.ASSERT),
        (ExitEvidence(SEGV), ExitCause.ASSERT),
        (ExitEvidence(SEGV, has_computed=False), ExitCause.BROKEN_BUILD),
        (ExitEvidence(ILL, has_computed=False), ExitCause.BROKEN_BUILD),
        (ExitEvidence(ILL, has_computed=False, ready=False), ExitCause.BROKEN_BUILD),
        (ExitEvidence(ILL), ExitCause.ASSERT),
        (ExitEvidence(SEGV, has_computed=False, build_is_trusted=True), ExitCause.ASSERT),
        (ExitEvidence(ABORT, has_computed=False), ExitCause.ASSERT),
        (ExitEvidence(SEGV, has_computed=False, last_text="ggml.c:1: GGML_ASSERT(false) failed"), ExitCause.ASSERT),
        (ExitEvidence(SEGV, has_computed=False, requested=True), ExitCause.REQUESTED),
        (ExitEvidence(ABORT, last_text="CUDA error: out of memory"), ExitCause.OOM_COMPUTE),
        (ExitEvidence(ABORT, ready=False, last_text="CUDA error: out of memory"), ExitCause.OOM_LOAD),
        (ExitEvidence(ABORT, last_text="alloc: cudaMalloc failed: out of memory"), ExitCause.OOM_COMPUTE),
        (ExitEvidence(1, greeted=False, ready=False), ExitCause.STARTUP),
        (ExitEvidence(-15), ExitCause.KILLED),
        (ExitEvidence(1), ExitCause.ASSERT),
    ],
)
def test_cause_follows_from_the_strongest_evidence(remains: ExitEvidence, cause: ExitCause) -> None:
    assert classify(remains) is cause
